"""The worker's side of the capture, for both model runners."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from routed_experts.capture.worker.device_cache import DeviceCache
from routed_experts.capture.worker.pipeline import Pipeline
from routed_experts.capture.worker.profile import ExpertProfile
from routed_experts.protocol.routing_input import ONE_GROUP, Groups


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
    # of the routers; known where requests may say which experts their tokens take
    groups: Groups = ONE_GROUP
    # whether a token's experts come with the largest weight first
    sorted_by_weight: bool = False

    @classmethod
    def of_stages(cls, stages: Sequence["RowShape"]) -> "RowShape":
        """The shape of the whole model from those of its pipeline stages, in order.

        Raises `ValueError` if no stage has MoE layers, if stages differ, or if two name one decoder
        layer.
        """
        stages_with_layers = [stage for stage in stages if stage.layer_ids]
        sizes = {(stage.num_experts, stage.top_k) for stage in stages_with_layers}
        if not sizes:
            raise ValueError("no MoE layer was found in the model")
        if len(sizes) != 1:
            raise ValueError(
                f"the MoE layers of a model must agree in experts and top-k, but these are {sorted(sizes)}"
            )
        num_experts, top_k = sizes.pop()
        layer_ids: tuple[int, ...] = ()
        weights_scale: tuple[float, ...] = ()
        for stage in stages:
            layer_ids += stage.layer_ids
            weights_scale += stage.weights_scale
        _check_distinct(layer_ids)
        weights_on_input = any(stage.weights_on_input for stage in stages)
        groups = stages_with_layers[0].groups
        if any(stage.groups != groups for stage in stages_with_layers):
            raise ValueError("the routers of a model must agree in their groups of experts")
        sorted_by_weight = all(stage.sorted_by_weight for stage in stages_with_layers)
        return cls(
            layer_ids,
            num_experts,
            top_k,
            weights_scale,
            weights_on_input,
            groups,
            sorted_by_weight,
        )


def _check_distinct(layer_ids: Sequence[int]) -> None:
    """Rows that are spread over all decoder layers would have only one of two rows of a layer."""
    if len(set(layer_ids)) != len(layer_ids):
        raise ValueError(
            f"the pipeline stages of a model must not share a decoder layer, but these are {[*layer_ids]}"
        )


LocalTokenSlice = Callable[[torch.Tensor], tuple[int, torch.Tensor]]
"""From the ids that a router has chosen those of the step's own tokens, and which of these is the
first."""

Sink = Callable[..., None]
"""Takes the ids [n, >= K] that a router has chosen, and their weights [n, >= K] if they are
captured."""


def ignore(ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    """A `Sink` that stores nothing."""


class _Deferred(NamedTuple):
    """What a layer's router has chosen, to be stored at the end of the forward pass."""

    ids: torch.Tensor  # [n, K] int32
    weights: torch.Tensor | None  # [n, K] float32


class Capturer:
    """Owns the device cache of one worker and sends each step's rows to the host."""

    def __init__(
        self,
        shape: RowShape,  # of the whole model
        *,
        stage_layers: Sequence[int],  # how many MoE layers each pipeline stage has, in order
        stage: int,  # which of them this worker's is
        max_tokens: int,  # in one step
        max_steps_in_flight: int,  # launched, with outputs that have not been read
        device: torch.device,
        with_weights: bool = False,
        tells_layer_ids: bool = False,  # with each step's rows
        profile: ExpertProfile | None = None,  # counts each step's rows
    ) -> None:
        self.shape = shape
        self.cache = DeviceCache(
            stage_layers[stage],
            max_tokens=max_tokens,
            top_k=shape.top_k,
            device=device,
            with_weights=with_weights,
        )
        self.pipeline = Pipeline(
            self.cache,
            max_steps_in_flight,
            num_upstream_layers=sum(stage_layers[:stage]),
            told_layer_ids=shape.layer_ids if tells_layer_ids else (),
            profile=profile,
        )
        # by layer, between `defer_stores` and `flush_stores`
        self._deferred: dict[int, _Deferred] | None = None

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
        view, weights_view = self.cache.views(layer)
        top_k = self.cache.top_k

        def store(ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
            if weights_view is None:
                weights = None
            if may_defer and self._deferred is not None and own_tokens is None:
                self._deferred[layer] = _Deferred(
                    ids[:, :top_k], None if weights is None else weights[:, :top_k]
                )
                return
            first = 0
            own = ids
            if own_tokens is not None:
                first, own = own_tokens(ids)
            end = first + own.shape[0]
            view[first:end].copy_(own[:, :top_k])
            if weights is not None and weights_view is not None:
                # Not by another call of `own_tokens`, which counts its calls.
                source = (own.storage_offset() - ids.storage_offset()) // ids.stride(0)
                own_weights = weights[source : source + own.shape[0]]
                weights_view[first:end].copy_(own_weights[:, :top_k])

        return store

    def defer_stores(self) -> None:
        """Until `flush_stores`, sinks that may defer keep the ids where their router has put them.
        For a forward pass that is recorded as one CUDA graph. A copy in each of 58 layers took 1 %
        of a step of 4 ms."""
        self._deferred = {}

    def flush_stores(self) -> None:
        """Enqueues two kernels that store what was deferred, with weights four, as the end of the
        forward pass."""
        deferred = self._deferred
        self._deferred = None
        if not deferred:
            return
        self._store(self.cache.ids, {layer: chosen.ids for layer, chosen in deferred.items()})
        if self.cache.weights is not None:
            weights: dict[int, torch.Tensor] = {}
            for layer, chosen in deferred.items():
                assert chosen.weights is not None, f"layer {layer} deferred ids without weights"
                weights[layer] = chosen.weights
            self._store(self.cache.weights, weights)

    def _store(self, plane: torch.Tensor, chosen: Mapping[int, torch.Tensor]) -> None:
        """Copies what layers have chosen ([n, K] each) into `plane` ([L, N, K]). Layers that are
        not in `chosen` are stored already, or written directly."""
        if len(chosen) == self.cache.num_layers:
            stacked = torch.stack([chosen[layer] for layer in range(len(chosen))])  # [L, n, K]
            plane[:, : stacked.shape[1]].copy_(stacked)
            return
        for layer, of_layer in chosen.items():
            plane[layer, : len(of_layer)].copy_(of_layer)

    def downstream(self, num_tokens: int, upstream: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, layers so far, K] int32 (2K with weights) for the next stage: `upstream`'s
        rows, then its own. Always memory of its own: the next forward pass writes into the device
        cache while this is still being sent."""
        planes = self.cache.planes[:, :, :num_tokens]  # [1 or 2, L, n, K]
        own = planes.permute(2, 1, 0, 3).flatten(2)  # [n, L, K or 2K]
        parts = [own] if upstream is None else [upstream[:num_tokens], own]
        return torch.cat(parts, dim=1)
