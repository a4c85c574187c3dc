"""`routed-experts export` of known rows: what each format's reader finds is what was written."""

import copy
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from routed_experts.server.cli.main import INTERRUPTED, main
from routed_experts.server.tools import export
from routed_experts.server.tools.running import bodies_of
from tests.documentation import ROOT
from tests.protocol.answers import (
    EXPERTS,
    LAYERS,
    TOP_K,
    RoutedPrompt,
    answer,
    peak_of,
    rows_of,
    sse,
    stream,
    weights_of,
)

LAYER_IDS = [1, 3, 4]
INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": LAYER_IDS}
FORMATS = ("out.parquet", "out.csv", "out.jsonl", "out.npz")

SEVERAL = RoutedPrompt(rows_of(20, 1), [rows_of(9, 2), rows_of(5, 3)], weights=True)
SEVERAL.prompt[3] = -1
STREAMED = RoutedPrompt(rows_of(7, 4), [rows_of(3, 5)], start=2, first_token=500, weights=True)
JOINED = RoutedPrompt(
    rows_of(2, 1), [rows_of(2, 2)], layout="joined", weights=True
)  # without token ids
OF_PAGE = RoutedPrompt(rows_of(2, 6), [rows_of(2, 7)], weights=True)
TEXTS = {1: [None] * 7 + [*"wxyz"], 3: ["p", '"a",\n', "\ud800", None, "s"]}
"""Of some answers: log-probabilities have those of generated tokens, files of the page all."""

JOINED_ANSWER = answer(JOINED)
for _name in ("prompt_token_ids", "token_ids"):
    del JOINED_ANSWER["choices"][0][_name]

Tokens = list[dict[str, Any]]


def expected(folder: Path) -> Iterator[dict[str, Any]]:
    """The tokens with rows, in the order of the answers. A prompt's come once."""
    for request, routed in enumerate((SEVERAL, STREAMED, JOINED, OF_PAGE)):
        for choice, generated in enumerate(routed.choices):
            tokens, rows = (
                [*routed.prompt_token_ids, *routed.token_ids(choice)],
                np.concatenate([routed.prompt, generated]),
            )
            texts = [
                text and text.replace("\ud800", "?")
                for text in TEXTS.get(request, [None] * len(rows))
            ]
            for position in range(len(routed.prompt) if choice else routed.start, len(rows)):
                is_known = routed is not JOINED
                yield {
                    **{
                        "source": str(folder / f"{request}.jsonl"),
                        "group": str(folder),
                        "request": request,
                    },
                    **{
                        "id": "cmpl-1" if request == 0 else None,
                        "choice": choice,
                        "position": position,
                    },
                    "is_prompt": position < len(routed.prompt) if is_known else None,
                    "token_id": tokens[position] if is_known else None,
                    "token": texts[position],
                    "experts": rows[position].tolist(),
                    "weights": weights_of(rows[position]).tolist(),
                }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with the answers above; the first two say which layers they have."""
    folder = tmp_path / "answers"
    folder.mkdir()
    first = {"id": "cmpl-1", **answer(SEVERAL), "routed_experts_info": INFO}
    chunks, texts = stream(STREAMED), iter(TEXTS[1][7:])
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        choice["logprobs"] = {"tokens": [next(texts) for _ in choice.get("token_ids", ())]}
    of_page = answer(OF_PAGE)
    of_page["choices"][0]["logprobs"] = {"tokens": TEXTS[3]}
    for number, text in enumerate(
        (json.dumps(first), sse(chunks).decode(), json.dumps(JOINED_ANSWER), json.dumps(of_page))
    ):
        (folder / f"{number}.jsonl").write_text(
            f"{json.dumps(INFO)}\n{text}" if number == 1 else text
        )
    return folder


def exported(folder: Path, words: str) -> Path:
    """The file that a command writes beside `folder`."""
    name, *flags = words.split()
    assert main(["export", str(folder), "-o", str(folder.parent / name), *flags]) == 0
    return folder.parent / name


def tokens_in(path: Path) -> tuple[Tokens, list[int] | None]:
    """The tokens in a file as `expected` has them, and the layers' ids."""
    if path.suffix == ".npz":
        return tokens_in_npz(path)
    if path.suffix == ".csv":
        rows = rows_in_csv(path)
    elif path.suffix == ".jsonl":
        rows = rows_in_json_lines(path)
    else:
        rows = pq.read_table(path).to_pylist()
    if "layer" not in rows[0]:  # a row for each token
        return rows, None
    return tokens_of_layers(rows)


def tokens_in_npz(path: Path) -> tuple[Tokens, list[int] | None]:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    ids = arrays.pop("layer_ids", None)
    arrays["source"] = arrays.pop("sources")[arrays["source"]]
    arrays.pop("num_experts", None)
    assert arrays["experts"].dtype == np.int16
    has_unknown = [name for name in arrays if arrays[name].ndim == 1]  # -1 there is no id
    tokens = [
        dict(zip(arrays, values, strict=True))
        for values in zip(*(array.tolist() for array in arrays.values()), strict=True)
    ]
    for token in tokens:
        token.update({name: None for name in has_unknown if token[name] == -1})
    return tokens, ids


def rows_in_csv(path: Path) -> Tokens:
    """With lists of experts and weights, which have a column each."""
    with path.open(newline="", encoding="utf-8") as file:
        rows: Tokens = [
            {name: json_of(name, value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    for row in rows:
        for name in ("expert", "weight"):
            columns = [column for column in row if column.startswith(f"{name}_")]
            values = [row.pop(column) for column in columns]
            if values:
                row[f"{name}s"] = values
    return rows


def rows_in_json_lines(path: Path) -> Tokens:
    """With NaN for a weight that is null. No line has NaN, which few readers take."""
    rows: Tokens = [
        json.loads(line, parse_constant=pytest.fail)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        if "weights" in row:
            row["weights"] = [np.nan if weight is None else weight for weight in row["weights"]]
    return rows


def tokens_of_layers(rows: Tokens) -> tuple[Tokens, list[int] | None]:
    """Of rows for each token and layer."""
    ids: set[tuple[int, ...]] = set()
    tokens = []
    for first in range(0, len(rows), LAYERS):
        layers = rows[first : first + LAYERS]
        assert [row.pop("layer") for row in layers] == [*range(LAYERS)]
        ids.add(tuple(row.pop("layer_id") for row in layers))
        lists = {"experts", "weights"} & layers[0].keys()
        tokens.append({**layers[0], **{name: [row[name] for row in layers] for name in lists}})
    (ids_of_all,) = ids
    return tokens, [*ids_of_all]


def json_of(name: str, value: str) -> Any:
    if not value or name in ("source", "group", "id", "token"):
        return value or None
    return json.loads(value.replace("nan", "NaN"))


def weights_in(tokens: Tokens) -> np.ndarray:
    return np.array([token.pop("weights") for token in tokens], np.float32)


@pytest.mark.parametrize("has_all", [True, False], ids=["layers and weights", "neither"])
@pytest.mark.parametrize("words", [*FORMATS, "out.parquet --per token"])
def test_every_format(
    folder: Path,
    words: str,
    has_all: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # so that choices are cut, and groups have several parts
    monkeypatch.setattr(export, "_CUT", 4 * LAYERS)
    monkeypatch.setattr(export, "_GROUP", 10)
    if not has_all:
        remove_info(folder)
    path = exported(folder, f"{words} --weights" if has_all else words)
    whole = list(expected(folder))
    said = said_of(path, len(whole), per_token="token" in words)
    assert capsys.readouterr() == (said, "")

    tokens, ids = tokens_in(path)
    weights = weights_in(whole)
    if has_all:
        assert np.array_equal(weights_in(tokens), weights, equal_nan=True)
    assert tokens == (without_texts(whole) if path.suffix == ".npz" else whole)
    if "token" not in words:
        check_layer_ids(ids, has_all)
    if path.suffix == ".parquet":
        check_parquet(pq.ParquetFile(path), said, has_all)


def check_layer_ids(ids: Any, has_all: bool) -> None:
    """Where the files do not say which layers they have, there are none, or null in each place."""
    ids_in_file = None if ids is None else [*ids]
    assert ids_in_file in ([LAYER_IDS] if has_all else [None, [None] * LAYERS])


def check_parquet(file: pq.ParquetFile, said: str, has_all: bool) -> None:
    assert f" {file.metadata.num_rows} rows" in said
    assert file.num_row_groups > 2
    facts = json.loads(file.schema_arrow.metadata[b"routed_experts"])
    assert facts == (INFO if has_all else {**INFO, "num_experts": None, "layer_ids": None})


def remove_info(folder: Path) -> None:
    """Leaves files that do not say which layers they have."""
    for file in folder.iterdir():
        text = file.read_text().replace(f"{json.dumps(INFO)}\n", "")
        file.write_text(text.replace("routed_experts_info", "other"))


def said_of(path: Path, num_tokens: int, per_token: bool) -> str:
    """What the command says of a file with the answers above."""
    if path.suffix == ".npz":
        written = f"arrays of {num_tokens}"
    elif per_token:
        written = f"{num_tokens} rows, one for each token"
    else:
        written = f"{num_tokens * LAYERS} rows, one for each token and layer"
    return (
        f"Wrote {path}: 4 responses, {num_tokens} tokens with experts, 1 of them unknown; "
        f"{written}.\n"
    )


def without_texts(tokens: Tokens) -> Tokens:
    """As npz has them: it has no texts but the file's name."""
    texts = ("group", "id", "token")
    return [{name: value for name, value in token.items() if name not in texts} for token in tokens]


def test_prompts_whose_rows_are_equal(tmp_path: Path) -> None:
    """Of a list: both come, as their tokens differ."""
    several = [
        RoutedPrompt(rows_of(2, 1), [rows_of(2, 2)] * 2, first_token=first) for first in (100, 500)
    ]
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer(*several)))
    tokens, _ = tokens_in(exported(tmp_path / "answers.jsonl", "out.npz --n 2"))
    of_prompts = [(token["token_id"], token["choice"]) for token in tokens if token["is_prompt"]]
    assert of_prompts == [(100, 0), (101, 0), (500, 2), (501, 2)]


# ---- the documentation ----


def test_the_documented_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, documented: list[str]
) -> None:
    (command,) = documented
    monkeypatch.chdir(folder)
    Path("0.jsonl").rename("answers.jsonl")
    assert main(command.split()[1:]) == 0
    assert pq.read_table("experts.parquet").num_rows == (20 + 9 + 5) * LAYERS


@pytest.fixture
def known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """The tokens of exports in the current folder with known experts: of responses that say their
    tokens."""
    (folder / "2.jsonl").unlink()
    for name in FORMATS:
        monkeypatch.chdir(exported(folder, name.replace("out", "experts")).parent)
    return [
        token
        for token in expected(folder)
        if token["token_id"] is not None and token["experts"][0][0] >= 0
    ]


def run_example(example: str) -> None:
    exec((ROOT / "examples" / example).read_text(encoding="utf-8"), {})


def counts_of(tokens: Tokens) -> np.ndarray:
    """[decoder layers, experts]"""
    counts = np.zeros((max(LAYER_IDS) + 1, EXPERTS), np.int64)
    for token in tokens:
        for layer, experts in zip(LAYER_IDS, token["experts"], strict=True):
            counts[layer, experts] += 1
    return counts


def loads_in(lines: Iterable[tuple[int, int, int]]) -> np.ndarray:
    counts = np.zeros((max(LAYER_IDS) + 1, EXPERTS), np.int64)
    for layer, expert, times in lines:
        counts[layer, expert] = times
    return counts


def test_pandas(known: Tokens, documented: list[str]) -> None:
    names: dict[str, Any] = {}
    exec(documented[0], names)
    assert len(names["table"]) == len(known) * LAYERS
    assert np.array_equal(
        loads_in((*key, count) for key, count in names["load"].items()), counts_of(known)
    )


def test_tokens_that_pandas_takes_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, documented: list[str]
) -> None:
    """And empty cells of numbers are still nothing."""
    texts = ["null", "NA", "NaN", "None", "n/a"]
    body = answer(OF_PAGE)
    body["choices"][0]["logprobs"] = {"tokens": texts}
    (folder / "3.jsonl").write_text(json.dumps(body))
    monkeypatch.chdir(exported(folder, "experts.csv --weights").parent)
    names: dict[str, Any] = {}
    exec(documented[0], names)
    table = names["table"]
    of_request = table[(table.request == 3) & (table.layer == 0)]
    assert of_request.token.tolist() == texts[:4]
    assert of_request.token_id.tolist() == [*OF_PAGE.prompt_token_ids, *OF_PAGE.token_ids(0)][:4]
    assert table[table.request == 2].token_id.isna().all()
    assert table[table.expert_0 < 0].weight_0.isna().all()
    assert (table.weight_0.dtype, table.expert_0.dtype) == (np.float64, np.int64)


def test_loads_of_other_programs(known: Tokens) -> None:
    """EPLB d52c72d5, `rebalance_experts`, takes `weight` [MoE layers, experts], and so does vLLM's.
    SGLang 01fec5c2, `compute_initial_expert_location_metadata`, reads a dict with `logical_count`
    [decoder layers, experts], with zeros in dense layers."""
    run_example("loads.py")
    load, counts = np.load("load.npy", allow_pickle=False), counts_of(known)
    assert np.array_equal(load, counts[LAYER_IDS])
    assert json.loads(Path("load.json").read_text()) == {"logical_count": counts.tolist()}
    replicas = EXPERTS + 4
    logical = DefaultEplbPolicy.rebalance_experts(torch.from_numpy(load), replicas, 1, 1, 4).numpy()
    for layer, placed in enumerate(logical):
        assert set(placed) == set(range(EXPERTS))
        share = load[layer] / np.bincount(placed, minlength=EXPERTS)
        assert (
            share[placed].reshape(4, -1).sum(axis=1).max()
            < load[layer].reshape(4, -1).sum(axis=1).max()
        )


def test_llama_cpps_traces(known: Tokens) -> None:
    """thecodacus/llama.cpp 8e5bc28c: `init_moe_expert_cache` counts lines `step,layer,id,...`, and
    none of negative steps, which `tools/moe-trace` writes for prompts. Pull request 28544 of
    ggml-org/llama.cpp: `layer,expert`."""
    run_example("llama_cpp_trace.py")
    lines = [
        [int(word) for word in line.split(",")]
        for line in Path("trace.csv").read_text().splitlines()
    ]
    assert lines == [
        [-1 - step if token["is_prompt"] else step, layer, *ids]
        for step, token in enumerate(known)
        for layer, ids in zip(LAYER_IDS, token["experts"], strict=True)
    ]
    choices = [
        tuple(map(int, line.split(","))) for line in Path("moe_trace.csv").read_text().splitlines()
    ]
    assert np.array_equal(
        loads_in((*key, count) for key, count in Counter(choices).items()), counts_of(known)
    )


def test_megatrons_trace(known: Tokens) -> None:
    """NVIDIA/Megatron-LM 059f0f5c, `RouterTracer`: experts come in ascending order, from a mask."""
    run_example("megatron_trace.py")
    lines = [json.loads(line) for line in Path("router_trace_rank0.jsonl").read_text().splitlines()]
    answers = dict.fromkeys((token["request"], token["choice"]) for token in known)
    for step, key in enumerate(answers):
        tokens = [
            one_token["experts"]
            for one_token in known
            if (one_token["request"], one_token["choice"]) == key
        ]
        for index, layer in enumerate(LAYER_IDS):
            line = lines.pop(0)
            assert line.pop("top_indices") == [sorted(experts[index]) for experts in tokens]
            common = {
                "step": step,
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": 0,
            }
            assert line == {**common, "num_tokens": len(tokens), "topk": TOP_K}
    assert lines == []


# ---- requests ----


def test_how_prompts_are_sent(tmp_path: Path) -> None:
    """Greedily, so that the same command gives the same rows; what a request says takes
    precedence."""
    lines = [
        "one",
        {"prompt": "two", "temperature": 0.5, "max_tokens": 9},
        {"prompt": "three", "n": 2},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    command = ["--url", "host", "--prompts", str(file), "-o", "out.csv", "--max-tokens", "4"]
    (source, one), (_, two), (_, three) = bodies_of(export.parse(command))
    assert source == (str(file), 1)
    assert one == {"prompt": "one", "max_tokens": 4, "temperature": 0}
    assert two == {"prompt": "two", "max_tokens": 9, "temperature": 0.5}
    assert three == {"prompt": "three", "max_tokens": 4, "n": 2}, (
        "vLLM refuses two likeliest choices"
    )
    flags = ["--temperature", "0.7", "--seed", "3", "--chat"]
    (_, one), (_, two), (_, three) = bodies_of(export.parse([*command, *flags]))
    sampling = {"max_tokens": 4, "temperature": 0.7, "seed": 3}
    assert one == {"messages": [{"role": "user", "content": "one"}], **sampling}
    assert two == {"prompt": "two", "max_tokens": 9, "temperature": 0.5, "seed": 3}
    assert three == {"prompt": "three", "n": 2, **sampling}


# ---- long and interrupted exports ----


# JSON lines come from the same parts, and would take half a minute while memory is traced.
@pytest.mark.parametrize("name", sorted({*FORMATS} - {"out.jsonl"}))
def test_memory_does_not_grow(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_GROUP", 2000)
    line = json.dumps(
        {**answer(RoutedPrompt(rows_of(400, 1), [rows_of(200, 2)])), "routed_experts_info": INFO}
    )
    pool, peaks = pa.default_memory_pool(), []
    for answers in (4, 40):
        file = tmp_path / f"{answers}.jsonl"
        file.write_text(f"{line}\n" * answers)
        of_arrow = pa.proxy_memory_pool(pool)
        pa.set_memory_pool(of_arrow)
        try:
            status, peak = peak_of(
                lambda file=file: main(["export", str(file), "-o", str(tmp_path / name)])
            )
        finally:
            pa.set_memory_pool(pool)
        assert status == 0
        peaks.append(peak + (of_arrow.max_memory() or 0))
    assert peaks[1] < 1.25 * peaks[0] + len(line), peaks


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", ["Ctrl-C", "a line that was cut off"])
def test_an_interrupted_export_leaves_what_was_there(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({**answer(SEVERAL), "routed_experts_info": INFO})
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
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "tqdm"):
        monkeypatch.setitem(sys.modules, module, None)
    exported(folder, "out.npz")
    for name in ("out.parquet", "out.csv", "out.jsonl"):
        assert main(["export", str(folder), "-o", str(folder / name)]) == 2
        assert capsys.readouterr().err == f"routed-experts: {export.NO_PYARROW}\n"


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, other = (
        answer(replace(SEVERAL, weights=False)),
        answer(RoutedPrompt(rows_of(4, layers=2), [rows_of(2, layers=2)])),
    )
    large = answer(RoutedPrompt(rows_of(2, 1), [rows_of(2, 2)], first_token=1 << 40))
    nothing = answer(RoutedPrompt(rows_of(2, 1), [rows_of(0, 2)], start=2))
    nowhere = tmp_path / "nowhere" / "out.csv"
    far, deep = (
        copy.deepcopy(JOINED_ANSWER),
        answer(RoutedPrompt(rows_of(2, layers=5000), [rows_of(1, layers=5000)])),
    )
    far["choices"][0]["routed_experts"]["start"] = 2**31 - 1
    for body, flags, sentence in [
        ([far], "-o out.csv", "line 1: choice 0: its first row is at 2147483647."),
        (
            [deep],
            "-o out.parquet",
            "line 1: rows of 5000 layers and 4 experts, which no model has.",
        ),
        (
            [plain, other],
            "-o out.csv",
            "line 2: num_layers is 2 after 3: export one model at a time.",
        ),
        (
            [plain],
            "-o out.csv --weights",
            "line 1: the response has no weights: set return_routed_expert_weights",
        ),
        (
            [{"error": {"message": "no"}}],
            "-o out.csv",
            "line 1: the server answered with an error: no.",
        ),
        (
            [{**plain, "id": 3, "choices": [{**plain["choices"][0], "logprobs": 3}]}],
            "-o out.csv",
            "line 1: ",
        ),
        (
            [large],
            "-o out.parquet",
            "line 1: not what the server sends: Expected `int` <= 2147483647",
        ),
        ([nothing], "-o out.csv", "Nothing to export: the responses have no rows."),
        ([{"choices": []}], "-o out.npz", "line 1: the answer has no choices"),
        (
            [{"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}],
            "-o out.csv",
            "line 1: choice 0 has no routed_experts: the request must ask with return_routed_experts.",
        ),
        (
            [plain],
            f"-o {nowhere}",
            f"--output {nowhere} cannot be written: No such file or directory.",
        ),
        ([plain], f"-o {tmp_path} --format csv", f"--output {tmp_path} is not a file."),
    ]:
        file = tmp_path / "answers.jsonl"
        file.write_text("\n".join(map(json.dumps, body)))
        words = [
            str(tmp_path / word) if word.startswith("out.") else word for word in flags.split()
        ]
        assert main(["export", str(file), *words]) == 2
        message = capsys.readouterr().err
        assert sentence in message
        assert message.count(str(file)) <= 1, "a place is named once"
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]
    for flags, sentence in [
        (
            "FILE -o out.xyz",
            "--output out.xyz names no format: let it end in one of .parquet, .csv, .jsonl, .npz, or set",
        ),
        ("FILE --ouput out.csv", "(--ouput: did you mean --output?)"),
        ("FILE -o out.csv --per token", "--per token is for parquet"),
        ("-o out.csv", "give files, or --url and --prompts"),
        ("-o out.csv --url host", "give files, or --url and --prompts"),
        ("FILE -o out.csv --url host --prompts p", "give files, or --url and --prompts"),
    ]:
        with pytest.raises(SystemExit):
            main(["export", *flags.split()])
        assert sentence in capsys.readouterr().err
