"""The routers' weights over HTTP, through vLLM's real API process and scheduler: in every form, streamed and not."""

import base64
import io
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from routed_experts.protocol.codec import unpaired
from tests.contract.engine import K, L, weights_for
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, rows_of, serving
from tests.e2e.harness import Server, prompt_of, read_events

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
FLAG = "--enable-return-routed-expert-weights"
WEIGHTS = {"return_routed_experts": True, "return_routed_expert_weights": True, "return_token_ids": True}
IDS = {"return_routed_experts": True, "return_token_ids": True}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me something about experts."}]}


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--max-num-batched-tokens", "64", "--enable-scale-out", FLAG) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--max-num-batched-tokens", "64", "--enable-scale-out") as server:
        yield server


def decoded(value: Any, dtype: str, layers: int = L) -> np.ndarray:
    """Any form of an array, as JSON or MessagePack has it."""
    if isinstance(value, list):
        array = np.array(value, dtype=np.float64 if dtype == "float32" else dtype)
        return array.astype(dtype).reshape(-1, layers, K)
    if isinstance(value, dict):
        assert value["dtype"] == dtype
        return np.frombuffer(binary(value["data"]), dtype).reshape(value["shape"])
    data = binary(value)
    if data.startswith(b"\x93NUMPY"):
        array = np.load(io.BytesIO(data))
        assert array.dtype == np.dtype(dtype)
        return array
    return np.frombuffer(data, dtype).reshape(-1, layers, K)


def binary(data: Any) -> bytes:
    return base64.b64decode(data) if isinstance(data, str) else data


def check(container: dict[str, Any], prefix: str = "", dtype: str = "int16", layers: str = "moe") -> np.ndarray | None:
    """That weights are those of the ids beside them, in the same form; gives the ids."""
    name, of_weights = f"{prefix}routed_experts", f"{prefix}routed_expert_weights"
    assert (name in container) == (of_weights in container)
    if name not in container:
        return None
    ids, weights = container[name], container[of_weights]
    assert type(ids) is type(weights)
    if isinstance(ids, dict):
        assert [ids[key] for key in ("shape", "start", "missing")] == [
            weights[key] for key in ("shape", "start", "missing")
        ]
        assert list(weights) == ["data", "shape", "dtype", "start", "missing"]
    count = DECODER_LAYERS if layers == "all" else L
    rows, found = decoded(ids, dtype, count), decoded(weights, "float32", count)
    assert found.shape == rows.shape
    expected = weights_for(rows.astype(np.int16))
    if layers == "all":
        dense = np.delete(found, LAYER_IDS, axis=1)
        assert dense[~np.isnan(dense)].any() == False  # noqa: E712
        found, expected = found[:, LAYER_IDS], expected[:, LAYER_IDS]
    if isinstance(ids, list):  # null stands for every NaN
        assert np.array_equal(found, expected, equal_nan=True)
    else:
        assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    return rows


def post(server: Server, path: str, accept: str = "application/json", **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={"model": "tiny", "temperature": 0, **body}, headers={"Accept": accept})


FORMS = ("object", "npy", "raw", "list")


@pytest.mark.parametrize(("fmt", "layout", "layers"), list(product(FORMS, ("split", "joined"), ("moe", "all"))))
def test_every_form_whole_and_streamed(api: Server, fmt: str, layout: str, layers: str) -> None:
    form = {"routed_experts_format": fmt, "routed_experts_layout": layout, "routed_experts_layers": layers}
    body = {"prompt": prompt_of(40, 1), "n": 2, "max_tokens": 6, "temperature": 1.0, "seed": 3, **WEIGHTS, **form}
    whole = api.complete(**body)
    (packed,) = [msgspec.msgpack.decode(post(api, COMPLETIONS, "application/msgpack", **body).content)]
    chunks = api.stream(**body)
    for index, choice in enumerate(whole["choices"]):
        rows = check(choice, layers=layers)
        assert rows is not None
        tokens = [*prompt_of(40, 1), *choice["token_ids"]][:-1]
        mine = rows if layers == "moe" else rows[:, LAYER_IDS]
        assert np.array_equal(mine, rows_of(tokens, 0 if layout == "joined" else 40))
        of_packed = check(packed["choices"][index], layers=layers)
        assert of_packed is not None
        of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        pieces = [piece for part in of_choice if (piece := check(part, layers=layers)) is not None]
        assert pieces
        assert sum(map(len, pieces)) == len(rows)
    for container in (whole, packed):
        prompt = check(container, "prompt_", layers=layers)
        assert (prompt is None) == (layout == "joined")
    pieces = [piece for chunk in chunks if (piece := check(chunk, "prompt_", layers=layers)) is not None]
    assert sum(map(len, pieces)) == (0 if layout == "joined" else 40)


@pytest.mark.parametrize("layers", [None, "moe", "all"])
def test_pairs(api: Server, plain: Server, layers: str | None) -> None:
    """Ids, and the bits of their weights, in one array of all decoder layers, as a trainer reads it."""
    form = {"routed_experts_format": "paired"} | ({} if layers is None else {"routed_experts_layers": layers})
    body = {"prompt": prompt_of(40, 1), "max_tokens": 6, **WEIGHTS, **form}
    whole, chunks = api.complete(**body), api.stream(**body)
    rows = rows_of([*prompt_of(40, 1), *whole["choices"][0]["token_ids"]][:-1])
    expected = np.concatenate([rows.astype(np.int32), weights_for(rows).view(np.int32)], axis=2)
    arrays = [whole["prompt_routed_experts"], whole["choices"][0]["routed_experts"]]
    streamed = [chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk]
    streamed += [part["routed_experts"] for chunk in chunks for part in chunk["choices"] if "routed_experts" in part]
    assert "routed_expert_weights" not in whole["choices"][0]
    for pieces in (arrays, streamed):
        found = np.concatenate(
            [np.frombuffer(binary(each["data"]), each["dtype"]).reshape(each["shape"]) for each in pieces]
        )
        if layers != "moe":
            assert found.shape[1:] == (DECODER_LAYERS, 2 * K)
            assert (np.delete(found, LAYER_IDS, axis=1)[:, :, :K] == 0).all()
            found = found[:, LAYER_IDS]
        assert np.array_equal(found[:, :, :K], expected[:, :, :K])
        is_number = ~np.isnan(weights_for(rows))
        assert np.array_equal(found[:, :, K:][is_number], expected[:, :, K:][is_number])
    ids, weights = unpaired(arrays[1])
    assert ids.shape == weights.shape
    response = post(api, COMPLETIONS, **{**body, "return_routed_expert_weights": False})
    assert response.json()["error"]["param"] == "routed_experts_format"
    assert post(plain, COMPLETIONS, **body).status_code == 400


def test_streamed_weights_are_those_of_the_whole_answer(api: Server) -> None:
    for body in (
        {"prompt": prompt_of(300, 2), "max_tokens": 5},
        {"prompt": prompt_of(33, 3), "max_tokens": 1},
        {"prompt": prompt_of(20, 4), "max_tokens": 30, "stream_interval": 7},
    ):
        whole, chunks = api.complete(**body, **WEIGHTS), api.stream(**body, **WEIGHTS)
        for prefix, containers, target in (
            ("prompt_", chunks, whole),
            ("", [chunk["choices"][0] for chunk in chunks], whole["choices"][0]),
        ):
            name = f"{prefix}routed_expert_weights"
            data = [binary(each[name]["data"]) for each in containers if name in each]
            assert b"".join(data) == binary(target[name]["data"])
            check(target, prefix)


def test_lines_hold_both_arrays(api: Server) -> None:
    """No line of a stream has more than 64 KiB of routing, ids and weights together."""
    for form in FORMS:
        body = {"prompt": prompt_of(250, 5), "max_tokens": 3, "routed_experts_format": form, **WEIGHTS}
        with api.client() as client:
            response = client.post(COMPLETIONS, json={"model": "tiny", "stream": True, **body})
        lines = response.text.splitlines()
        assert max(map(len, lines)) < (64 << 10) + 2000
        assert sum(len(line) > 40 << 10 for line in lines) >= 8
        rows = [check(chunk, "prompt_") for chunk in read_events(iter(lines))]
        assert sum(len(each) for each in rows if each is not None) == 250


def test_lists_of_prompts(api: Server) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17)]
    whole = api.complete(prompt=prompts, n=2, max_tokens=4, temperature=1.0, **WEIGHTS)
    assert len(whole["prompt_routed_expert_weights"]) == len(whole["prompt_routed_experts"]) == 3
    for index, prompt in enumerate(prompts):
        names = "prompt_routed_experts", "prompt_routed_expert_weights"
        rows = check({name: whole[name][index] for name in names}, "prompt_")
        assert np.array_equal(rows, rows_of(prompt))
    for choice in whole["choices"]:
        assert check(choice) is not None


@pytest.mark.parametrize("start", [0, 1, 16, 39, 40])
def test_prompt_starts(api: Server, start: int) -> None:
    whole = api.complete(prompt=prompt_of(40, 1), max_tokens=3, routed_experts_prompt_start=start, **WEIGHTS)
    rows = check(whole, "prompt_")
    assert np.array_equal(rows, rows_of(prompt_of(40, 1), start))
    assert whole["prompt_routed_expert_weights"]["start"] == start


def test_chat(api: Server) -> None:
    whole, chunks = (
        api.chat(**MESSAGES, max_tokens=12, **WEIGHTS),
        api.stream(CHAT, **MESSAGES, max_tokens=12, **WEIGHTS),
    )
    assert check(whole, "prompt_") is not None
    rows = check(whole["choices"][0])
    assert rows is not None
    assert len(rows) == 11
    pieces = [each for chunk in chunks for part in chunk["choices"] if (each := check(part)) is not None]
    assert np.array_equal(np.concatenate(pieces), rows)


def test_tokens_in_and_out(api: Server) -> None:
    """There a second .npy stands beside vLLM's own; nothing is, unless it is asked for."""
    body = {"token_ids": prompt_of(20, 6), "sampling_params": {"max_tokens": 5, "temperature": 0, "ignore_eos": True}}
    alone = post(api, GENERATE, return_routed_experts=True, **body).json()
    assert "routed_expert_weights" not in alone["choices"][0]
    asked = {"return_routed_experts": True, "return_routed_expert_weights": True}
    whole = post(api, GENERATE, **asked, **body).json()
    rows = check(whole["choices"][0], dtype="uint16", layers="all")
    assert rows is not None
    assert rows.shape == (24, DECODER_LAYERS, K)
    split = {"routed_experts_layout": "split", "routed_experts_format": "object"}
    whole = post(api, GENERATE, **asked, **split, **body).json()
    assert check(whole, "prompt_") is not None
    assert check(whole["choices"][0]) is not None
    chunks = api.stream(GENERATE, **asked, **body)
    pieces = [check(part, dtype="uint16", layers="all") for chunk in chunks for part in chunk["choices"]]
    assert sum(len(piece) for piece in pieces if piece is not None) == 24


@pytest.mark.parametrize(
    "form",
    [{}, {"routed_experts_format": "list"}, {"routed_experts_histogram": True}, {"routed_experts_layout": "joined"}],
)
@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_for_ids_gets_what_a_server_without_weights_sends(
    api: Server, plain: Server, form: dict[str, Any], stream: bool
) -> None:
    """Byte for byte, but for what is new in every answer."""
    texts = []
    for server in (api, plain):
        body = {"prompt": prompt_of(200, 8), "n": 2, "max_tokens": 9, "temperature": 1.0, **IDS, **form}
        text = post(server, COMPLETIONS, **body, stream=stream).text
        answer = msgspec.json.decode(text.removeprefix("data: ").splitlines()[0] if stream else text)
        text = text.replace(answer["id"], "ID").replace(str(answer["created"]), "TIME")
        texts.append(re.sub(r'"system_fingerprint":"[^"]*"', "", text))  # which vLLM makes of its configuration
    lines = [sorted(text.splitlines()) for text in texts]  # choices may come in another order
    assert lines[0] == lines[1]


def test_histograms_have_sums(api: Server) -> None:
    body = {"prompt": prompt_of(50, 9), "max_tokens": 4, "routed_experts_histogram": True, "return_token_ids": True}
    for more in ({"return_routed_expert_weights": True}, WEIGHTS):
        whole = api.complete(**body | more)
        (last,) = [chunk for chunk in api.stream(**body | more) if "prompt_routed_experts_histogram" in chunk]
        tokens = [*prompt_of(50, 9), *whole["choices"][0]["token_ids"]][:-1]
        for counted, streamed, rows in (
            (whole["prompt_routed_experts_histogram"], last["prompt_routed_experts_histogram"], rows_of(tokens[:50])),
            (
                whole["choices"][0]["routed_experts_histogram"],
                last["choices"][0]["routed_experts_histogram"],
                rows_of(tokens, 50),
            ),
        ):
            weights = weights_for(rows).astype(np.float64)
            sums = np.zeros((L, len(counted["counts"][0])))
            for row, layer, slot in np.argwhere(~np.isnan(weights)).tolist():
                sums[layer, rows[row, layer, slot]] += weights[row, layer, slot]
            assert np.allclose(counted["weights"], sums, rtol=1e-12)
            assert np.allclose(streamed["weights"], sums, rtol=1e-12)
    assert "weights" not in api.complete(**body)["prompt_routed_experts_histogram"]


def test_what_is_refused(api: Server, plain: Server) -> None:
    body = {"prompt": prompt_of(5, 1), "max_tokens": 2}
    for path, more in ((COMPLETIONS, body), (CHAT, MESSAGES | {"max_tokens": 2})):
        response = post(plain, path, **WEIGHTS, **more)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "return_routed_expert_weights"
        assert FLAG in response.json()["error"]["message"]
    for value in (1, "true", None):
        response = post(api, COMPLETIONS, **body, **{**WEIGHTS, "return_routed_expert_weights": value})
        assert response.json()["error"]["param"] == "return_routed_expert_weights"
    response = post(api, COMPLETIONS, **body, return_routed_expert_weights=True)
    assert response.json()["error"]["param"] == "return_routed_expert_weights"
    assert "needs return_routed_experts" in response.json()["error"]["message"]
    assert post(api, COMPLETIONS, **body, **IDS, return_routed_expert_weights=False).status_code == 200


def test_what_the_server_says(api: Server, plain: Server) -> None:
    info = api.info()
    assert (info["weights"], info["weights_scale"], info["weights_on_input"]) == (True, [1.0] * L, False)
    assert plain.info()["weights"] is False
    assert info["capture"]["host_cache_bytes"] == 3 * plain.info()["capture"]["host_cache_bytes"]


def test_limits_and_defaults(tiny_model: Path) -> None:
    default = '{"return_routed_experts": true, "return_routed_expert_weights": true, "routed_experts_format": "npy"}'
    limit = str(4 * 50 * L * K * 4)  # of base64: 150 rows of ids, 50 with weights
    flags = ("--routed-experts-default", default, "--routed-experts-max-response-bytes", limit, FLAG)
    with serving(tiny_model, *flags) as server:
        whole = server.complete(prompt=prompt_of(20, 1), max_tokens=3)
        assert check(whole, "prompt_") is not None
        assert check(whole["choices"][0]) is not None
        body = {"prompt": prompt_of(100, 1), "max_tokens": 2}
        ids = server.complete(**body, return_routed_expert_weights=False)
        assert "prompt_routed_experts" in ids
        assert "prompt_routed_expert_weights" not in ids
        response = post(server, COMPLETIONS, **body, return_routed_expert_weights=True)
        assert response.status_code == 400
        assert "leave out return_routed_expert_weights" in response.json()["error"]["message"]
