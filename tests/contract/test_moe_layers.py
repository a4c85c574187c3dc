"""vLLM's real MoE layers, model runner and scheduler with ours, in this process: no server, no
engine process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import (
    DPMetadata,
    ForwardContext,
    override_forward_context,
    set_forward_context,
)
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.required import WORKER
from routed_experts.capture.wire.rows import WEIGHTS_KEY, ids_of, weights_of
from routed_experts.capture.wire.transport import StepRows, detach
from routed_experts.capture.worker import binding
from routed_experts.capture.worker.binding import bind, capture_choice
from routed_experts.capture.worker.capturer import Capturer, RowShape
from routed_experts.capture.worker.moe_layers import (
    MoELayers,
    find_moe_layers,
    has_parts,
    returns_sorted,
)
from routed_experts.capture.worker.refusals import REFUSED_ROUTERS
from routed_experts.capture.worker.weights import check_weights, check_weights_are_kept
from routed_experts.server.http.seams import _first_or_none
from tests.contract.engine import no_collections
from tests.contract.served import worker_in_this_process

with_routers = pytest.mark.skipif(
    _first_or_none("select_experts", *cpu_kernels._MODULES) is not None,
    reason="vLLM 0.29 and older: kernels for CPUs choose experts without a router",
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="written for the worker of the CPU build"
)


class Engine:
    """vLLM's engine core with our worker and scheduler, stepped by hand."""

    def __init__(self, model: Path, **options: Any) -> None:
        args = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=8 << 20,
            max_model_len=512,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            worker_cls="routed_experts.capture.worker.worker.CpuCaptureWorker",
            scheduler_cls="routed_experts.capture.scheduler.scheduler.CaptureScheduler",
            **options,
        )
        self.config = args.create_engine_config()
        self.core = EngineCore(self.config, UniProcExecutor, log_stats=False)
        self.worker: Any = self.core.model_executor.driver_worker.worker
        self.model = self.worker.model_runner.get_model()
        self.runners = [module for module in self.model.modules() if isinstance(module, MoERunner)]
        self.ids: torch.Tensor = self.worker._capturer.cache.ids

    def steps(self, prompts: list[list[int]], max_tokens: int) -> list[StepRows]:
        """What each step brought back while it generated `max_tokens` tokens for each prompt."""
        steps: list[StepRows | None] = []
        update: Callable[..., Any] = self.core.scheduler.update_from_output

        def recording(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Any:
            steps.append(detach(output))
            return update(scheduled, output)

        with patch.object(self.core.scheduler, "update_from_output", recording):
            for prompt in prompts:
                sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
                request = EngineCoreRequest(
                    str(next(_ids)), prompt, None, sampling, None, 0.0, None, None, None
                )
                self.core.add_request(*self.core.preprocess_add_request(request))
            while self.core.scheduler.has_unfinished_requests():
                self.core.step()
        return [step for step in steps if step is not None]


_ids = count()


@contextmanager
def stepped(model: Path, **options: Any) -> Iterator[Engine]:
    with worker_in_this_process({}), no_collections():
        running = Engine(model, **options)
        try:
            yield running
        finally:
            running.core.shutdown()
            cleanup_dist_env_and_memory()


with_weights = pytest.mark.parametrize("engine", [True], ids=["weights"], indirect=True)


@pytest.fixture(scope="module", params=[False], ids=["ids"])
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with stepped(tiny_model, additional_config={WEIGHTS_KEY: request.param}) as running:
        yield running


def capturer_of(shape: RowShape, max_tokens: int = 8) -> Capturer:
    """Of a model without pipeline stages."""
    return Capturer(
        shape,
        stage_layers=[len(shape.layer_ids)],
        stage=0,
        max_tokens=max_tokens,
        max_steps_in_flight=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_layer_writes_what_its_gate_chooses(
    engine: Engine, tiny_model: Path, tokens: int
) -> None:
    """The oracle is the product with the gate's weights as they are in the file."""
    hidden = torch.randn((tokens, 64), generator=torch.Generator().manual_seed(tokens))
    weights = load_file(tiny_model / "model.safetensors")
    moe_layers = [1, 2, 3, 4, 5]
    assert len(engine.ids) == len(moe_layers)
    with torch.inference_mode(), set_forward_context(None, engine.config, num_tokens=tokens):
        for row, layer in enumerate(moe_layers):
            engine.ids.fill_(-1)
            engine.model.model.layers[layer].mlp(hidden)
            scores = hidden @ weights[f"model.layers.{layer}.mlp.gate.weight"].T
            written = engine.ids[row, :tokens].long()
            # In the router's own order: on CPU that of an unsorted top-k, which is not by score.
            assert torch.equal(written, scores.topk(4, dim=1, sorted=False).indices)
            assert (engine.ids[row, tokens:] == -1).all()
            assert (np.delete(engine.ids.numpy(), row, axis=0) == -1).all()


def test_no_router_is_replaced_without_need(engine: Engine) -> None:
    """But where weights or routing as an input are asked for."""
    assert len(engine.runners) == 5
    assert not [one for one in engine.runners if "_compute_routing" in vars(one.router)]


@with_routers
def test_steps_that_a_layer_skips(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a kernel for small batches that routes by itself: its rows are unknown, and not those
    of another step."""
    layer = 2
    router = engine.runners[layer].router
    capture = router.capture_fn
    monkeypatch.setattr(router, "capture_fn", lambda ids: capture(ids) if len(ids) > 3 else None)
    prefill, *decode = engine.steps([[70, 71, 72], [73, 74, 75]], max_tokens=4)
    assert prefill.rows.min() >= 0
    assert len(decode) == 3
    for step in decode:
        assert (step.rows[:, layer] == -1).all()
        assert (np.delete(step.rows, layer, axis=1) >= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda of: (of, "layer_name", of.layer_name),
            "captured by something else already",
            marks=with_routers,
        ),
        (
            lambda of: (of.moe_config.moe_parallel_config, "sp_size", 2),
            "Layer 1 spreads the tokens",
        ),
        (lambda of: (of, "layer_name", "model.meta_mlp.0.experts"), "share MoE layers"),
        (
            lambda of: (of, "layer_name", "model.layers.1.mlp.text_experts"),
            "routes text and image tokens",
        ),
    ],
)
def test_layers_that_cannot_be_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], message: str
) -> None:
    assert not has_parts(engine.model.modules())
    monkeypatch.setattr(*change(engine.runners[0]))
    assert has_parts(engine.model.modules()) == ("spreads" in message)
    with pytest.raises(UnsupportedConfig, match=message):
        find_moe_layers(engine.model)


def test_routers_of_refused_classes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of classes that derive from them; the list of required names has each, so that a rename
    in vLLM is seen."""
    assert REFUSED_ROUTERS.keys() <= {name.short for name in WORKER}
    derived = type("Derived", (ZeroExpertRouter,), {})
    for cls in (ZeroExpertRouter, derived):
        monkeypatch.setattr(engine.runners[0], "router", object.__new__(cls))
        with pytest.raises(UnsupportedConfig, match="Layer 1 has zero experts"):
            find_moe_layers(engine.model)


def test_layers_of_a_vision_tower_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose rows would be of patches; vLLM's multimodal models say which of their parts are
    towers."""
    for runner in engine.runners:
        monkeypatch.setattr(runner.router, "capture_fn", None)
    monkeypatch.setattr(engine.model, "_tower_model_names", ["visual"], raising=False)
    assert find_moe_layers(engine.model).shape.layer_ids == (1, 2, 3, 4, 5)
    monkeypatch.setattr(engine.model, "_tower_model_names", ["model"])
    with pytest.raises(UnsupportedConfig, match="encoder of images, video or audio has MoE layers"):
        find_moe_layers(engine.model)


@with_routers
def test_of_layers_that_all_ranks_route_one_rank_has_the_ids(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others are spread, so that the ranks' ids are joined."""
    for runner in engine.runners:
        monkeypatch.setattr(runner.router, "capture_fn", None)
    monkeypatch.setattr(engine.runners[1].moe_config.moe_parallel_config, "sp_size", 2)
    monkeypatch.setattr(binding, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    layers = MoELayers(tuple(engine.runners), engine.worker._capturer.shape)
    capturer = capturer_of(layers.shape)
    bind(layers, capturer, dp_rank=0, dp_size=2)
    metadata = DPMetadata(torch.tensor([6, 2], dtype=torch.int32))
    with override_forward_context(ForwardContext({}, {}, {}, dp_metadata=metadata)):
        for layer, runner in enumerate(engine.runners):
            runner.router.capture_fn(
                torch.full((3 if layer == 1 else 6, layers.shape.top_k), layer)
            )
    assert (capturer.cache.ids[1, 3:6] == 1).all()
    capturer.cache.ids[1, 3:6] = -1
    assert (capturer.cache.ids == -1).all()


@pytest.mark.parametrize("recorded", [True, False])
def test_ids_are_stored_at_the_end_of_a_forward_pass_that_is_recorded(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And layer by layer in all others, also when nothing is recorded any more."""
    capturer = capturer_of(RowShape((0, 1), 8, 2), max_tokens=4)
    ids = torch.arange(6, dtype=torch.int32).reshape(3, 2)

    class Model(torch.nn.Module):
        def forward(self) -> bool:
            capturer.sink(0, may_defer=True)(ids)
            capturer.sink(1, may_defer=True)(ids + 2)
            return bool((capturer.cache.ids == -1).all())

    model = Model()
    monkeypatch.setattr(type(binding.current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded)
    with binding.storing_after_forward(model, capturer):
        assert model() is recorded
    assert torch.equal(capturer.cache.ids[:, :3], torch.stack([ids, ids + 2]))
    capturer.cache.reset_rows(4)
    assert model() is False


@with_routers
def test_ids_that_came_from_outside_are_not_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Transformers backend's, whose memory the compiled graph gives to the next layer."""
    from_outside = CustomRoutingRouter(4, 16, custom_routing_function=lambda **_: None)
    for runner, router in zip(engine.runners, (from_outside, FusedTopKRouter(4, 16)), strict=False):
        monkeypatch.setattr(runner, "router", router)
    shape = engine.worker._capturer.shape
    capturer = capturer_of(shape)
    bind(MoELayers(tuple(engine.runners[:2]), shape), capturer, dp_rank=0, dp_size=1)
    capturer.defer_stores()
    for runner in engine.runners[:2]:
        runner.router.capture_fn(torch.ones((3, shape.top_k), dtype=torch.int32))
    assert (capturer.cache.ids[0][:3] == 1).all()
    assert (capturer.cache.ids[1] == -1).all()
    capturer.flush_stores()
    assert (capturer.cache.ids[1][:3] == 1).all()


def test_fused_layers_are_refused(engine: Engine) -> None:
    """As vLLM's own capture tells them: by what they have."""
    fused = torch.nn.Module()
    fused.layer_id = 1
    fused.capture_fn = None
    with pytest.raises(UnsupportedConfig, match=r"MegaMoE.*choose another one"):
        find_moe_layers(torch.nn.ModuleList([engine.model, fused]))


# ---- weights, as the layers hand them to their experts ----


def handed_by(
    runner: MoERunner, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a layer's experts are handed from now on: ids and weights, as they were then."""
    method, handed = runner.routed_experts.quant_method, []
    apply = method.apply

    def recording(*, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **others: Any) -> Any:
        handed.append((topk_ids.clone(), topk_weights.clone()))
        return apply(topk_weights=topk_weights, topk_ids=topk_ids, **others)

    monkeypatch.setattr(method, "apply", recording, raising=False)
    return handed


@with_weights
@with_routers
def test_rows_are_what_each_layers_experts_are_handed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = [handed_by(runner, monkeypatch) for runner in engine.runners]
    steps = engine.steps([[40, 41, 42, 43, 44], [50, 51, 52], [60]], max_tokens=4)
    assert len(steps) == 4
    for index, step in enumerate(steps):
        assert step.rows.shape[1:] == (15, 4)
        for layer, of_layer in enumerate(handed):
            ids, weights = of_layer[index]
            count = len(step.rows)
            assert (ids_of(step.rows)[:, layer] == ids[:count].numpy()).all()
            assert weights_of(step.rows)[:, layer].tobytes() == weights[:count].numpy().tobytes()


@with_weights
@with_routers
def test_a_kernel_that_overwrites_weights(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied before it runs, as that of Llama 4 on CPUs does it."""
    runner, cache = engine.runners[0], engine.worker._capturer.cache
    method = runner.routed_experts.quant_method
    apply = method.apply

    def overwriting(*, topk_weights: torch.Tensor, **others: Any) -> Any:
        output = apply(topk_weights=topk_weights, **others)
        topk_weights.fill_(1.0)
        return output

    monkeypatch.setattr(method, "apply", overwriting, raising=False)
    handed = handed_by(runner, monkeypatch)
    with torch.inference_mode(), set_forward_context(None, engine.config, num_tokens=5):
        engine.model.model.layers[1].mlp(torch.randn(5, 64))
    assert (handed[0][1] != 1.0).all()
    assert torch.equal(cache.weights[0, :5], handed[0][1])


@with_weights
def test_what_a_model_says_of_its_weights(engine: Engine) -> None:
    shape = engine.worker._capturer.shape
    assert (shape.weights_scale, shape.weights_on_input) == ((1.0,) * 5, False)
    info = engine.worker.routed_experts_info()
    assert (info["weights"], info["weights_scale"], info["weights_on_input"]) == (
        True,
        [1.0] * 5,
        False,
    )
    assert info["device_bytes"] == 2 * 5 * engine.worker.model_runner.max_num_tokens * 4 * 4


def test_an_order_is_promised_on_cuda_for_the_plain_top_k_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.worker.routed_experts_info()["sorted_by_weight"] is False  # on a CPU
    cuda = torch.device("cuda")
    plain = SimpleNamespace(
        router=FusedTopKRouter(top_k=2, global_num_experts=4), is_monolithic=False
    )
    assert returns_sorted([plain, plain], cuda)
    assert not returns_sorted([plain], torch.device("cpu"))
    by_itself = SimpleNamespace(router=plain.router, is_monolithic=True)
    other = SimpleNamespace(router=object.__new__(CustomRoutingRouter), is_monolithic=False)
    for layer in (by_itself, other):
        assert not returns_sorted([plain, layer], cuda)


def layers_of(engine: Engine) -> MoELayers:
    return MoELayers(tuple(engine.runners), engine.worker._capturer.shape)


@with_weights
def test_kernels_that_route_by_themselves_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_weights(layers_of(engine), is_eager=False)
    monkeypatch.setattr(MoERunner, "is_monolithic", True)
    monkeypatch.setattr(binding.cpu_kernels, "routes_itself", lambda runner: False)
    with pytest.raises(UnsupportedConfig) as error:
        check_weights(layers_of(engine), is_eager=True)
    assert "not their weights: choose another one with --moe-backend" in str(error.value)
    # The tiny model has weights though nobody has given a flag that could be removed.
    assert "or serve without weights (--no-enable-return-routed-expert-weights)" in str(error.value)


@with_weights
def test_compiled_kernels_that_overwrite_weights_are_refused(engine: Engine) -> None:
    layers = layers_of(engine)
    on_input = replace(layers, shape=replace(layers.shape, weights_on_input=True))
    check_weights(on_input, is_eager=True)
    with pytest.raises(UnsupportedConfig, match="add --enforce-eager"):
        check_weights(on_input, is_eager=False)


def run_layer(engine: Engine) -> None:
    with torch.inference_mode(), set_forward_context(None, engine.config, num_tokens=3):
        engine.model.model.layers[2].mlp(torch.randn(3, 64))


@with_weights
@with_routers
def test_weights_are_compared_before_and_after_the_kernel(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and where a kernel that changes them would be seen."""
    experts = engine.runners[1].routed_experts
    check_weights_are_kept(engine.runners[1])
    assert "forward_modular" in vars(experts)
    run_layer(engine)
    assert "forward_modular" not in vars(experts)
    apply = experts.quant_method.apply
    for change in (lambda weights: weights.mul_(2.0), lambda weights: weights[-1, -1].fill_(-0.0)):

        def changing(*, topk_weights: torch.Tensor, change: Any = change, **others: Any) -> Any:
            output = apply(topk_weights=topk_weights, **others)
            change(topk_weights)
            return output

        monkeypatch.setattr(experts.quant_method, "apply", changing, raising=False)
        check_weights_are_kept(engine.runners[1])
        with pytest.raises(UnsupportedConfig, match="layer 2 changes the weights that it is given"):
            run_layer(engine)
        del experts.forward_modular
        monkeypatch.undo()


@with_weights
@with_routers
def test_a_choice_is_captured_before_ids_are_mapped(engine: Engine) -> None:
    """As they are where experts have replicas: weights belong to the logical ids."""
    router, seen = engine.runners[0].router, []
    compute, capture = router._compute_routing, router.capture_fn
    vars(router).pop("_compute_routing", None)
    try:
        capture_choice(router, lambda ids, weights: seen.append((ids.clone(), weights.clone())))
        with patch.object(type(router), "_apply_eplb_mapping", lambda self, ids: ids + 100):
            weights, ids = router.select_experts(torch.zeros(3, 64), torch.randn(3, 16))
        ((logical, own),) = seen
        assert torch.equal(ids, logical + 100)
        assert torch.equal(weights, own)
    finally:
        router._compute_routing = compute
        router.set_capture_fn(capture)
