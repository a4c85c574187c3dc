"""The benchmark of a streamed token's rows runs."""

import asyncio

import pytest

from bench.streamed_token import Stream

pytestmark = pytest.mark.release


def test_every_part_is_timed() -> None:
    figures = asyncio.run(Stream(3).figures())
    assert len(figures) == 2
    # The other is a difference, which can be anything where the machine is busy.
    assert figures["of it encoding"] > 0
