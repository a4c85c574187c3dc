"""`routed-experts export` of known rows: what each format's reader finds is what was written."""

import csv
import json
import sys
import tracemalloc
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.cli.main import INTERRUPTED, main
from routed_experts.server.tools import export, formats
from routed_experts.server.tools.running import bodies_of
from routed_experts.server.tools.saved import opened
from tests.protocol.answers import EXPERTS, LAYERS, TOP_K, Told, answer, rows_of, sse, stream

LAYER_IDS = [1, 3, 4]
INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": LAYER_IDS}
UNKNOWN_ROW = 3
FORMATS = {each: f"out.{each}" for each in ("parquet", "csv", "npz", "jsonl")}

Export = Any


def told() -> list[Told]:
    """Two choices of a prompt with an unknown row, and a streamed answer without a prompt's first rows."""
    several = Told(rows_of(20, 1), [rows_of(9, 2), rows_of(5, 3)])
    several.prompt[UNKNOWN_ROW] = -1
    return [several, Told(rows_of(7, 4), [rows_of(3, 5)], start=2, first_token=500)]


def weights_of(rows: np.ndarray) -> np.ndarray:
    """Weights that differ in every slot; NaN where a row is unknown."""
    values = np.random.default_rng(int(rows.sum()) % 1000).random(rows.shape, dtype=np.float32)
    return np.where(rows < 0, np.float32(np.nan), values)


def with_weights(body: dict[str, Any]) -> dict[str, Any]:
    """`body` in the form `list`, with weights beside all rows."""
    pairs = [(body, "prompt_routed_experts"), *((choice, "routed_experts") for choice in body["choices"])]
    for holder, name in pairs:
        weights = weights_of(np.array(holder[name])).tolist()
        nulls = [[[None if one != one else one for one in slots] for slots in row] for row in weights]
        holder[name.replace("experts", "expert_weights")] = nulls
    return body


def expected() -> list[dict[str, Any]]:
    """The tokens with rows, and their rows [L, K], in the order of the answers. A prompt's come once."""
    found = []
    for request, one in enumerate(told()):
        for choice in range(len(one.choices)):
            tokens = [*one.prompt_token_ids, *one.token_ids(choice)]
            rows = np.concatenate([one.prompt, one.choices[choice]])
            for position in range(len(one.prompt) if choice else one.start, len(rows)):
                is_prompt = position < len(one.prompt)
                about = {
                    "source": f"{request}.jsonl",
                    "request": request,
                    "choice": choice,
                    "position": position,
                    "is_prompt": is_prompt,
                }
                found.append(about | {"token_id": tokens[position], "rows": rows[position]})
    return found


def with_texts(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`chunks` with the texts of their tokens."""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        choice["logprobs"] = {"tokens": ["x"] * len(choice.get("token_ids", ()))}
    return chunks


def token_text(token: dict[str, Any]) -> str | None:
    """Log-probabilities of the stream say those of generated tokens."""
    return "x" if token["request"] and not token["is_prompt"] else None


EXPECTED = expected()
KNOWN = [token for token in EXPECTED if (token["rows"] >= 0).all()]


def counts() -> np.ndarray:
    """[L, E] of the known rows."""
    found = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in KNOWN:
        for layer, slot in np.ndindex(LAYERS, TOP_K):
            found[layer, token["rows"][layer, slot]] += 1
    return found


@pytest.fixture
def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Exports the answers above to a file, from a folder of which one file has the stream."""
    folder = tmp_path / "answers"
    folder.mkdir()
    several, streamed = told()
    body = {"id": "cmpl-1", **answer(several), "routed_experts_info": INFO}
    (folder / "0.jsonl").write_text(json.dumps(body) + "\n")
    (folder / "1.jsonl").write_bytes(json.dumps(INFO).encode() + b"\n" + sse(with_texts(stream(streamed))))

    def run(name: str, *flags: str) -> Path:
        assert main(["export", str(folder), "-o", str(tmp_path / name), *flags]) == 0
        said = f"Wrote {tmp_path / name}: 2 responses, {len(EXPECTED)} rows, 1 of them unknown.\n"
        assert capsys.readouterr() == (said, "")
        return tmp_path / name

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_the_documented_command(exported: Export, monkeypatch: pytest.MonkeyPatch, documented: list[str]) -> None:
    (command,) = documented
    monkeypatch.chdir(exported("answers.npz").parent / "answers")
    Path("0.jsonl").rename("answers.jsonl")
    assert main(command.split()[1:]) == 0
    assert pq.read_table("experts.parquet").num_rows == (20 + 9 + 5) * LAYERS


# ---- tables and arrays ----


def test_parquet_with_a_row_per_token_and_layer(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CUT", 4 * LAYERS)  # so that choices are cut, and groups have several spans
    monkeypatch.setattr(formats, "_GROUP", 30)
    file = pq.ParquetFile(exported("out.parquet"))
    assert file.num_row_groups > 2
    assert json.loads(file.schema_arrow.metadata[b"routed_experts"]) == INFO
    rows = file.read().to_pylist()
    assert len(rows) == len(EXPECTED) * LAYERS
    for place, row in enumerate(rows):
        token, layer = EXPECTED[place // LAYERS], place % LAYERS
        assert row == {
            **{name: value for name, value in token.items() if name != "rows"},
            "source": str(exported.folder / token["source"]),
            "group": str(exported.folder),
            "id": None if token["request"] else "cmpl-1",
            "token": token_text(token),
            "layer": layer,
            "layer_id": LAYER_IDS[layer],
            "experts": token["rows"][layer].tolist(),
        }


def test_parquet_with_a_row_per_token(exported: Export) -> None:
    rows = pq.read_table(exported("out.parquet", "--per", "token")).to_pylist()
    assert [row["experts"] for row in rows] == [token["rows"].tolist() for token in EXPECTED]
    assert [row["position"] for row in rows] == [token["position"] for token in EXPECTED]
    assert not rows[0].keys() & {"layer", "layer_id"}


def test_csv(exported: Export) -> None:
    with exported("out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(EXPECTED) * LAYERS
    for place, row in enumerate(rows):
        token, layer = EXPECTED[place // LAYERS], place % LAYERS
        assert [int(row[f"expert_{slot}"]) for slot in range(TOP_K)] == token["rows"][layer].tolist()
        for name in ("request", "choice", "position", "is_prompt", "token_id"):
            assert row[name] == str(token[name])
        assert (row["layer"], row["layer_id"]) == (str(layer), str(LAYER_IDS[layer]))
        assert row["token"] == (token_text(token) or "")
        assert (row["source"], row["group"]) == (str(exported.folder / token["source"]), str(exported.folder))


def test_npz(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CUT", 4 * LAYERS)
    with np.load(exported("out.npz"), allow_pickle=False) as found:
        assert found["experts"].dtype == np.int16
        assert np.array_equal(found["experts"], np.stack([token["rows"] for token in EXPECTED]))
        for name in ("request", "choice", "position", "is_prompt", "token_id"):
            assert found[name].tolist() == [token[name] for token in EXPECTED]
        assert (found["layer_ids"].tolist(), int(found["num_experts"])) == (LAYER_IDS, EXPERTS)
        sources = [str(exported.folder / token["source"]) for token in EXPECTED]
        assert found["sources"][found["source"]].tolist() == sources


def test_weights(tmp_path: Path) -> None:
    several = told()[0]
    several.fmt = "list"
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(with_weights(answer(several))))
    weights = np.concatenate([weights_of(rows) for rows in (several.prompt, *several.choices)])
    for name in ("out.parquet", "out.csv", "out.npz"):
        assert main(["export", str(file), "--weights", "-o", str(tmp_path / name)]) == 0
    found = pq.read_table(tmp_path / "out.parquet")["weights"].to_pylist()
    assert np.array_equal(np.array(found, np.float32), weights.reshape(-1, TOP_K), equal_nan=True)
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.array_equal(arrays["weights"], weights, equal_nan=True)
    with (tmp_path / "out.csv").open(newline="") as text:
        lines = [[float(row[f"weight_{slot}"]) for slot in range(TOP_K)] for row in csv.DictReader(text)]
    assert np.array_equal(np.array(lines, np.float32), weights.reshape(-1, TOP_K), equal_nan=True)


def test_texts_and_what_is_unknown(tmp_path: Path) -> None:
    """Texts of log-probabilities and of files of the page. Without token ids, joined rows have no prompt."""
    one = Told(rows_of(2, 1), [rows_of(2, 2)])
    body = answer(one)
    body["choices"][0]["logprobs"] = {"tokens": ['"a",\n', "\ud800", "c"]}
    page = {**answer(one), "routed_experts_page": {"prompt_tokens": ["p", "q"]}}
    page["choices"][0]["logprobs"] = {"tokens": ["r", None, "s"]}
    joined = answer(Told(rows_of(2, 1), [rows_of(2, 2)], layout="joined"))
    for name in ("prompt_token_ids", "token_ids"):
        del joined["choices"][0][name]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, (body, page, joined))))
    for name in ("out.parquet", "out.csv", "out.npz"):
        assert main(["export", str(file), "-o", str(tmp_path / name)]) == 0
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()[::LAYERS]
    texts = [None, None, '"a",\n', "?", "p", "q", "r", None, None, None, None, None]
    assert [row["token"] for row in table] == texts
    assert [row["is_prompt"] for row in table] == [True, True, False, False] * 2 + [None] * 4
    assert {(row["token_id"], row["layer_id"]) for row in table[8:]} == {(None, None)}
    with (tmp_path / "out.csv").open(newline="") as text:
        assert [row["token"] or None for row in csv.DictReader(text)][::LAYERS] == texts
    with np.load(tmp_path / "out.npz") as arrays:
        assert set(arrays["token_id"][8:]) == set(arrays["is_prompt"][8:]) == {-1}
        assert "layer_ids" not in arrays


def test_prompts_whose_rows_are_equal(tmp_path: Path) -> None:
    """Of a list: both come, as their tokens differ."""
    several = [Told(rows_of(2, 1), [rows_of(2, 2)] * 2, first_token=first) for first in (100, 500)]
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer(*several)))
    assert main(["export", str(tmp_path / "answers.jsonl"), "--n", "2", "-o", str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz") as found:
        place = found["is_prompt"] == 1
        assert found["token_id"][place].tolist() == [100, 101, 500, 501]
        assert found["choice"][place].tolist() == [0, 0, 2, 2]


# ---- other programs ----


def test_loads_of_other_programs(exported: Export, documented: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes. EPLB d52c72d5, `rebalance_experts`, takes `weight` [MoE layers, experts]. SGLang 6270b014,

    `compute_initial_expert_location_metadata`, reads a dict with `logical_count` [decoder layers, experts], with zeros
    in dense layers.
    """
    (recipe,) = documented
    monkeypatch.chdir(exported("experts.npz").parent)
    exec(recipe, {})
    assert np.array_equal(np.load("load.npy", allow_pickle=False), counts())
    every = np.zeros((max(LAYER_IDS) + 1, EXPERTS), np.int64)
    every[LAYER_IDS] = counts()
    (found,) = torch.load("load.pt", weights_only=True).items()
    assert (found[0], found[1].dtype, found[1].is_contiguous()) == ("logical_count", torch.int64, True)
    assert np.array_equal(found[1].numpy(), every)


def test_llama_cpps_trace(exported: Export, documented: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe. `init_moe_expert_cache` of thecodacus/llama.cpp 8e5bc28c counts lines `step,layer,id,...`."""
    (recipe,) = documented
    monkeypatch.chdir(exported("experts.parquet").parent)
    exec(recipe, {})
    read = [[int(word) for word in line.split(",")] for line in Path("trace.csv").read_text().splitlines()]
    generated = [token for token in KNOWN if not token["is_prompt"]]
    assert [line[1:] for line in read] == [
        [LAYER_IDS[layer], *token["rows"][layer]] for token in generated for layer in range(LAYERS)
    ]
    assert [line[0] for line in read] == [step for step in range(len(generated)) for _ in range(LAYERS)]


# ---- responses ----


def test_f6_responses(exported: Export, tmp_path: Path) -> None:
    """F6: the lines are read again as what was read."""
    again = list(read(opened([str(exported("out.jsonl"))]), ModelInfo()))
    assert [each.info.layer_ids for each in again] == [tuple(LAYER_IDS)] * 2
    for one, read_again in zip(told(), again, strict=True):
        for choice, routing in enumerate(read_again.routings()):
            assert np.array_equal(routing.rows, one.whole(choice))
            assert (routing.start, routing.prompt_len, routing.index) == (one.start, len(one.prompt), choice)
            assert routing.prompt_token_ids == tuple(one.prompt_token_ids)
            assert routing.token_ids == tuple(one.token_ids(choice))
    assert again[1].routings()[0].texts == (*[None] * 7, *"xxxx")
    assert main(["export", str(tmp_path / "out.jsonl"), "-o", str(tmp_path / "again.jsonl")]) == 0
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()


# ---- requests ----


def test_f6_how_prompts_are_sent(tmp_path: Path) -> None:
    """F6: greedily, so that the same command gives the same rows; what a request says takes precedence."""
    lines = ["one", {"prompt": "two", "temperature": 0.5, "max_tokens": 9}, {"prompt": "three", "n": 2}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    command = ["--url", "host", "--prompts", str(file), "-o", "out.csv", "--max-tokens", "4"]
    (place, one), (_, two), (_, three) = bodies_of(export.parse(command))
    assert place == (str(file), 1)
    assert one == {"prompt": "one", "max_tokens": 4, "temperature": 0}
    assert two == {"prompt": "two", "max_tokens": 9, "temperature": 0.5}
    assert three == {"prompt": "three", "max_tokens": 4, "n": 2}, "vLLM refuses two likeliest choices"
    flags = ["--temperature", "0.7", "--seed", "3", "--chat"]
    (_, one), (_, two), (_, three) = bodies_of(export.parse([*command, *flags]))
    sampling = {"max_tokens": 4, "temperature": 0.7, "seed": 3}
    assert one == {"messages": [{"role": "user", "content": "one"}], **sampling}
    assert two == {"prompt": "two", "max_tokens": 9, "temperature": 0.5, "seed": 3}
    assert three == {"prompt": "three", "n": 2, **sampling}


# ---- long and interrupted exports ----


@pytest.mark.parametrize("name", FORMATS.values())
def test_memory_does_not_grow(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_GROUP", 2000)
    line = json.dumps({**answer(Told(rows_of(400, 1), [rows_of(200, 2)])), "routed_experts_info": INFO})
    pool, peaks = pa.default_memory_pool(), []
    for answers in (4, 40):
        file = tmp_path / f"{answers}.jsonl"
        file.write_text(f"{line}\n" * answers)
        of_arrow = pa.proxy_memory_pool(pool)
        pa.set_memory_pool(of_arrow)
        tracemalloc.start()
        try:
            assert main(["export", str(file), "-o", str(tmp_path / name)]) == 0
            peaks.append(tracemalloc.get_traced_memory()[1] + (of_arrow.max_memory() or 0))
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(pool)
    assert peaks[1] < 1.25 * peaks[0] + len(line), peaks


@pytest.mark.parametrize("name", FORMATS.values())
@pytest.mark.parametrize("way", ["Ctrl-C", "a line that was cut off"])
def test_an_interrupted_export_leaves_what_was_there(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({**answer(told()[0]), "routed_experts_info": INFO})
    file, out = tmp_path / "answers.jsonl", tmp_path / "out" / name
    out.parent.mkdir()
    out.write_text("before")
    file.write_text(f"{line}\n{line}\n{line[:50]}\n" if way != "Ctrl-C" else f"{line}\n" * 3)
    if way == "Ctrl-C":
        responses = count()

        def check(*_: Any) -> None:
            if next(responses) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(export.Exported, "count", check)
    status = main(["export", str(file), "-o", str(out)])
    assert status == (INTERRUPTED if way == "Ctrl-C" else 2)
    assert [path.name for path in out.parent.iterdir()] == [name]
    assert out.read_text() == "before"


# ---- what cannot be exported ----


def test_without_pyarrow_and_tqdm(
    exported: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "tqdm"):
        monkeypatch.setitem(sys.modules, module, None)
    exported("out.csv")
    assert main(["export", str(tmp_path / "answers"), "-o", str(tmp_path / "out.parquet")]) == 2
    assert capsys.readouterr().err == f"routed-experts: {formats.NO_PYARROW}\n"


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, other = answer(told()[0]), answer(Told(rows_of(4, layers=2), [rows_of(2, layers=2)]))
    large = answer(Told(rows_of(2, 1), [rows_of(2, 2)], first_token=1 << 40))
    nothing = answer(Told(rows_of(2, 1), [rows_of(0, 2)], start=2))
    nowhere = tmp_path / "nowhere" / "out.csv"
    for body, flags, sentence in [
        ([plain, other], "-o out.csv", "line 2: num_layers is 2 after 3: export one model at a time."),
        ([plain], "-o out.csv --weights", "line 1: the response has no weights: set return_routed_expert_weights"),
        ([{"error": {"message": "no"}}], "-o out.csv", "line 1: the server answered with an error: no."),
        ([{**plain, "id": 3, "choices": [{**plain["choices"][0], "logprobs": 3}]}], "-o out.csv", "line 1: "),
        ([large], "-o out.parquet", "line 1: not token ids: from 1099511627776 to"),
        ([nothing], "-o out.csv", "Nothing to export: the responses have no rows."),
        ([{"choices": []}], "-o out.jsonl", "line 1: the answer has no choices"),
        ([plain], f"-o {nowhere}", f"--output {nowhere} cannot be written: No such file or directory."),
        ([plain], f"-o {tmp_path} --format csv", f"--output {tmp_path} is a folder."),
    ]:
        file = tmp_path / "answers.jsonl"
        file.write_text("\n".join(map(json.dumps, body)))
        words = [str(tmp_path / word) if word.startswith("out.") else word for word in flags.split()]
        assert main(["export", str(file), *words]) == 2
        assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("FILE -o out.xyz", "--output out.xyz names no format: set --format"),
        ("FILE -o out.csv --per token", "--per token is for parquet"),
        ("-o out.csv", "give files, or --url and --prompts"),
        ("-o out.csv --url host", "give files, or --url and --prompts"),
        ("FILE -o out.csv --url host --prompts p", "give files, or --url and --prompts"),
    ],
)
def test_command_lines(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", *words.split()])
    assert sentence in capsys.readouterr().err
