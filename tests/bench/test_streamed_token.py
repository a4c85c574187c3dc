"""The benchmark of a streamed token's rows runs."""

import asyncio

from bench.streamed_token import Stream


def test_every_part_is_timed() -> None:
    figures = asyncio.run(Stream(3).figures())
    assert len(figures) == 3
    # The others are differences, which can be anything where the machine is busy.
    assert figures["of what is left, encoding"] > 0
