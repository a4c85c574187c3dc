"""From the device cache to the host, without making the forward pass wait.

A step's rows and the KV slots of its tokens are packed into one contiguous int16 buffer on the
device, copied on a stream of their own into pinned memory, and read when the step's output is
materialised.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from routed_experts.capture.wire.rows import row_shape
from routed_experts.capture.wire.transport import TOLD_NOTHING, StepRows, Told
from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.profile import ExpertProfile

_SLOT_WORDS = 4  # int16 words in one int64 slot number


Copy = Callable[[], NDArray[np.int16]]
"""Blocks until the words of a step are on the host; the array belongs to the caller."""


class CpuCopier:
    """Moves the packed words of one step to the host, which is the device here: nothing is left to
    copy."""

    device_bytes = pinned_bytes = 0  # what it keeps allocated

    def staging(self, num_words: int) -> torch.Tensor:
        """The flat int16 buffer ([num_words]) on the device to pack this step into."""
        self._packed = torch.empty(num_words, dtype=torch.int16)
        return self._packed

    def start(self) -> Copy:
        """Begins the copy of the words packed last."""
        return self._packed.numpy


class CudaCopier:
    """As `CpuCopier`, with one staging buffer on the device and a ring of pinned buffers, one for
    each step in flight.

    A step whose output nobody reads (warm-up) is simply overwritten. One that is read after its
    buffer was taken again raises, so that rows of another step are never handed out.
    """

    def __init__(self, max_words: int, depth: int, device: torch.device) -> None:
        self._device_words = torch.empty(max_words, dtype=torch.int16, device=device)
        self._packed = self._device_words[:0]
        self._ring = [
            torch.empty(max_words, dtype=torch.int16, pin_memory=True) for _ in range(depth)
        ]
        self.device_bytes = self._device_words.nbytes
        self.pinned_bytes = sum(words.nbytes for words in self._ring)
        self._num_started = 0
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def staging(self, num_words: int) -> torch.Tensor:
        if self._copied is not None:
            # on the device; the host does not wait
            torch.cuda.current_stream().wait_event(self._copied)
        self._packed = self._device_words[:num_words]
        return self._packed

    def start(self) -> Copy:
        number = self._num_started
        self._num_started += 1
        words = self._ring[number % len(self._ring)][: len(self._packed)]
        packed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        packed.record()
        self._copied = copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(packed)
            words.copy_(self._packed, non_blocking=True)
            copied.record()

        def wait() -> NDArray[np.int16]:
            copied.synchronize()
            copy: NDArray[np.int16] = words.numpy().copy()
            if self._num_started > number + len(self._ring):
                raise RuntimeError(
                    "rows of a step were read after its staging buffer had been used for a later step"
                )
            return copy

        return wait


PendingStep = Callable[[], StepRows]
"""Blocks until the rows of a step are on the host."""


class Pipeline:
    """Packs the rows of each step and starts them on their way to the host."""

    def __init__(
        self,
        cache: DeviceCache,
        max_steps_in_flight: int,
        num_upstream_layers: int = 0,
        told_layer_ids: tuple[int, ...] = (),  # as in `StepRows`
        profile: ExpertProfile | None = None,  # counts the rows
    ) -> None:
        self._cache = cache
        self._profile = profile
        self._told_layer_ids = told_layer_ids
        self._num_upstream_layers = num_upstream_layers
        num_layers = num_upstream_layers + cache.num_layers
        self._row_shape = row_shape(num_layers, cache.top_k, cache.weights is not None)
        self._words_per_token = _SLOT_WORDS + self._row_shape[0] * self._row_shape[1]
        device = cache.ids.device
        self._copier: CpuCopier | CudaCopier = CpuCopier()
        if device.type == "cuda":
            self._copier = CudaCopier(
                cache.max_tokens * self._words_per_token, max_steps_in_flight + 1, device
            )
        # the device cache, and one packed step
        self.device_bytes = cache.planes.nbytes + self._copier.device_bytes
        self.pinned_bytes = self._copier.pinned_bytes  # on the host

    def submit(
        self,
        slots: torch.Tensor,
        offsets: NDArray[np.int64],
        upstream: torch.Tensor | None = None,
        told: Told = TOLD_NOTHING,
    ) -> PendingStep:
        """Takes the step that has just been launched. Returns at once.

        `slots` ([>= n] int64, on the device) are the KV slots of the batch's tokens, and `offsets`
        ([requests + 1]) as in `StepRows`, the last being n. `upstream` ([>= n, layers, K] int32, 2K
        with weights) has the layers of earlier pipeline stages. `told` is what its routers were told.
        Raises if `upstream` is missing, or if there are more tokens than the device cache has
        rows.
        """
        cache = self._cache
        n = int(offsets[-1])
        num_upstream = 0 if upstream is None else upstream.shape[1]
        if num_upstream != self._num_upstream_layers:
            raise ValueError("the rows of the earlier pipeline stages did not come with the step")
        if n > cache.max_tokens:
            raise ValueError(
                f"a step of {n} tokens does not fit the device cache of {cache.max_tokens}"
            )
        staging = self._copier.staging(n * self._words_per_token)
        staging[: n * _SLOT_WORDS].view(torch.int64).copy_(slots[:n])
        rows = staging[n * _SLOT_WORDS :].view(n, *self._row_shape)
        self._pack_rows(rows, upstream)
        copy = self._copier.start()
        # behind the start of the copy, which needs not wait for it
        self._count(rows)
        return partial(self._result, copy, offsets, told)

    def _count(self, rows: torch.Tensor) -> None:
        """Counts packed `rows` ([n, L, K] int16, [n, 3L, K] with weights)."""
        if self._profile is None:
            return
        if self._cache.weights is None:
            self._profile.count(rows, None)
            return
        num_layers = rows.shape[1] // 3
        words = rows[:, num_layers:].view(len(rows), num_layers, 2 * self._cache.top_k)
        # a copy, also where that would be contiguous: words may begin within a float
        words = words.clone(memory_format=torch.contiguous_format)
        weights = words.view(torch.float32)  # [n, L, K]
        self._profile.count(rows[:, :num_layers], weights)

    def _pack_rows(self, rows: torch.Tensor, upstream: torch.Tensor | None) -> None:
        """Fills `rows` ([n, L, K] int16, [n, 3L, K] with weights) with those of earlier stages and
        of the device cache."""
        cache = self._cache
        n = len(rows)
        first = self._num_upstream_layers
        end = first + cache.num_layers
        # One kernel transposes and narrows. A copy to the host of a view that is not contiguous
        # would block.
        rows[:, first:end].copy_(cache.ids[:, :n].transpose(0, 1))
        if upstream is not None:
            rows[:, :first].copy_(upstream[:n, :, : cache.top_k])
        if cache.weights is None:
            return
        # as words, which are moved and not converted
        weights = rows[:, end:].view(n, end, 2 * cache.top_k)  # [n, L, 2K]
        own_words = cache.planes[1].view(torch.int16)  # [own layers, N, 2K]
        weights[:, first:].copy_(own_words[:, :n].transpose(0, 1))
        if upstream is not None:
            weights[:, :first].copy_(upstream[:n, :, cache.top_k :].view(torch.int16))

    def _result(self, copy: Copy, offsets: NDArray[np.int64], told: Told) -> StepRows:
        began = time.perf_counter()
        words = copy()
        waited_s = time.perf_counter() - began
        n = int(offsets[-1])
        slots = words[: n * _SLOT_WORDS].view(np.int64)  # [n]
        rows = words[n * _SLOT_WORDS :].reshape(n, *self._row_shape)  # [n, L, K] or [n, 3L, K]
        return StepRows(rows, slots, offsets, waited_s, told, self._told_layer_ids)
