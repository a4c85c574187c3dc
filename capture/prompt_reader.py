"""Reads rows of long prompts from the host cache in a thread, so that scheduler steps do not wait for them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import Rows


@dataclass
class _Read:
    """A read of the host cache.

    Attributes:
        blocks: [number of blocks], which of them are read as a whole.
        first_slot, end_slot: the part that is read of the last block, into which the request goes on writing.
    """

    rows: Future[Rows]
    blocks: NDArray[np.bool_]
    first_slot: int
    end_slot: int

    def touches(self, slots: NDArray[np.int64], block_size: int) -> bool:
        in_last = (slots >= self.first_slot) & (slots < self.end_slot)
        # "clip": slots outside the KV cache are not written, and to wait for block 0 instead is no error.
        return bool(in_last.any() or self.blocks.take(slots // block_size, mode="clip").any())


class PromptReader:
    """Runs reads of the host cache one after another, so that no step has to wait for them.

    A slot must not be written while it is read: `wait_for_reads` comes before every write.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="routed-experts-gather")
        self._reads: list[_Read] = []

    def start(self, read: Callable[[], Rows], block_ids: NDArray[np.int64], first: int, end: int) -> Future[Rows]:
        """Has `read` run in the thread.

        Args:
            block_ids: the block table of the sequence that it reads.
            first, end: the positions that it reads, `end` exclusive.
        """
        size = self._block_size
        blocks = np.zeros(self._num_blocks, dtype=np.bool_)
        blocks[block_ids[first // size : end // size]] = True
        last = int(block_ids[end // size]) * size if end % size else 0
        rows = self._thread.submit(read)
        self._reads.append(_Read(rows, blocks, last, last + end % size))
        return rows

    def wait_for_reads(self, slots: NDArray[np.int64]) -> None:
        """Waits for the reads of slots that are about to be written.

        That is rare: the request must have lost its blocks right after its first token, and another got them.
        """
        if not self._reads:
            return
        self._reads = [read for read in self._reads if not read.rows.done()]
        for read in self._reads:
            if read.touches(slots, self._block_size):
                read.rows.exception()  # waits; an error is for the one who takes the result
