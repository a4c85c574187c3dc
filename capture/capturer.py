"""The worker's side of the capture, for both model runners."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from capture.device_cache import DeviceCache
from capture.pipeline import PendingRows, Pipeline


class Capturer:
    """Owns the device cache of one worker and sends each step's rows to the host.

    Args:
        layer_ids: absolute decoder-layer index of each MoE layer, ascending.
        num_experts: logical experts of a layer.
        top_k: experts per token.
        max_tokens: most tokens in one step.
        max_steps_in_flight: most steps launched whose outputs have not been read.
    """

    def __init__(
        self,
        layer_ids: tuple[int, ...],
        num_experts: int,
        top_k: int,
        max_tokens: int,
        max_steps_in_flight: int,
        device: torch.device,
    ) -> None:
        self.layer_ids = layer_ids
        self.num_experts = num_experts
        self.cache = DeviceCache(len(layer_ids), max_tokens, top_k, device)
        self._pipeline = Pipeline(self.cache, max_steps_in_flight)

    def sink(self, layer: int) -> Callable[[torch.Tensor], None]:
        """A function that stores the `[n, >= K]` ids that the router of row index `layer` has chosen.

        Runs inside the model's MoE operator, under graph capture too: it only enqueues one copy. Columns after K
        are those of fused shared experts, which every token goes to and which are not the router's choice.
        """
        view = self.cache.view(layer)
        top_k = self.cache.top_k

        def store(ids: torch.Tensor) -> None:
            view[: ids.shape[0]].copy_(ids[:, :top_k])

        return store

    def submit(self, slots: torch.Tensor, offsets: NDArray[np.int64]) -> PendingRows:
        """Takes the step that has just been launched; see `Pipeline.submit`."""
        return self._pipeline.submit(slots, offsets)
