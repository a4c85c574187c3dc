"""Requests that say which experts their tokens take, in a real engine: against transformers with
these experts, and against the same requests that say nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.protocol.routing_input import RoutingInput
from tests.e2e.harness import ON_GPU, prompt_of
from tests.e2e.shapes import OWN_FORMULA, SHAPES, SIXTEEN_BIT, Shape, make_model
from tests.e2e.steered import Program, Reference, program

pytestmark = pytest.mark.e2e

NOISE = 1e-4
"""What log-probabilities of the two differ by in float32: measured up to 9e-5."""
NUM_TOKENS = 200
PROMPT = prompt_of(NUM_TOKENS, seed=1)
NEVER, ALWAYS = -np.inf, np.inf

_MARKS = {"mixtral": [], "deepseek-v3, plain attention": [pytest.mark.release]}
"""Of a softmax, and of a sigmoid with a correction and groups; all others are for long runs."""

_FAILS_ON_CPUS = {"granitemoehybrid": "vLLM's operator of Mamba 2 for CPUs fails with the prompt"}


def as_param(shape: Shape) -> Any:
    marks = [*_MARKS.get(shape.name, [pytest.mark.long])]
    reason = shape.needs_gpu or _FAILS_ON_CPUS.get(shape.model_type)
    if reason and not ON_GPU:
        marks.append(pytest.mark.skip(reason=reason))
    return pytest.param(shape, id=shape.name, marks=marks)


class Pair:
    """An engine, and the same model in transformers."""

    def __init__(self, shape: Shape, program: Program, reference: Reference) -> None:
        self.shape = shape
        self.program = program
        self.reference = reference
        self.natural = program.one(PROMPT)
        self.natural_rows = self.natural.rows[:NUM_TOKENS]


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


FOLLOWED = [shape for shape in SHAPES if shape.model_type not in OWN_FORMULA]
REFUSED = [shape for shape in (*SHAPES, *SIXTEEN_BIT) if shape.model_type in OWN_FORMULA]


@pytest.fixture(scope="module", params=[as_param(shape) for shape in FOLLOWED])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    shape: Shape = request.param
    model = tmp_path_factory.mktemp("model") / "model"
    make_model(shape, model)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shape.env.items():
            patch.setenv(name, value)
        with program(model) as running:
            yield Pair(shape, running, Reference(model, running.layer_ids))


def test_a_program_is_told_what_its_model_cannot_do(pair: Pair) -> None:
    """Before the request goes to the engine."""
    of_another_model = RoutingInput(rows=np.zeros((5, 1, 1), np.int16))
    with pytest.raises(VLLMValidationError, match=r"must have .* layers"):
        pair.program.one(PROMPT, of_another_model)
    too_many = RoutingInput(rows=pair.program.random_rows(NUM_TOKENS + 1))
    with pytest.raises(VLLMValidationError, match=f"prompt's {NUM_TOKENS} tokens"):
        pair.program.one(PROMPT, too_many)
    assert pair.program.one(PROMPT).is_same(pair.natural)


def off(one: np.ndarray, other: np.ndarray) -> float:
    assert len(one) == len(other) > 0
    return float(np.abs(one - other).max())


def test_own_rows_and_a_bias_of_zeros_change_nothing_bit_for_bit(pair: Pair) -> None:
    for said in (RoutingInput(rows=pair.natural_rows), RoutingInput(bias=pair.program.zero_bias())):
        assert pair.program.one(PROMPT, said).is_same(pair.natural)


def test_given_rows_are_the_experts_of_their_tokens(pair: Pair) -> None:
    rows = pair.program.random_rows(NUM_TOKENS)
    forced = pair.program.one(PROMPT, RoutingInput(rows=rows))
    assert np.array_equal(forced.rows[:NUM_TOKENS], rows)
    assert off(forced.prompt_logprobs, pair.natural.prompt_logprobs) > 0.1
    assert off(forced.prompt_logprobs, pair.reference.logprobs(PROMPT, rows)) < NOISE


def test_the_router_chooses_where_a_row_says_nothing(pair: Pair) -> None:
    rows = pair.program.random_rows(NUM_TOKENS)
    rows[::3] = -1
    rows[:, 0] = -1
    partly = pair.program.one(PROMPT, RoutingInput(rows=rows))
    captured = partly.rows[:NUM_TOKENS]
    assert np.array_equal(captured[:, 0], pair.natural_rows[:, 0])
    is_given = rows >= 0
    assert np.array_equal(captured[is_given], rows[is_given])
    assert off(partly.prompt_logprobs, pair.reference.logprobs(PROMPT, rows)) < NOISE


def test_rows_from_a_position_on_leave_those_before_as_they_are(pair: Pair) -> None:
    rows = pair.program.random_rows(70)
    late = pair.program.one(PROMPT, RoutingInput(rows=rows, start=50))
    assert np.array_equal(late.rows[:50], pair.natural_rows[:50])
    assert np.array_equal(late.rows[50:120], rows)
    whole = np.full((NUM_TOKENS, *rows.shape[1:]), -1)
    whole[50:120] = rows
    assert off(late.prompt_logprobs, pair.reference.logprobs(PROMPT, whole)) < NOISE


def test_a_finite_bias_is_one_of_the_gates(pair: Pair) -> None:
    if not pair.reference.knows_gates:
        pytest.skip("the reference knows the gates of other models only")
    bias = 0.3 * np.random.default_rng(0).standard_normal(pair.program.zero_bias().shape)
    biased = pair.program.one(PROMPT, RoutingInput(bias=bias.astype(np.float32)))
    assert off(biased.prompt_logprobs, pair.natural.prompt_logprobs) > NOISE
    expected = pair.reference.logprobs_with_bias(PROMPT, bias.astype(np.float32))
    assert off(biased.prompt_logprobs, expected) < NOISE


def test_experts_are_never_and_always_chosen_of_prompt_and_answer(pair: Pair) -> None:
    bias = pair.program.zero_bias()
    bias[:, 0] = NEVER
    bias[0, 2] = ALWAYS
    bias[-1, 3] = ALWAYS
    steered = pair.program.one(PROMPT, RoutingInput(bias=bias), max_tokens=20)
    assert (pair.natural.rows == 0).any()
    assert not (steered.rows == 0).any()
    assert (steered.rows[:, 0] == 2).any(axis=1).all()
    assert (steered.rows[:, -1] == 3).any(axis=1).all()
    if not pair.reference.knows_gates:
        return
    expected = pair.reference.logprobs_with_bias(PROMPT, bias)
    assert off(steered.prompt_logprobs, expected) < NOISE
    tokens = [*PROMPT, *steered.tokens]
    of_answer = pair.reference.logprobs_with_bias(tokens, bias)[NUM_TOKENS - 1 :]
    assert off(steered.logprobs, of_answer) < NOISE


def test_neighbours_are_untouched_bit_for_bit(pair: Pair) -> None:
    prompts = [prompt_of(length, seed=length) for length in (90, 120, 33)]
    bias = pair.program.zero_bias()
    bias[:, 1] = NEVER
    quiet = pair.program.run(prompts, max_tokens=12)
    for said in (RoutingInput(rows=pair.program.random_rows(120)), RoutingInput(bias=bias)):
        loud = pair.program.run(prompts, [None, said, None], max_tokens=12)
        assert loud[0].is_same(quiet[0])
        assert not loud[1].is_same(quiet[1])
        assert loud[2].is_same(quiet[2])


def hits(running: Program, inputs: list[RoutingInput | None], seed: int) -> list[Any]:
    """Answers to one prompt, one after the other, which may be in the prefix cache."""
    prompt = prompt_of(256, seed=seed)
    return [running.one(prompt, said, max_tokens=8, with_prompt_logprobs=False) for said in inputs]


def test_the_prefix_cache_is_shared_by_equal_inputs_only(pair: Pair) -> None:
    if not pair.shape.prefix_cache or not pair.program.has_prefix_cache:
        pytest.skip("vLLM has no prefix cache for this model")
    rows = pair.program.random_rows(256)
    said = RoutingInput(rows=rows)
    other = RoutingInput(rows=rows[::-1])
    answers = hits(pair.program, [said, None, None, said, other], seed=21)
    forced, natural, natural_again, forced_again, _ = answers
    is_hit = [answer.num_cached > 0 for answer in answers]
    assert is_hit == [False, False, True, True, False]
    assert natural_again.tokens == natural.tokens
    assert forced_again.tokens == forced.tokens
    assert np.array_equal(forced_again.rows[:256], rows)


@pytest.mark.long
@pytest.mark.parametrize("shape", REFUSED, ids=lambda shape: shape.name)
def test_a_model_whose_routers_have_their_own_formula_is_refused(
    shape: Shape, tmp_path: Path
) -> None:
    make_model(shape, tmp_path)
    with (
        pytest.raises(UnsupportedConfig, match="a formula of its own"),
        program(tmp_path, dtype="bfloat16"),
    ):
        pass
