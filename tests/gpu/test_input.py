"""Routing as an input on a GPU: the kernel against plain torch, and engines in bfloat16 with CUDA
graphs.

Run by hand, as `tests/gpu/test_engines.py`. All engines start at once: they are small, and what
takes time is their start.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from routed_experts.capture.worker.router_input.formula import Routing, rewritten
from tests.capture.router_input import FAMILIES, LAYER, Sized, case_of
from tests.e2e.harness import ROOT
from tests.gpu.steered_engine import (
    LATENT,
    MODES,
    MODES_OF_TINY,
    OTHERS,
    RECOMPUTED,
    SHAPES,
    TINY,
)

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU")]

WEIGHTS_OFF = 1e-6
"""What two computations of a weight, divided by the router's scale, may differ by."""


@pytest.mark.parametrize("tokens_of_program", [1, 4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_the_kernel_does_what_the_formula_says(
    sized: Sized, dtype: torch.dtype, tokens_of_program: int | None
) -> None:
    from routed_experts.capture.worker.router_input import kernel

    case = case_of(sized, dtype, torch.device("cuda"), num_tokens=1500)
    expected = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    result = Routing(case.routing.weights.clone(), case.routing.ids.clone())
    kernel.rewrite(
        case.tables,
        LAYER,
        case.family,
        result,
        case.logits,
        tokens_of_program=tokens_of_program,
    )
    untold = ~case.is_told
    assert torch.equal(result.ids[untold], case.routing.ids[untold])
    assert torch.equal(result.weights[untold], case.routing.weights[untold])
    # Experts of equal scores, which in 16 bits are many, may be chosen in another order.
    off = (result.weights.sort(1).values - expected.weights.sort(1).values).abs().max()
    assert off <= WEIGHTS_OFF * case.family.scale
    if dtype == torch.float32:
        assert torch.equal(result.ids, expected.ids)


@pytest.mark.parametrize("sized", FAMILIES, ids=[sized.name for sized in FAMILIES])
def test_the_kernel_gives_no_weight_to_a_score_that_is_no_number(sized: Sized) -> None:
    """For tokens with rows, which leave no choice: among experts without a score, any may be taken."""
    from routed_experts.capture.worker.router_input import kernel

    case = case_of(sized, torch.float32, torch.device("cuda"))
    case.logits[:, ::3] = torch.nan
    expected = rewritten(case.tables, LAYER, case.family, case.routing, case.logits)
    result = Routing(case.routing.weights.clone(), case.routing.ids.clone())
    kernel.rewrite(case.tables, LAYER, case.family, result, case.logits)
    assert not result.weights[case.is_told].isnan().any()
    has_row = (case.tables.rows[: len(case.logits), LAYER] >= 0).all(dim=1)
    assert (has_row & case.is_told).any()
    off = (result.weights[has_row] - expected.weights[has_row]).abs().max()
    assert off <= WEIGHTS_OFF * case.family.scale


@dataclass
class Engine:
    """A program that runs, and writes its claims into a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def claims(self) -> dict[str, bool]:
        code = self.process.wait(480)
        text = self.log.read_text()
        assert code == 0, text[-3000:]
        assert "\nDONE\n" in text, text[-3000:]
        print(*[line for line in text.splitlines() if line.startswith(("ENGINE ", "RECOMPUTED "))])
        lines = [line for line in text.splitlines() if line.startswith("CLAIM ")]
        return dict(json.loads(line.removeprefix("CLAIM ")) for line in lines)


CASES = [(shape, "graphs") for shape in SHAPES]
CASES += [(next(iter(SHAPES)), mode) for mode in MODES if mode != "graphs"]
CASES += [(next(iter(SHAPES)), mode) for mode in RECOMPUTED]
CASES += [(LATENT, "graphs"), (TINY, "graphs")]
CASES += [(TINY, mode) for mode in MODES_OF_TINY]
CASES += [(shape, "graphs") for shape in OTHERS]
NEED_TWO = {"tensor parallel", "pipeline parallel", "expert load balancing", *list(RECOMPUTED)[1:]}


def can_run(case: tuple[str, str]) -> bool:
    return GPUS >= 2 or case[1] not in NEED_TWO


def as_param(case: tuple[str, str]) -> Any:
    marks = [pytest.mark.xdist_group("engines with an input")]
    if case[0] in OTHERS:
        marks.append(pytest.mark.slow)
    if not can_run(case):
        marks.append(pytest.mark.skip(reason="needs 2 GPUs"))
    return pytest.param(case, id=", ".join(case), marks=marks)


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Engine]]:
    """Those that the chosen tests need."""
    folder = tmp_path_factory.mktemp("engines")
    running = {}
    for number, case in enumerate(needed_cases(request.session)):
        if can_run(case):
            running[case] = started(case, number % GPUS, folder / f"{number}.log")
    try:
        yield running
    finally:
        for engine in running.values():
            engine.process.kill()
            engine.process.wait()


def needed_cases(session: pytest.Session) -> list[tuple[str, str]]:
    """Those of the chosen tests, in the order of `CASES`."""
    calls = [getattr(item, "callspec", None) for item in session.items]
    needed = {call.params.get("case") for call in calls if call}
    return [case for case in CASES if case in needed]


def started(case: tuple[str, str], gpu: int, log: Path) -> Engine:
    """The engine of a case, on a GPU of its own or on all."""
    shape, mode = case
    env = {**os.environ}
    if shape in OTHERS:
        env.update(OTHERS[shape].env)
    if mode not in NEED_TWO:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    command = [sys.executable, "-m", "tests.gpu.steered_engine", *case]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    return Engine(process, log)


@pytest.mark.parametrize("case", [as_param(case) for case in CASES])
def test_experts_are_what_requests_say(
    engines: dict[tuple[str, str], Engine], case: tuple[str, str]
) -> None:
    claims = engines[case].claims()
    assert len(claims) >= 1
    assert [name for name, holds in claims.items() if not holds] == []
