"""The V2 runner on CUDA in the configurations that change how steps run: each server against the
oracle.

Run by hand on a machine with GPUs (with `-n 8 --dist loadgroup` where pytest-xdist is installed).
`tests/gpu_runs.py` says how; it keeps the results in `docs/gpu-runs.json`.
"""

import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.capture.wire.rows import WEIGHTS_FLAG
from tests.e2e.harness import (
    ASK,
    DRAFTS,
    NGRAM,
    SERVER_FLAGS,
    Oracle,
    Server,
    answer_of,
    at_once,
    check,
    check_weights,
    free_port,
    prompt_of,
    rows_of,
    same,
    serving,
    with_weights_as_rows,
)

GPUS = torch.cuda.device_count()
WEIGHTS = {"return_routed_expert_weights": True}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU")]


@dataclass(frozen=True)
class Engine:
    """An engine configuration, a counter of vLLM's that must have moved afterwards, and a pattern
    of its log."""

    name: str
    flags: tuple[str, ...]
    gpus: int = 1
    runner: str | None = None  # vLLM's default otherwise
    provokes: str | None = None
    log_says: str | None = None


BALANCED = ("-tp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config")
BALANCED += (
    '{"window_size": 8, "step_interval": 16, "num_redundant_experts": 2, "log_balancedness": true}',
)
ON_HOST, ON_DEVICE = (
    ("--speculative-config", json.dumps({**NGRAM, "method": how})) for how in ("ngram", "ngram_gpu")
)

ENGINES = [
    Engine("full graphs", (), log_says=r"Capturing CUDA graphs \(.*\bFULL\)"),
    Engine(
        "piecewise graphs",
        ("-cc.cudagraph_mode=PIECEWISE",),
        log_says=r"Capturing CUDA graphs \(.*\bPIECEWISE\)",
    ),
    Engine("eager", ("--enforce-eager",)),
    Engine("synchronous scheduling", ("--no-async-scheduling",)),
    Engine("V1 runner", (), runner="v1"),
    Engine("V2 runner", (), runner="v2"),
    Engine("n-gram drafts", ON_HOST, provokes=DRAFTS[0]),
    Engine("n-gram drafts on the GPU, asynchronous", ON_DEVICE, provokes=DRAFTS[0]),
    Engine(
        "preemption", ("--num-gpu-blocks-override", "20"), provokes="vllm:num_preemptions_total"
    ),
    Engine("no prefix caching", ("--no-enable-prefix-caching",)),
    Engine("tensor parallel 2", ("-tp", "2"), gpus=2),
    Engine("tensor and expert parallel 2", ("-tp", "2", "--enable-expert-parallel"), gpus=2),
    Engine("pipeline parallel 2", ("-pp", "2"), gpus=2),
    Engine(
        "pipeline parallel 2, eager, synchronous",
        ("-pp", "2", "--enforce-eager", "--no-async-scheduling"),
        gpus=2,
    ),
    Engine("data parallel 2", ("-dp", "2"), gpus=2),
    Engine("data and expert parallel 2", ("-dp", "2", "--enable-expert-parallel"), gpus=2),
    Engine("expert load balancing", BALANCED, gpus=2, log_says="Rearranging experts"),
]


WEIGHING = {
    "full graphs",
    "piecewise graphs",
    "V1 runner",
    "n-gram drafts on the GPU, asynchronous",
    "preemption",
}
WEIGHING |= {
    "tensor parallel 2",
    "tensor and expert parallel 2",
    "pipeline parallel 2",
    "data parallel 2",
}
WEIGHING |= {"data and expert parallel 2", "expert load balancing"}
ROWS_ALONE = {"V1 runner"}
"""Of them, those that are also tested on a server that captures no weights; "V2 runner" is that of
full graphs."""


@dataclass(frozen=True)
class Exact:
    """A server of which every row was exact, and how many weights were."""

    runner: str
    rows: int
    weights: int


def of(engine: Engine, weighs: bool) -> Any:
    """Tests of the same server are for one process, under `--dist loadgroup`."""
    return pytest.param(
        (engine, weighs), id=engine.name, marks=pytest.mark.xdist_group(f"{engine.name} {weighs}")
    )


@pytest.fixture(scope="session")
def exact(
    request: pytest.FixtureRequest, tiny_model: Path, oracle: Oracle, tmp_path_factory: Any
) -> Exact:
    """What a server came to; one that captures weights serves the tests of rows and of weights."""
    engine, weighs = request.param
    if engine.gpus > GPUS:
        pytest.skip(f"needs {engine.gpus} GPUs")
    flags = (*engine.flags, WEIGHTS_FLAG) if weighs else engine.flags
    return run(
        replace(engine, flags=flags), tiny_model, oracle, tmp_path_factory.mktemp("engine") / "log"
    )


@pytest.mark.parametrize(
    "exact", [of(engine, engine.name in WEIGHING - ROWS_ALONE) for engine in ENGINES], indirect=True
)
def test_every_row_is_exact(exact: Exact) -> None:
    assert exact.rows > 5000


@pytest.mark.parametrize(
    "exact", [of(engine, True) for engine in ENGINES if engine.name in WEIGHING], indirect=True
)
def test_every_weight_is_exact(exact: Exact) -> None:
    assert exact.weights > 2000


def run(engine: Engine, model: Path, oracle: Oracle, log: Path) -> Exact:
    flags = (*SERVER_FLAGS, *engine.flags)
    if "-dp" in flags:  # its default is one port for the whole machine
        flags += ("--data-parallel-rpc-port", str(free_port()))
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(int(engine.runner == "v2"))} if engine.runner else {}
    with serving(model, log, *flags, env=env) as server:
        repetitive = [40, 41, 42, 43] * 12  # for drafts to find
        for length in (1, 31, 32, 64, 65, 150):
            one(server, oracle, prompt=prompt_of(length, length), max_tokens=9)
        one(server, oracle, prompt=repetitive, max_tokens=40)
        rows, weights = load(server, oracle, requests=96)
        if engine.provokes:
            assert server.metric(engine.provokes) > 0
        capture = server.info()["capture"]
        print(f"{engine.name}: runner {capture['runner']}, {rows} rows exact")
        if engine.runner:
            assert capture["runner"] == engine.runner
    if engine.log_says:
        assert re.search(engine.log_says, log.read_text())
    return Exact(capture["runner"], rows, weights)


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs")
def test_sequence_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    engine = Engine(
        "sequence-parallel MoE", ("-tp", "2", "-dp", "2", "--enable-expert-parallel"), gpus=4
    )
    run(engine, tiny_model, oracle, tmp_path / "log")


def one(server: Server, oracle: Oracle, **body: Any) -> None:
    """Streamed and not: bit-equal where the engine's numbers are, and exact by the oracle."""
    body |= {**ASK, "ignore_eos": True}
    unstreamed, streamed = answer_of(server.complete(**body)), answer_of(server.stream(**body))
    check(unstreamed, oracle)
    check(streamed, oracle)
    for answer in (unstreamed, streamed):
        # The order within a row may differ between batch shapes where two experts score alike; the
        # sets are checked.
        answer.prompt_rows, answer.rows = (
            np.sort(answer.prompt_rows, axis=2),
            np.sort(answer.rows, axis=2),
        )
    same(unstreamed, streamed)


def load(server: Server, oracle: Oracle, requests: int) -> tuple[int, int]:
    """Concurrent requests with shared prefixes, with and without the opt-in; returns how many rows
    were checked, and of how many the weights.

    Some ask for weights, where the server has any.
    """
    bodies, rows, weights, weighs = [], 0, 0, server.info()["weights"]
    for index in range(requests):
        rng = random.Random(index)
        prompt = [
            *prompt_of(96, 99)[: rng.randrange(97)],
            *prompt_of(rng.randrange(1, 90), 1000 + index),
        ]
        body = {
            "prompt": prompt,
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0, 1]),
        }
        bodies.append(
            {**body, "stream": index % 2 == 0, "ignore_eos": True, **(ASK if index % 5 else {})}
        )
        bodies[-1] |= WEIGHTS if weighs and index % 5 in (1, 2) else {}
    for index, got in enumerate(at_once(server, bodies)):
        if index % 5:
            answer = answer_of(got)
            check(answer, oracle)
            rows += len(answer.prompt_rows) + len(answer.rows)
            if "return_routed_expert_weights" in bodies[index]:
                beside = (
                    [with_weights_as_rows(routing) for routing in got]
                    if isinstance(got, list)
                    else with_weights_as_rows(got)
                )
                tokens = [*answer.prompt, *answer.tokens[:-1]]
                check_weights(rows_of(answer_of(beside)), rows_of(answer), tokens, oracle)
                if server.info()["sorted_by_weight"]:
                    assert (np.diff(rows_of(answer_of(beside)), axis=-1) <= 0).all()
                weights += len(rows_of(answer))
        else:
            assert "routed_experts" not in json.dumps(got)
    return rows, weights
