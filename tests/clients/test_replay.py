"""`routed_experts.replay` in routers of transformers, against routers whose top k is replaced.

`examples/replay.py` is run on a server.
"""

import gc
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from routed_experts.protocol.collect import Routing
from routed_experts.replay import ReplayError, replayed
from routed_experts.replay.formulas import Formula
from tests import programs
from tests.clients.conftest import FAMILIES, QWEN3, Load
from tests.clients.test_collect import ROOT, run_example
from tests.contract.served import serving_quickly
from tests.e2e.harness import Server, prompt_of
from tests.e2e.shapes import HookOracle, Shape
from tests.protocol.answers import rows_of

BATCH, TOKENS = 2, 12
FORMS = ("qwen3_moe", "llama4_text", "gemma4_text", "deepseek_v3")
"""One family of each form of routers: ids and weights, dense weights, weights times a scale of each
expert, a block's method. `test_families.py` has all families."""
KEPT = [
    torch.ops.aten._softmax.default,
    torch.ops.aten.sigmoid.default,
    torch.ops.aten.sum.dim_IntList,
]
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    # It hands results to the recomputed pass by the number of the call that they are of.
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, KEPT),
    },
}
ROUTER = r"\.(gate|router)\b.*weight$"


class ByHand(TorchFunctionMode):
    """Replaces each router's top k by the rows of its layer, and gathers the scores of all groups
    of experts."""

    def __init__(self, rows: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.rows, self.layer = rows.flatten(0, -3), 0
        self.shape = (len(self.rows), num_experts)
        self.scores: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(args[0] if args else None, torch.Tensor) or args[0].shape != self.shape:
            return result
        if func is torch.Tensor.masked_fill:
            self.scores = args[0]
        if func in (torch.topk, torch.Tensor.topk):
            scores, self.scores = args[0] if self.scores is None else self.scores, None
            rows = self.rows[:, self.layer]
            self.layer += 1
            ids = torch.where((rows < 0).any(dim=1, keepdim=True), result[1], rows)
            return torch.return_types.topk((scores.gather(1, ids), ids))
        return result


def batch(length: int = TOKENS) -> torch.Tensor:
    return torch.tensor([prompt_of(length, seed) for seed in range(BATCH)])


def given_rows(shape: Shape, seed: int = 4) -> torch.Tensor:
    """[B, S, L, K], some of them unknown."""
    rows = rows_of(
        BATCH * TOKENS, seed, shape.num_experts, len(shape.layer_ids), shape.top_k
    ).astype(np.int64)
    rows = torch.from_numpy(rows).unflatten(0, (BATCH, TOKENS))
    rows[0, 2] = rows[1, -3:] = -1
    return rows


def step(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.logsumexp(dim=-1).sum().backward()
    return logits.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check_same(actual: Any, expected: Any) -> None:
    """Two results of `step`."""
    assert torch.allclose(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.allclose(
            actual[1][name], gradient, rtol=1e-3, atol=1e-5 + 1e-4 * float(gradient.abs().max())
        ), name


@pytest.mark.parametrize("model_type", FORMS)
def test_log_probabilities_are_closer_to_those_of_the_rows(model_type: str, load: Load) -> None:
    """Of a model whose routers are a little off, as those of another precision or of a step before
    are. With the weights too, nothing is left of that. Scores are narrow here, so that the last of
    the K experts counts as well.
    """
    shape, model = FAMILIES[model_type], load(model_type)
    tokens, generator = batch(40), torch.Generator().manual_seed(5)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, module in model.named_modules():
        if type(module).__name__ == "Llama4Router":
            module.register_forward_hook(
                lambda module, args, output: calls.append(output[0].topk(1)[::-1])
            )
        elif name.endswith(".experts") and model_type != "llama4_text":
            module.register_forward_pre_hook(lambda module, args: calls.append(args[1:3]))
    routers = [weight for name, weight in model.named_parameters() if re.search(ROUTER, name)]
    with torch.no_grad():
        for weight in routers:
            weight *= 0.1
        right = log_probabilities(model, tokens)
        rows, weights = (
            torch.stack(scores, dim=1).unflatten(0, tokens.shape)
            for scores in zip(*calls, strict=True)
        )
        for weight in routers:
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        off = [(log_probabilities(model, tokens) - right).abs().mean()]
        for more in (None, weights):
            with replayed(model, rows, more, layer_ids=shape.layer_ids):
                off.append((log_probabilities(model, tokens) - right).abs().mean())
    assert off[1] < 0.8 * off[0]
    assert off[2] < 0.01 * off[0]


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return (
        model(input_ids=tokens, use_cache=False)
        .logits.log_softmax(dim=-1)
        .gather(2, tokens[..., None])
    )


def test_weights_take_the_place_of_the_routers_own_but_not_of_their_gradients(
    load: Load,
) -> None:
    model, rows = load(), given_rows(QWEN3)
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    seen: list[torch.Tensor] = []
    for block in experts:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[2].detach()))
    with replayed(model, rows):
        own = step(model, batch())
    weights = torch.stack([block.reshape(BATCH, TOKENS, -1) for block in seen], dim=2)
    seen.clear()
    with replayed(model, rows, weights):
        check_same(step(model, batch()), own)
    seen.clear()
    others = torch.where(rows < 0, torch.nan, torch.rand(rows.shape))
    others[0, 5] = torch.nan  # ids without weights
    with replayed(model, rows, others):
        model(input_ids=batch(), use_cache=False)
    taken = torch.stack([block.reshape(BATCH, TOKENS, -1) for block in seen], dim=2)
    assert torch.equal(taken[~others.isnan()], others[~others.isnan()])
    assert torch.allclose(
        taken[others.isnan()].unflatten(0, (-1, QWEN3.top_k)).sum(dim=1), torch.ones(())
    )


def test_after_the_block_the_model_is_as_before(load: Load) -> None:
    """Also after an error within, and where its own experts were replayed, in rows with zeros for
    dense layers too."""
    shape, model = FAMILIES["deepseek_v3"], load("deepseek_v3")
    tokens, classes = batch(), [type(module) for module in model.modules()]
    live = step(model, tokens)
    with pytest.raises(ZeroDivisionError), replayed(model, given_rows(shape)):
        raise ZeroDivisionError
    oracle = HookOracle(model, shape)
    rows = np.stack([oracle.rows(sequence.tolist()) for sequence in tokens])
    spread = np.zeros((*rows.shape[:2], 4, shape.top_k), np.uint8)
    spread[:, :, 1:] = rows
    for rows_given, layer_ids in ((rows, None), (rows, shape.layer_ids), (spread, range(4))):
        with replayed(model, rows_given, layer_ids=layer_ids):
            check_same(step(model, tokens), live)
    assert [type(module) for module in model.modules()] == classes
    check_same(step(model, tokens), live)


@pytest.mark.parametrize("model_type", FORMS)
def test_selective_checkpointing(model_type: str, load: Load) -> None:
    """Recomputed layers replay again, and do not count again."""
    shape, model = FAMILIES[model_type], load(model_type).train()
    rows, tokens = given_rows(shape), batch()
    with replayed(model, rows, layer_ids=shape.layer_ids):
        expected = step(model, tokens)
    model.gradient_checkpointing_enable(CHECKPOINTING["selective"])
    model.enable_input_require_grads()
    with replayed(model, rows, layer_ids=shape.layer_ids) as replay:
        check_same(step(model, tokens), expected)
    assert replay.asked == [1] * len(shape.layer_ids)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_unknown_rows_are_not_chosen_anew_when_they_are_recomputed(
    use_reentrant: bool, load: Load
) -> None:
    """With noise, the router would choose others then, and the backward pass would be of other
    experts."""
    model, rows, generator = load().train(), given_rows(QWEN3), torch.Generator().manual_seed(6)
    rows[:, ::2] = -1
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, ids in zip(model.model.layers, seen, strict=True):
        layer.mlp.gate.register_forward_pre_hook(
            lambda module, args: args[0] + torch.randn(args[0].shape, generator=generator)
        )
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, args, ids=ids: ids.append(args[1])
        )
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with replayed(model, rows) as replay:
        step(model, batch())
    assert all(torch.equal(first, recomputed) for first, recomputed in seen)
    assert replay.replayed == (rows >= 0).all(dim=-1).sum()


def plain_load_balancing(
    logits: Sequence[torch.Tensor], ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """For `ids` [B, S, L, K], expert by expert: how often it was chosen, times its mean score, both
    over the tokens of all layers together."""
    is_token = mask.bool()
    scores = torch.stack([of_layer.softmax(dim=-1).unflatten(0, mask.shape) for of_layer in logits])
    scores = scores[:, is_token]  # [L, tokens, E]
    chosen = ids[is_token]
    shares = [
        (chosen == expert).sum() / (len(chosen) * len(logits)) * scores[..., expert].mean()
        for expert in range(scores.shape[-1])
    ]
    return len(shares) * torch.stack(shares).sum()


@pytest.mark.parametrize("kind", ["none", "not reentrant", "selective"])
def test_auxiliary_loss_of_replayed_experts(kind: str, load: Load) -> None:
    """Of the rows, and of the router's own choice where a row is not known, without padding."""
    model, rows, mask = load().train(), given_rows(QWEN3), torch.ones(BATCH, TOKENS)
    mask[1, -4:] = 0
    inputs: dict[str, Any] = {"input_ids": batch(), "attention_mask": mask, "use_cache": False}
    inputs["output_router_logits"] = True
    with replayed(model, rows):
        logits = model(**inputs).router_logits
    own = own_choice(logits)
    expected = plain_load_balancing(logits, torch.where(rows < 0, own, rows), mask)
    assert not torch.isclose(plain_load_balancing(logits, own, mask), expected)
    gate = model.model.layers[1].mlp.gate.weight
    (gradient,) = torch.autograd.grad(expected, gate)
    if kind != "none":
        model.gradient_checkpointing_enable(CHECKPOINTING[kind])
        model.enable_input_require_grads()
    with replayed(model, rows, aux_loss=True):
        loss = model(**inputs).aux_loss
        loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(gate.grad, gradient, rtol=1e-3, atol=1e-7)
    live = model(**inputs)
    expected_live = plain_load_balancing(live.router_logits, own_choice(live.router_logits), mask)
    assert torch.allclose(live.aux_loss, expected_live), "something is left"


def own_choice(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, S, L, K]"""
    ids = [of_layer.topk(QWEN3.top_k, dim=-1).indices for of_layer in logits]
    return torch.stack(ids, dim=1).unflatten(0, (BATCH, TOKENS))


def test_auxiliary_loss_of_a_reference_within_the_block(load: Load) -> None:
    """It is that of its own choice: it is not replayed."""
    model, reference, rows = load(), load(), given_rows(QWEN3)
    with torch.no_grad():
        reference.model.layers[0].mlp.gate.weight.neg_()
    inputs: dict[str, Any] = {"input_ids": batch(), "use_cache": False}
    inputs["output_router_logits"] = True
    alone = reference(**inputs).aux_loss
    for is_first in (True, False):
        with replayed(model, rows, aux_loss=True):
            if is_first:
                first = reference(**inputs).aux_loss
            policy = model(**inputs).aux_loss
            if not is_first:
                first = reference(**inputs).aux_loss
        assert torch.equal(first, alone)
        assert not torch.isclose(policy, alone)


def test_auxiliary_losses_that_cannot_be_replayed(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = load(), given_rows(QWEN3)
    with (
        pytest.raises(ReplayError, match="computed no auxiliary loss: set output_router_logits"),
        replayed(model, rows, aux_loss=True),
    ):
        model(input_ids=batch(), use_cache=False)
    shape, other = FAMILIES["deepseek_v3"], load("deepseek_v3")
    without = pytest.raises(ReplayError, match="has no load-balancing loss of transformers")
    with without, replayed(other, given_rows(shape), aux_loss=True):
        pass
    module = sys.modules[type(model).__module__]
    original = module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args: 2 * original(*args))
    changed = pytest.raises(ReplayError, match="auxiliary loss in another way than is known")
    with changed, replayed(model, rows, aux_loss=True):
        model(input_ids=batch(), use_cache=False, output_router_logits=True)


@pytest.mark.release
def test_a_compiled_model(load: Load) -> None:
    """Compiled once for replay and once without, in one graph each; with other rows each time."""
    model, tokens = load(), batch()
    live = step(model, tokens)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    for seed in (4, 5, None, 6):
        if seed is None:
            check_same(step_of(compiled, tokens), live)
            continue
        rows = given_rows(QWEN3, seed)
        with replayed(model, rows):
            expected = step(model, tokens)
        with replayed(compiled, rows) as replay:
            check_same(step_of(compiled, tokens), expected)
        assert replay.asked == [1] * 3
    assert len(graphs) == 2


def step_of(compiled: Any, tokens: torch.Tensor) -> Any:
    """`step` of a compiled model, with the names of the parameters that it has uncompiled."""
    logits, gradients = step(compiled, tokens)
    return logits, {
        name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()
    }


@pytest.mark.release
def test_the_auxiliary_loss_of_a_compiled_model(load: Load) -> None:
    """With other rows in each block, as when it is not compiled."""
    model = load()
    compiled: Any = torch.compile(model, backend="eager")
    inputs: dict[str, Any] = {"input_ids": batch(), "use_cache": False}
    inputs["output_router_logits"] = True
    gates = [layer.mlp.gate.weight for layer in model.model.layers]

    def loss_and_gradients(one_model: Any, rows: torch.Tensor) -> list[torch.Tensor]:
        with replayed(one_model, rows, aux_loss=True) as replay:
            loss = one_model(**inputs).aux_loss
            result = [loss.detach(), *torch.autograd.grad(loss, gates)]
        assert replay.asked == [1] * 3
        return result

    for seed in (4, 5):
        rows = given_rows(QWEN3, seed)
        expected = loss_and_gradients(model, rows)
        actual = loss_and_gradients(compiled, rows)
        for one, other in zip(actual, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_layer_that_is_recomputed(use_reentrant: bool, load: Load) -> None:
    """What is compiled does not know of the backward pass that it is a part of."""
    model, rows, tokens = load().train(), given_rows(QWEN3), batch()
    with replayed(model, rows):
        expected = step(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model.model.layers[1].compile(backend="eager")
    with replayed(model, rows) as replay:
        check_same(step(model, tokens), expected)
    assert replay.asked == [1] * 3


def test_what_cannot_be_replayed(load: Load) -> None:
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    many, twice = rows.clone(), rows.clone()
    many[1, 2, 0, 0] = QWEN3.num_experts
    twice[0, 5, 1] = torch.tensor([4, 2, 4])
    for wrong_rows, options, message in (
        (rows[:, :, :2], {}, "rows of 2 layers for 3 routers: give layer_ids"),
        (rows, {"layer_ids": [0, 1]}, r"rows of 3 layers for layer_ids \[0, 1\]"),
        (
            rows[:, :, [0, 1, 2, 2]],
            {"layer_ids": [0, 1, 2, 2]},
            r"rows of 4 layers for layer_ids \[0, 1, 2, 2\]",
        ),
        (rows, {"layer_ids": [0, 1, 3]}, r"no layer for the routers of decoder layers \[2\]"),
        (
            torch.cat([rows, rows], dim=2),
            {"layer_ids": range(6)},
            r"layers \[3, 4, 5\] too, .* one stage of a pipeline",
        ),
        (rows.float(), {}, "rows must be integers"),
        (rows[:1], {}, r"rows \[T, K\] of \[12, 3\], but the router has \[24, 3\]"),
        (many, {}, "expert 8 in the rows of a model with 8"),
        (twice, {}, r"the row \[4, 2, 4\] of token 5 has an expert twice"),
        (rows.clamp(min=0), {}, r"the row \[0, 0, 0\] of token 2 has an expert twice"),
        (rows, {"weights": torch.ones(TOKENS, BATCH, 3, 3)}, "weights of shape"),
    ):
        with pytest.raises(ReplayError, match=message), replayed(model, wrong_rows, **options):
            model(input_ids=tokens, use_cache=False)
    with (
        pytest.raises(ReplayError, match=r"decoder layers \[0, 1, 2\] were never asked"),
        replayed(model, rows),
    ):
        pass
    with replayed(model, rows):
        with pytest.raises(ReplayError, match="already"), replayed(model, rows):
            pass
        model(input_ids=tokens, use_cache=False)
    with (
        pytest.raises(ReplayError, match="Linear has no routers"),
        replayed(torch.nn.Linear(2, 2), rows),
    ):
        pass


def of_objects(rows: torch.Tensor) -> np.ndarray:
    arrays = np.empty(len(rows), dtype=object)
    arrays[:] = list(rows.numpy())
    return arrays


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda rows: rows.transpose(0, 1), "rows of .12, 2. tokens for inputs of .2, 12."),
        (lambda rows: [*rows], "a list is not one array of numbers"),
        (of_objects, "a ndarray is not one array of numbers"),
        (lambda rows: torch.nested.nested_tensor([*rows]), "nested and sparse"),
        (lambda rows: rows.to_sparse(), "nested and sparse"),
    ],
)
def test_rows_with_an_order_of_their_own(
    other: Callable[[torch.Tensor], Any], message: str, load: Load
) -> None:
    """Programs that align or pack rows are named. The model is as before."""
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    for options in ({"input_ids": tokens}, {"inputs_embeds": model.get_input_embeddings()(tokens)}):
        refused = pytest.raises(ReplayError, match=message + ".*align.*pack")
        with refused, replayed(model, other(rows)):
            model(**options, use_cache=False)
    with replayed(model, rows):
        model(input_ids=tokens, use_cache=False)


def test_a_model_is_not_copied_while_it_is_replayed(load: Load, tmp_path: Path) -> None:
    """The copy would replay for ever."""
    model, rows = load(), given_rows(QWEN3)
    for copy in (deepcopy, lambda model: torch.save(model, tmp_path / "model")):
        refused = pytest.raises(ReplayError, match="not copied or saved as a whole")
        with refused, replayed(model, rows):
            copy(model)
    deepcopy(model)


def test_a_block_is_for_one_forward_pass(load: Load) -> None:
    """The rows of a microbatch do not go to the next one of the same shape, nor those of a prompt
    to later tokens."""
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    message = r"\['model.layers.0.mlp.gate'\] were asked in a second forward pass"

    def twice() -> None:
        with replayed(model, rows):
            model(input_ids=tokens, use_cache=False)
            model(input_ids=tokens, use_cache=False)

    with pytest.raises(ReplayError, match=message):
        twice()
    with pytest.raises(ReplayError, match=r"router has \[2, 3\]|second"), replayed(model, rows):
        model.generate(tokens, max_new_tokens=3)
    with pytest.raises(ReplayError, match="second"), replayed(model, rows[:1, 5:6]):
        model.generate(tokens[:1, 5:6], max_new_tokens=3, min_new_tokens=3)


def test_two_models_in_one_module(load: Load) -> None:
    """Rows are for one of them."""
    both, rows, tokens = (
        torch.nn.ModuleDict({"policy": load(), "reference": load()}),
        given_rows(QWEN3),
        batch(),
    )
    with replayed(both, rows) as replay:
        both["policy"](input_ids=tokens, use_cache=False)
    assert replay.asked == [1] * 3
    names = r"policy\S*layers.0.mlp.gate', 'reference\S*layers.0.mlp.gate'\] were asked in a second"

    def both_in_a_block(second: torch.Tensor) -> None:
        with replayed(both, rows):
            both["policy"](input_ids=tokens, use_cache=False)
            both["reference"](input_ids=second, use_cache=False)

    for second in (tokens, tokens[:, 1:]):
        with pytest.raises(ReplayError, match=names):
            both_in_a_block(second)


def test_hooks_of_accelerate(load: Load) -> None:
    """On several devices, they are in place of the methods of modules."""
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    with replayed(model, rows):
        expected = step(model, tokens)
    router = model.model.layers[1].mlp.gate
    forward = router.forward
    router.forward = hook = Mock(side_effect=lambda *args, **kwargs: forward(*args, **kwargs))
    for _ in range(2):
        with replayed(model, rows) as replay:
            check_same(step(model, tokens), expected)
        assert replay.asked == [1] * 3
        assert router.forward is hook
    assert hook.call_count == 2


def last_layer_on_disk(model: Any, folder: Path) -> None:
    """As with a `device_map` that has `disk` in it."""
    *others, last = (
        name for name, _ in model.named_modules() if re.fullmatch(r"model\.layers\.\d+", name)
    )
    rest = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    places = dict.fromkeys(("lm_head", *rest, *others), "cpu") | {last: "disk"}
    dispatch_model(model, places, offload_dir=folder, offload_buffers=True, force_hooks=True)


def all_weights(model: Any, folder: Path) -> None:
    cpu_offload(model, offload_buffers=True)


@pytest.mark.parametrize(
    ("model_type", "offload"),
    [
        *((model_type, last_layer_on_disk) for model_type in FORMS),
        ("gemma4_text", all_weights),
    ],
)
def test_weights_that_are_offloaded(
    model_type: str, offload: Callable[[Any, Path], Any], load: Load, tmp_path: Path
) -> None:
    """They are there within a module's own forward pass, and at no other time."""
    shape, model = FAMILIES[model_type], load(model_type)
    rows, tokens = given_rows(shape), batch()
    with torch.no_grad(), replayed(model, rows, layer_ids=shape.layer_ids):
        expected = log_probabilities(model, tokens)
    offload(model, tmp_path)
    assert any(
        weight.is_meta for name, weight in model.named_parameters() if re.search(ROUTER, name)
    )
    before = [(type(module), vars(module).get("_old_forward")) for module in model.modules()]
    with torch.no_grad(), replayed(model, rows, layer_ids=shape.layer_ids) as replay:
        assert torch.allclose(log_probabilities(model, tokens), expected, rtol=1e-4, atol=1e-4)
    assert replay.replayed == (rows >= 0).all(dim=-1).sum()
    assert [
        (type(module), vars(module).get("_old_forward")) for module in model.modules()
    ] == before


def set_logits(model: Any, logits: torch.Tensor, top_k: int | None = None) -> list[Any]:
    """Lets each router give all tokens these logits [E]. Returns the routers."""
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    for gate in gates:
        gate.top_k = gate.top_k if top_k is None else top_k
        gate.weight.data = logits[:, None].expand(gate.weight.shape) / gate.hidden_dim
        gate.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]), *args[1:]))
    return gates


def test_scores_that_are_almost_nothing(load: Load) -> None:
    """LFM2 adds 1e-6 to the sum of the sigmoids."""
    model, shape = load("lfm2_moe"), FAMILIES["lfm2_moe"]
    rows, logits = given_rows(shape), -14 - torch.arange(shape.num_experts) / 8
    set_logits(model, logits)
    seen: list[torch.Tensor] = []
    model.model.layers[2].feed_forward.experts.register_forward_pre_hook(
        lambda module, args: seen.append(args[2])
    )
    with replayed(model, rows, layer_ids=shape.layer_ids):
        model(input_ids=batch(), use_cache=False)
    is_known = (rows[:, :, 0] >= 0).all(dim=-1)
    chosen = logits.sigmoid()[rows[:, :, 0].clamp(min=0)]
    expected = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-6)
    assert torch.allclose(
        seen[0].unflatten(0, (BATCH, TOKENS))[is_known], expected[is_known], rtol=1e-3
    )


@pytest.mark.parametrize(
    ("logit", "weight"), [(-40.0, 1.0), (-200.0, 0.0)], ids=["1e-18", "0 in float32"]
)
def test_one_expert_that_the_router_would_never_choose(
    logit: float, weight: float, load: Load
) -> None:
    """Its weight is its score, divided by the sum of the chosen scores: by itself."""
    model = load("qwen3_moe")
    logits_of_token = torch.zeros(FAMILIES["qwen3_moe"].num_experts)
    logits_of_token[1] = logit
    gates = set_logits(model, logits_of_token, top_k=1)
    seen: list[torch.Tensor] = []
    layer_ids = FAMILIES["qwen3_moe"].layer_ids
    model.model.layers[layer_ids[0]].mlp.experts.register_forward_pre_hook(
        lambda module, args: seen.append(args[2])
    )
    rows = torch.ones(BATCH, TOKENS, len(layer_ids), 1, dtype=torch.int64)
    with replayed(model, rows, layer_ids=layer_ids):
        logits = model(input_ids=batch(), use_cache=False).logits
        logits.sum().backward()
    assert torch.equal(seen[0], torch.full((BATCH * TOKENS, 1), weight))
    assert all(gate.weight.grad.isfinite().all() for gate in gates)


@pytest.mark.parametrize("score", ["softmax", "sqrtsoftplus"])
@pytest.mark.parametrize("logit", [-95.0, -200.0])
def test_gradients_of_scores_of_almost_nothing(score: str, logit: float) -> None:
    """Divided by a sum of 1e-40, one would be infinite."""
    formula = Formula(score, 0.0, 1.0, in_logits_dtype=False)
    logits = torch.tensor([[0.0, logit, logit - 0.5, -1.0]])
    ids = torch.tensor([[1, 2]])
    gradient, _ = formula.gradients(torch.tensor([[1.0, 0.0]]), logits, ids, None)
    assert gradient.isfinite().all()


class Adapted(torch.nn.Module):
    """As PEFT's `modules_to_save`: a copy is trained, and the original runs while adapters are
    disabled."""

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.original_module, self.modules_to_save = (
            original,
            torch.nn.ModuleDict({"default": deepcopy(original)}),
        )
        self.is_disabled = False

    def forward(self, *args: Any) -> Any:
        return (self.original_module if self.is_disabled else self.modules_to_save["default"])(
            *args
        )


@pytest.mark.parametrize("is_disabled", [False, True])
def test_routers_beside_a_copy(is_disabled: bool, load: Load) -> None:
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    with replayed(model, rows):
        expected, _ = step(model, tokens)
    for layer in model.model.layers:
        layer.mlp.gate = Adapted(layer.mlp.gate)
        layer.mlp.gate.is_disabled = is_disabled
    with replayed(model, rows) as replay:
        assert torch.allclose(step(model, tokens)[0], expected, rtol=1e-4, atol=1e-4)
    assert replay.asked == [1] * 3
    assert replay.replayed == (rows >= 0).all(dim=-1).sum()


def test_expert_parallelism_that_makes_ids_local(load: Load) -> None:
    """Those of rows are all ranks'. What other parallelism puts in place of a router's method is no
    hindrance."""
    parallel: Any = pytest.importorskip("transformers.distributed.tensor_parallel")
    model, mesh = load(), Mock()
    parallel.TensorParallelLayer().install_forward(model.model.layers[0].mlp.gate, mesh)
    with replayed(model, given_rows(QWEN3)):
        model(input_ids=batch(), use_cache=False)
    if not hasattr(parallel, "EpRouterParallel"):
        pytest.skip(
            "this version of transformers has no ep_router: its experts take all ranks' ids"
        )
    parallel.EpRouterParallel().install_forward(model.model.layers[1].mlp.gate, mesh)
    with pytest.raises(ReplayError, match="with ep_router"), replayed(model, given_rows(QWEN3)):
        pass


def test_a_version_that_returns_probabilities_for_logits(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.2 has it. Their softmax would be wrong."""
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data *= 50  # far from equal weights
    with replayed(model, rows):
        expected = step(model, tokens)
    router = type(model.model.layers[0].mlp.gate)
    original = router.forward

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, ids = original(self, hidden)
        return logits.float().softmax(dim=-1), weights, ids

    monkeypatch.setattr(router, "forward", forward)
    with replayed(model, rows):
        check_same(step(model, tokens), expected)


class ConfiguredRouter(torch.nn.Module):
    """Computes softmax or sigmoid, as it is configured."""

    def __init__(self, score: str, is_normalised: bool, weight: torch.Tensor) -> None:
        super().__init__()
        self.top_k = 2
        self.config = {"score": score}
        self.is_normalised = is_normalised
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
        """Logits, weights and ids: the `ids`, or its own choice."""
        logits = torch.nn.functional.linear(hidden, self.weight)
        if self.config["score"] == "softmax":
            scores = logits.float().softmax(dim=-1)
        else:
            scores = logits.float().sigmoid()
        if ids is None:
            ids = scores.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights.to(logits.dtype), ids

    def gradient(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        _, weights, _ = self(hidden, ids)
        upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3))
        return torch.autograd.grad(weights, self.weight, upstream.to(weights.dtype))[0]


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize(
    ("score", "dtype", "spread", "is_refused"),
    [
        ("sigmoid", torch.float32, 0.0, True),
        ("sigmoid", torch.bfloat16, 1e-4, True),
        ("sigmoid", torch.float32, 1e-2, False),
        ("softmax", torch.float32, 1e-2, False),
        ("sigmoid", torch.bfloat16, 0.1, False),
        ("softmax", torch.bfloat16, 0.1, False),
    ],
)
def test_equal_weights_of_unlike_gradients(
    score: str, dtype: torch.dtype, spread: float, is_refused: bool, is_normalised: bool
) -> None:
    """With equal logits, a normalised softmax of 2 experts and sigmoids give all weights 0.5."""
    generator = torch.Generator().manual_seed(1)
    weight = spread * torch.randn(16, 32, generator=generator)
    hidden = torch.randn(64, 32, generator=generator).to(dtype)
    rows = torch.rand(64, 16, generator=generator).argsort(dim=-1)[:, :2]
    router = ConfiguredRouter(score, is_normalised, weight.to(dtype))
    expected = router.gradient(hidden, rows)
    if is_refused:
        refused = pytest.raises(ReplayError, match=r"fit several formulas .* random weights")
        with refused, replayed(torch.nn.ModuleList([router]), rows[:, None]):
            router.gradient(hidden)
        return
    with replayed(torch.nn.ModuleList([router]), rows[:, None]):
        gradient = router.gradient(hidden)
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def looks_at_values(run: Callable[[], Any]) -> int:
    """How often the host waits for a value: on a GPU, for the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    waiting = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}
    # `profiler.events()` makes a tree of them, which takes a hundred times as long
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() in waiting for event in events)


def test_known_formulas_are_taken_without_waiting(load: Load) -> None:
    """In the first block, each router's is looked for. Gradients are the same."""
    model, rows, tokens = load(), given_rows(QWEN3), batch()
    weights = torch.rand(rows.shape)
    model.train().gradient_checkpointing_enable(CHECKPOINTING["not reentrant"])
    model.enable_input_require_grads()
    without_replay = looks_at_values(lambda: step(model, tokens))
    with replayed(model, rows, weights):
        expected = step(model, tokens)
    for given in (None, weights):
        with replayed(model, rows, given) as replay:
            assert looks_at_values(lambda: step(model, tokens)) == without_replay
        assert replay.asked == [1] * 3
    with replayed(model, rows, weights):
        check_same(step(model, tokens), expected)


def router_to_configure() -> tuple[ConfiguredRouter, torch.Tensor, torch.Tensor]:
    """With hidden states [T, H], and rows [T, K] other than its choice."""
    generator = torch.Generator().manual_seed(1)
    router = ConfiguredRouter("softmax", True, torch.randn(16, 32, generator=generator))
    hidden = torch.randn(64, 32, generator=generator)
    rows = torch.rand(64, 16, generator=generator).argsort(dim=-1)[:, :2]
    return router, hidden, rows


def test_a_formula_that_changes_between_blocks() -> None:
    """A change of the router's attributes is seen at once, a change of its configuration at the
    block's end. The next block has the new formula."""
    router, hidden, rows = router_to_configure()
    model = torch.nn.ModuleList([router])

    def gradient() -> torch.Tensor:
        with replayed(model, rows[:, None]):
            return router.gradient(hidden)

    assert torch.allclose(gradient(), router.gradient(hidden, rows), atol=1e-6)
    router.is_normalised = False
    assert torch.allclose(gradient(), router.gradient(hidden, rows), atol=1e-6)
    router.config["score"] = "sigmoid"
    with pytest.raises(ReplayError, match=r"\['0'\] computed weights in another way than in"):
        gradient()
    for _ in range(2):
        assert torch.allclose(gradient(), router.gradient(hidden, rows), atol=1e-6)


class SoftmaxRouter(torch.nn.Module):
    """Its code names softmax and no other function, as that of most routers does."""

    def __init__(self, top_k: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.top_k = top_k
        self.weight = torch.nn.Parameter(torch.randn(16, 32, generator=generator))
        self.hidden = torch.randn(64, 32, generator=generator)
        self.config: dict[str, Any] = {"is_normalised": False, "ids": torch.int64}

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
        """Logits, weights and ids: the `ids`, or its own choice."""
        logits = torch.nn.functional.linear(hidden, self.weight)
        scores = logits.softmax(dim=-1, dtype=self.config.get("scores", torch.float32))
        if ids is None:
            ids = scores.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids.to(torch.int64))
        if self.config["is_normalised"] or (
            self.config.get("normalises_eval") and not self.training
        ):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids.to(self.config["ids"])

    def rows(self) -> torch.Tensor:
        """[T, K], other in each call."""
        return torch.rand(len(self.hidden), 16).argsort(dim=-1)[:, : self.top_k]

    def block(self, hidden: torch.Tensor | None = None) -> float:
        """The largest error of weights in a block, for experts that the router does not choose."""
        hidden = self.hidden.to(self.weight.dtype) if hidden is None else hidden
        rows = self.rows()[: len(hidden)]
        with replayed(torch.nn.ModuleList([self]), rows[:, None]):
            _, weights, _ = self(hidden)
        _, expected, _ = self(hidden, rows)
        apart = (weights - expected).abs().nan_to_num(nan=0.0)
        return float(apart.max()) if len(hidden) else 0.0


IN_ANOTHER_WAY = r"\['0'\] computed weights in another way than in"


def test_ids_keep_the_routers_type() -> None:
    """Compiled code reads them as that type, whatever they are."""
    router = SoftmaxRouter()
    router.config["ids"] = torch.int32
    rows = router.rows()
    rows[3] = -1
    with replayed(torch.nn.ModuleList([router]), rows[:, None]):
        _, _, ids = router(router.hidden)
    _, _, own = router(router.hidden)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, torch.where(rows < 0, own, rows.to(torch.int32)))


@pytest.mark.parametrize("kind", ["NaN", "no tokens"])
def test_a_first_block_that_shows_no_formula(kind: str) -> None:
    """All formulas are exact in it."""
    router = SoftmaxRouter()
    router.block(router.hidden[:0] if kind == "no tokens" else router.hidden * torch.nan)
    for _ in range(2):
        assert router.block() < 1e-6


@pytest.mark.parametrize(
    ("dtype", "saturated", "nearly"), [(torch.float32, 100, 8), (torch.bfloat16, 20, 2)]
)
def test_a_first_block_in_which_chosen_experts_have_all_probability(
    dtype: torch.dtype, saturated: float, nearly: float
) -> None:
    """There, it makes no difference for the router's own weights whether they are normalised, but
    for those of other experts. In the next block it does."""
    router = SoftmaxRouter().to(dtype)
    own_weight = router.weight.data
    router.weight.data = own_weight * saturated
    with pytest.raises(ReplayError, match="fit several formulas"):
        router.block()
    router.weight.data = own_weight * nearly
    for _ in range(2):
        assert router.block() < 1e-6


def test_a_formula_is_of_types() -> None:
    """In float32 it does not show whether scores are computed in the type of the logits."""
    router = SoftmaxRouter(top_k=4)
    router.config |= {"is_normalised": True, "scores": None}
    assert router.block() < 1e-6
    router.bfloat16()
    for _ in range(2):
        assert router.block() == 0


def test_a_formula_that_depends_on_the_mode() -> None:
    """Each of training and evaluation has its own."""
    router = SoftmaxRouter()
    router.config["normalises_eval"] = True
    for is_training in (True, False, True, False):
        assert router.train(is_training).block() < 1e-6


def test_a_method_that_changes_between_blocks() -> None:
    router = SoftmaxRouter()
    assert router.block() < 1e-6

    def normalised(self: Any, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
        logits = torch.nn.functional.linear(hidden, self.weight)
        scores = logits.float().softmax(dim=-1)
        if ids is None:
            ids = scores.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return logits, weights / weights.sum(dim=-1, keepdim=True), ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftmaxRouter, "forward", normalised)
        assert router.block() < 1e-6
    assert router.block() < 1e-6


def test_a_wrong_block_stays_wrong() -> None:
    """After `check`, too, and when a later block has another formula."""
    router = SoftmaxRouter()
    router.block()
    model = torch.nn.ModuleList([router])
    router.config["is_normalised"] = True
    wrong = pytest.raises(ReplayError, match=IN_ANOTHER_WAY)
    with wrong, replayed(model, router.rows()[:, None]) as first:
        router(router.hidden)
        with pytest.raises(ReplayError, match=IN_ANOTHER_WAY):
            first.check()
    assert router.block() < 1e-6
    with pytest.raises(ReplayError, match=IN_ANOTHER_WAY):
        first.check()


def test_a_block_that_an_exception_leaves() -> None:
    """It is not checked, but the next one is, and the first can be."""
    router = SoftmaxRouter()
    router.block()
    model = torch.nn.ModuleList([router])
    router.config["is_normalised"] = True
    with suppress(KeyError), replayed(model, router.rows()[:, None]) as left:
        router(router.hidden)
        raise KeyError
    with pytest.raises(ReplayError, match=IN_ANOTHER_WAY):
        router.block()
    with pytest.raises(ReplayError, match=IN_ANOTHER_WAY):
        left.check()


def test_what_was_replayed_does_not_keep_the_model() -> None:
    router = SoftmaxRouter()
    with replayed(torch.nn.ModuleList([router]), router.rows()[:, None]) as replay:
        router(router.hidden)
    alive = weakref.ref(router)
    del router
    gc.collect()
    assert alive() is None
    assert replay.replayed == 64


def test_a_block_that_is_entered_in_inference_mode() -> None:
    router = SoftmaxRouter()
    rows = router.rows()
    with ExitStack() as block:
        with torch.inference_mode():
            block.enter_context(replayed(torch.nn.ModuleList([router]), rows[:, None]))
        _, weights, _ = router(router.hidden)
        weights.square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None
    router(router.hidden, rows)[1].square().sum().backward()
    assert gradient is not None
    assert router.weight.grad is not None
    assert torch.allclose(gradient, router.weight.grad, atol=1e-5)


def test_the_page(load: Load, documented: list[str]) -> None:
    rows = given_rows(QWEN3).numpy().astype(np.int16)
    routings = [Routing(rows[0, :-1]), Routing(rows[1, :-1])]
    loss_of = Mock(side_effect=lambda model: model(input_ids=batch(), use_cache=False).logits.sum())
    names = {
        "model": load(),
        "routings": routings,
        "length": TOKENS,
        "loss_of": loss_of,
        "info": {"layer_ids": [0, 1, 2]},
    }
    exec("\n".join(documented), names)
    assert names["replay"].replayed == (rows[:, :-1] >= 0).all(axis=3).sum()
    assert names["model"].model.layers[1].mlp.gate.weight.grad.abs().sum() > 0


@pytest.mark.e2e
def test_the_example(tiny_model: Path, tmp_path: Path) -> None:
    """Server and trainer in bfloat16: replay is closer than the live router, and mistakes are
    further away."""
    flags = ("--dtype", "bfloat16", "--enforce-eager", "--enable-return-routed-expert-weights")
    sizes = ("--kv-cache-memory-bytes", "8388608", "--max-model-len", "2048")
    with serving_quickly(tiny_model, tmp_path / "log", *flags, *sizes) as server:
        assert server.info()["model_dtype"] == "bfloat16"
        out = run_example(
            "replay.py",
            str(server.model),
            "--url",
            server.url,
            "--max-tokens",
            "64",
            "--group",
            "8",
            "--mistakes",
        )
    table = re.findall(r"^(\w.*?) {3,}(\S+) +(\S+) +(\S+) +(\d+) of (\d+)$", out, re.MULTILINE)
    means = {name: float(mean) for name, mean, *_ in table}
    others = {name: int(count) for name, *_, count, _ in table}
    assert [*means][:3] == ["live router", "ids", "ids with weights"]
    assert means["ids"] < 1.1 * means["live router"], (
        "in a model so small, what bfloat16 rounds elsewhere is as large"
    )
    assert others["ids"] == others["ids with weights"] == 0
    assert 0 < others["live router"] < int(table[0][-1])
    for name in [*means][3:5]:
        assert means[name] > means["live router"]
        assert others[name] > others["live router"]
    step = re.search(r"step: loss (\S+), gradient norm (\S+), ratio (\S+)", out)
    assert step is not None
    assert float(step[2]) > 0
    assert float(step[3]) == pytest.approx(1, abs=0.1)


@pytest.mark.e2e
def test_the_example_refuses_a_model_of_another_type(server: Server) -> None:
    """Else rounding alone would tell more than replay."""
    command = [str(ROOT / "examples/replay.py"), str(server.model)]
    done = programs.run([*command, "--url", server.url, "--dtype", "bfloat16"])
    assert done.returncode == 2
    assert "the server's model is in float32: start it with --dtype bfloat16" in done.stderr
