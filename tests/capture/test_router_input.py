"""What routers are told: the tables against a loop, and the formula against one for each token."""

from collections.abc import Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.capture.wire import message
from routed_experts.capture.wire.step_tag import StepTag
from routed_experts.capture.wire.transport import Told
from routed_experts.capture.worker.router_input.filling import RouterInputOfTables
from routed_experts.capture.worker.router_input.formula import rewritten
from routed_experts.capture.worker.router_input.running import Model, RunningInputs
from routed_experts.capture.worker.router_input.tables import Tables
from routed_experts.protocol.routing_input import ONE_GROUP, RoutingInput, routing_args
from tests.capture.router_input import FAMILIES, LAYER, Case, Sized, case_of

CPU = torch.device("cpu")
L, K, E = 3, 2, 8
MODEL = Model(L, K, E, ONE_GROUP)


# ---- the formula ----


@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_each_token_is_rewritten_as_its_request_says(sized: Sized) -> None:
    case = case_of(sized, torch.float32, CPU)
    result = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    for token in range(len(case.logits)):
        weights, ids = expected_of(case, token)
        np.testing.assert_array_equal(result.ids[token], ids)
        scale = case.family.scale
        np.testing.assert_allclose(result.weights[token], weights, rtol=1e-5, atol=1e-6 * scale)


def expected_of(case: Case, token: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids of one token, in float64 and plain numpy."""
    family = case.family
    own = case.routing.weights[token].numpy(), case.routing.ids[token].numpy()
    row = case.tables.rows[token, LAYER].numpy()
    table_row = int(case.tables.index[token])
    bias = case.tables.bias[table_row, LAYER].numpy().astype(np.float64)
    has_row = bool((row >= 0).all())
    if not has_row and not bias.any():
        return own
    if has_row and not bias.any() and (row == own[1]).all():
        return own
    never, always = bias == -np.inf, bias == np.inf
    logits = case.logits[token].numpy().astype(np.float64)
    logits += np.where(never | always, 0, bias)
    logits[always] = logits[~never].max() + 0.01
    logits[never] = -np.inf
    scores = {
        "softmax": lambda: np.exp(logits) / np.exp(logits).sum(),
        "sigmoid": lambda: 1 / (1 + np.exp(-logits)),
        "sqrtsoftplus": lambda: np.sqrt(np.log1p(np.exp(logits))),
    }[family.scoring]()
    ids = row.astype(np.int64) if has_row else chosen(case, scores, never, always)
    weights = scores[ids]
    if family.renormalize:
        weights = weights / weights.sum()
    return weights * family.scale, ids


def chosen(case: Case, scores: np.ndarray, never: np.ndarray, always: np.ndarray) -> np.ndarray:
    family = case.family
    wanted = scores + (0 if family.correction is None else family.correction.numpy())
    wanted = np.where(always, 1e6, np.where(never, -1e6, wanted))
    grouped = wanted.reshape(family.groups.count, -1)
    best = np.sort(grouped, axis=1)[:, -family.groups.summed :].sum(axis=1)
    outside = np.argsort(-best)[family.groups.chosen :]
    grouped[outside] = -np.inf
    wanted = grouped.ravel()
    order = np.argsort(-wanted, kind="stable")
    return order[: family.top_k]


@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_tokens_that_are_told_nothing_stay_bit_for_bit(sized: Sized) -> None:
    """Also rows that are the router's own choice, and layers of a bias that are all zeros."""
    case = case_of(sized, torch.bfloat16, CPU)
    assert 0 < case.is_told.sum() < len(case.is_told)
    result = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    untold = ~case.is_told
    assert torch.equal(result.ids[untold], case.routing.ids[untold])
    assert torch.equal(result.weights[untold], case.routing.weights[untold])


@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_bans_and_activations_hold_where_logits_are_no_numbers(sized: Sized) -> None:
    """As in a model that overflows: else such a request would end the engine, which checks them."""
    case = case_of(sized, torch.float32, CPU)
    for first, value in enumerate([np.nan, np.inf, -np.inf]):
        case.logits[first::6] = value
        case.logits[first + 3 :: 6, ::3] = value
    result = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    table_rows = case.tables.index.long()
    for token in range(len(case.logits)):
        bias = case.tables.bias[table_rows[token], LAYER].numpy()
        if case.tables.rows[token, LAYER].min() >= 0 or not bias.any():
            continue
        ids = set(result.ids[token].tolist())
        assert not ids & set(np.flatnonzero(bias == -np.inf).tolist())
        assert ids >= set(np.flatnonzero(bias == np.inf).tolist())


@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_an_expert_whose_score_is_no_number_has_no_weight(sized: Sized) -> None:
    """As in vLLM's kernels for GPUs. Here of rows that are given. Beside it, others have theirs, but
    for softmax, of whose sum it is a part."""
    case = case_of(sized, torch.float32, CPU)
    case.logits[:, ::3] = np.nan
    result = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    has_other_row = case.is_told & (case.tables.index[: len(case.logits)] == 0)
    weights = result.weights[has_other_row]
    has_score = result.ids[has_other_row] % 3 > 0
    if case.family.scoring == "softmax":
        has_score[:] = False
    assert len(weights) > 0
    assert torch.equal(weights > 0, has_score)
    assert not weights[~has_score].any()


# ---- the tables ----


def step_of(
    new: list[Any],
    finished: Collection[str] = (),
    recomputed: Mapping[str, message.PlacedRows] = MappingProxyType({}),
) -> SimpleNamespace:
    """A step, as the scheduler sends it."""
    return SimpleNamespace(
        finished_req_ids=finished,
        scheduled_new_reqs=new,
        aux_output_connector_metadata=StepTag(1, recomputed),
    )


class Steps:
    """Steps of random requests, and what a loop says that their tables must hold."""

    def __init__(self, seed: int, layers: slice = slice(0, L)) -> None:
        self.rng = np.random.default_rng(seed)
        self.layers = layers
        num_layers = len(range(L)[layers])
        self.tables = Tables(
            num_layers,
            max_tokens=40,
            top_k=K,
            num_experts=E,
            max_requests=3,
            max_steps_in_flight=1,
            device=CPU,
        )
        self.filled = RouterInputOfTables(RunningInputs(MODEL, layers), self.tables, [])
        self.inputs: dict[str, RoutingInput | None] = {}
        self.computed: dict[str, int] = {}
        self.finished: set[str] = set()

    def run(self) -> None:
        new = self.new_requests()
        for request_id in [known for known in self.inputs if self.rng.random() < 0.2]:
            self.finished.add(request_id)
            del self.inputs[request_id], self.computed[request_id]
        running = list(self.inputs)
        self.rng.shuffle(running)
        batch = running[:3]
        counts = self.rng.integers(1, 10, len(batch))
        recomputed = self.some_recomputed(batch, counts)
        self.filled.begin_step(step_of(new, self.finished, recomputed))
        self.finished = set()
        offsets = np.array([0, *np.cumsum(counts)], np.int32)
        starts = np.array([self.computed[request_id] for request_id in batch], np.int32)
        self.filled.fill(batch, offsets, starts)
        self.check(batch, offsets, starts, recomputed)
        for request_id, count in zip(batch, counts, strict=True):
            self.computed[request_id] += int(count)
            if self.rng.random() < 0.1:
                self.computed[request_id] = 0  # preempted

    def some_recomputed(
        self, batch: list[str], counts: np.ndarray
    ) -> dict[str, message.PlacedRows]:
        """Rows of some requests that begin again, which are fewer than their tokens, or as many."""
        recomputed = {}
        for request_id, count in zip(batch, counts, strict=True):
            if self.computed[request_id] == 0 and self.rng.random() < 0.5:
                order = self.rng.random((self.rng.integers(1, count + 1), L, E)).argsort(axis=2)
                rows = order[:, :, :K].astype(np.int16)
                recomputed[request_id] = message.PlacedRows(0, rows)
        return recomputed

    def new_requests(self) -> list[Any]:
        new = []
        for _ in range(self.rng.integers(0, 3)):
            request_id = str(self.rng.integers(1 << 30))
            self.inputs[request_id] = self.some_input()
            self.computed[request_id] = int(self.rng.integers(0, 4))  # a prefix hit
            extra_args = None
            routing_input = self.inputs[request_id]
            if routing_input is not None:
                extra_args = routing_args(
                    rows=routing_input.rows, start=routing_input.start, bias=routing_input.bias
                )
            params = SimpleNamespace(extra_args=extra_args)
            new.append(SimpleNamespace(req_id=request_id, sampling_params=params))
        return new

    def some_input(self) -> RoutingInput | None:
        kind = self.rng.integers(4)
        if kind == 0:
            return None
        rows = bias = None
        start = 0
        if kind != 1:
            order = self.rng.random((self.rng.integers(1, 25), L, E)).argsort(axis=2)
            rows = order[:, :, :K].astype(np.int16)
            start = int(self.rng.integers(0, 5))
        if kind != 2:
            bias = self.rng.standard_normal((L, E)).astype(np.float32)
            bias[self.rng.integers(L)] = 0
        return RoutingInput(rows=rows, start=start, bias=bias)

    def check(
        self,
        batch: list[str],
        offsets: np.ndarray,
        starts: np.ndarray,
        recomputed: dict[str, message.PlacedRows],
    ) -> None:
        num_rows = num_steered = 0
        end_of_batch = offsets[-1]
        assert (self.tables.rows[end_of_batch:] == -1).all()
        assert (self.tables.index[end_of_batch:] == 0).all()
        for index, request_id in enumerate(batch):
            routing_input = self.inputs[request_id]
            has_bias = routing_input is not None and routing_input.bias is not None
            num_steered += has_bias
            for token in range(offsets[index], offsets[index + 1]):
                position = starts[index] + token - offsets[index]
                row = np.full((L, K), -1)
                rows = None if routing_input is None else routing_input.rows
                if request_id in recomputed:
                    if position < len(recomputed[request_id].rows):
                        row = recomputed[request_id].rows[position]
                        num_rows += 1
                elif rows is not None and routing_input.start <= position < routing_input.end:
                    row = rows[position - routing_input.start]
                    num_rows += 1
                np.testing.assert_array_equal(self.tables.rows[token], row[self.layers])
                table_row = int(self.tables.index[token])
                bias = routing_input.bias if has_bias else np.zeros((L, E), np.float32)
                np.testing.assert_array_equal(self.tables.bias[table_row], bias[self.layers])
                steers = (bias[self.layers] != 0).any(axis=1)
                np.testing.assert_array_equal(self.tables.steers[table_row], steers)
        assert self.filled.take_told() == Told(num_rows, num_steered)


@pytest.mark.parametrize("layers", [slice(0, 3), slice(1, 3)], ids=["all", "a stage"])
def test_tables_hold_what_the_requests_of_each_step_say(layers: slice) -> None:
    """With more requests than a step has, prefix hits, preemption, and some that end."""
    steps = Steps(0, layers)
    for _ in range(200):
        steps.run()


def test_a_step_that_was_not_filled_says_that_it_was_told_nothing() -> None:
    steps = Steps(0)
    steps.run()
    steps.filled.begin_step(step_of([]))
    assert steps.filled.take_told() == Told()


def test_an_input_of_another_model_is_reported_and_not_followed() -> None:
    steps = Steps(0)
    args = routing_args(rows=np.array([[[0, E], [0, 1], [2, 3]]]))
    new = SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(extra_args=args))
    steps.filled.begin_step(step_of([new]))
    steps.filled.fill(["a"], np.array([0, 1]), np.array([0]))
    assert (steps.tables.rows == -1).all()
    assert steps.filled.take_told() == Told(unfit=("a",))


def test_a_request_that_is_sent_again_keeps_its_place() -> None:
    """As after a preemption on the V2 model runner."""
    steps = Steps(0)
    args = routing_args(bias=np.ones((L, E)))
    new = SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(extra_args=args))
    for _ in range(5):  # more often than there are places
        steps.filled.begin_step(step_of([new]))
        steps.filled.fill(["a"], np.array([0, 4]), np.array([0]))
        assert (steps.tables.index[:4] == steps.tables.index[0]).all()
        assert steps.filled.take_told() == Told(num_steered=1)
