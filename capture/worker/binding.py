"""Binds the model's MoE layers to the device cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.platforms import current_platform

from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.engine import RoutedExpertsSink
from routed_experts.capture.worker.capturer import Capturer, LocalTokenSlice, Sink, ignore
from routed_experts.capture.worker.moe_layers import MoELayers, has_parts
from routed_experts.capture.worker.refusals import monolithic_experts
from routed_experts.capture.worker.token_slices import local_token_slice
from routed_experts.capture.worker.weights import check_weights_are_kept


@dataclass(frozen=True)
class _Ranks:
    """This worker's place among the data-parallel and tensor-parallel ranks."""

    dp_rank: int
    dp_size: int
    tp_rank: int  # 0 where no layer is sequence-parallel

    def own_tokens(self, sp_size: int) -> LocalTokenSlice | None:
        """For a layer whose tokens `sp_size` ranks share; None if its router sees just this rank's
        tokens."""
        if self.dp_size == 1:
            return None
        return local_token_slice(self.dp_rank, self.tp_rank, sp_size)


RewriteBehind = Callable[[MoERunner, int], None]
"""Puts itself behind the router of the layer at an index of a row, and changes what it returns."""


def change_nothing(runner: MoERunner, row: int) -> None:
    """A `RewriteBehind`, where requests say nothing."""


def bind(
    layers: MoELayers,
    capturer: Capturer,
    dp_rank: int,
    dp_size: int,
    rewrite_behind: RewriteBehind = change_nothing,
) -> None:
    """Makes every layer write its logical expert ids into its view of the device cache, and their
    weights if captured: those that `rewrite_behind` leaves.

    This happens inside the opaque MoE operator, so that it works under torch.compile and is
    recorded by graph capture.
    """
    tp_rank = get_tp_group().rank_in_group if has_parts(layers.runners) else 0
    ranks = _Ranks(dp_rank, dp_size, tp_rank)
    for row, runner in enumerate(layers.runners):
        _bind_runner(runner, row, capturer, ranks, rewrite_behind)


def _bind_runner(
    runner: MoERunner,
    row: int,
    capturer: Capturer,
    ranks: _Ranks,
    rewrite_behind: RewriteBehind,
) -> None:
    """Binds the layer at index `row` of a row."""
    with_weights = capturer.cache.weights is not None
    sp_size = int(runner.moe_config.sp_size)
    own_tokens = ranks.own_tokens(sp_size)
    may_defer = owns_topk_buffer(runner) and own_tokens is None
    if with_weights and may_defer:
        check_weights_are_kept(runner)  # they are read after the experts' kernel
    rewrite_behind(runner, row)  # before what captures
    if sp_size == 1 and ranks.tp_rank > 0:
        # All ranks route all tokens, and their ids are joined: those of rank 0 are enough.
        _send_choices(runner, ignore, with_weights=with_weights)
    else:
        sink = capturer.sink(row, own_tokens, may_defer)
        _send_choices(runner, sink, with_weights=with_weights)


def owns_topk_buffer(runner: MoERunner) -> bool:
    """Whether the layer's ids and weights are tensors that the MoE operator allocates, so that a
    reference keeps their memory. The compiled graph around it reuses that of others, as in the
    Transformers backend, despite references."""
    return (
        type(runner.router) in (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter)
        and not runner.is_monolithic
    )


def _send_choices(runner: MoERunner, sink: Sink, *, with_weights: bool) -> None:
    """Gives `sink` the experts that a layer chooses: in its kernel, or with its router."""
    if not runner.is_monolithic:
        if with_weights:
            capture_choice(runner.router, sink)
        else:
            runner.router.set_capture_fn(sink)
    elif cpu_kernels.routes_itself(runner):
        cpu_kernels.capture(runner, sink)
    else:
        experts = monolithic_experts(runner)
        assert experts is not None, f"layer {runner.layer_id} is refused (`check_layer`)"
        runner.routed_experts.routing_sink = RoutedExpertsSink(experts.moe_config, sink)


def capture_choice(router: BaseRouter, sink: Sink) -> None:
    """Gives `sink` the logical ids that a router chooses, and their weights as the experts' kernel
    gets them."""
    # on the instance, because vLLM's capture function gets the ids only
    compute = router._compute_routing

    def compute_routing(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = compute(*args, **kwargs)
        sink(ids, weights)
        return weights, ids

    router._compute_routing = compute_routing
    # Does nothing, but vLLM 0.33 expects every captured router to have a capture function.
    router.set_capture_fn(ignore)


@contextmanager
def storing_after_forward(model: torch.nn.Module, capturer: Capturer) -> Iterator[None]:
    """In CUDA graphs of a whole forward pass of `model`, stores the ids of all layers at the end of
    the graph; eager forward passes and piecewise graphs store them layer by layer."""

    def hold(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            capturer.defer_stores()

    def release(*_: Any) -> None:
        capturer.flush_stores()

    if not current_platform.is_cuda():
        yield
        return
    hooks = [model.register_forward_pre_hook(hold), model.register_forward_hook(release)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
