"""The notebook `examples/study.ipynb`, run as it is: its table is the model's, and its answers are the table's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import matplotlib.pyplot as plt
import numpy as np
import pytest

from routed_experts.protocol.expert_load import count_experts, expert_load
from tests.conftest import SERVER_FLAGS
from tests.contract.served import serving_quickly
from tests.e2e.harness import ROOT, Oracle, free_port

CELLS = json.loads((ROOT / "examples/study.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run(cells: list[str], found: dict[str, Any]) -> None:
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), found)


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The notebook's names after its run against a server."""
    log = tmp_path_factory.mktemp("study") / "log"
    names: dict[str, Any] = {}
    plt.switch_backend("agg")
    with pytest.MonkeyPatch.context() as patch, serving_quickly(tiny_model, log, *SERVER_FLAGS) as server:
        patch.setenv("ROUTED_EXPERTS_URL", server.url)
        run(CODE, names)
    yield names
    plt.close("all")


def rows_by_text(found: dict[str, Any]) -> dict[tuple[str, int], tuple[list[int], np.ndarray]]:
    """Token ids and rows [tokens, L, K] of each domain's texts."""
    texts = {}
    for key, rows in found["table"].sort_values(["position", "layer"]).groupby(["domain", "request"]):
        shape = (-1, len(found["layers"]), found["top_k"])
        texts[key] = (rows.token_id[rows.layer == 0].tolist(), np.stack(rows.experts.to_list()).reshape(shape))
    return texts


def test_the_table_is_the_models(found: dict[str, Any], oracle: Oracle) -> None:
    texts = rows_by_text(found)
    assert len(texts) == 12
    for tokens, rows in texts.values():
        assert len(rows) == len(tokens) > 48
        assert oracle.wrong(rows, tokens) == []


def test_its_answers(found: dict[str, Any]) -> None:
    texts, layers = rows_by_text(found), len(found["layers"])
    for domain in ("code", "prose"):
        rows = np.concatenate([rows for (of, _), (_, rows) in texts.items() if of == domain])
        assert np.array_equal(found["counts"][domain], count_experts(rows, 16))
        assert np.array_equal(found["load"][domain].balance, expert_load(found["counts"][domain]).balance)
    for line in found["specific"].itertuples():
        shares = [(found["counts"][of][line.layer - 1][line.expert] + 1) for of in ("code", "prose")]
        totals = [found["counts"][of][line.layer - 1].sum() + 16 for of in ("code", "prose")]
        assert line.log2 == pytest.approx(np.log2(shares[0] / totals[0] * totals[1] / shares[1]))
        assert line.domain == ("code" if line.log2 > 0 else "prose")
    pairs = [(a, b) for _, rows in texts.values() for a, b in zip(rows[:-3, 2], rows[3:, 2], strict=True)]
    again = np.mean([len({*a} & {*b}) / len(a) for a, b in pairs])
    assert found["kept"].iloc[2, 2] == pytest.approx(again)
    alike = found["alike"]
    assert np.allclose(alike, alike.T)
    assert np.allclose(alike.diagonal(), 1)
    assert (alike[~np.eye(layers, dtype=bool)] < 0.9).all()
    assert all(np.isfinite(values).all() for values in (found["between"], *found["within"].values(), found["expected"]))


@pytest.mark.e2e
def test_it_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUTED_EXPERTS_URL", raising=False)
    monkeypatch.setenv("ROUTED_EXPERTS_PORT", str(free_port()))
    names: dict[str, Any] = {}
    try:
        run(CODE[:1], names)
        with urlopen(f"{names['url']}/v1/routed_experts") as response:
            assert json.load(response)["num_experts"] == 16
        run(CODE[-1:], names)
        assert names["server"].returncode is not None
    finally:
        if "server" in names:
            names["server"].kill()
