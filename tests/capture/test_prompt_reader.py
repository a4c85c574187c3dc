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

    fails = False

    def __init__(self, reader: PromptReader, blocks: NDArray[np.int64] = BLOCKS) -> None:
        self.go = threading.Event()
        self.rows = reader.start(self._run, blocks, BLOCK, 2 * BLOCK + 2)

    def _run(self) -> Rows:
        assert self.go.wait(60)
        if self.fails:
            raise IndexError
        return ROWS

    def end_soon(self) -> None:
        threading.Timer(0.05, self.go.set).start()


@pytest.fixture
def reader() -> PromptReader:
    return PromptReader(num_blocks=9, block_size=BLOCK)


@pytest.fixture
def read(reader: PromptReader) -> Iterator[Read]:
    started = Read(reader)
    yield started
    started.go.set()


def test_writes_wait_for_reads_of_their_slots(reader: PromptReader, read: Read) -> None:
    """But not for others: the block that a read ends in is the one that its request goes on writing."""
    others = [slot for block in range(9) for slot in range(block * BLOCK, block * BLOCK + BLOCK) if block not in (5, 7)]
    reader.wait_for_reads(np.array([*others, 5 * BLOCK + 2, 5 * BLOCK + 3]))
    assert not read.rows.done()


@pytest.mark.parametrize("slot", [7 * BLOCK, 7 * BLOCK + 3, 5 * BLOCK, 5 * BLOCK + 1, 2 * BLOCK + 1])
def test_slots_that_are_being_read_are_written_afterwards(reader: PromptReader, read: Read, slot: int) -> None:
    """Writes wait for each of several reads."""
    other = Read(reader, np.array([0, 2, 6]))
    waits_for, ended = (other, read) if slot == 2 * BLOCK + 1 else (read, other)
    ended.go.set()
    waits_for.end_soon()
    reader.wait_for_reads(np.array([0, slot]))
    assert waits_for.rows.done()
    assert waits_for.rows.result() is ended.rows.result() is ROWS
    reader.wait_for_reads(np.array([slot]))
    assert reader._reads == []


def test_a_failed_read_raises_where_its_rows_are_taken(reader: PromptReader, read: Read) -> None:
    read.fails = True
    read.end_soon()
    reader.wait_for_reads(np.array([7 * BLOCK]))
    assert read.rows.done()
    with pytest.raises(IndexError):
        read.rows.result()
