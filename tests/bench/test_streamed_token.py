"""The benchmark of a streamed token's rows runs, and its parts take time."""

import asyncio

from bench.streamed_token import Stream


def test_every_part_takes_time() -> None:
    figures = asyncio.run(Stream(3).figures())
    assert len(figures) == 3
    assert all(0 < us < 10_000 for us in figures.values()), figures
    taken, encoding, whole = figures.values()
    assert max(taken, encoding) < whole
