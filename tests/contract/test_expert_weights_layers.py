"""Weights as vLLM's real layers hand them to their experts, and what is refused where they cannot be had."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

from routed_experts.capture.engine import binding
from routed_experts.capture.engine.binding import (
    MoELayers,
    capture_choice,
    check_weights,
    check_weights_are_kept,
    write_directly,
)
from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.rows import WEIGHTS_KEY, ids_of, weights_of
from tests.contract.served import worker_in_this_process
from tests.contract.test_moe_layers import Engine, with_routers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for the worker of the CPU build")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with worker_in_this_process({}):
        running = Engine(tiny_model, additional_config={WEIGHTS_KEY: True})
        try:
            yield running
        finally:
            running.core.shutdown()
            cleanup_dist_env_and_memory()


def handed_by(runner: MoERunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a layer's experts are handed from now on: ids and weights, as they were then."""
    method, handed = runner.routed_experts.quant_method, []
    apply = method.apply

    def recording(*, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **others: Any) -> Any:
        handed.append((topk_ids.clone(), topk_weights.clone()))
        return apply(topk_weights=topk_weights, topk_ids=topk_ids, **others)

    monkeypatch.setattr(method, "apply", recording, raising=False)
    return handed


@with_routers
def test_rows_are_what_each_layers_experts_are_handed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_model_says_of_its_weights(engine: Engine) -> None:
    shape = engine.worker._capturer.shape
    assert (shape.weights_scale, shape.weights_on_input) == ((1.0,) * 5, False)
    info = engine.worker.routed_experts_info()
    assert (info["weights"], info["weights_scale"], info["weights_on_input"]) == (True, [1.0] * 5, False)
    assert info["device_bytes"] == 2 * 5 * engine.worker.model_runner.max_num_tokens * 4 * 4


def layers_of(engine: Engine) -> MoELayers:
    return MoELayers(tuple(engine.runners), engine.worker._capturer.shape)


def test_kernels_that_route_by_themselves_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    check_weights(layers_of(engine), is_eager=False)
    monkeypatch.setattr(MoERunner, "is_monolithic", True)
    monkeypatch.setattr(binding.cpu_kernels, "routes_itself", lambda runner: False)
    with pytest.raises(UnsupportedConfig, match="not their weights: choose another one with --moe-backend"):
        check_weights(layers_of(engine), is_eager=True)


def test_compiled_kernels_that_overwrite_weights_are_refused(engine: Engine) -> None:
    layers = layers_of(engine)
    on_input = replace(layers, shape=replace(layers.shape, weights_on_input=True))
    check_weights(on_input, is_eager=True)
    with pytest.raises(UnsupportedConfig, match="add --enforce-eager"):
        check_weights(on_input, is_eager=False)


def run_layer(engine: Engine) -> None:
    with torch.inference_mode(), set_forward_context(None, engine.config, num_tokens=3):
        engine.model.model.layers[2].mlp(torch.randn(3, 64))


@with_routers
def test_weights_are_compared_before_and_after_the_kernel(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_kernel_that_writes_directly(with_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into both views; without weights into the ids' alone. CPUs have no such kernel: this one is in PyTorch."""

    def top_k(weights: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor, norm: bool) -> Any:
        found = logits.softmax(1).topk(ids.shape[1], dim=1)
        weights.copy_(found.values)
        ids.copy_(found.indices)
        return weights, ids

    monkeypatch.setattr(binding, "dispatch_topk_softmax_func", lambda: top_k)
    router = FusedTopKRouter(top_k=4, global_num_experts=16)
    view = torch.full((8, 4), -1, dtype=torch.int32)
    weights_view = torch.full((8, 4), torch.nan)
    write_directly(router, view, weights_view if with_weights else None)
    logits = torch.randn(5, 16)
    weights, ids = router.select_experts(torch.zeros(5, 64), logits)
    assert ids.data_ptr() == view.data_ptr()
    assert torch.equal(weights, logits.softmax(1).topk(4, dim=1).values)
    assert (weights.data_ptr() == weights_view.data_ptr()) is with_weights
    assert (view[5:] == -1).all()
    assert weights_view[5 if with_weights else 0 :].isnan().all()


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
