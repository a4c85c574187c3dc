"""What the tokens of a step are told, on the device, at addresses that never change: a CUDA graph
reads them at every replay."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routed_experts.capture.worker.router_input.running import PlacedRows
from routed_experts.protocol.codec import UNKNOWN
from routed_experts.protocol.routing_input import Bias


class _Staging:
    """Host memory from which a step's changes are copied to the device. Pinned, and allocated at
    start: to allocate pinned memory while requests come took up to 30 ms for each."""

    def __init__(self, tables: "Tables") -> None:
        self.rows = self._like(tables.rows)
        self.index = self._like(tables.index)
        self.bias = self._like(tables.bias)
        self.steers = self._like(tables.steers)
        self._copied: torch.cuda.Event | None = None

    @staticmethod
    def _like(table: Tensor) -> Tensor:
        return torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, self.index, self.bias, self.steers))

    def wait(self) -> None:
        """Until the copies of the step that used it last have run."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark_copied(self) -> None:
        if self.rows.is_pinned():
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


class Tables:
    """Rows of given experts, and the biases of up to `max_requests` requests of a step.

    Not in the memory that vLLM frees while an engine sleeps, which forgets: other than the device
    cache, these are read before they are written.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        max_requests: int,
        max_steps_in_flight: int,
        device: torch.device,
    ) -> None:
        self.top_k = top_k
        num_places = max_requests + 1  # place 0 says nothing
        # [N, L, K], as a step's rows come, so that one copy is enough
        self.rows = torch.full(
            (max_tokens, num_layers, top_k), UNKNOWN, dtype=torch.int16, device=device
        )
        # [N], the place of a token's request in the next two
        self.index = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        # [places, L]: whether the request says something about the layer
        self.steers = torch.zeros((num_places, num_layers), dtype=torch.uint8, device=device)
        self.bias = torch.zeros((num_places, num_layers, num_experts), device=device)
        self.is_used = False  # in the step that runs
        self._ring = [_Staging(self) for _ in range(max_steps_in_flight + 1)]
        self._turn = 0
        self._staging: _Staging | None = None  # of the step that is filled
        self._places: dict[str, int] = {}  # of requests that have a bias
        self._free = list(range(max_requests, 0, -1))
        self._index = np.zeros(0, np.int32)  # what `index` begins with; the rest is 0
        self._num_dirty_rows = 0  # which `rows` begins with; the rest is -1

    @property
    def device_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, self.index, self.steers, self.bias))

    @property
    def pinned_bytes(self) -> int:
        if not self.rows.is_cuda:
            return 0
        return sum(staging.num_bytes for staging in self._ring)

    def forget(self, request_id: str) -> None:
        """Called when a request has ended."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._free.append(place)

    def fill(
        self,
        rows: Sequence[PlacedRows],
        biases: Mapping[int, tuple[str, Bias]],
        offsets: NDArray[np.integer[Any]],
    ) -> None:
        """Before a forward pass: what it is told. Enqueues copies on the current stream, behind the
        pass before.

        `rows` are in the order of the batch. `biases` are those of requests, by their index in the
        batch, with their ids; request i has the tokens `offsets[i]` to `offsets[i + 1]`.
        """
        self._staging = None
        self._fill_index(biases, offsets)
        self._fill_rows(rows)
        if self._staging is not None:
            self._staging.mark_copied()
        self.is_used = len(rows) > 0 or len(biases) > 0

    def is_clean(self) -> bool:
        """Whether the last step was told nothing."""
        return not self._num_dirty_rows and not len(self._index)

    def _stage(self) -> _Staging:
        """Host memory for this step. There is one for each step in flight and one more, so it
        waits for nothing."""
        if self._staging is None:
            self._turn = (self._turn + 1) % len(self._ring)
            self._staging = self._ring[self._turn]
            self._staging.wait()
        return self._staging

    def _fill_index(
        self, biases: Mapping[int, tuple[str, Bias]], offsets: NDArray[np.integer[Any]]
    ) -> None:
        index = np.zeros(0, np.int32)
        if biases:
            self._give_places(biases)
            place_of_request = np.zeros(len(offsets) - 1, np.int32)
            for request, (request_id, _) in biases.items():
                place_of_request[request] = self._places[request_id]
            index = np.repeat(place_of_request, np.diff(offsets))
        if np.array_equal(index, self._index):
            return
        num_before = len(self._index)
        num_now = len(index)
        if num_now:
            staged = self._stage().index[:num_now]
            staged.numpy()[:] = index
            self.index[:num_now].copy_(staged, non_blocking=True)
        if num_now < num_before:
            self.index[num_now:num_before].zero_()
        self._index = index

    def _give_places(self, biases: Mapping[int, tuple[str, Bias]]) -> None:
        """A place for each request that has none. If all are taken, by requests that wait or were
        preempted, it is one of theirs: a step has at most `max_requests`."""
        in_batch = {request_id for request_id, _ in biases.values()}
        for request_id, bias in biases.values():
            if request_id in self._places:
                continue
            if not self._free:
                waiting = next(other for other in self._places if other not in in_batch)
                self.forget(waiting)
            place = self._free.pop()
            self._places[request_id] = place
            staging = self._stage()
            staging.bias[place].numpy()[:] = bias
            staging.steers[place].numpy()[:] = (bias != 0).any(axis=1)
            self.bias[place].copy_(staging.bias[place], non_blocking=True)
            self.steers[place].copy_(staging.steers[place], non_blocking=True)

    def _fill_rows(self, rows: Sequence[PlacedRows]) -> None:
        low = rows[0].first if rows else 0
        high = rows[-1].first + len(rows[-1].rows) if rows else 0
        is_covered = low == 0 and high >= self._num_dirty_rows
        if self._num_dirty_rows and not is_covered:
            self.rows[: self._num_dirty_rows].fill_(UNKNOWN)
        if rows:
            staged = self._stage().rows
            values = staged.numpy()
            if sum(len(placed.rows) for placed in rows) < high - low:
                values[low:high] = UNKNOWN  # between the requests that give rows
            for placed in rows:
                values[placed.first : placed.first + len(placed.rows)] = placed.rows
            self.rows[low:high].copy_(staged[low:high], non_blocking=True)
        self._num_dirty_rows = high
