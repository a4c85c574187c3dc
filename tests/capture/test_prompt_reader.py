"""Reads of long prompts beside the scheduler's thread."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from routed_experts.capture.prompt_reader import PromptReader
from routed_experts.protocol.codec import Rows

BLOCK = 4
BLOCKS = np.array([3, 7, 5], dtype=np.int64)
ROWS = np.zeros((1, 2, 3), dtype=np.int16)


class Read:
    """A read of positions 4 to 9, the whole of block 7 and half of block 5, that ends when it is told to."""

    def __init__(self, gatherer: PromptReader, blocks: NDArray[np.int64] = BLOCKS) -> None:
        self.go = threading.Event()
        self.rows = gatherer.start(self._run, blocks, BLOCK, 2 * BLOCK + 2)

    def _run(self) -> Rows:
        self.go.wait()
        return ROWS


@pytest.fixture
def gatherer() -> PromptReader:
    return PromptReader(num_blocks=9, block_size=BLOCK)


@pytest.fixture
def read(gatherer: PromptReader) -> Iterator[Read]:
    started = Read(gatherer)
    yield started
    started.go.set()


@pytest.mark.parametrize("slot", [3 * BLOCK, 5 * BLOCK + 2, 5 * BLOCK + 3, 6 * BLOCK, 8 * BLOCK, 0])
def test_slots_that_are_not_read_are_written_at_once(gatherer: PromptReader, read: Read, slot: int) -> None:
    """The block that a read ends in is the one that its request goes on writing."""
    gatherer.wait_for_reads(np.array([slot]))
    assert not read.rows.done()


@pytest.mark.parametrize("slot", [7 * BLOCK, 7 * BLOCK + 3, 5 * BLOCK, 5 * BLOCK + 1])
def test_slots_that_are_read_are_written_afterwards(gatherer: PromptReader, read: Read, slot: int) -> None:
    threading.Timer(0.05, read.go.set).start()
    gatherer.wait_for_reads(np.array([0, slot]))
    assert read.rows.done()
    assert read.rows.result() is ROWS


@pytest.mark.parametrize("slot", [7 * BLOCK, 2 * BLOCK + 1])
def test_all_reads_that_are_under_way_are_waited_for(gatherer: PromptReader, read: Read, slot: int) -> None:
    """They run one after another."""
    other = Read(gatherer, np.array([0, 2, 6]))
    other.go.set()
    threading.Timer(0.05, read.go.set).start()
    gatherer.wait_for_reads(np.array([slot]))
    assert (read if slot == 7 * BLOCK else other).rows.done()


def test_reads_that_have_ended_are_forgotten(gatherer: PromptReader, read: Read) -> None:
    read.go.set()
    read.rows.result()
    gatherer.wait_for_reads(np.array([7 * BLOCK]))
    assert gatherer._reads == []


def test_a_read_that_fails_is_for_the_one_who_takes_its_rows(gatherer: PromptReader) -> None:
    go = threading.Event()

    def fail() -> Rows:
        go.wait()
        raise IndexError

    rows = gatherer.start(fail, BLOCKS, 0, BLOCK)
    threading.Timer(0.05, go.set).start()
    gatherer.wait_for_reads(np.array([3 * BLOCK]))
    assert rows.done()
    with pytest.raises(IndexError):
        rows.result()
