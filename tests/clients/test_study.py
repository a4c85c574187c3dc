"""The notebook `examples/study.ipynb`, run as it is: its table is the model's, its answers are
those of plain loops over the table, and its stored outputs are those of the run."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations, compress, product, starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from routed_experts.server.cli.main import main
from tests.contract.served import serving_quickly
from tests.e2e.harness import ROOT, SERVER_FLAGS, Oracle, Server, free_port
from tests.notebook import Cell, Ran, outputs_of, read, run_against

pytestmark = pytest.mark.release

_, CELLS = read(ROOT / "examples/study.ipynb")
L, K, E = 5, 4, 16
"""Layers, and chosen and all experts, of the tiny model."""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, "--enable-return-routed-expert-weights")
    with serving_quickly(tiny_model, tmp_path_factory.mktemp("study") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def ran(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_against(server.url, CELLS, tmp_path_factory.mktemp("study") / "figures")


@pytest.fixture
def study(ran: Ran) -> dict[str, Any]:
    return ran[0]


@pytest.fixture
def sets(study: dict[str, Any]) -> list[list[set[int]]]:
    """Of each token, the experts of each layer, from the rows of the table."""
    return [[set(map(int, layer)) for layer in token] for token in study["rows"]]


def cell_with(text: str) -> Cell:
    (cell,) = (cell for cell in CELLS if text in "".join(cell["source"]))
    return cell


def test_the_stored_outputs_are_those_of_the_run(ran: Ran) -> None:
    """After a change: `python -m tests.notebook examples/study.ipynb`."""
    for cell, outputs in zip(CELLS, ran[1], strict=True):
        for stored, now in zip(cell["outputs"], outputs, strict=True):
            is_figure = "image/png" in now.get("data", {})
            assert "image/png" in stored["data"] if is_figure else stored == now


def test_the_table_is_the_models(study: dict[str, Any], oracle: Oracle) -> None:
    tokens, rows = study["tokens"], study["rows"]
    texts = tokens.groupby(["domain", "request"], sort=False).indices.values()
    assert len(texts) == 40
    for rows_of_text in texts:
        assert tokens.position[rows_of_text].tolist() == list(range(len(rows_of_text)))
        assert oracle.wrong(rows[rows_of_text], tokens.token_id[rows_of_text].tolist()) == []


Prompts = dict[str, list[list[list[set[int]]]]]
"""By domain, of each prompt and token, the experts of each layer."""


def prompts_by_domain(study: dict[str, Any], sets: list[list[set[int]]]) -> Prompts:
    by_request: dict[tuple[str, int], list[list[set[int]]]] = defaultdict(list)
    tokens = study["tokens"]
    for domain, request, layers in zip(tokens.domain, tokens.request, sets, strict=True):
        by_request[domain, request].append(layers)
    prompts: Prompts = {"code": [], "prose": []}
    for (domain, _), prompt in by_request.items():
        prompts[domain].append(prompt)
    return prompts


def mean_load(prompts: list[list[list[set[int]]]], layer: int, expert: int) -> float:
    """Which share of its tokens a prompt sends to an expert; each prompt counts the same."""
    loads = [np.mean([expert in token[layer] for token in prompt]) for prompt in prompts]
    return float(np.mean(loads))


def p_of(value: float, shuffled: Iterable[float]) -> float:
    """Which share of 2,000 shuffles reach a value; the value itself is one more."""
    reached = sum(one >= value - 1e-9 for one in shuffled)
    return (1 + reached) / 2001


def test_the_difference_of_loads(study: dict[str, Any], sets: list[list[set[int]]]) -> None:
    """With its p, which is also corrected for the number of differences."""
    prompts = prompts_by_domain(study, sets)
    differences = study["difference"](study["is_first"])
    statistics = np.abs(differences / study["spread"])
    largest = [np.abs(shuffle / study["spread"]).max() for shuffle in study["differences"]]
    for layer, expert in product(range(L), range(E)):
        code = mean_load(prompts["code"], layer, expert)
        prose = mean_load(prompts["prose"], layer, expert)
        assert differences[layer, expert] == pytest.approx(code - prose)
        shuffled = np.abs(study["differences"][:, layer, expert])
        p = p_of(abs(code - prose), shuffled)
        assert study["p"][layer, expert] == pytest.approx(p, abs=1e-3)
        corrected = p_of(statistics[layer, expert], largest)
        assert study["corrected"][layer, expert] == pytest.approx(corrected)


def test_the_distance_of_layers(study: dict[str, Any]) -> None:
    """Half of what the loads of all experts differ by, divided by K."""
    differences = study["difference"](study["is_first"])
    distance = np.abs(differences).sum(axis=1) / 2 / K
    chance = np.abs(study["differences"]).sum(axis=2) / 2 / K
    mean = chance.mean(axis=0)
    statistics = (distance - mean) / chance.std(axis=0)
    shuffled = (chance - mean) / chance.std(axis=0)
    for layer, line in enumerate(study["per_layer"].to_dict("records")):
        assert line["distance"] == pytest.approx(distance[layer])
        assert line["by chance"] == pytest.approx(mean[layer])
        assert line["p"] == pytest.approx(p_of(statistics[layer], shuffled[:, layer]))
        largest = shuffled.max(axis=1)
        assert line["corrected"] == pytest.approx(p_of(statistics[layer], largest))


def test_effects_are_differences_in_units_of_the_spread_between_prompts(
    study: dict[str, Any],
) -> None:
    """Cohen's d."""
    code, prose = study["load"][study["is_first"]], study["load"][~study["is_first"]]
    for line in study["effects"].to_dict("records"):
        of_code = code[:, line["layer"] - 1, line["expert"]]
        of_prose = prose[:, line["layer"] - 1, line["expert"]]
        difference = of_code.mean() - of_prose.mean()
        assert line["load of code"] - line["load of prose"] == pytest.approx(difference)
        spread = max(np.sqrt((of_code.var(ddof=1) + of_prose.var(ddof=1)) / 2), 1e-9)
        assert line["d"] == pytest.approx(difference / spread)


def test_intervals_are_those_of_prompts_that_are_drawn_again(study: dict[str, Any]) -> None:
    """Of experts that many prompts take: other draws hardly change these."""
    rng = np.random.default_rng(1)
    code, prose = study["load"][study["is_first"]], study["load"][~study["is_first"]]
    often = study["effects"].query("`load of code` > 0.1 and `load of prose` > 0.1")
    assert len(often) > 20
    for line in often.to_dict("records"):
        loads = (of_domain[:, line["layer"] - 1, line["expert"]] for of_domain in (code, prose))
        of_code, of_prose = (rng.choice(load, (4000, 20)).mean(axis=1) for load in loads)
        differences = of_code - of_prose
        low, high = np.quantile(differences, [0.025, 0.975])
        assert line["low"] == pytest.approx(low, abs=0.4 * differences.std())
        assert line["high"] == pytest.approx(high, abs=0.4 * differences.std())


def test_figures_are_svg_with_text(study: dict[str, Any]) -> None:
    texts = {"load": "decoder layer", "router": "entropy", "again": "distance in tokens"}
    for name, text in texts.items():
        svg = (study["FIGURES"] / f"{name}.svg").read_text(encoding="utf-8")
        assert "<svg" in svg
        assert f">{text}</text>" in svg


class OwnTables:
    """Runs the notebook on files, without a server, as far as the sizes of effects; then its last
    section."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch

    def write(self, name: str, table: Any, num_experts: int | None = E) -> str:
        model = {"num_experts": num_experts, "layer_ids": [*range(1, L + 1)]}
        model |= {"num_layers": L, "top_k": K}
        exported = table.drop(columns="domain").assign(experts=table.experts.map(list))
        arrow = pa.Table.from_pandas(exported, preserve_index=False)
        file = self.folder / f"{name}.parquet"
        pq.write_table(arrow.replace_schema_metadata({"routed_experts": json.dumps(model)}), file)
        return str(file)

    def run(self, *files: str, length: int = 0) -> tuple[dict[str, Any], str]:
        """The notebook's names, and all that it prints."""
        self.patch.delenv("ROUTED_EXPERTS_URL", raising=False)
        self.patch.setenv("ROUTED_EXPERTS_TABLES", " ".join(files))
        self.patch.setenv("ROUTED_EXPERTS_LENGTH", str(length))
        names: dict[str, Any] = {}
        end = CELLS.index(cell_with("def drawn_again")) + 1
        outputs = list(outputs_of([*CELLS[:end], cell_with("if is_paired:\n    of_first")], names))
        lines = [line for cell in outputs for output in cell for line in output.get("text", [])]
        return names, "".join(lines)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnTables:
    return OwnTables(tmp_path, monkeypatch)


@pytest.mark.parametrize("num_files", [1, 2])
def test_own_tables_say_what_the_server_said(
    own: OwnTables, study: dict[str, Any], num_files: int
) -> None:
    """One file with two groups, or a file for each domain."""
    table = study["table"]
    if num_files == 1:
        files = [own.write("all", table.assign(group=table.domain))]
    else:
        files = [own.write(name, table[table.domain == name]) for name in ("code", "prose")]
    names, printed = own.run(*files)
    assert names["domains"] == ["code", "prose"]
    assert np.array_equal(names["corrected"], study["corrected"])
    assert names["effects"].equals(study["effects"])
    assert "The domains have different prompts." in printed
    assert names["info"]["weights"]


def test_checkpoints_are_compared_by_pairs_of_a_prompt(
    own: OwnTables, study: dict[str, Any]
) -> None:
    """The second takes expert 3 of the third layer for expert 5, where it does not have both."""
    table = study["table"]
    before = table[table.domain == "code"]
    after = before.copy()
    is_third = after.layer == 2
    after.loc[is_third, "experts"] = after[is_third].experts.map(
        lambda chosen: [3 if expert == 5 and 3 not in chosen else expert for expert in chosen]
    )
    names, _ = own.run(own.write("before", before), own.write("after", after))
    assert names["is_paired"]
    changed = names["effects"].query("difference < -1e-9 or difference > 1e-9")
    assert changed[["layer", "expert"]].to_numpy().tolist() == [[3, 3], [3, 5]]
    difference = names["load"][:20] - names["load"][20:]
    of_three = difference[:, 2, 3]
    assert changed.d.iloc[0] == pytest.approx(of_three.mean() / of_three.std(ddof=1))
    assert (changed.low < changed.difference).all()
    assert (changed.difference < changed.high).all()
    same = np.stack(before[is_third].experts) == np.stack(after[is_third].experts)
    agreement = names["agreement"]
    assert agreement.same[3] == pytest.approx(same.mean())
    assert agreement.low[3] < agreement.same[3] < agreement.high[3] < 1
    assert agreement.drop(3)[["same", "low", "high"]].eq(1).all(axis=None)


def test_a_pair_is_swapped_or_not(own: OwnTables, study: dict[str, Any]) -> None:
    code = study["table"][study["table"].domain == "code"]
    names, _ = own.run(own.write("before", code), own.write("after", code))
    labels = names["shuffles"](2000)
    assert (labels[:, :20] != labels[:, 20:]).all()
    assert np.abs(labels.mean(axis=0) - 0.5).max() < 0.05
    assert np.array_equal(*np.hsplit(names["drawn_again"](5), 2))


def test_lengths_that_differ_are_said_and_can_be_cut(own: OwnTables, study: dict[str, Any]) -> None:
    table = study["table"]
    is_shorter = (table.domain == "code") | (table.position < 30)
    file = own.write("all", table[is_shorter].assign(group=table.domain))
    _, printed = own.run(file)
    assert "NOT alike" in printed
    names, printed = own.run(file, length=30)
    assert "NOT alike" not in printed
    assert {len(tokens) for tokens in names["ids_of_prompts"]} == {30}


def test_tables_that_cannot_be_compared(own: OwnTables, study: dict[str, Any]) -> None:
    table = study["table"].assign(group="one")
    with pytest.raises(ValueError, match="Two domains"):
        own.run(own.write("all", table))
    with pytest.raises(ValueError, match="of one model"):
        own.run(own.write("all", table), own.write("other", table, num_experts=E + 1))
    with pytest.raises(ValueError, match="no token ids"):
        own.run(own.write("a", table), own.write("b", table.assign(token_id=None)))


def test_what_the_notebook_says_of_the_tiny_model(study: dict[str, Any]) -> None:
    """After correction the first layer and one expert differ; the prompt explains more than the
    token; bytes have lift, classes have not."""
    assert study["per_layer"].corrected.le(0.05).tolist() == [True, False, False, False, False]
    assert (study["corrected"] <= 0.05).sum() == 1
    assert (study["variance"].prompt > 2 * study["variance"].token).all()
    assert np.median(study["margin"]) > 0.8
    of_classes, of_tokens = study["limits"]
    assert study["of_classes"].lift.max() < of_classes
    assert 3 < (study["of_tokens"].lift > of_tokens).sum() < 10


def test_shuffled_labels_have_uniform_p_values(study: dict[str, Any]) -> None:
    """And a study without a difference seldom has a corrected one."""
    p, corrected = np.swapaxes(study["control"], 0, 1)
    assert np.abs(np.sort(p.ravel()) - np.linspace(0, 1, p.size)).max() < 0.03
    assert 0.02 < (corrected <= 0.05).any(axis=(1, 2)).mean() < 0.09
    assert (corrected >= p).all()


def test_the_limit_of_lifts(study: dict[str, Any]) -> None:
    """Five in a hundred shuffles exceed it; a shuffle keeps the tokens of each prompt, and its
    first token."""
    seen: list[Any] = []

    def lifts(groups: Any) -> Any:
        seen.append(groups)
        return SimpleNamespace(lift=np.array([0, len(seen)]))

    names = {**study}
    list(outputs_of([cell_with("def limit_of")], names))
    names["lifts"] = lifts
    assert names["limit_of"](study["texts"]) == pytest.approx(95.05)
    later, prompt, texts = (
        (study["tokens"].position > 0).to_numpy(),
        study["prompt"],
        study["texts"],
    )
    for shuffled in seen[:3]:
        assert (shuffled[later] != texts[later]).mean() > 0.5
        for one in set(prompt):
            of_prompt = later & (prompt == one)
            assert sorted(shuffled[of_prompt]) == sorted(texts[of_prompt])
            assert shuffled[~later].isna().all()


@pytest.mark.parametrize("kind", ["of_classes", "of_tokens"])
def test_lifts(kind: str, study: dict[str, Any], sets: list[list[set[int]]]) -> None:
    name = study["class_of"] if kind == "of_classes" else repr
    later = (study["tokens"].position > 0).tolist()
    groups = list(compress(study["texts"].map(name), later))
    sets = list(compress(sets, later))
    lines = study[kind]
    assert lines.lift.is_monotonic_decreasing
    assert len(lines) > 20
    for line in lines.iloc[:: len(lines) // 20].to_dict("records"):
        has = [line["expert"] in token[line["layer"] - 1] for token in sets]
        own = list(compress(has, [group == line["group"] for group in groups]))
        assert (line["tokens"], line["in group"]) == (len(own), pytest.approx(np.mean(own)))
        assert line["lift"] == pytest.approx(np.mean(own) / np.mean(has))
        assert sum(own) >= 10


def test_classes_of_texts(study: dict[str, Any]) -> None:
    assert {study["class_of"](text) for text in (" the", "Größe")} == {"word"}
    assert [study["class_of"](text) for text in (" ", "\n", "42", "):", "")] == [
        "space",
        "space",
        "number",
        "sign",
        "space",
    ]


def test_what_explains_the_choices(study: dict[str, Any]) -> None:
    """Adjusted R² of each layer: one less the variance within groups, divided by the whole."""
    chosen, ids = study["chosen"].astype(float), study["tokens"].token_id.to_numpy()
    for name, groups in (("token", ids), ("prompt", study["prompt"])):
        within = sum(
            ((chosen[groups == one] - chosen[groups == one].mean(axis=0)) ** 2).sum(axis=(0, 2))
            for one in {*groups}
        )
        whole = ((chosen - chosen.mean(axis=0)) ** 2).sum(axis=(0, 2))
        adjusted = 1 - (within / (len(ids) - len({*groups}))) / (whole / (len(ids) - 1))
        assert np.allclose(study["variance"][name], adjusted)


def test_pairs(study: dict[str, Any], sets: list[list[set[int]]]) -> None:
    """What loads lead to adds up to each expert's partners, and is a product: of four experts,
    either way of pairing them gives the same."""
    for layer in range(L):
        expected = expected_pairs(study, layer)
        for expert in range(E):
            partners = sum(K - 1 for token in sets if expert in token[layer])
            of_expert = [
                expected[frozenset((expert, other))] for other in range(E) if other != expert
            ]
            assert sum(of_expert) == pytest.approx(partners)
        for a, b, c, d in combinations(range(E), 4):
            one_way = expected[frozenset((a, b))] * expected[frozenset((c, d))]
            other_way = expected[frozenset((a, c))] * expected[frozenset((b, d))]
            assert one_way == pytest.approx(other_way)


def expected_pairs(study: dict[str, Any], layer: int) -> dict[frozenset[int], float]:
    """How many tokens would choose both experts of a pair if nothing but loads decided."""
    alone = study["pairs_of"](study["chosen"])[1]
    pairs = map(frozenset, combinations(range(E), 2))
    return dict(zip(pairs, alone[layer], strict=True))


def test_lifts_of_pairs(study: dict[str, Any], sets: list[list[set[int]]]) -> None:
    for layer in range(L):
        expected = expected_pairs(study, layer)
        lines = study["pairs"][study["pairs"].layer == layer + 1]
        assert len(lines) == sum(value >= 20 for value in expected.values()) > 20
        for line in lines.to_dict("records"):
            pair = frozenset((line["expert"], line["with"]))
            assert line["both"] == sum(pair <= token[layer] for token in sets)
            assert line["lift"] == pytest.approx(line["both"] / expected[pair])


def test_pairs_of_experts_chosen_alone_do_not_repeat(study: dict[str, Any]) -> None:
    """With unequal loads; the product of two loads would repeat."""
    rng = np.random.default_rng(0)
    odds = np.linspace(0.02, 0.9, E) ** 2
    drawn = rng.random((40 * study["chosen"].shape[0] * L, E)) < odds
    chosen = drawn[drawn.sum(axis=1) == K][: study["chosen"].shape[0] * L].reshape(
        study["chosen"].shape
    )
    names = {**study, "chosen": chosen}
    list(outputs_of([cell_with("def pairs_of")], names))
    assert abs(np.mean(names["repeats"])) < 0.15


def test_the_weights(study: dict[str, Any]) -> None:
    for token in range(0, len(study["rows"]), 100):
        for layer in range(L):
            weights = np.float64(study["table"].weights.iloc[token * L + layer])
            shares = weights / weights.sum()
            entropy = -sum(share * np.log(share) for share in shares if share) / np.log(K)
            assert study["entropy"][token, layer] == pytest.approx(entropy, abs=1e-5)
            assert study["margin"][token, layer] == pytest.approx(
                shares.max() - shares.min(), abs=1e-5
            )
    ((said,),) = outputs_of(
        [cell_with("entropy =")], {**study, "info": {**study["info"], "weights": False}}
    )
    assert "servers need --enable-return-routed-expert-weights" in "".join(said["text"])


def shared(one: list[set[int]], other: list[set[int]]) -> float:
    """Which share of its experts in the third layer a token has in common with another."""
    return len(one[2] & other[2]) / K


def test_choices_that_last(study: dict[str, Any], sets: list[list[set[int]]]) -> None:
    prompts = [
        list(compress(sets, study["prompt"] == number)) for number in sorted({*study["prompt"]})
    ]
    after_three = [
        shared(*pair) for prompt in prompts for pair in zip(prompt, prompt[3:], strict=False)
    ]
    assert study["again"].loc[3, 3] == pytest.approx(np.mean(after_three))
    of_any_two = [np.mean(list(starmap(shared, combinations(prompt, 2)))) for prompt in prompts]
    nexts = [len(prompt) - 1 for prompt in prompts]
    assert study["same_prompt"][2] == pytest.approx(np.average(of_any_two, weights=nexts))


def test_what_loads_alone_would_make_last(
    study: dict[str, Any], sets: list[list[set[int]]]
) -> None:
    loads = [np.mean([expert in token[2] for token in sets]) for expert in range(E)]
    assert study["expected"][2] == pytest.approx(sum(load * load for load in loads) / K)
    assert study["largest"][2] == pytest.approx(sum(sorted(loads)[-K:]) / K)


def test_the_documented_row(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documented: list[str]
) -> None:
    """All columns of the first row of the command's table, with their types."""
    (command,) = documented
    page = (ROOT / "docs/study.md").read_text(encoding="utf-8")
    page = page.partition("### A row")[2].partition("\n### ")[0]
    monkeypatch.chdir(tmp_path)
    (prompt,) = re.findall(r"prompt `(.*)`", page)
    Path("prompts.txt").write_text(prompt)
    assert main(command.replace("http://localhost:8000", server.url).split()[1:]) == 0
    table = pq.read_table("experts.parquet")
    (row,) = table.slice(0, 1).to_pylist()
    lines = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    types = {"list<element: int16>": "list of int16", "list<element: float>": "list of float"}
    assert [line[:2] for line in lines] == [
        (field.name, types.get(str(field.type), str(field.type))) for field in table.schema
    ]
    shown = {name: value for name, _, value in lines}
    assert shown.pop("id")[:5] == row.pop("id")[:5]
    assert np.array(shown.pop("weights").split(), float) == pytest.approx(
        row.pop("weights"), abs=5e-5
    )
    assert shown.pop("experts") == " ".join(map(str, row.pop("experts")))
    assert shown == {
        name: "null" if value is None else str(value).replace("True", "true")
        for name, value in row.items()
    }


@pytest.mark.e2e
def test_it_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUTED_EXPERTS_URL", raising=False)
    monkeypatch.setenv("ROUTED_EXPERTS_PORT", str(free_port()))
    names: dict[str, Any] = {}
    try:
        list(outputs_of(CELLS[:1], names))
        with urlopen(f"{names['url']}/v1/routed_experts") as response:
            info = json.load(response)
        assert (info["num_experts"], info["weights"]) == (16, True)
        list(outputs_of(CELLS[-1:], names))
        assert names["server"].returncode is not None
    finally:
        if "server" in names:
            names["server"].kill()
