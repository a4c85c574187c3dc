"""Rows in 16 bits, held against the scores that the routers were given; and that oracle's own
tests, without engine.

On a CPU these run too, with one engine; the shapes there only with `-m slow`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.e2e.harness import NGRAM, ON_GPU, counts_of, prompt_of
from tests.e2e.shapes import (
    SHAPES,
    SIXTEEN_BIT,
    HookOracle,
    Shape,
    make_draft_model,
    make_eagle_models,
    make_model,
    make_mtp_model,
    make_mxfp4_model,
    write_adapter,
)
from tests.gpu.scores import Part, Recording, Rule, Verdict, judge, rule_of

pytestmark = pytest.mark.timeout(1200)

K, EXPERTS, LAYERS = 4, 16, 3
BIAS = torch.linspace(-0.5, 0.5, EXPERTS).repeat(LAYERS, 1)


def random_scores(n: int, seed: int = 0) -> np.ndarray:
    """[n, LAYERS, EXPERTS] as a gate in bfloat16 gives them, among which some are equal."""
    return np.random.default_rng(seed).normal(size=(n, LAYERS, EXPERTS)).astype(np.float32) * 4


def best(scores: np.ndarray, count: int = K) -> np.ndarray:
    return np.argsort(-scores, axis=2)[:, :, :count]


def with_last(ranked: np.ndarray, expert: int) -> np.ndarray:
    """The best, but for the last expert of one layer of a row."""
    rows = ranked[:, :, :K].copy()
    rows[7, 1, K - 1] = expert
    return rows


# ---- the rule ----


@pytest.mark.parametrize(
    "shape",
    {shape.model_type: shape for shape in (*SHAPES, *SIXTEEN_BIT)}.values(),
    ids=lambda shape: shape.name,
)
def test_the_rule_is_that_of_hugging_face(shape: Shape, tmp_path: Path) -> None:
    """What its routers are given, in float32, and what they hand to their experts."""
    make_model(shape, tmp_path)
    oracle = HookOracle(tmp_path, shape)
    seen: list[torch.Tensor] = []

    def see(
        module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        x = (args[0] if args else kwargs["hidden_states"]).float()
        weight, bias = module.weight, getattr(module, "bias", None)
        seen.append(torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), weight.float(), bias))

    for name, module in oracle.model.named_modules():
        is_router = name.endswith((".gate", ".router", ".router.layer", ".router.proj"))
        if is_router and getattr(module, "weight", None) is not None and module.weight.dim() == 2:
            module.register_forward_pre_hook(see, with_kwargs=True)
    rows = oracle.rows(prompt_of(100, seed=1)).astype(np.int64)
    scores = torch.stack(seen, dim=1).numpy()
    assert scores.shape == (100, len(shape.layer_ids), shape.num_experts)
    rule = rule_of(tmp_path, shape.layer_ids)
    assert (rule.judge(scores, rows) == Verdict.EXACT).all()
    others = rule.judge(np.roll(scores, 1, axis=1), rows)
    assert (others.min(axis=1) == Verdict.WRONG).mean() > 0.5


def test_one_expert_of_many_layers() -> None:
    scores, rule = random_scores(50), Rule(K)
    ranked = best(scores, EXPERTS)
    assert (rule.judge(scores, ranked[:, :, :K]) == Verdict.EXACT).all()
    assert (rule.judge(scores, ranked[:, :, K - 1 :: -1]) == Verdict.EXACT).all()
    for instead in (*ranked[7, 1, K:], ranked[7, 1, 0], -1, EXPERTS):
        verdicts = rule.judge(scores, with_last(ranked, instead))
        assert np.argwhere(verdicts == Verdict.WRONG).tolist() == [[7, 1]]
    scores[2, 1] = np.nan  # what was not recorded
    assert np.argwhere(rule.judge(scores, ranked[:, :, :K]) == Verdict.WRONG).tolist() == [[2, 1]]


def test_only_bit_equal_scores_are_ties() -> None:
    scores, rule = random_scores(50), Rule(K)
    ranked = best(scores, EXPERTS)
    last, next_, third = (int(ranked[7, 1, rank]) for rank in (K - 1, K, K + 1))
    scores[7, 1, next_] = scores[7, 1, last]
    for other, verdict in ((last, Verdict.TIE), (next_, Verdict.TIE), (third, Verdict.WRONG)):
        verdicts = rule.judge(scores, with_last(ranked, other))
        assert verdicts[7, 1] == verdict
        assert (verdicts == Verdict.EXACT).sum() == verdicts.size - 1
    scores[7, 1, next_] = np.nextafter(scores[7, 1, last], -np.inf)
    for other, verdict in ((last, Verdict.EXACT), (next_, Verdict.WRONG)):
        assert rule.judge(scores, with_last(ranked, other))[7, 1] == verdict


def test_ties_of_groups() -> None:
    """Of two groups that are as good, either; not both, and not a worse one."""
    scores = np.full((1, 1, EXPERTS), -5.0, dtype=np.float32)
    scores[0, 0, [0, 1, 4, 5, 8, 9]] = [3, 3, 2, 1, 2, 1]  # of three of the four groups
    rule = Rule(K, "softmax", groups=4, top_groups=2, group_best=1)
    cases = (
        ([0, 1, 4, 5], Verdict.TIE),
        ([0, 1, 8, 9], Verdict.TIE),
        ([0, 1, 4, 8], Verdict.WRONG),
    )
    for chosen, verdict in (*cases, ([0, 1, 4, 6], Verdict.WRONG), ([0, 1, 4, 12], Verdict.WRONG)):
        assert rule.judge(scores, np.array([[chosen]])).item() == verdict, chosen


def test_only_rounding_is_left_to_a_router_that_computes() -> None:
    scores = random_scores(50)
    compared = torch.from_numpy(scores).sigmoid() + BIAS
    for off, verdict in ((2.0**-22, Verdict.ROUNDING), (2.0**-16, Verdict.WRONG)):
        bias = BIAS.clone()
        first, second = torch.topk(compared[7, 1], 2).indices.tolist()
        bias[1, second] += compared[7, 1, first] - compared[7, 1, second] - off
        rule, rows = Rule(1, "sigmoid", bias), torch.topk(compared, 1).indices.numpy()
        for expert, expected in ((second, verdict), (first, Verdict.EXACT)):
            rows[7, 1] = expert
            assert rule.judge(scores, rows)[7, 1] == expected


# ---- what was computed, and read ----

BLOCK = 4


class Steps:
    """Forward passes of requests whose block tables are given, and the rows of every
    computation."""

    def __init__(self, **blocks: list[int]) -> None:
        self.recording, self.rule = Recording(list(range(LAYERS))), Rule(K)
        self.blocks = blocks

    def run(self, *parts: tuple[str, int, list[int]]) -> list[np.ndarray]:
        """A step of (request, first position, its tokens there); the rows of each part."""
        scores = random_scores(
            sum(len(tokens) for _, _, tokens in parts), seed=len(self.recording.owners)
        )
        made = []
        for request, first, tokens in parts:
            every = np.arange(first + len(tokens))
            slots = np.array(self.blocks[request])[every // BLOCK] * BLOCK + every % BLOCK
            made.append(Part(request, every[first:], np.array(tokens), slots))
        self.recording.step(scores, made)
        return np.split(best(scores), np.cumsum([len(tokens) for _, _, tokens in parts])[:-1])

    def judge(self, request: str, tokens: list[int], *rows: np.ndarray) -> dict[str, int]:
        return judge(self.recording, self.rule, request, tokens, np.concatenate(rows))

    def wrong(self, request: str, tokens: list[int], *rows: np.ndarray) -> int:
        return self.judge(request, tokens, *rows)["wrong"]


def test_chunks_and_a_prefix_hit_in_the_same_step() -> None:
    steps, tokens = Steps(a=[5, 2, 7], b=[5, 3]), [1, 2, 3, 4, 5, 6]
    (a1,) = steps.run(("a", 0, [1, 2, 3]))
    b1, a2 = steps.run(("b", 4, [9, 9]), ("a", 3, [4, 5, 6]))  # b reads what a computes beside it
    assert steps.wrong("a", tokens, a1, a2) == 0
    counts = steps.judge("b", [1, 2, 3, 4, 9, 9], a1, a2[:1], b1)
    assert [counts[name] for name in ("wrong", "hits", "not recorded", "layers")] == [
        0,
        4,
        0,
        6 * LAYERS,
    ]
    assert steps.wrong("b", [1, 2, 3, 4, 9, 9], a1, a2[:2], b1[1:]) == 1
    assert steps.wrong("a", tokens, a2, a1) == 6
    shifted = np.concatenate([a1, a2])
    shifted[2, 1] = shifted[2, 2]  # one layer of one row
    assert steps.wrong("a", tokens, shifted) == 1
    assert steps.wrong("a", [1, 2, 3, 4, 5, 7], a1, a2) == 1  # of another text
    assert steps.wrong("a", [1, 0, 3, 4, 5, 6], a1, a2) == 5


def test_the_same_text_computed_by_somebody_else_is_not_the_same_row() -> None:
    steps = Steps(a=[1], b=[2])
    a, b = steps.run(("a", 0, [1, 2, 3]), ("b", 0, [1, 2, 3]))
    assert steps.wrong("a", [1, 2, 3], a) == steps.wrong("b", [1, 2, 3], b) == 0
    assert steps.wrong("a", [1, 2, 3], b) == 3


def test_the_same_text_computed_by_another_adapter_is_not_the_same_row() -> None:
    for adapters, wrong in (({}, 0), ({"b": 1}, 5)):
        steps = Steps(a=[1], b=[1, 2])
        steps.recording.adapters.update(adapters)
        (a,) = steps.run(("a", 0, [1, 2, 3, 4]))
        (b,) = steps.run(("b", 4, [5]))
        assert steps.wrong("a", [1, 2, 3, 4], a) == 0
        assert steps.wrong("b", [1, 2, 3, 4, 5], a, b) == wrong


def test_a_preempted_request_has_computed_twice() -> None:
    steps, tokens = Steps(a=[1], b=[1]), [1, 2, 3, 4]
    (old,) = steps.run(("a", 0, [1, 2, 3]))
    (b,) = steps.run(("b", 0, [1, 2, 7]))
    assert steps.wrong("b", [1, 2, 7], b) == 0
    steps.blocks["a"] = [4]
    (new,) = steps.run(("a", 0, tokens))
    for rows in ((old, new[3:]), (new,), (new[:1], old[1:], new[3:])):
        assert steps.wrong("a", tokens, *rows) == 0
    assert steps.wrong("a", tokens, b, new[3:]) == 3
    mixed = new.copy()
    mixed[0, 0] = old[0, 0]
    assert steps.wrong("a", tokens, mixed) == 1
    assert steps.judge("a", tokens, new)["recomputed"] == 3


def test_prompt_rows_of_another_choice() -> None:
    steps, tokens = Steps(**{"0_a": [1], "1_a": [2]}), [1, 2, 3]
    first, second = steps.run(("0_a", 0, tokens), ("1_a", 0, tokens))
    for rows, wrong, by_another in (
        ((second,), 0, 0),
        ((first[:2], second[2:]), 0, 2),
        ((first,), 1, 2),
        ((first[:1], second[1:]), 1, 0),
    ):
        judged = judge(
            steps.recording, steps.rule, "1_a", tokens, np.concatenate(rows), 2, ["0_a", "1_a"]
        )
        assert (judged["wrong"], judged["by another choice"]) == (wrong, by_another)


def test_drafts_that_were_rejected() -> None:
    """The second draft is what was sampled in the end, but it was computed after the wrong first
    one."""
    steps = Steps(a=[1, 2])
    (before,) = steps.run(("a", 0, [1, 2]))
    (draft,) = steps.run(("a", 2, [3, 8, 5]))
    (right,) = steps.run(("a", 3, [4, 5]))
    assert steps.wrong("a", [1, 2, 3, 4, 5], before, draft[:1], right) == 0
    assert steps.wrong("a", [1, 2, 3, 4, 5], before, draft[:1], right[:1], draft[2:]) == 1


# ---- engines ----


def run(
    model: Path, env: Mapping[str, str], misplaced: float = 0.2, **options: Any
) -> dict[str, int]:
    """What the run counted, in which no row was wrong. The share of rows that would be right in
    another place must be less than `misplaced`: random models repeat themselves."""
    counts = counts_of("tests.gpu.recorded", str(model), json.dumps(options), env=env, limit_s=1200)
    assert counts["wrong"] == counts["not recorded"] == 0
    if options.get("weights", True):
        assert (counts["wrong weights"], counts["weights"]) == (0, counts["rows"])
    assert counts["rows"] > 2000
    assert counts["right at the next position"] < misplaced * counts["rows"]
    assert counts["right in the next layer"] < misplaced * counts["rows"]
    # the more experts, the more share a score of 16 bits
    assert counts["ties in layers"] < 0.15 * counts["layers"]
    assert counts["roundings in layers"] == 0 or ON_GPU
    return counts


DICTATE_BLOCKS = ("mamba", "gated delta", "convolutions", "latent", "sparse", "chunked")
LITTLE_SPACE = {"block_size": 32, "num_gpu_blocks_override": 24}


def run_in_little_space(model: Path, env: Mapping[str, str], **options: Any) -> dict[str, int]:
    counts = run(model, env, **LITTLE_SPACE, **options)
    assert counts["hits"] > 500
    assert counts["recomputed"] > 50
    return counts


needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
MODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "eager": ({"enforce_eager": True}, {}),
    "graphs": ({}, {}),
    "graphs, V1 runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "graphs, n-gram drafts": ({"speculative_config": NGRAM}, {}),
    "graphs, FP8": ({"quantization": "fp8"}, {}),
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=needs_gpu if "graphs" in name else ()) for name in MODES]
)
def test_every_row_in_16_bits(mode: str, tiny_model: Path) -> None:
    options, env = MODES[mode]
    run_in_little_space(tiny_model, env, **options)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "is_eager",
    [
        pytest.param(True, id="eager", marks=pytest.mark.slow),
        pytest.param(False, id="graphs", marks=needs_gpu),
    ],
)
@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle"])
def test_drafts_of_a_model_in_16_bits(
    method: str, is_eager: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """A draft model and the layer for multi-token prediction have routers too, of which there must
    be no rows."""
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    env: Mapping[str, str] = {}
    if method == "draft_model":
        model = tiny_model
        make_draft_model(model, drafter)
    elif method == "mtp":
        env = make_mtp_model(model).env
    else:
        make_eagle_models(model, drafter)
    if method != "mtp":
        speculative["model"] = str(drafter)
    # With four letters to choose from, they repeat themselves more: 0.198 for multi-token
    # prediction on a CPU.
    counts = run(
        model, env, 0.3, **LITTLE_SPACE, speculative_config=speculative, enforce_eager=is_eager
    )
    assert counts["hits"] > 300
    assert counts["recomputed"] > 50
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]
    if not is_eager:
        assert counts["asynchronous"]
        assert counts["steps in full graphs"] > 10


@pytest.mark.e2e
@pytest.mark.skipif(not ON_GPU, reason="with LoRA, vLLM's MoE layers need Triton")
def test_adapters_in_16_bits(tiny_model: Path, tmp_path: Path) -> None:
    adapters = [tmp_path / "a", tmp_path / "b"]
    for seed, adapter in enumerate(adapters):
        write_adapter(AutoConfig.from_pretrained(tiny_model), adapter, seed=seed)
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    lora |= {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    counts = run(
        tiny_model,
        {},
        **LITTLE_SPACE,
        **lora,
        adapters=[str(adapter) for adapter in adapters],
        turns=3,
    )
    assert counts["hits"] > 500
    assert counts["recomputed"] > 0
    assert counts["swaps of adapters"] >= 3
    assert counts["unlike the base's"] > 0.3 * counts["prompts' rows of adapters"] > 0
    assert counts["asynchronous"]
    assert counts["steps in full graphs"] > 10


@pytest.mark.e2e
@needs_gpu
def test_experts_of_4_bits_in_16_bits(tmp_path: Path) -> None:
    make_mxfp4_model(tmp_path / "model")
    run_in_little_space(tmp_path / "model", {}, moe_backend="marlin")


@pytest.mark.e2e
@needs_gpu
def test_experts_of_4_bits_whose_kernel_routes_by_itself_are_refused(tmp_path: Path) -> None:
    """It is what vLLM chooses on Hopper, where it has it."""
    from vllm.utils.import_utils import has_triton_kernels  # takes seconds

    if not has_triton_kernels():
        pytest.skip("this build of vLLM has no triton_kernels")
    make_mxfp4_model(tmp_path / "model")
    with pytest.raises(
        AssertionError, match=r"OAITritonMxfp4ExpertsMonolithic .* routes by itself"
    ):
        run(tmp_path / "model", {}, **LITTLE_SPACE, moe_backend="triton")


def as_param(shape: Shape) -> Any:
    skipped = [pytest.mark.skip(reason=shape.needs_gpu)] if shape.needs_gpu and not ON_GPU else []
    return pytest.param(shape, id=shape.name, marks=[pytest.mark.slow, *skipped])


@pytest.mark.e2e
@pytest.mark.parametrize("shape", [as_param(shape) for shape in (*SHAPES, *SIXTEEN_BIT)])
def test_shapes_in_16_bits(shape: Shape, tmp_path: Path) -> None:
    make_model(shape, tmp_path / "model")
    if any(word in shape.name for word in DICTATE_BLOCKS):
        run(tmp_path / "model", shape.env, enable_prefix_caching=True, **shape.engine)
    else:
        run_in_little_space(tmp_path / "model", shape.env, **shape.engine)
