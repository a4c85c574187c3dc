"""Streams of all kinds are byte for byte what they were: `streams.json` has the digest of each.

`python -m tests.server.test_stream_bytes` writes it anew, where a change of the bytes is meant.
"""

import hashlib
import json
import logging
from pathlib import Path

import pytest

from tests.server.odd_streams import OddStream

DIGESTS = Path(__file__).with_name("streams.json")
NUM_STREAMS = 150


def digest(seed: int) -> str:
    return hashlib.sha256("".join(OddStream(seed).lines()).encode()).hexdigest()[:16]


@pytest.mark.parametrize("first", range(0, NUM_STREAMS, 30))
def test_odd_streams_are_what_they_were(first: int) -> None:
    recorded = json.loads(DIGESTS.read_text())
    different = [
        (seed, OddStream(seed).options)
        for seed in range(first, first + 30)
        if digest(seed) != recorded[seed]
    ]
    assert not different


if __name__ == "__main__":
    logging.disable()
    DIGESTS.write_text(json.dumps([digest(seed) for seed in range(NUM_STREAMS)], indent=0) + "\n")
