"""An engine in bfloat16 on a GPU whose requests say which experts they take: what it did, as JSON.

    python -m tests.gpu.steered_engine SHAPE MODE

Against the same requests that say nothing, and against the rows themselves: nothing else agrees
bit for bit in 16 bits. Prints a line for each claim, and whether it holds.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from vllm.lora.request import LoRARequest

from bench.shapes import GROUPED_256, QWEN3_30B_A3B
from routed_experts.capture.wire.rows import RECOMPUTE_KEY
from routed_experts.protocol.routing_input import RoutingInput
from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.e2e import shapes
from tests.e2e.harness import NGRAM
from tests.e2e.rows_of_kv import RowsOfKV
from tests.e2e.steered import INPUT, Answered, Program

Claims = dict[str, bool]

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "num_hidden_layers": 6,
    "eos_token_id": 0,
    "bos_token_id": 0,
}

SHAPES: dict[str, dict[str, Any]] = {
    "softmax, renormalised": {**QWEN3_30B_A3B, **SMALL, "num_experts": 64},
    "softmax": {
        **QWEN3_30B_A3B,
        **SMALL,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    "sigmoid in groups": {
        **GROUPED_256,
        **SMALL,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
    },
}

TINY = "tiny"

_FOLLOWED = {
    shape.name: shape
    for shape in (*shapes.SHAPES, *shapes.SIXTEEN_BIT)
    if shape.model_type not in shapes.OWN_FORMULA
}
LATENT = "latent attention"
OTHERS = {name: shape for name, shape in _FOLLOWED.items() if name != f"deepseek-v3, {LATENT}"}
"""What else can be told its experts, whether or not another shape here has the same router."""

WRITTEN: dict[str, Callable[[Path], object]] = {
    LATENT: partial(shapes.make_model, _FOLLOWED[f"deepseek-v3, {LATENT}"]),
    TINY: make_tiny_model,
    **{name: partial(shapes.make_model, shape) for name, shape in OTHERS.items()},
}
"""Models with a checkpoint. When one is loaded, vLLM computes other tensors from its weights, for
latent attention or in 8 bits, so that `initialise` would come too late."""

GRAPH_SIZES = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}}

MODES: dict[str, dict[str, Any]] = {
    "graphs": GRAPH_SIZES,
    "V1 runner": GRAPH_SIZES,
    "weights captured": GRAPH_SIZES,
    "eager": {"enforce_eager": True},
    "sleep": {"enforce_eager": True, "enable_sleep_mode": True},
    "preemption": {**GRAPH_SIZES, "num_gpu_blocks_override": 150},
    "drafts": {**GRAPH_SIZES, "speculative_config": NGRAM},
    "engine process": GRAPH_SIZES,
    "tensor parallel": {**GRAPH_SIZES, "tensor_parallel_size": 2},
    "pipeline parallel": {**GRAPH_SIZES, "pipeline_parallel_size": 2},
    "expert load balancing": {
        **GRAPH_SIZES,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"window_size": 8, "step_interval": 16, "num_redundant_experts": 2},
    },
}

_LITTLE_KV = {**GRAPH_SIZES, "num_gpu_blocks_override": 150, "enable_prefix_caching": False}

RECOMPUTED: dict[str, dict[str, Any]] = {
    "replay on recomputation": _LITTLE_KV,
    "replay on recomputation, tensor parallel": {**_LITTLE_KV, "tensor_parallel_size": 2},
    "replay on recomputation, pipeline parallel": {**_LITTLE_KV, "pipeline_parallel_size": 2},
}
"""Modes in which the KV of preempted requests is computed again under the rows that were sent."""

ROUTERS_CHOOSE = "recomputation"
"""The same without it: how many tokens then have other experts is printed, and no claim."""

LORA = {**GRAPH_SIZES, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}

MODES_OF_TINY: dict[str, dict[str, Any]] = {
    "FP8": {**GRAPH_SIZES, "quantization": "fp8"},
    "FP8, a scale for each token": {
        **GRAPH_SIZES,
        "quantization": "fp8_per_channel",
        "moe_backend": "triton",
    },
    # Of projections that take more than 64 numbers, as the one behind attention, vLLM's kernel adds
    # more than two parts of a sum in any order: no request repeats itself bit for bit.
    "LoRA on attention": {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj"]},
    "LoRA on experts": {**LORA, "lora_target_modules": ["experts"]},
}

ADAPTERS: dict[str, Callable[..., None]] = {
    "LoRA on attention": shapes.write_adapter,
    "LoRA on experts": shapes.write_adapter_of_experts,
}

SCALE_OF_STEP = "FP8"
"""The mode in which numbers of a token depend on others: all tokens of a step share the scale of
their activations, which is that of the greatest of them."""

IN_MOTION = ("preemption", "drafts", "engine process", *list(MODES)[-3:])
"""Modes in which requests come and go together; in the others, each claim has requests of its
own."""


_EVERY_MODE = MODES | MODES_OF_TINY | RECOMPUTED | {ROUTERS_CHOOSE: _LITTLE_KV}


def engine(shape: str, mode: str, folder: Path) -> Program:
    from vllm import LLM

    model = folder / "model"
    if shape in WRITTEN:
        WRITTEN[shape](model)
    else:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    additional = dict(INPUT)
    if mode == "weights captured":
        additional["enable_return_routed_expert_weights"] = True
    if mode in RECOMPUTED:
        additional[RECOMPUTE_KEY] = True
    options: dict[str, Any] = {}
    if shape in OTHERS:  # of which some dictate their blocks, or have no prefix cache
        options = {"enable_prefix_caching": False, **OTHERS[shape].engine}
    llm = LLM(
        str(model),
        load_format="auto" if shape in WRITTEN else "dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.05,
        enable_return_routed_experts=True,
        disable_log_stats=False,
        additional_config=additional,
        **_EVERY_MODE[mode],
        **options,
    )
    if shape not in WRITTEN:
        llm.apply_model(initialise)
    running = Program(llm)
    if mode in ADAPTERS:
        ADAPTERS[mode](AutoConfig.from_pretrained(model), folder / "adapter", seed=0)
        running.adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
    return running


def initialise(model: torch.nn.Module) -> None:
    """Weights with which experts and tokens differ."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1)
        elif "correction_bias" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
        elif parameter.dim() < 2:
            parameter.data.zero_()
        else:
            spread = 2.0 if ".gate." in name else 3.0 if "lm_head" in name else 1.0
            width = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.data.normal_(0, spread * width, generator=generator)


def prompt(running: Program, length: int, seed: int) -> list[int]:
    last = running.vocab_size - 1
    return np.random.default_rng(1000 + seed).integers(1, last, length).tolist()


def steering(running: Program) -> RoutingInput:
    """Expert 0 is never chosen, two others always in one layer each."""
    bias = running.zero_bias()
    bias[:, 0] = -np.inf
    bias[0, 2] = np.inf
    bias[-1, 3] = np.inf
    return RoutingInput(bias=bias)


def is_steered(rows: np.ndarray) -> bool:
    never = not (rows == 0).any()
    always = (rows[:, 0] == 2).any(axis=1).all() and (rows[:, -1] == 3).any(axis=1).all()
    return bool(never and always)


def claims_of_prompt(
    running: Program, length: int, *, has_scale_of_step: bool = False
) -> Iterator[tuple[str, bool]]:
    tokens = prompt(running, length, seed=1)
    new = 64

    def run(said: RoutingInput | None = None) -> Answered:
        return running.one(tokens, said, max_tokens=new)

    natural = run()
    rows = natural.rows[:length]
    yield "the same request twice, bit for bit", run().is_same(natural)
    yield "own rows, bit for bit", run(RoutingInput(rows=rows)).is_same(natural)
    zero = RoutingInput(bias=running.zero_bias())
    yield "a bias of zeros, bit for bit", run(zero).is_same(natural)

    random_rows = running.random_rows(length)
    forced = run(RoutingInput(rows=random_rows))
    yield "random rows are captured as given", np.array_equal(forced.rows[:length], random_rows)
    moved = np.abs(forced.prompt_logprobs - natural.prompt_logprobs).mean()
    yield "random rows move log-probabilities", bool(moved > 0.1)

    partly = random_rows.copy()
    partly[::3] = -1
    partly[:, 0] = -1
    captured = run(RoutingInput(rows=partly)).rows[:length]
    is_given = partly >= 0
    yield (
        "rows beside -1 are captured as given",
        np.array_equal(captured[is_given], partly[is_given]),
    )
    yield "layers before a given one are natural", np.array_equal(captured[:, 0], rows[:, 0])
    late = run(RoutingInput(rows=random_rows[50:120], start=50)).rows[:length]
    yield "rows of positions are captured there", np.array_equal(late[50:120], random_rows[50:120])
    if not has_scale_of_step:
        yield "positions before are natural", np.array_equal(late[:50], rows[:50])

    steered = run(steering(running))
    yield "the natural request takes what is banned", bool((natural.rows == 0).any())
    yield "bans and activations hold in prompt and answer", is_steered(steered.rows)

    last = running.zero_bias()
    last[-1] = np.random.default_rng(0).standard_normal(running.num_experts)
    biased = run(RoutingInput(bias=last)).rows[:length]
    yield "layers without a bias are natural", np.array_equal(biased[:, :-1], rows[:, :-1])
    yield "the layer with one is not", not np.array_equal(biased[:, -1], rows[:, -1])


def claims_of_neighbours(
    running: Program, *, has_scale_of_step: bool = False
) -> Iterator[tuple[str, bool]]:
    """With a scale of the step, neighbours are off by no more than beside another text."""
    prompts = [prompt(running, length, seed=length) for length in (90, 120, 33)]
    quiet = running.run(prompts, max_tokens=64)
    beside_another = running.run(
        [prompts[0], prompt(running, 120, seed=4), prompts[2]], max_tokens=64
    )
    for name, said in (
        ("a forced one", RoutingInput(rows=running.random_rows(120))),
        ("a steered one", steering(running)),
    ):
        loud = running.run(prompts, [None, said, None], max_tokens=64)
        yield f"{name} is not as before", not loud[1].is_same(quiet[1])
        if has_scale_of_step:
            bound = 3 * off_beside(beside_another, quiet)
            yield f"neighbours of {name}, within bounds", off_beside(loud, quiet) <= bound
        else:
            is_same = loud[0].is_same(quiet[0]) and loud[2].is_same(quiet[2])
            yield f"neighbours of {name}, bit for bit", is_same
    after = running.run(prompts, max_tokens=64)
    if has_scale_of_step:  # of the padding of graphs, too, in steps that generate
        yield "all prompts are natural afterwards", off_beside(after, quiet) == 0
    else:
        yield "all are natural afterwards", all(map(Answered.is_same, after, quiet))


def off_beside(answers: list[Answered], others: list[Answered]) -> float:
    """By how much the log-probabilities of the first and third prompt differ, on average."""
    differences = [
        np.abs(answers[index].prompt_logprobs - others[index].prompt_logprobs) for index in (0, 2)
    ]
    return float(np.concatenate(differences).mean())


def claims_of_prefix_cache(running: Program) -> Iterator[tuple[str, bool]]:
    tokens = prompt(running, 256, seed=21)
    rows = running.random_rows(256)
    said = RoutingInput(rows=rows)
    other = RoutingInput(rows=rows[::-1])
    answers = [
        running.one(tokens, routing_input, max_tokens=8, with_prompt_logprobs=False)
        for routing_input in (said, None, None, said, other)
    ]
    is_hit = [answer.num_cached > 0 for answer in answers]
    yield "equal inputs alone hit the prefix cache", is_hit == [False, False, True, True, False]
    yield "a hit returns the rows given", np.array_equal(answers[3].rows[:256], rows)


def claims_in_motion(running: Program, repeats_itself: bool) -> Iterator[tuple[str, bool]]:
    """Many requests at once."""
    prompts, said = in_motion(running, repeats_itself)
    answers = running.run(prompts, said, max_tokens=48, with_prompt_logprobs=False)
    yield from claims_of_answers(prompts, said, answers)


def in_motion(
    running: Program, repeats_itself: bool = False
) -> tuple[list[list[int]], list[RoutingInput | None]]:
    """Prompts, and what their requests say: a third natural, a third forced, a third steered."""
    lengths = np.random.default_rng(3).integers(30, 700, 40).tolist()
    prompts = [prompt(running, length, seed=500 + index) for index, length in enumerate(lengths)]
    if repeats_itself:  # for drafts to find
        prompts = [
            list(range(40 + index % 7, 60)) * (length // 10) for index, length in enumerate(lengths)
        ]
        prompts = [
            tokens_of_prompt[:length]
            for tokens_of_prompt, length in zip(prompts, lengths, strict=True)
        ]
    said: list[RoutingInput | None] = []
    for index, tokens in enumerate(prompts):
        forced = RoutingInput(rows=running.random_rows(len(tokens), seed=index))
        said.append((None, forced, steering(running))[index % 3])
    return prompts, said


def claims_of_answers(
    prompts: list[list[int]], said: list[RoutingInput | None], answers: list[Answered]
) -> Iterator[tuple[str, bool]]:
    yield (
        "forced rows are captured as given",
        all(
            np.array_equal(answer.rows[: len(tokens)], tokens_of_prompt.rows)
            for answer, tokens, tokens_of_prompt in zip(
                answers[1::3], prompts[1::3], said[1::3], strict=True
            )
            if tokens_of_prompt is not None
        ),
    )
    yield "bans and activations hold", all(is_steered(answer.rows) for answer in answers[2::3])


def claims_of_recomputation(running: Program, mode: str) -> Iterator[tuple[str, bool]]:
    kv = RowsOfKV(running)
    prompts, said = in_motion(running)
    answers = running.run(prompts, said, max_tokens=48, with_prompt_logprobs=False)
    num_changed = kv.num_changed(answers)
    print(
        f"RECOMPUTED {provoked(running, 'preemption')} preemptions, {kv.num_again} tokens computed "
        f"again, {kv.num_given} of them given their experts, {num_changed} of other experts"
    )
    yield "there was preemption", provoked(running, "preemption") > 0
    yield from claims_of_answers(prompts, said, answers)
    if mode == ROUTERS_CHOOSE:
        return
    yield "tokens are given the experts that they had", kv.num_given > 100
    yield "KV is of the experts that were sent", num_changed == 0


def claims_of_graphs(running: Program) -> Iterator[tuple[str, bool]]:
    """Steps that a graph replays run no Python of a router."""
    from routed_experts.capture.worker.router_input.rewriting import Rewriter

    calls = 0
    call: Callable[..., None] = Rewriter.__call__

    def counted(self: Rewriter, *args: Any) -> None:
        nonlocal calls
        calls += 1
        call(self, *args)

    Rewriter.__call__ = counted  # type: ignore[method-assign]
    try:
        running.one(prompt(running, 200, seed=2), steering(running), max_tokens=64)
    finally:
        Rewriter.__call__ = call  # type: ignore[method-assign]
    yield "graphs rewrite 63 steps without Python", calls <= running.num_layers


def claims_of_sleep(running: Program) -> Iterator[tuple[str, bool]]:
    tokens = prompt(running, 200, seed=1)
    said = [RoutingInput(rows=running.random_rows(200)), steering(running), None]
    before = running.run([tokens] * 3, said, max_tokens=32)
    running.llm.sleep(level=1)
    running.llm.wake_up()
    after = running.run([tokens] * 3, said, max_tokens=32)
    yield "as before after sleep", all(map(Answered.is_same, before, after))
    yield from claims_of_prompt(running, 200)
    yield from claims_of_neighbours(running)


def claims_of_adapter(running: Program) -> Iterator[tuple[str, bool]]:
    tokens = prompt(running, 256, seed=22)
    said = RoutingInput(rows=running.random_rows(256))
    adapted = running.one(tokens)
    running.one(tokens, said, with_prompt_logprobs=False)
    adapter = running.adapter
    running.adapter = None
    natural = running.one(tokens)
    forced = running.one(tokens, said, with_prompt_logprobs=False)
    running.adapter = adapter
    yield "an adapter changes experts", not np.array_equal(adapted.rows, natural.rows)
    yield "equal inputs hit no cache of another adapter", forced.num_cached == 0


def claims_of_motion(running: Program, mode: str) -> Iterator[tuple[str, bool]]:
    for turn in ("first", "again"):
        for name, holds in claims_in_motion(running, repeats_itself=mode == "drafts"):
            yield f"{turn}: {name}", holds
    if mode in ("preemption", "drafts"):
        yield f"there was {mode}", provoked(running, mode) > 0
    if mode == "drafts":  # by which the sizes of a step, and so bits of neighbours, differ
        yield from claims_of_prompt(running, 200)


def claims(running: Program, mode: str) -> Iterator[tuple[str, bool]]:
    if mode in IN_MOTION:
        yield from claims_of_motion(running, mode)
        return
    if mode in RECOMPUTED or mode == ROUTERS_CHOOSE:
        yield from claims_of_recomputation(running, mode)
        return
    if mode == "sleep":
        yield from claims_of_sleep(running)
        return
    if mode in ADAPTERS:
        yield from claims_of_adapter(running)
    has_scale_of_step = mode == SCALE_OF_STEP
    for length in (200, 1500):
        for name, holds in claims_of_prompt(running, length, has_scale_of_step=has_scale_of_step):
            yield f"{length} tokens: {name}", holds
    yield from claims_of_neighbours(running, has_scale_of_step=has_scale_of_step)
    if running.has_prefix_cache:
        yield from claims_of_prefix_cache(running)
    yield from claims_in_motion(running, repeats_itself=False)
    if mode == "graphs":
        yield from claims_of_graphs(running)


def provoked(running: Program, mode: str) -> int:
    name = {
        "preemption": "vllm:num_preemptions",
        "drafts": "vllm:spec_decode_num_accepted_tokens",
    }[mode]
    return sum(metric.value for metric in running.llm.get_metrics() if metric.name == name)


def main(shape: str, mode: str) -> None:
    has_process = mode in IN_MOTION[2:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(has_process))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `initialise`
    if mode == "V1 runner":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        running = engine(shape, mode, Path(folder))
        config = running.llm.llm_engine.vllm_config
        print(
            f"ENGINE runner {running.info['runner']}, {config.compilation_config.cudagraph_mode}, "
            f"asynchronous {config.scheduler_config.async_scheduling}, "
            f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
        )
        for name, holds in claims(running, mode):
            print(f"CLAIM {json.dumps([name, bool(holds)])}", flush=True)
        print("DONE", flush=True)
        running.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    # As the module that workers import: `initialise`, which is sent to them, is found there.
    from tests.gpu import steered_engine

    steered_engine.main(*sys.argv[1:])
