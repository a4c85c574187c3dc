"""Binds the model's MoE layers to the device cache."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
    dispatch_topk_sigmoid_func,
    dispatch_topk_softmax_func,
)
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.platforms import current_platform
from vllm.v1.worker import ubatching

from routed_experts.capture.capturer import Capturer, LocalTokenSlice, RowShape
from routed_experts.capture.engine.config import BOUNDED_REPLAY
from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.engine import RoutedExpertsCaptureSource, RoutedExpertsSink, can_report_choice

_SHARED_BY_LAYERS = ".meta_mlp."
"""In the names of InternS2-Mobius's MoE layers, each of which takes the place of several."""


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of this worker's part of a model, in decoder order."""

    runners: tuple[MoERunner, ...]
    shape: RowShape


def find_moe_layers(model: torch.nn.Module) -> MoELayers:
    """The MoE layers of `model` and what their rows look like; a pipeline stage may have none.

    Raises:
        UnsupportedConfig: a layer's routing cannot be captured, or the layers do not fit one array.
    """
    if any(isinstance(module, RoutedExpertsCaptureSource) for module in model.modules()):
        raise UnsupportedConfig(
            "The model's fused MoE layers (MegaMoE) cannot be captured: choose another kernel with --moe-backend."
        )
    if getattr(model, "decoder_replay_layers", None) is not None:
        raise UnsupportedConfig(BOUNDED_REPLAY)
    runners = tuple(sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: int(m.layer_id)))
    layer_ids = tuple(int(runner.layer_id) for runner in runners)
    if len(set(layer_ids)) != len(layer_ids):
        raise UnsupportedConfig(f"Several MoE layers share a decoder layer, which rows cannot express: {layer_ids}.")
    for runner in runners:
        _check_capturable(runner)
    kinds = {(int(runner.moe_config.num_logical_experts), _top_k(runner)) for runner in runners} or {(0, 0)}
    if len(kinds) != 1:
        raise UnsupportedConfig(
            f"The MoE layers differ in experts or top-k, which one array cannot express: {sorted(kinds)}."
        )
    num_experts, top_k = kinds.pop()
    return MoELayers(runners, RowShape(layer_ids, num_experts, top_k))


def has_parts(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether an MoE layer among `modules` is sequence-parallel: each tensor-parallel rank routes a part of the tokens.

    The models decide that for themselves, and not all by vLLM's configuration.
    """
    return any(isinstance(module, MoERunner) and module.moe_config.sp_size > 1 for module in modules)


def bind(layers: MoELayers, capturer: Capturer, dp_rank: int, dp_size: int) -> None:
    """Makes every layer write its logical expert ids into its view of the device cache.

    The routers do so before they map logical to physical ids (expert load balancing), inside the opaque MoE
    operator, so it works under torch.compile and is recorded by graph capture.
    """
    tp_rank = get_tp_group().rank_in_group if has_parts(layers.runners) else 0
    for row, runner in enumerate(layers.runners):
        sp_size = int(runner.moe_config.sp_size)
        own_tokens = local_token_slice(dp_rank, tp_rank, sp_size) if dp_size > 1 else None
        # Where all ranks route all tokens, one of them is enough for the join.
        sink = _ignore if sp_size == 1 and tp_rank > 0 else capturer.sink(row, own_tokens, owns_topk_buffer(runner))
        if runner.is_monolithic and cpu_kernels.routes_itself(runner):
            cpu_kernels.capture(runner, sink)
        elif runner.is_monolithic:
            experts = _monolithic_experts(runner)
            runner.routed_experts.routing_sink = RoutedExpertsSink(experts.moe_config, sink)
        elif can_write_directly(runner, dp_size):
            write_directly(runner.router, capturer.cache.view(row))
        else:
            runner.router.set_capture_fn(sink)


@contextmanager
def storing_after_forward(model: torch.nn.Module, capturer: Capturer) -> Iterator[None]:
    """While CUDA graphs are recorded: has layers' ids stored at once in those of a whole forward pass of `model`.

    No kernel of a layer may write into its router's ids, as where they are written directly. A forward pass that is
    not recorded, or of which torch.compile's pieces are, stores them layer by layer.
    """

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


def _ignore(ids: torch.Tensor) -> None:
    pass


def owns_topk_buffer(runner: MoERunner) -> bool:
    """Whether the layer's ids are a tensor that the MoE operator allocates, and nothing else gets while it is held.

    Others may be one that came from outside, as the Transformers backend's are: the compiled graph around the operator
    gives its memory to the next layer, whoever holds it.
    """
    return type(runner.router) in (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter) and not runner.is_monolithic


def can_write_directly(runner: MoERunner, dp_size: int) -> bool:
    """Whether the layer's top-k kernel can be given the device cache's view as its output.

    Only vLLM's default router on CUDA, where the kernel wants int32 ids, and where it sees this rank's tokens only.
    """
    return (
        current_platform.is_cuda()
        and dp_size == 1
        and type(runner.router) is FusedTopKRouter
        and runner._quant_method.topk_indices_dtype in (None, torch.int32)
    )


def write_directly(router: FusedTopKRouter, view: torch.Tensor) -> None:
    """Makes the router's top-k kernel write into `view` ([N, K] int32) instead of a tensor of its own.

    Raises, when a step runs or is captured:
        RuntimeError: the step has more than N tokens, which the kernel would write past the end of `view`.
    """
    scores = {"softmax": dispatch_topk_softmax_func, "sigmoid": dispatch_topk_sigmoid_func}
    top_k_kernel = scores[router.scoring_func]()

    def compute_routing(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert indices_type in (None, torch.int32)
        num_tokens = router_logits.shape[0]
        if num_tokens > view.shape[0]:
            raise RuntimeError(f"a step of {num_tokens} tokens does not fit the device cache of {view.shape[0]}")
        ids = view[:num_tokens]
        weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        source_rows = torch.empty_like(ids)
        chosen = top_k_kernel(weights, ids, source_rows, router_logits, router.renormalize)
        return chosen[0], chosen[1]

    # On the instance, because the model makes its routers itself. vLLM's method allocates the kernel's output; taking a
    # copy of that instead would cost one kernel more in each layer and step. Until a router can be given its output.
    router._compute_routing = compute_routing
    # Nothing is left to capture, but vLLM 0.33 takes a router without a capture function for one that is not captured.
    router.set_capture_fn(_ignore)


def local_token_slice(dp_rank: int, sp_rank: int = 0, sp_size: int = 1) -> LocalTokenSlice:
    """A function that finds a data-parallel rank's tokens in a router's ids.

    vLLM's dispatch either routes each rank's tokens where they are, or gathers those of all ranks first, in the order
    of the ranks. With sequence-parallel MoE the tensor-parallel ranks of a data-parallel rank have a part of its tokens
    each: equal parts, the last filled up with padding. With dual-batch overlap the step is two or more microbatches,
    each with a thread and a context of its own, which go through each layer in order, as one waits for the other.

    Args:
        dp_rank: the data-parallel rank.
        sp_rank, sp_size: the tensor-parallel rank and how many there are, if the layer is sequence-parallel.
    """
    microbatches: list[int] = []  # how many tokens those that have been here in this step had

    def first_token(count: int) -> int:
        if not ubatching.dbo_enabled():
            return 0
        current = ubatching.dbo_current_ubatch_id()
        if current == 0:
            microbatches.clear()  # of a forward pass that failed
        if len(microbatches) != current:  # the others' threads then wait for ever, as vLLM's do at any error
            raise RuntimeError(f"microbatch {current} of a step came to a router as number {len(microbatches)}")
        first = sum(microbatches)
        microbatches.append(count)
        if len(microbatches) == ubatching._NUM_UBATCHES:
            microbatches.clear()
        return first

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            if sp_size > 1:
                raise RuntimeError("vLLM does not say how the tokens of a step are spread over the ranks")
            return 0, ids
        counts = metadata.num_tokens_across_dp_cpu.tolist()
        parts = [-(-count // sp_size) for count in counts]
        part = parts[dp_rank]
        if ids.shape[0] == part:
            own = ids
        elif ids.shape[0] == sum(parts) * sp_size:  # of these its own part too: no row has the ids of two ranks
            own = ids[sum(parts[:dp_rank]) * sp_size + sp_rank * part :][:part]
        else:
            raise RuntimeError(
                f"a router saw {ids.shape[0]} tokens: neither this rank's part, {part}, nor all ranks' {counts}"
            )
        first = min(sp_rank * part, counts[dp_rank])
        return first_token(counts[dp_rank]) + first, own[: counts[dp_rank] - first]

    return own_tokens


def _check_capturable(runner: MoERunner) -> None:
    router = runner.router
    if runner.moe_config.sp_size > 1 and runner.moe_config.dp_size == 1:
        raise UnsupportedConfig(
            f"Layer {runner.layer_id} spreads the tokens of a step over the tensor-parallel ranks, but vLLM says how "
            "with data parallelism only: choose another --moe-backend, or remove --enable-expert-parallel."
        )
    if _SHARED_BY_LAYERS in runner.layer_name:
        raise UnsupportedConfig("Decoder layers of the model share MoE layers, which rows cannot express.")
    if runner.is_monolithic:
        if not cpu_kernels.routes_itself(runner):
            _monolithic_experts(runner)
        return
    if not isinstance(router, BaseRouter):
        raise UnsupportedConfig(f"The router {type(router).__name__} of layer {runner.layer_id} cannot be captured.")
    if isinstance(router, ZeroExpertRouter):
        raise UnsupportedConfig(
            f"Layer {runner.layer_id} has zero experts, whose ids vLLM replaces by 0: its routing cannot be captured."
        )
    if router.capture_fn is not None:
        raise UnsupportedConfig(
            f"The router of layer {runner.layer_id} is captured by something else already: only one can be."
        )


def _monolithic_experts(runner: MoERunner) -> Any:
    """The kernel of a layer that routes by itself, if it can write its choice out.

    Raises:
        UnsupportedConfig: it cannot.
    """
    kernel = getattr(getattr(runner._quant_method, "moe_kernel", None), "impl", None)
    experts = getattr(kernel, "fused_experts", None)
    if not (isinstance(experts, FusedMoEExpertsMonolithic) and can_report_choice(experts)):
        raise UnsupportedConfig(
            f"The MoE kernel {type(experts).__name__} of layer {runner.layer_id} routes by itself and does not say "
            "how: choose another one with --moe-backend, for example --moe-backend triton (marlin for MXFP4)."
        )
    return experts


def _top_k(runner: MoERunner) -> int:
    fused_shared = int(getattr(runner.router, "num_fused_shared_experts", 0))
    return int(runner.router.top_k) - fused_shared
