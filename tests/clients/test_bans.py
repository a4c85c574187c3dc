"""The notebook `examples/bans.ipynb`, run as it is: its effects are those that transformers computes,
its stored outputs are those of the run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.contract.served import serving_quickly
from tests.e2e.harness import ROOT, SERVER_FLAGS, Server
from tests.e2e.steered import Reference
from tests.notebook import Cell, Ran, outputs_of, read, run_against

pytestmark = pytest.mark.release

_, CELLS = read(ROOT / "examples/bans.ipynb")
L, E = 5, 16
"""Layers and experts of the tiny model."""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, "--enable-routed-experts-input")
    with serving_quickly(tiny_model, tmp_path_factory.mktemp("bans") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def ran(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_against(server.url, CELLS, tmp_path_factory.mktemp("figures"))


@pytest.fixture
def study(ran: Ran) -> dict[str, Any]:
    return ran[0]


class Model:
    """The tiny model in transformers, and the prompts that the notebook measures."""

    def __init__(self, folder: Path, study: dict[str, Any]) -> None:
        self.layer_ids = study["layer_ids"]
        self.reference = Reference(folder, self.layer_ids)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [tokenizer.encode(prompt) for prompt in study["prompts"][::2]]

    def change(self, layer: int, expert: int, bias: float) -> np.ndarray:
        """Of each prompt's mean log-probability, by a bias of one expert."""
        biases = np.zeros((L, E), np.float32)
        biases[layer, expert] = bias
        with_bias = [self.reference.logprobs_with_bias(prompt, biases) for prompt in self.prompts]
        usual = [self.reference.logprobs(prompt) for prompt in self.prompts]
        return np.array([(a - b).mean() for a, b in zip(with_bias, usual, strict=True)])


@pytest.fixture
def model(tiny_model: Path, study: dict[str, Any]) -> Model:
    return Model(tiny_model, study)


def texts_of(outputs: list[Cell]) -> list[str]:
    return ["".join(output["text"]) for output in outputs if "text" in output]


def same_line(stored: str, now: str) -> bool:
    """But for the rounding of another CPU. It decides p where an effect is next to nothing."""
    numbers = r"-?\d+\.\d+(?=\s|$)"
    if re.sub(numbers, "", stored).split() != re.sub(numbers, "", now).split():
        return False
    before, after = (np.array(re.findall(numbers, line), float) for line in (stored, now))
    if len(after) >= 5 and abs(after[-5]) < 2e-3:
        before, after = before[:-2], after[:-2]
    return np.allclose(before, after, rtol=0, atol=2e-3)


def test_the_stored_outputs_are_those_of_the_run(ran: Ran) -> None:
    """After a change: `python -m tests.notebook examples/bans.ipynb`."""
    for cell, outputs in zip(CELLS, ran[1], strict=True):
        assert len(cell["outputs"]) == len(outputs)
        stored = "".join(texts_of(cell["outputs"])).splitlines()
        now = "".join(texts_of(outputs)).splitlines()
        assert [pair for pair in zip(stored, now, strict=True) if not same_line(*pair)] == []


def test_effects_of_bans_are_those_that_transformers_computes(
    study: dict[str, Any], model: Model
) -> None:
    layer = 2
    expert = study["by_load"][layer, 0]
    line = study["bans"].query("layer == 3 and banned == 'the most taken'").iloc[0]
    expected = model.change(layer, expert, -np.inf)
    assert line.effect == pytest.approx(expected.mean(), abs=1e-4)
    error = expected.std(ddof=1) / np.sqrt(len(expected))
    assert line.low == pytest.approx(expected.mean() - 1.96 * error, abs=0.5 * error)
    assert line.high == pytest.approx(expected.mean() + 1.96 * error, abs=0.5 * error)


def test_effects_of_activation_are_those_that_transformers_computes(
    study: dict[str, Any], model: Model
) -> None:
    layer = 1
    expert = study["by_load"][layer, -1]
    line = study["activations"].query("layer == 2 and activated == 'the least taken'").iloc[0]
    assert line.effect == pytest.approx(model.change(layer, expert, np.inf).mean(), abs=1e-4)


def test_direct_effects_are_those_that_transformers_computes(
    study: dict[str, Any], model: Model
) -> None:
    """With the experts of one layer as under its ban, and all others as usual."""
    layer = 2
    changes = []
    pairs = zip(model.prompts, study["baseline"], study["banned"][layer], strict=True)
    for prompt, (_, usual), (_, under_ban) in pairs:
        rows = usual.copy()
        rows[:, layer] = under_ban[:, layer]
        now = model.reference.logprobs(prompt, rows)
        changes.append((now - model.reference.logprobs(prompt)).mean())
    parts = study["parts"].set_index(["layer", "effect of the ban"]).effect
    assert parts[3, "direct"] == pytest.approx(np.mean(changes), abs=1e-4)
    assert parts[3, "whole"] == pytest.approx(parts[3, "direct"] + parts[3, "by others"], abs=2e-5)


def test_the_prompts_that_choose_are_not_those_that_are_measured(study: dict[str, Any]) -> None:
    assert not {*study["measured"]} & {*study["prompts"][1::2]}
    rows = np.concatenate([rows for _, rows in study["usual"][1::2]])
    for layer in range(L):
        counts = np.bincount(rows[:, layer].ravel(), minlength=E)
        assert np.array_equal(counts, study["times"][layer])
        assert counts[study["by_load"][layer, 0]] == counts.max()
        assert study["by_load"][layer, 0] not in study["randoms"][layer]


def test_what_the_notebook_says_of_the_tiny_model(study: dict[str, Any]) -> None:
    for table in ("bans", "activations", "parts"):
        assert (study[table].corrected > 0.05).all()


def test_changes_without_an_effect_seldom_have_a_corrected_p(study: dict[str, Any]) -> None:
    """Of 100 studies of 15 tests of independent changes around 0; p is uniform."""
    random = np.random.default_rng(0)
    tables = [
        study["table_of"]([{"test": test} for test in range(15)], random.normal(size=(15, 12)))
        for _ in range(100)
    ]
    p = np.concatenate([table.p for table in tables])
    assert np.abs(np.sort(p) - np.linspace(0, 1, p.size)).max() < 0.04
    assert 0 < np.mean([table.corrected.min() <= 0.05 for table in tables]) < 0.12
    assert all((table.corrected >= table.p).all() for table in tables)


def test_an_effect_on_every_prompt_is_found(study: dict[str, Any]) -> None:
    changes = np.random.default_rng(0).normal(size=(15, 12))
    changes[4] -= 5
    table = study["table_of"]([{"test": test} for test in range(15)], changes)
    assert (table.corrected <= 0.05).tolist() == [test == 4 for test in range(15)]
    assert table.low[4] < table.effect[4] < table.high[4] < 0


def test_own_texts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("one prompt\nanother prompt\n")
    monkeypatch.setenv("ROUTED_EXPERTS_URL", server.url)
    monkeypatch.setenv("ROUTED_EXPERTS_TEXT", str(tmp_path / "text"))
    names: dict[str, Any] = {}
    list(outputs_of(CELLS[:2], names))
    assert names["prompts"] == ["one prompt", "another prompt"]
    assert [len(rows) for _, rows in names["usual"]] == [10, 14]
