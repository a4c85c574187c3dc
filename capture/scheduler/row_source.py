"""Where rows come from: steps and the host cache."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler

from routed_experts.capture.scheduler.host_cache import HostCache
from routed_experts.capture.scheduler.pending_rows import PendingRows, Piece
from routed_experts.capture.scheduler.request_rows import RequestRows
from routed_experts.capture.scheduler.step import BlockTable, Step
from routed_experts.capture.wire.message import Cause, UnknownRows
from routed_experts.capture.wire.vllm_rows import sends_bare_rows
from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_STEP, Rows, Steps

# `__name__` begins with "routed_experts". A child of vLLM's logger, which is configured.
logger = init_logger(f"vllm.{__name__}")


def block_ids(table: BlockTable, first: int = 0) -> NDArray[np.int64]:
    """The ids [number of blocks] of a table's blocks from index `first` on; 0 before it."""
    ids = np.zeros(len(table), dtype=np.int64)
    ids[first:] = [block.block_id for block in table[first:]]
    return ids


class RowSource:
    """Gives the rows of a request from steps and from the host cache, and remembers why some are
    unknown."""

    def __init__(self, scheduler: Scheduler, kv_group: int, cache: HostCache) -> None:
        self.cache = cache
        # KV may be loaded without rows. A front end that is not ours is told nothing.
        self._tells_causes = scheduler.connector is not None and not sends_bare_rows(
            scheduler.vllm_config
        )
        self._scheduler = scheduler
        self._kv_group = kv_group
        # to be reported, and to which API process
        self._unknown: list[tuple[int, UnknownRows]] = []

    def of_step(
        self,
        request: RequestRows,
        step: Step,
        *,
        start: int,
        first: int,
        end: int,
        as_captured: bool = False,
    ) -> PendingRows:
        """Rows of positions `first` to `end` as of a step that began at position `start`: its own,
        and before them those of the host cache. Rows that neither has are -1. As for `pending`."""
        step_rows = step.rows_of(request.request_id)
        table = step.block_tables.get(request.request_id)
        split = min(max(start, first), end)  # the first position that is the step's
        own = step_rows[max(split - start, 0) : max(end - start, 0)]
        num_before = split - first
        num_behind = end - split - len(own)
        pieces: list[Piece] = [num_before, own]
        steps = [step.number]
        if table is None and num_before:
            pieces[0] = _unknown(num_before, own)
            steps.insert(0, UNKNOWN_STEP)
        if num_behind:
            pieces.append(_unknown(num_behind, own))
            steps.append(UNKNOWN_STEP)
        return self.pending(
            request, first, pieces, table or (), steps=steps, as_captured=as_captured
        )

    def pending(
        self,
        request: RequestRows,
        first: int,
        pieces: list[Piece],
        table: BlockTable = (),
        *,
        steps: Sequence[int | Steps] = (),
        as_captured: bool = False,
    ) -> PendingRows:
        """Rows from position `first` on. `table` is the sequence's block table, if some are in the
        host cache. They have weights if the request asks for them, or if rows of this engine have
        them and they are wanted `as_captured`. `steps` has those of each piece that is at hand: one
        of all its rows, or one of each."""
        wants_weights = request.opt_in.weights or as_captured
        # Only what is needed: a long table takes longer than its rows.
        ids = block_ids(table, first // self.cache.block_size)
        return PendingRows(
            self.cache,
            first,
            pieces,
            ids,
            partial(self._report_unknown, request),
            ids_only=self.cache.has_weights and not wants_weights,
            steps=self._steps(first, pieces, ids, steps) if request.opt_in.steps else None,
        )

    def _steps(
        self,
        first: int,
        pieces: Sequence[Piece],
        block_table: NDArray[np.int64],
        of_rows_at_hand: Sequence[int | Steps],
    ) -> Steps:
        """The steps of all rows in `pieces`, the first of which is that of position `first`."""
        at_hand = iter(of_rows_at_hand)
        steps: list[Steps] = []
        for piece in pieces:
            if isinstance(piece, int):
                steps.append(self.cache.steps(block_table, first, piece))
            else:
                steps.append(np.full(len(piece), next(at_hand), dtype=np.uint32))
            first += len(steps[-1])
        return np.concatenate(steps)

    def _report_unknown(
        self, request: RequestRows, blocks: NDArray[np.int64], first: int, rows: Rows
    ) -> None:
        """Remembers why some of `rows` ([n, L, K]) are unknown, which were read from position
        `first` on through the block table `blocks`."""
        if not self._tells_causes:
            logger.error(
                "Request %r: some of its rows are not known and are sent as -1.",
                request.request_id,
            )
            return
        positions = np.flatnonzero(rows[:, 0, 0] == UNKNOWN) + first
        causes = self.cache.causes(blocks, positions)
        num_rows = int(np.count_nonzero(causes == Cause.KV_TRANSFER))
        if num_rows:
            unknown = UnknownRows(
                request.opt_in.prompt_id,
                request.request_id,
                is_prompt=first < request.num_prompt_tokens,
                cause=Cause.KV_TRANSFER,
                num_rows=num_rows,
            )
            self._unknown.append((request.client, unknown))

    def pop_unknown(self) -> list[tuple[int, UnknownRows]]:
        """Why rows are unknown that were read since the last call, each with the API process to
        tell."""
        unknown = self._unknown
        self._unknown = []
        return unknown

    def ids_before(self, end: int, table: BlockTable) -> Rows:
        """The ids [end, L, K] of a sequence's positions before `end`, of the host cache; -1 where it
        has none. A copy."""
        rows = np.empty((end, *self.cache.row_shape), dtype=np.int16)
        self.cache.read(block_ids(table), 0, rows)
        return np.ascontiguousarray(self.cache.ids(rows))

    def block_table(self, request_id: str) -> BlockTable:
        """The blocks that vLLM has for a request now."""
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[self._kv_group]
        return tuple(manager.req_to_blocks[request_id])


def _unknown(count: int, like: Rows) -> Rows:
    """`count` unknown rows, of the shape of `like`."""
    return np.full((count, *like.shape[1:]), UNKNOWN, dtype=np.int16)
