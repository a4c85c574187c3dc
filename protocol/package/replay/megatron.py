"""`MegatronReplay`: hands rows to the routers of Megatron-core."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.recomputation import in_recomputed_pass
from routed_experts.replay.rows import (
    as_tensor,
    check_distinct,
    check_order,
    flat_rows,
    layer_indices,
)


class MegatronReplay:
    """Feeds the `RouterReplay` of Megatron-core's routers (`moe_enable_routing_replay`) with rows
    of microbatches.

    A context manager around the forward and backward passes of a step. Each forward step calls
    `feed` first. Layers that are recomputed get the rows of their microbatch again, in the order in
    which they were fed, which is that of Megatron's schedules; another order is an error. In the
    end no rows are left in the routers.

    Layers of multi-token prediction are not touched: no response has rows of them.

    Attributes:
        replayed: rows that were replayed so far, counted in each layer.

    Args:
        chunks: the virtual stages that this rank has of the model, or its only one.
        aux_loss: auxiliary losses count the replayed experts, not those that the live router would
            choose.

    Raises:
        ReplayError: a router has no `RouterReplay`, or drops experts that are full, or two are of
            one layer; or, at the end, a router was never asked, or only some microbatches were
            recomputed.
    """

    def __init__(self, chunks: Module | Sequence[Module], *, aux_loss: bool = False) -> None:
        self.replayed = 0
        self._aux_loss = aux_loss
        modules = [chunks] if isinstance(chunks, Module) else chunks
        self._chunks = [_megatron_routers(module) for module in modules]
        self._devices = [
            next((weight.device for weight in module.parameters()), None) for module in modules
        ]
        self._fed: list[int] = []  # microbatches of each chunk; none outside of the block

    def __enter__(self) -> "MegatronReplay":
        if any("get_replay_topk" in vars(router.replay) for router in self._routers()):
            raise ReplayError("the model is being replayed already")
        self.replayed = 0
        self._fed = [0] * len(self._chunks)
        for router in self._routers():
            router.start(self._aux_loss)
        return self

    def feed(self, rows: Any, layer_ids: Sequence[int], chunk: int = 0) -> None:
        """Rows of the next microbatch for a stage.

        Args:
            rows: [..., L, K] ids of this rank's tokens in the order of its hidden states: [T, L, K]
                of packed sequences, else [S, B, L, K] (see `protocol.ranks`).
            layer_ids: decoder layer of each of the L layers; other stages' layers may be among
                them.
            chunk: the place of the virtual stage in `chunks`.

        Raises:
            ReplayError: the rows lack layers of the stage, or have an expert twice; the microbatch
                before was not replayed; or this is not within the block.
        """
        if not self._fed:
            raise ReplayError(
                "rows are replayed within `with MegatronReplay(...)` only: feed them there"
            )
        tensor = as_tensor(rows, self._devices[chunk])
        ids = flat_rows(tensor)
        routers = self._chunks[chunk]
        index_of_layer = layer_indices(list(routers), ids, layer_ids)
        check_distinct(ids[:, sorted(index_of_layer.values())])
        self._check_asked(chunk)
        self._fed[chunk] += 1
        for layer, router in routers.items():
            of_layer = ids[:, index_of_layer[layer]].to(torch.int64)
            router.replay.set_target_indices(of_layer)
            router.shape = tensor.shape
            self.replayed += int((of_layer >= 0).all(dim=1).sum())

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            for chunk, fed in enumerate(self._fed if kind is None else []):
                self._check_asked(chunk)
                for layer, router in self._chunks[chunk].items():
                    if 0 < (left := len(router.replay.replay_backward_list)) < fed:
                        raise ReplayError(
                            f"decoder layer {layer} recomputed {fed - left} of {fed} microbatches"
                        )
        finally:
            self._fed = []
            for router in self._routers():
                router.stop()

    def _routers(self) -> "Iterator[_MegatronRouter]":
        return (router for chunk in self._chunks for router in chunk.values())

    def _check_asked(self, chunk: int) -> None:
        silent = [
            layer
            for layer, router in self._chunks[chunk].items()
            if router.replay.target_topk_idx is not None
        ]
        if silent:
            raise ReplayError(
                f"the routers of decoder layers {silent} were never asked: nothing was replayed there"
            )


_AUXILIARY_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of Megatron-core's routers that count the experts of a routing map."""


class _MegatronRouter:
    """One of Megatron-core's routers, and what it does with the experts that were replayed in the
    pass under way."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.replay = module.router_replay
        self.shape: Sequence[int] = ()  # of the rows that were fed last
        self.ids: Tensor | None = None  # [T, K]
        self.is_known: Tensor | None = None  # [T, 1], of the rows
        self.handle: Any = None

    def start(self, aux_loss: bool) -> None:
        self.replay.clear_indices()
        self.replay.get_replay_topk = _choosing(self.replay, self)
        self.handle = self.module.register_forward_pre_hook(self._check_order)
        for name in _AUXILIARY_LOSSES if aux_loss else ():
            vars(self.module)[name] = self._counting_replayed(getattr(self.module, name))

    def stop(self) -> None:
        self.replay.clear_indices()
        del self.replay.get_replay_topk
        self.handle.remove()
        for name in _AUXILIARY_LOSSES:
            vars(self.module).pop(name, None)
        self.ids = self.is_known = None

    def _check_order(self, _: Any, args: Any) -> None:
        if len(self.shape) == 4 and not in_recomputed_pass():
            check_order(self.shape, args)

    def _counting_replayed(self, apply_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`apply_loss` with the replayed experts in place of those of the live router, which stay
        where a row is not known."""

        def apply(
            probs: Tensor, scores: Tensor, live_map: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            assert self.ids is not None
            assert self.is_known is not None
            replayed_map = torch.zeros_like(live_map, dtype=torch.bool).scatter(1, self.ids, True)
            is_token = live_map.any(dim=1, keepdim=True)  # padding has no experts
            # Megatron counts the largest scores, which with a bias or groups are not what it chooses.
            routing_map = torch.where(self.is_known, replayed_map & is_token, live_map.bool())
            return apply_loss(probs, scores, routing_map, *args, **kwargs)

        return apply


def _choosing(replay: Any, router: _MegatronRouter) -> Callable[..., tuple[Tensor, Tensor]]:
    """What takes the place of `get_replay_topk` of a router's `RouterReplay`. It replays all rows,
    as they are.

    A recomputed pass does what the first one did, operation by operation. Checkpointing without
    `use_reentrant` counts the tensors that autograd saves, and selective checkpointing counts all
    operators.
    """
    # Of each pass that may be recomputed, in the order of the passes.
    peaks: list[NDArray[np.float32]] = []  # the largest score of each token [T]
    known: list[Tensor] = []  # whether each row is known [T, 1]

    def get_replay_topk(
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        is_recomputed = in_recomputed_pass()
        fed = replay.replay_backward_list
        peak = scores.detach().amax(dim=1).float().cpu().numpy()
        if is_recomputed:
            if not _is_first_of(peaks, peak):
                raise ReplayError(
                    "a microbatch is recomputed that is not the next of those fed within this block"
                )
            peaks.pop(0)
            rows = fed.pop(0)
        else:
            rows = replay.target_topk_idx
        _check_rows_fit(rows, scores, topk)
        rows = rows.to(scores.device)
        _, own = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
        is_unknown = (rows < 0).any(dim=1, keepdim=True)
        ids = torch.where(is_unknown, own, rows)
        router.ids = ids
        is_known = ~is_unknown
        router.is_known = known.pop(0) if is_recomputed else is_known
        if not is_recomputed:
            known.append(is_known)
            replay.target_topk_idx = None  # one forward pass per microbatch
            fed[-1] = ids
            peaks.append(peak)
        return scores.gather(1, ids), ids

    return get_replay_topk


def _check_rows_fit(rows: Tensor | None, scores: Tensor, topk: int) -> None:
    """Raises `ReplayError` if `rows` are not ids [T, K] for scores [T, E]."""
    num_tokens, num_experts = scores.shape
    needed = f"rows for {[num_tokens, topk]} of {num_experts} experts are needed"
    if rows is None:
        raise ReplayError(f"{needed}, none are fed")
    highest_id = int(rows.max()) if rows.numel() else -1
    if rows.shape != (num_tokens, topk) or highest_id >= num_experts:
        raise ReplayError(f"{needed}, they are {[*rows.shape]} up to expert {highest_id}")


def _is_first_of(peaks: Sequence[NDArray[np.float32]], peak: NDArray[np.float32]) -> bool:
    """Whether the microbatch with the scores `peak` is the first of those with `peaks`: none is
    much nearer to it."""
    if not peaks or len(peaks[0]) != len(peak):
        return False
    apart = [float(np.abs(other - peak).sum()) for other in peaks if len(other) == len(peak)]
    return apart[0] <= 4 * min(apart[1:], default=np.inf)


def _megatron_routers(chunk: Module) -> dict[int, _MegatronRouter]:
    """The router of each decoder layer."""
    routers: dict[int, _MegatronRouter] = {}
    for name, module in chunk.named_modules():
        if hasattr(module, "router_replay") and "mtp" not in name.split("."):
            if module.router_replay is None:
                raise ReplayError(f"{name} has no RouterReplay: set moe_enable_routing_replay")
            if module.config.moe_expert_capacity_factor is not None:
                raise ReplayError(
                    f"{name} drops experts that are full: leave moe_expert_capacity_factor unset"
                )
            layer = int(module.layer_number) - 1
            if layer in routers:
                raise ReplayError(
                    f"two routers in decoder layer {layer}: give the part of the model that has one"
                )
            routers[layer] = _MegatronRouter(module)
    return routers
