"""`routed-experts export` of known rows: what each format's reader finds is what was written."""

import copy
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
    step_of,
    stream,
    weights_of,
)

LAYER_IDS = [1, 3, 4]
INFO = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS, "layer_ids": LAYER_IDS}
FORMATS = ("out.parquet", "out.npz")

SEVERAL = RoutedPrompt(rows_of(20, 1), [rows_of(9, 2), rows_of(5, 3)], weights=True, steps=True)
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
                        "label": "gsm8k" if request == 0 else None,
                        "choice": choice,
                        "position": position,
                    },
                    "is_prompt": position < len(routed.prompt) if is_known else None,
                    "token_id": tokens[position] if is_known else None,
                    "token": texts[position],
                    "step": step_of(position)
                    if routed.steps and (rows[position] >= 0).all()
                    else None,
                    "experts": rows[position].tolist(),
                    "weights": weights_of(rows[position]).tolist(),
                }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with the answers above; the first two say which layers they have."""
    folder = tmp_path / "answers"
    folder.mkdir()
    first = {
        "id": "cmpl-1",
        "routed_experts_label": "gsm8k",
        **answer(SEVERAL),
        "routed_experts_info": INFO,
    }
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
    return tokens_of_layers(pq.read_table(path).to_pylist())


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


def weights_in(tokens: Tokens) -> np.ndarray:
    return np.array([token.pop("weights") for token in tokens], np.float32)


@pytest.mark.parametrize("has_all", [True, False], ids=["layers and weights", "neither"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(
    folder: Path,
    name: str,
    has_all: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # so that choices are cut, and groups have several parts
    monkeypatch.setattr(export, "_CUT", 4 * LAYERS)
    monkeypatch.setattr(export, "_GROUP", 10)
    if not has_all:
        remove_info(folder)
    path = exported(folder, f"{name} --weights" if has_all else name)
    whole = list(expected(folder))
    said = f"Wrote {path}: 4 responses, {len(whole)} tokens with experts, 1 of them unknown.\n"
    assert capsys.readouterr() == (said, "")

    tokens, ids = tokens_in(path)
    weights = weights_in(whole)
    if has_all:
        assert np.array_equal(weights_in(tokens), weights, equal_nan=True)
    assert tokens == (without_texts(whole) if path.suffix == ".npz" else whole)
    check_layer_ids(ids, has_all)
    if path.suffix == ".parquet":
        check_parquet(pq.ParquetFile(path), has_all)


def check_layer_ids(ids: Any, has_all: bool) -> None:
    """Where the files do not say which layers they have, there are none, or null in each place."""
    ids_in_file = None if ids is None else [*ids]
    assert ids_in_file in ([LAYER_IDS] if has_all else [None, [None] * LAYERS])


def check_parquet(file: pq.ParquetFile, has_all: bool) -> None:
    assert file.num_row_groups > 2
    facts = json.loads(file.schema_arrow.metadata[b"routed_experts"])
    assert facts == (INFO if has_all else {**INFO, "num_experts": None, "layer_ids": None})


def remove_info(folder: Path) -> None:
    """Leaves files that do not say which layers they have."""
    for file in folder.iterdir():
        text = file.read_text().replace(f"{json.dumps(INFO)}\n", "")
        file.write_text(text.replace("routed_experts_info", "other"))


def without_texts(tokens: Tokens) -> Tokens:
    """As npz has them: it has no texts but the file's name."""
    texts = ("group", "id", "label", "token")
    return [{name: value for name, value in token.items() if name not in texts} for token in tokens]


def test_prompts_whose_rows_are_equal(tmp_path: Path) -> None:
    """Of a list: both come, as their tokens differ."""
    several = [
        RoutedPrompt(rows_of(2, 1), [rows_of(2, 2)] * 2, first_token=first) for first in (100, 500)
    ]
    body = {**answer(*several), "routed_experts_info": {"n": 2}}
    (tmp_path / "answers.jsonl").write_text(json.dumps(body))
    tokens, _ = tokens_in(exported(tmp_path / "answers.jsonl", "out.npz"))
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


def test_traces_of_moe_cache_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """birkansit/moe-cache-lab bf796de1, `TRACE_FORMAT.md`, version 1: prompts layer by layer, then
    token by token. What was computed otherwise is left out: here a prompt of two steps."""
    routed = RoutedPrompt(rows_of(4, 1), [rows_of(3, 2)], steps=True)
    in_chunks = RoutedPrompt(rows_of(5, 3), [rows_of(3, 4)], steps=True)
    lines = [{**answer(routed), "routed_experts_info": INFO}, answer(in_chunks)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "answers.jsonl", "-o", "experts.parquet"]) == 0
    capsys.readouterr()
    run_example("moe_cache_lab_trace.py")
    assert capsys.readouterr().out.startswith("response 1, choice 0: not computed")
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace-0-0.jsonl"]
    head, *events = map(json.loads, Path("trace-0-0.jsonl").read_text().splitlines())
    assert (head["format"], head["format_version"]) == ("moe-cache-lab.routing-jsonl", 1)
    assert (head["num_experts"], head["experts_per_token"]) == (EXPERTS, TOP_K)
    of_prompt = [("prompt", at, layer) for layer in range(LAYERS) for at in range(4)]
    generated = [("generated", at, layer) for at in range(4, 7) for layer in range(LAYERS)]
    rows = routed.whole()
    assert events == [
        {
            "record_type": "routing_selection",
            "phase": phase,
            "token_position": at,
            "layer": LAYER_IDS[layer],
            "selected_experts": rows[at, layer].tolist(),
        }
        for phase, at, layer in [*of_prompt, *generated]
    ]


def test_tokens_and_experts_of_a_step(known: Tokens, documented: list[str]) -> None:
    names: dict[str, Any] = {}
    exec(documented[0], names)
    steps = Counter(token["step"] for token in known if token["step"] is not None)
    assert names["tokens"].to_dict() == steps
    for (step, layer), num_experts in names["experts"].items():
        of_step = [token["experts"] for token in known if token["step"] == step]
        index = LAYER_IDS.index(layer)
        assert num_experts == len({expert for experts in of_step for expert in experts[index]})
    assert len(names["experts"]) == len(steps) * LAYERS


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
    command = ["--url", "host", "--prompts", str(file), "-o", "out.npz", "--max-tokens", "4"]
    (source, one), (_, two), (_, three) = bodies_of(export.parse(command))
    assert source == (str(file), 1)
    assert one == {"prompt": "one", "max_tokens": 4, "temperature": 0}
    assert two == {"prompt": "two", "max_tokens": 9, "temperature": 0.5}
    assert three == {"prompt": "three", "max_tokens": 4, "n": 2}, (
        "vLLM refuses two likeliest choices"
    )


# ---- long and interrupted exports ----


def test_memory_of_parquet_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
                lambda file=file: main(["export", str(file), "-o", str(tmp_path / "out.parquet")])
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
    assert main(["export", str(folder), "-o", str(folder / "out.parquet")]) == 2
    assert capsys.readouterr().err == f"routed-experts: {export.NO_PYARROW}\n"


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, other = (
        answer(replace(SEVERAL, weights=False)),
        answer(RoutedPrompt(rows_of(4, layers=2), [rows_of(2, layers=2)])),
    )
    large = answer(RoutedPrompt(rows_of(2, 1), [rows_of(2, 2)], first_token=1 << 40))
    nothing = answer(RoutedPrompt(rows_of(2, 1), [rows_of(0, 2)], start=2))
    nowhere = tmp_path / "nowhere" / "out.npz"
    far, deep = (
        copy.deepcopy(JOINED_ANSWER),
        answer(RoutedPrompt(rows_of(2, layers=5000), [rows_of(1, layers=5000)])),
    )
    far["choices"][0]["routed_experts"]["start"] = 2**31 - 1
    (tmp_path / "folder.npz").mkdir()
    for body, flags, sentence in [
        ([far], "-o out.npz", "line 1: choice 0: its first row is at 2147483647."),
        (
            [deep],
            "-o out.parquet",
            "line 1: rows of 5000 layers and 4 experts, which no model has.",
        ),
        (
            [plain, other],
            "-o out.npz",
            "line 2: num_layers is 2 after 3: export one model at a time.",
        ),
        (
            [plain],
            "-o out.npz --weights",
            "line 1: the response has no weights: set return_routed_expert_weights",
        ),
        (
            [{"error": {"message": "no"}}],
            "-o out.npz",
            "line 1: the server answered with an error: no.",
        ),
        (
            [{**plain, "id": 3, "choices": [{**plain["choices"][0], "logprobs": 3}]}],
            "-o out.npz",
            "line 1: ",
        ),
        (
            [large],
            "-o out.parquet",
            "line 1: not what the server sends: Expected `int` <= 2147483647",
        ),
        ([nothing], "-o out.npz", "Nothing to export: the responses have no rows."),
        ([{"choices": []}], "-o out.npz", "line 1: the answer has no choices"),
        (
            [{"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}],
            "-o out.npz",
            "line 1: choice 0 has no routed_experts: the request must ask with return_routed_experts.",
        ),
        (
            [plain],
            f"-o {nowhere}",
            f"--output {nowhere} cannot be written: No such file or directory.",
        ),
        ([plain], f"-o {tmp_path}/folder.npz", "folder.npz is not a file."),
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
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", "folder.npz"}
    for flags, sentence in [
        (
            "FILE -o out.xyz",
            "--output out.xyz must end in .parquet or .npz",
        ),
        ("-o out.npz", "give files, or --url and --prompts"),
        ("-o out.npz --url host", "give files, or --url and --prompts"),
        ("FILE -o out.npz --url host --prompts p", "give files, or --url and --prompts"),
    ]:
        with pytest.raises(SystemExit):
            main(["export", *flags.split()])
        assert sentence in capsys.readouterr().err
