"""vLLM's real MoE layers, model runner and scheduler with ours, in this process: no server, no engine process."""

from collections.abc import Callable, Iterator
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
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context, set_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.engine import binding
from routed_experts.capture.engine.binding import MoELayers, bind, find_moe_layers, has_parts, write_directly
from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.engine.transport import detach
from routed_experts.capture.pipeline import StepRows
from routed_experts.capture.seams import cpu_kernels
from routed_experts.capture.seams.http import _first
from tests.contract.served import worker_in_this_process

with_routers = pytest.mark.skipif(
    _first("select_experts", *cpu_kernels._MODULES) is not None,
    reason="vLLM 0.29 and older: kernels for CPUs choose experts without a router",
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for the worker of the CPU build")


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
            worker_cls="routed_experts.capture.engine.worker.CpuCaptureWorker",
            scheduler_cls="routed_experts.capture.engine.scheduler.CaptureScheduler",
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
                request = EngineCoreRequest(str(next(_ids)), prompt, None, sampling, None, 0.0, None, None, None)
                self.core.add_request(*self.core.preprocess_add_request(request))
            while self.core.scheduler.has_unfinished_requests():
                self.core.step()
        return [step for step in steps if step is not None]


_ids = count()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with worker_in_this_process({}):
        running = Engine(tiny_model)
        try:
            yield running
        finally:
            running.core.shutdown()
            cleanup_dist_env_and_memory()


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_layer_writes_what_its_gate_chooses(engine: Engine, tiny_model: Path, tokens: int) -> None:
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


def test_the_steps_of_requests(engine: Engine) -> None:
    """Every row of every step is known, in prefill and decode steps and in a batch."""
    steps = engine.steps([[40, 41, 42, 43, 44], [50, 51, 52], [60]], max_tokens=4)
    assert [np.diff(step.offsets).tolist() for step in steps] == [[5, 3, 1], *([[1, 1, 1]] * 3)]
    for step in steps:
        assert step.rows.min() >= 0
        assert len(set(step.slots.tolist())) == len(step.slots)


@with_routers
def test_without_weights_no_method_is_replaced(engine: Engine) -> None:
    """vLLM's own capture function gets the ids, into a cache of their own."""
    for runner in engine.runners:
        assert "_compute_routing" not in vars(runner.router)
        assert "forward_modular" not in vars(runner.routed_experts)
        assert runner.router.capture_fn is not None
    assert len(engine.worker._capturer.cache.planes) == 1


@with_routers
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_steps_that_a_layer_skips(engine: Engine, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    """Such as a kernel for small batches that routes by itself: its rows are unknown, and not those of another step."""
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
            lambda of: (of, "layer_name", of.layer_name), "captured by something else already", marks=with_routers
        ),
        (lambda of: (of.moe_config.moe_parallel_config, "sp_size", 2), "Layer 1 spreads the tokens"),
        (lambda of: (of, "layer_name", "model.meta_mlp.0.experts"), "share MoE layers"),
        (lambda of: (of, "layer_name", "model.layers.1.mlp.text_experts"), "routes text and image tokens"),
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


def test_layers_of_a_vision_tower_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows would be of patches; vLLM's multimodal models say which of their parts are towers."""
    for runner in engine.runners:
        monkeypatch.setattr(runner.router, "capture_fn", None)
    monkeypatch.setattr(engine.model, "_tower_model_names", ["visual"], raising=False)
    assert find_moe_layers(engine.model).shape.layer_ids == (1, 2, 3, 4, 5)
    monkeypatch.setattr(engine.model, "_tower_model_names", ["model"])
    with pytest.raises(UnsupportedConfig, match="encoder of images, video or audio has MoE layers"):
        find_moe_layers(engine.model)


@with_routers
def test_of_layers_that_all_ranks_route_one_rank_has_the_ids(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others are spread, so that the ranks' ids are joined."""
    for runner in engine.runners:
        monkeypatch.setattr(runner.router, "capture_fn", None)
    monkeypatch.setattr(engine.runners[1].moe_config.moe_parallel_config, "sp_size", 2)
    monkeypatch.setattr(binding, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    layers = MoELayers(tuple(engine.runners), engine.worker._capturer.shape)
    capturer = Capturer(layers.shape, [len(engine.runners)], 0, 8, 1, torch.device("cpu"))
    bind(layers, capturer, dp_rank=0, dp_size=2)
    metadata = DPMetadata(torch.tensor([6, 2], dtype=torch.int32))
    with override_forward_context(ForwardContext({}, {}, {}, dp_metadata=metadata)):
        for layer, runner in enumerate(engine.runners):
            runner.router.capture_fn(torch.full((3 if layer == 1 else 6, layers.shape.top_k), layer))
    assert (capturer.cache.ids[1, 3:6] == 1).all()
    capturer.cache.ids[1, 3:6] = -1
    assert (capturer.cache.ids == -1).all()


@pytest.mark.parametrize("tokens", [9, 1000])
def test_a_router_that_is_written_directly(tokens: int) -> None:
    """With more tokens than the view has rows, the top-k kernel would write into the next layer's, or past the end.

    Kernels of vLLM 0.33 leave the router out where nobody captures it, and tell by its capture function.
    """
    router = FusedTopKRouter(top_k=4, global_num_experts=16)
    view = torch.full((2, 8, 4), -1, dtype=torch.int32)[0]
    write_directly(router, view)
    assert router.capture_fn is not None
    router.capture_fn(torch.zeros((8, 4), dtype=torch.int32))
    assert (view == -1).all()
    with pytest.raises(RuntimeError, match=f"a step of {tokens} tokens does not fit the device cache of 8"):
        router.select_experts(torch.zeros(tokens, 64), torch.zeros(tokens, 16))


@pytest.mark.parametrize("recorded", [True, False])
def test_ids_are_stored_at_the_end_of_a_forward_pass_that_is_recorded(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And layer by layer in all others, also when nothing is recorded any more."""
    capturer = Capturer(RowShape((0, 1), 8, 2), [2], 0, 4, 1, torch.device("cpu"))
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
def test_ids_that_came_from_outside_are_not_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Transformers backend's, whose memory the compiled graph gives to the next layer."""
    from_outside = CustomRoutingRouter(4, 16, custom_routing_function=lambda **_: None)
    for runner, router in zip(engine.runners, (from_outside, FusedTopKRouter(4, 16)), strict=False):
        monkeypatch.setattr(runner, "router", router)
    shape = engine.worker._capturer.shape
    capturer = Capturer(shape, [len(engine.runners)], 0, 8, 1, torch.device("cpu"))
    bind(MoELayers(tuple(engine.runners[:2]), shape), capturer, dp_rank=0, dp_size=1)
    capturer.defer_stores()
    for runner in engine.runners[:2]:
        runner.router.capture_fn(torch.ones((3, shape.top_k), dtype=torch.int32))
    assert (capturer.cache.ids[0][:3] == 1).all()
    assert (capturer.cache.ids[1] == -1).all()
    capturer.flush_stores()
    assert (capturer.cache.ids[1][:3] == 1).all()
