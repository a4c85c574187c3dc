"""`routed-experts compare` on answers whose rows are the oracle's, on rows that are not, and on a
running server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.routing import Routing
from routed_experts.server.cli.main import main
from routed_experts.server.tools import running
from routed_experts.server.tools.reference import Reference, score_gaps
from tests import programs
from tests.e2e.harness import OURS, Oracle, Server, prompt_of
from tests.e2e.shapes import SHAPES, HookOracle, Shape, make_model
from tests.protocol.forms import encode

P, G, L, K = 20, 7, 5, 4
TOKENS = prompt_of(P + G, seed=11)


def rows_of(oracle: Oracle, tokens: list[int]) -> np.ndarray:
    """Rows [tokens, L, K] in the order in which a router has them, best first."""
    return np.argsort(-oracle.logits(tokens), axis=2)[:, :, : oracle.top_k].astype(np.int16)


def answer_of(rows: np.ndarray, start: int = 0, **form: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "length",
        "prompt_token_ids": TOKENS[:P],
        "token_ids": TOKENS[P:],
        "routed_experts": encode(rows[P : P + G - 1], start=P, **form),
    }
    return {
        "prompt_routed_experts": encode(rows[start:P], start=start, **form),
        "choices": [choice],
    }


@pytest.fixture
def rows(oracle: Oracle) -> np.ndarray:
    return rows_of(oracle, TOKENS)


class Run:
    """The command on a file of answers: its exit status and its findings."""

    def __init__(self, model: Path, folder: Path, answers: tuple[Any, ...], flags: str) -> None:
        file, out = folder / "answers.jsonl", folder / "findings.json"
        file.write_text("\n\n".join(json.dumps(answer) for answer in answers))
        self.status = main(
            ["compare", str(model), "--answers", str(file), "--json", str(out), *flags.split()]
        )
        self.findings: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        self.total = self.findings.get("total", {})


Compare = Callable[..., Run]


@pytest.fixture
def compared(tiny_model: Path, tmp_path: Path) -> Compare:
    return lambda *answers, flags="": Run(tiny_model, tmp_path, answers, flags)


def test_the_same_experts(
    compared: Compare, rows: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    # the checkpoint says where MoE layers are
    every = np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)
    answers = (
        answer_of(rows),
        answer_of(rows, start=13),
        answer_of(every),
        {
            **answer_of(rows, fmt="raw", dtype="int32"),
            "routed_experts_info": {"rows_dtype": "int32"},
        },
    )
    run = compared(*answers)
    assert run.status == 0
    count = 3 * (P + G - 1) + (P + G - 1 - 13)
    assert (run.total["rows"], run.total["equal_rows"], run.total["differing_slots"]) == (
        L * count,
        L * count,
        0,
    )
    layers = [(layer["layer_id"], layer["rows"]) for layer in run.findings["layers"]]
    assert layers == [(at, count) for at in range(1, 6)]
    assert (run.findings["answers"], run.findings["missing_rows"], run.findings["dtype"]) == (
        4,
        0,
        "float32",
    )
    out, err = capsys.readouterr()
    assert "decoder layer" in out.splitlines()[0]
    assert "4 responses; 0 unknown rows" in out
    assert err == "", "a progress bar where there is no terminal"


def test_other_experts_are_found_with_their_gaps(
    compared: Compare, rows: np.ndarray, oracle: Oracle
) -> None:
    scores = oracle.logits(TOKENS)
    order = np.argsort(-scores, axis=2)
    rows[3, 2, 3] = order[3, 2, 4]
    rows[9, 4, 1:3] = order[9, 4, 14:]
    run = compared(answer_of(rows))
    assert run.status == 1
    expected = {
        2: (1, scores[3, 2, order[3, 2, 3]] - scores[3, 2, order[3, 2, 4]], scores[3, 2].std())
    }
    expected[4] = (
        2,
        scores[9, 4, order[9, 4, 1]] - scores[9, 4, order[9, 4, 15]],
        scores[9, 4].std(),
    )
    for layer in run.findings["layers"]:
        if layer["layer"] not in expected:
            assert layer["equal_rows"] == layer["rows"]
            continue
        slots, gap, deviation = expected[layer["layer"]]
        assert (layer["differing_slots"], layer["equal_rows"]) == (slots, layer["rows"] - 1)
        assert (layer["near_ties"], layer["other_rows"]) == (0, 1)
        assert layer["gap_max"] == pytest.approx(gap / deviation, rel=1e-4)
    assert (run.total["differing_slots"], run.total["other_rows"]) == (3, 2)

    near = max(gap / deviation for _, gap, deviation in expected.values()) * 1.01
    run = compared(answer_of(rows), flags=f"--near-tie {near}")
    assert (run.status, run.total["near_ties"]) == (0, 2)


def test_what_makes_no_difference(
    compared: Compare, rows: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of experts, and rows that are not known; a coarser precision makes little."""
    rows[4:7] = -1
    run = compared(answer_of(np.flip(rows, axis=2)), flags="--json -")
    assert (run.status, run.findings) == (0, {})
    findings = json.loads(capsys.readouterr().out)
    assert (findings["missing_rows"], findings["total"]["differing_slots"]) == (3, 0)
    assert findings["total"]["rows"] == L * (P + G - 1 - 3)
    run = compared(answer_of(rows), flags="--dtype bfloat16")
    assert run.findings["near_tie"] == pytest.approx(2**-3.5)
    assert run.total["rows"] == L * (P + G - 1 - 3)
    assert run.total["equal_rows"] > 0.8 * run.total["rows"], (
        "rounding decides few rows of this model"
    )


def test_answers_that_cannot_be_compared(
    compared: Compare, rows: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, without_ids = answer_of(rows), answer_of(rows)
    del without_ids["choices"][0]["token_ids"]
    unknown = "Nothing to compare: all 26 rows of 1 responses are unknown"
    for *answers, message in [
        (without_ids, "no token ids: set return_token_ids"),
        (answer_of(rows[:, :4]), "rows of 4 layers, but the model has 5"),
        (answer_of(rows[..., :3]), "rows of 3 experts, but the model has 4"),
        (answer_of(np.where(rows == 3, 99, rows)), "an id is 99, but the model has 16 experts"),
        ({"layer_ids": [0, 1, 2, 3, 4]}, whole, "line 3: its MoE layers are decoder layers [0, 1"),
        (answer_of(np.full_like(rows, -1)), unknown),
        ({"error": {"message": "no"}}, "line 1: the server answered with an error: no"),
        (whole, {"choices": []}, "line 3: the answer has no choices"),
    ]:
        assert compared(*answers).status == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "findings.json").exists()


def test_addresses_as_people_write_them() -> None:
    for url in (
        "host:8000",
        "http://host:8000",
        "http://host:8000/",
        "http://host:8000/v1/",
        "host:8000/v1",
    ):
        assert running.base_of(url) == "http://host:8000"


def shape_named(name: str) -> Shape:
    return next(shape for shape in SHAPES if shape.name.startswith(name))


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3, plain", "gpt-oss", "lfm2"])
def test_routers_of_other_models(name: str, tmp_path: Path) -> None:
    shape, tokens = shape_named(name), prompt_of(30, seed=2)
    make_model(shape, tmp_path)
    reference = Reference(str(tmp_path), "float32", "cpu")
    assert (tuple(reference.layer_ids), reference.top_k) == (shape.layer_ids, shape.top_k)
    assert reference.num_experts == shape.num_experts
    theirs, _ = reference.run(response_without_rows(reference, tokens))
    expected = HookOracle(tmp_path, shape).rows(tokens[:-1])
    assert np.array_equal(np.sort(theirs, axis=2), expected)


def response_without_rows(reference: Reference, tokens: list[int]) -> Routing:
    shape = (0, len(reference.layer_ids), reference.top_k)
    ids = tuple(tokens)
    return Routing(np.empty(shape, np.int16), prompt_token_ids=ids[:-1], token_ids=ids[-1:])


def test_a_model_whose_routers_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(shape_named("llama4"), tmp_path)
    (tmp_path / "answers.jsonl").write_text("{}\n")
    assert main(["compare", str(tmp_path), "--answers", str(tmp_path / "answers.jsonl")]) == 2
    assert "its routers in transformers do not return" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_running_server(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Which experts?\n\nAnd why?\n")
    command = ["-m", OURS, "compare", str(server.model), "--url", server.url]
    command += ["--prompts", str(prompts), "--max-tokens", "10", "--json", "-"]
    done = programs.run(command, check=True)
    findings = json.loads(done.stdout)
    assert (findings["answers"], findings["missing_rows"]) == (2, 0)
    assert findings["total"]["other_rows"] == 0
    assert findings["total"]["rows"] >= 5 * (14 + 8 + 2 * 2)


def test_a_gap_is_between_the_experts_that_one_side_chose_alone() -> None:
    """Whatever their places in the rows: here 3 and 0, beside 4."""
    scores = np.array([[0.0, 1.0, 2.0, 3.0, 10.0]])
    (gap,) = score_gaps(np.array([[4, 0]]), np.array([[3, 4]]), scores)
    assert gap == pytest.approx(3 / scores.std())
    assert np.isnan(score_gaps(np.array([[4, 3]]), np.array([[3, 4]]), scores)).all()
