"""The programs that build engines of their own: `examples/engine_*.py`, run as they are, against
the oracle."""

import importlib.util
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import FULL_PRECISION, ON_GPU, OPTIONS, ROOT, Oracle, run_program

pytestmark = pytest.mark.e2e

PROGRAMS = sorted((ROOT / "examples").glob("engine_*.py"))
# Engines with processes first: those without leave threads behind, which a process that is forked
# then waits for.
TOGETHER = ["engine_llm", "engine_async", "engine_workers"]
DECODER_LAYERS, MOE_LAYERS = 6, [1, 2, 3, 4, 5]
Answers = dict[str, list[tuple[list[int], np.ndarray]]]


def run(
    model: Path, out: Path, *names: str, launcher: tuple[str, ...] = (), **env: str
) -> list[Answers]:
    """The answers of the programs `names`, from each process that ran them."""
    programs = [str(ROOT / "examples" / f"{name}.py") for name in names]
    arguments = (str(out), str(model), json.dumps(OPTIONS), *programs)
    run_program(*launcher, "tests.e2e.examples", *arguments, env={**FULL_PRECISION, **env})
    return [pickle.loads(path.read_bytes()) for path in sorted(out.parent.glob(f"{out.name}.*"))]


def check(tokens: list[int], rows: np.ndarray, oracle: Oracle) -> None:
    """`rows` are those of the tokens before the last, laid out as vLLM's own capture does, in
    uint8."""
    assert rows.dtype == np.uint8
    assert rows.shape[1:] == (DECODER_LAYERS, oracle.top_k)
    assert rows.flags.writeable
    assert oracle.wrong(rows[:, MOE_LAYERS], tokens[:-1], len(tokens) - 1 - len(rows)) == []
    assert not np.delete(rows, MOE_LAYERS, axis=1).any()


@pytest.fixture(scope="module")
def together(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    (answers,) = run(tiny_model, tmp_path_factory.mktemp("examples") / "out", *TOGETHER)
    return answers


@pytest.mark.parametrize(
    ("name", "count"), [("engine_llm", 9), ("engine_async", 4), ("engine_workers", 2)]
)
def test_programs_in_one_process(together: Answers, oracle: Oracle, name: str, count: int) -> None:
    assert len(together[name]) == count
    for tokens, rows in together[name]:
        check(tokens, rows, oracle)
    if name == "engine_llm":  # the last turn asked for what the turn before had not
        (first, before), (second, rows) = together[name][0], together[name][-1]
        assert second[: len(first)] == first
        assert len(before) + len(rows) == len(second) - 1
    else:
        assert all(len(rows) == len(tokens) - 1 for tokens, rows in together[name])


@pytest.mark.release
def test_torchrun(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    env = {} if ON_GPU else {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    ranks = run(tiny_model, tmp_path / "out", "engine_torchrun", launcher=launcher, **env)
    assert len(ranks) == 2
    for one, other in zip(*(rank["engine_torchrun"] for rank in ranks), strict=True):
        assert one[0] == other[0]
        assert np.array_equal(one[1], other[1])
        check(*one, oracle)


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    (answers,) = run(tiny_model, tmp_path / "out", "engine_ray", RAY_USAGE_STATS_ENABLED="0")
    assert len(answers["engine_ray"]) == 4
    for tokens, rows in answers["engine_ray"]:
        check(tokens, rows, oracle)


def test_every_program_is_run() -> None:
    assert [path.stem for path in PROGRAMS] == sorted([*TOGETHER, "engine_torchrun", "engine_ray"])
