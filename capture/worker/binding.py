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

from routed_experts.capture.engine.config import BOUNDED_REPLAY
from routed_experts.capture.engine.versions import (
    ALLOW_UNTESTED_FLAG,
    ALLOW_UNTESTED_VARIABLE,
    UnsupportedConfig,
    untested_is_allowed,
)
from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.engine import (
    RoutedExpertsCaptureSource,
    RoutedExpertsSink,
    can_report_choice,
)
from routed_experts.capture.wire.rows import WEIGHTS_FLAG
from routed_experts.capture.worker.capturer import Capturer, LocalTokenSlice, RowShape, Sink

_SHARED_BY_LAYERS = ".meta_mlp."
"""Part of the names of InternS2-Mobius's MoE layers, each of which serves several decoder
layers."""
_BY_MODALITY = (".text_experts", ".vision_experts")
"""Parts of the names of ERNIE-4.5-VL's MoE layers: a step's text tokens pass through one, its image
tokens another."""


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of this worker's part of a model, in decoder order."""

    runners: tuple[MoERunner, ...]
    shape: RowShape
    # In place of `runners`: fused layers (MegaMoE), which give their logical ids to a `capture_fn`
    # of their own.
    fused: tuple[Any, ...] = ()


def find_moe_layers(model: torch.nn.Module) -> MoELayers:
    """The MoE layers of `model` and the shape of their rows; a pipeline stage may have none.
    Refuses layers whose routing cannot be captured, or that do not fit one array."""
    if getattr(model, "decoder_replay_layers", None) is not None:
        raise UnsupportedConfig(BOUNDED_REPLAY)
    fused = [module for module in model.modules() if isinstance(module, RoutedExpertsCaptureSource)]
    if fused:
        return _fused_layers(model, fused)
    named = {
        name: module for name, module in model.named_modules() if isinstance(module, MoERunner)
    }
    # of multimodal models
    towers = tuple(f"{name}." for name in getattr(model, "_tower_model_names", ()))
    if any(name.startswith(towers) for name in named):
        raise UnsupportedConfig(
            "The model's encoder of images, video or audio has MoE layers, which route no tokens."
        )
    runners = tuple(sorted(named.values(), key=lambda runner: int(runner.layer_id)))
    for runner in runners:
        _check_capturable(runner)
    kinds = {(int(runner.moe_config.num_logical_experts), _top_k(runner)) for runner in runners}
    scales = tuple(float(getattr(runner, "routed_scaling_factor", 1.0)) for runner in runners)
    on_input = any(runner.routed_experts.apply_router_weight_on_input for runner in runners)
    return MoELayers(runners, _row_shape(runners, kinds, scales, on_input))


def _fused_layers(model: torch.nn.Module, fused: Iterable[Any]) -> MoELayers:
    """MegaMoE layers: one kernel sends the tokens to their experts' ranks and back. Each rank sees
    its own tokens."""
    if not untested_is_allowed():
        raise UnsupportedConfig(
            "The capture of the model's fused MoE layers (MegaMoE) has not run on a GPU yet: choose another kernel "
            f"with --moe-backend, or add {ALLOW_UNTESTED_FLAG} ({ALLOW_UNTESTED_VARIABLE}=1 in the environment)."
        )
    if get_tp_group().world_size > 1 or any(
        isinstance(module, MoERunner) for module in model.modules()
    ):
        raise UnsupportedConfig(
            "Fused MoE layers (MegaMoE) are captured without tensor parallelism, which spreads tokens over its ranks, "
            "and without MoE layers of another kind: choose another kernel with --moe-backend, or use data parallelism."
        )
    layers = tuple(sorted(fused, key=lambda layer: int(layer.layer_id)))
    kinds = {(int(layer.num_logical_experts), int(layer.top_k)) for layer in layers}
    return MoELayers((), _row_shape(layers, kinds), layers)


def _row_shape(
    layers: Iterable[Any],
    kinds: set[tuple[int, int]],  # experts and top-k of these layers
    scales: tuple[float, ...] = (),
    on_input: bool = False,
) -> RowShape:
    layer_ids = tuple(int(layer.layer_id) for layer in layers)
    if len(set(layer_ids)) != len(layer_ids):
        raise UnsupportedConfig(
            f"Several MoE layers share a decoder layer, which rows cannot express: {layer_ids}."
        )
    if len(kinds) > 1:
        raise UnsupportedConfig(
            f"The MoE layers differ in experts or top-k, which one array cannot express: {sorted(kinds)}."
        )
    num_experts, top_k = kinds.pop() if kinds else (0, 0)  # of a pipeline stage without MoE layers
    return RowShape(layer_ids, num_experts, top_k, scales, on_input)


def has_parts(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether an MoE layer among `modules` is sequence-parallel: each tensor-parallel rank routes a
    part of the tokens. Each model decides this itself; not all follow vLLM's configuration."""
    return any(
        isinstance(module, MoERunner) and module.moe_config.sp_size > 1 for module in modules
    )


def check_weights(layers: MoELayers, is_eager: bool) -> None:
    """Raises `UnsupportedConfig` for layers whose weights cannot be captured."""
    if layers.fused:
        raise UnsupportedConfig(
            "Fused MoE layers (MegaMoE) say which experts were chosen but not their weights: choose another kernel "
            f"with --moe-backend, or remove {WEIGHTS_FLAG}."
        )
    for runner in layers.runners:
        if runner.is_monolithic and not cpu_kernels.routes_itself(runner):
            raise UnsupportedConfig(
                f"The MoE kernel of layer {runner.layer_id} routes by itself, and says which experts but not their "
                "weights: choose another one with --moe-backend, for example --moe-backend triton (marlin for MXFP4), "
                f"or remove {WEIGHTS_FLAG}."
            )
        # The kernel overwrites them, and says so neither to torch.compile nor to anybody else.
        if current_platform.is_cpu() and layers.shape.weights_on_input and not is_eager:
            raise UnsupportedConfig(
                f"The model's weights multiply the experts' input, and compiled code for CPUs overwrites them: add "
                f"--enforce-eager, or remove {WEIGHTS_FLAG}."
            )


def bind(layers: MoELayers, capturer: Capturer, dp_rank: int, dp_size: int) -> None:
    """Makes every layer write its logical expert ids into its view of the device cache, and their
    weights if captured: inside the opaque MoE operator, so that it works under torch.compile and is
    recorded by graph capture."""
    for row, layer in enumerate(layers.fused):
        layer.capture_fn = capturer.sink(row, local_token_slice(dp_rank) if dp_size > 1 else None)
    tp_rank = get_tp_group().rank_in_group if has_parts(layers.runners) else 0
    for row, runner in enumerate(layers.runners):
        sp_size = int(runner.moe_config.sp_size)
        own_tokens = local_token_slice(dp_rank, tp_rank, sp_size) if dp_size > 1 else None
        # Where all ranks route all tokens, one of them is enough for the join.
        sink = (
            _ignore
            if sp_size == 1 and tp_rank > 0
            else capturer.sink(row, own_tokens, owns_topk_buffer(runner))
        )
        view, weights = capturer.cache.views(row)
        is_direct = can_write_directly(runner, dp_size)
        if weights is not None and (is_direct or (owns_topk_buffer(runner) and own_tokens is None)):
            check_weights_are_kept(runner)
        if runner.is_monolithic and cpu_kernels.routes_itself(runner):
            cpu_kernels.capture(runner, sink)
        elif runner.is_monolithic:
            experts = _monolithic_experts(runner)
            runner.routed_experts.routing_sink = RoutedExpertsSink(experts.moe_config, sink)
        elif is_direct:
            write_directly(runner.router, view, weights)
        elif weights is not None:
            capture_choice(runner.router, sink)
        else:
            runner.router.set_capture_fn(sink)


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


def _ignore(ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    pass


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
    router.set_capture_fn(_ignore)  # as in `write_directly`


def check_weights_are_kept(runner: MoERunner) -> None:
    """Refuses a layer whose experts' kernel changes its weights, in vLLM's own first step before it
    is ready."""
    experts = runner.routed_experts
    forward = experts.forward_modular

    def forward_modular(*args: Any, topk_weights: torch.Tensor, **kwargs: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return forward(*args, topk_weights=topk_weights, **kwargs)
        before = topk_weights.clone()
        output = forward(*args, topk_weights=topk_weights, **kwargs)
        # NaN is equal to itself
        if not torch.equal(before.view(torch.uint8), topk_weights.view(torch.uint8)):
            raise UnsupportedConfig(
                f"The MoE kernel of layer {runner.layer_id} changes the weights that it is given: choose another one "
                f"with --moe-backend, or remove {WEIGHTS_FLAG}."
            )
        vars(experts).pop("forward_modular", None)  # microbatches come here at once
        return output

    experts.forward_modular = forward_modular


def owns_topk_buffer(runner: MoERunner) -> bool:
    """Whether the layer's ids and weights are tensors that the MoE operator allocates, so that a
    reference keeps their memory. The compiled graph around it reuses that of others, as in the
    Transformers backend, despite references."""
    return (
        type(runner.router) in (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter)
        and not runner.is_monolithic
    )


def can_write_directly(runner: MoERunner, dp_size: int) -> bool:
    """Whether the layer's top-k kernel can be given the device cache's view as its output. Only for
    vLLM's default router on CUDA with int32 ids, if it sees only this rank's tokens."""
    return (
        current_platform.is_cuda()
        and dp_size == 1
        and type(runner.router) is FusedTopKRouter
        and runner._quant_method.topk_indices_dtype in (None, torch.int32)
    )


def write_directly(
    router: FusedTopKRouter, view: torch.Tensor, weights_view: torch.Tensor | None = None
) -> None:
    """Makes the router's top-k kernel write into `view` ([N, K] int32) instead of a tensor of its
    own, and weights into `weights_view` ([N, K] float32). A step of more than N tokens raises: the
    kernel would write past their end."""
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
            raise RuntimeError(
                f"a step of {num_tokens} tokens does not fit the device cache of {view.shape[0]}"
            )
        ids = view[:num_tokens]
        if weights_view is None:
            weights = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        else:
            weights = weights_view[:num_tokens]
        source_rows = torch.empty_like(ids)
        chosen = top_k_kernel(weights, ids, source_rows, router_logits, router.renormalize)
        return chosen[0], chosen[1]

    # On the instance, because the model creates its routers itself. vLLM's method allocates the
    # kernel's output, and a copy would add a kernel per layer and step. Needed until vLLM lets
    # callers pass the output.
    router._compute_routing = compute_routing
    # Does nothing, but vLLM 0.33 expects every captured router to have a capture function.
    router.set_capture_fn(_ignore)


def local_token_slice(dp_rank: int, sp_rank: int = 0, sp_size: int = 1) -> LocalTokenSlice:
    """Returns a function that finds a data-parallel rank's tokens in a router's ids: those, or the
    gathered tokens of all ranks in rank order. With sequence-parallel MoE, each tensor-parallel
    rank (`sp_rank` of `sp_size`) has an equal part of them, the last part padded. With dual-batch
    overlap, the microbatches of a step, each with its own thread and context, pass through each
    layer in order."""
    microbatches: list[int] = []  # token counts of the microbatches seen in this layer so far

    def first_token(count: int) -> int:
        if not ubatching.dbo_enabled():
            return 0
        current = ubatching.dbo_current_ubatch_id()
        if current == 0:
            microbatches.clear()  # left over from a failed forward pass
        # as after any error in vLLM, the other threads then wait forever
        if len(microbatches) != current:
            raise RuntimeError(
                f"microbatch {current} of a step came to a router as number {len(microbatches)}"
            )
        first = sum(microbatches)
        microbatches.append(count)
        if len(microbatches) == ubatching._NUM_UBATCHES:
            microbatches.clear()
        return first

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            if sp_size > 1:
                raise RuntimeError(
                    "vLLM does not say how the tokens of a step are spread over the ranks"
                )
            return 0, ids
        counts = metadata.num_tokens_across_dp_cpu.tolist()
        parts = [-(-count // sp_size) for count in counts]
        part = parts[dp_rank]
        if ids.shape[0] == part:
            own = ids
        # its own part here too: each rank writes its rows only
        elif ids.shape[0] == sum(parts) * sp_size:
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
    if getattr(runner.routed_experts, "expert_substitution", None) is not None:  # since vLLM 0.33
        raise UnsupportedConfig(
            f"Layer {runner.layer_id} replaces experts (expert_substitution), which changes ids in place: its routing "
            "cannot be captured."
        )
    if _SHARED_BY_LAYERS in runner.layer_name:
        raise UnsupportedConfig(
            "Decoder layers of the model share MoE layers, which rows cannot express."
        )
    if any(part in runner.layer_name for part in _BY_MODALITY):
        raise UnsupportedConfig(
            "The model routes text and image tokens in different MoE layers, which rows cannot express."
        )
    if runner.is_monolithic:
        if not cpu_kernels.routes_itself(runner):
            _monolithic_experts(runner)
        return
    if not isinstance(router, BaseRouter):
        raise UnsupportedConfig(
            f"The router {type(router).__name__} of layer {runner.layer_id} cannot be captured."
        )
    if isinstance(router, ZeroExpertRouter):
        raise UnsupportedConfig(
            f"Layer {runner.layer_id} has zero experts, whose ids vLLM replaces by 0: its routing cannot be captured."
        )
    if router.capture_fn is not None:
        raise UnsupportedConfig(
            f"The router of layer {runner.layer_id} is captured by something else already: only one can be."
        )


def _monolithic_experts(runner: MoERunner) -> Any:
    """The kernel of a layer that routes by itself; refused if it cannot report its choice."""
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
