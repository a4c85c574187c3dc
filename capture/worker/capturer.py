"""The worker's side of the capture, for both model runners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.pipeline import Pipeline


@dataclass(frozen=True)
class RowShape:
    """What the rows of a model, or of one pipeline stage of it, look like."""

    layer_ids: tuple[int, ...]  # absolute decoder-layer index of each MoE layer, ascending
    num_experts: int  # logical experts of a layer
    top_k: int  # experts per token
    # For each layer, what vLLM multiplies its output by, after the router's weights.
    weights_scale: tuple[float, ...] = ()
    # whether weights multiply what goes into the experts, and not what comes out
    weights_on_input: bool = False

    @classmethod
    def of_stages(cls, stages: Sequence["RowShape"]) -> "RowShape":
        """The shape of the whole model from those of its pipeline stages, in order; refuses stages
        that differ."""
        kinds = {(stage.num_experts, stage.top_k) for stage in stages if stage.layer_ids}
        if not kinds:
            raise ValueError("no MoE layer was found in the model")
        if len(kinds) != 1:
            raise ValueError(
                f"the MoE layers of a model must agree in experts and top-k, but these are {sorted(kinds)}"
            )
        num_experts, top_k = kinds.pop()
        return cls(
            tuple(layer for stage in stages for layer in stage.layer_ids),
            num_experts,
            top_k,
            tuple(scale for stage in stages for scale in stage.weights_scale),
            any(stage.weights_on_input for stage in stages),
        )


LocalTokenSlice = Callable[[torch.Tensor], tuple[int, torch.Tensor]]
"""From the ids that a router has chosen those of the step's own tokens, and which of these is the
first."""

Sink = Callable[..., None]
"""Takes the ids [n, >= K] that a router has chosen, and their weights [n, >= K] if they are
captured."""


class Capturer:
    """Owns the device cache of one worker and sends each step's rows to the host."""

    def __init__(
        self,
        shape: RowShape,  # of the whole model
        stage_layers: Sequence[int],  # how many MoE layers each pipeline stage has, in order
        stage: int,  # which of them this worker's is
        max_tokens: int,  # in one step
        max_steps_in_flight: int,  # launched, with outputs that have not been read
        device: torch.device,
        with_weights: bool = False,
    ) -> None:
        self.shape = shape
        self.cache = DeviceCache(stage_layers[stage], max_tokens, shape.top_k, device, with_weights)
        self.pipeline = Pipeline(
            self.cache, max_steps_in_flight, num_upstream_layers=sum(stage_layers[:stage])
        )
        self._held: dict[int, tuple[torch.Tensor, ...]] | None = None

    def sink(
        self, layer: int, own_tokens: LocalTokenSlice | None = None, may_defer: bool = False
    ) -> Sink:
        """A function that stores the `[n, >= K]` ids, and weights, that the router of row index
        `layer` has chosen.

        Runs inside the model's MoE operator, under graph capture too. It enqueues one copy of each,
        or nothing between `defer_stores` and `flush_stores`. Columns after K belong to fused shared
        experts: every token goes to them, the router does not choose them.

        `own_tokens` picks this rank's rows where the router sees those of other ranks as well, or a
        part of them. It `may_defer` if the tensors stay unmodified while they are referenced.
        """
        (view, weights_view), top_k = self.cache.views(layer), self.cache.top_k

        def store(ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
            if weights_view is None:
                weights = None
            if may_defer and self._held is not None and own_tokens is None:
                self._held[layer] = tuple(
                    each[:, :top_k] for each in (ids, weights) if each is not None
                )
                return
            first, own = (0, ids) if own_tokens is None else own_tokens(ids)
            view[first : first + own.shape[0]].copy_(own[:, :top_k])
            if weights is not None and weights_view is not None:
                # `own_tokens` counts calls
                source = (own.storage_offset() - ids.storage_offset()) // ids.stride(0)
                own = weights[source : source + own.shape[0]]
                weights_view[first : first + own.shape[0]].copy_(own[:, :top_k])

        return store

    def defer_stores(self) -> None:
        """Until `flush_stores`, sinks that may hold keep the ids where their router has put them.
        For a forward pass that is recorded as one CUDA graph. A copy in each of 58 layers took 1 %
        of a step of 4 ms."""
        self._held = {}

    def flush_stores(self) -> None:
        """Enqueues two kernels that store what was held, with weights four, as the end of the
        forward pass."""
        held, self._held = self._held, None
        planes = (
            [self.cache.ids] if self.cache.weights is None else [self.cache.ids, self.cache.weights]
        )
        for index, plane in enumerate(planes if held else ()):
            assert held is not None
            if len(held) == self.cache.num_layers:
                stacked = torch.stack([held[layer][index] for layer in range(len(held))])
                plane[:, : stacked.shape[1]].copy_(stacked)
                continue
            for layer, kept in held.items():  # the others are stored, or written directly
                plane[layer, : len(kept[index])].copy_(kept[index])

    def downstream(self, num_tokens: int, upstream: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, layers so far, K] int32 (2K with weights) for the next stage: `upstream`'s
        rows, then its own. Always memory of its own: the next forward pass writes into the device
        cache while this is still being sent."""
        own = self.cache.planes[:, :, :num_tokens].permute(2, 1, 0, 3).flatten(2)
        return torch.cat([own] if upstream is None else [upstream[:num_tokens], own], dim=1)
