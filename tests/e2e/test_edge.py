"""What the HTTP edge adds to rows: pieces, MessagePack, histograms, server-wide defaults, limits and other doors.

One server for all, whose default is to return routing.
"""

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import numpy as np
import openai
import orjson
import pytest
import requests

from tests.clients import consumers
from tests.e2e.harness import SMALL_KV, Oracle, Server, decode, prompt_of, read_events, serving

pytestmark = pytest.mark.e2e

PROMPT_START = "routed_experts_prompt_start"
LINE_BYTES = 64 << 10
ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
FLAGS = (
    *SMALL_KV,
    *("--max-model-len", "2500", "--max-num-batched-tokens", "256", "--enable-scale-out"),
    *("--routed-experts-default", '{"return_routed_experts": true}'),
    *("--routed-experts-max-response-bytes", "150000"),
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, tmp_path_factory.mktemp("edge") / "log", *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


def body_for(path: str, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for `prompt` at any of the endpoints that return routing."""
    if path == "/inference/v1/generate":
        params = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields.pop("params", {})}
        return {"model": "tiny", "token_ids": prompt, "sampling_params": params, **fields}
    if path == "/v1/chat/completions":
        fields = {
            "messages": [{"role": "user", "content": "".join(chr(33 + token % 90) for token in prompt)}],
            **fields,
        }
    else:
        fields = {"prompt": prompt, **fields}
    return {"model": "tiny", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return orjson.loads(response.content)


def chunks_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return list(read_events(response.iter_lines()))


def joined(arrays: list[dict[str, Any]], start: int) -> np.ndarray:
    """The pieces of an array as one, without gap or overlap."""
    at = start
    for array in arrays:
        assert array["start"] == at
        at += array["shape"][0]
    return np.concatenate([decode(array) for array in arrays])


def rows_of_stream(chunks: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    prompts = [chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk]
    own = [c["routed_experts"] for chunk in chunks for c in chunk["choices"] if "routed_experts" in c]
    start = prompts[0]["start"]
    prompt_rows = joined(prompts, start)
    return prompt_rows, joined(own, start + len(prompt_rows)) if own else prompt_rows[:0]


# ---- pieces ----


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("form", ["object", "npy", "raw", "list"])
def test_pieces(client: httpx.Client, path: str, form: str) -> None:
    """2,000 prompt rows take more than one line; put together they are those of the unstreamed answer."""
    body = body_for(path, prompt_of(2000, seed=1), 3, routed_experts_format=form, routed_experts_layout="split")
    whole = answer(client, path, body)
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = list(response.iter_lines())
    assert max(map(len, lines)) <= LINE_BYTES + 1000
    chunks = list(read_events(iter(lines)))
    pieces = [chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk]
    assert len(pieces) > 1
    for chunk in chunks[: len(pieces) - 1]:
        (choice,) = chunk["choices"]
        assert choice.get("finish_reason") is None
        assert not choice.get("text")
        assert not choice.get("delta")
        assert not choice.get("token_ids")
    read = {
        "object": decode,
        "npy": lambda text: np.load(io.BytesIO(base64.b64decode(text))),
        "raw": lambda text: np.frombuffer(base64.b64decode(text), "<i2").reshape(-1, 5, 4),
        "list": np.array,
    }[form]
    assert np.array_equal(np.concatenate([read(piece) for piece in pieces]), read(whole["prompt_routed_experts"]))


def test_streams_with_the_clients_that_people_have(server: Server, oracle: Oracle) -> None:
    prompt = prompt_of(2000, seed=2)
    body = {**body_for("/v1/completions", prompt, 4), "stream": True, "return_token_ids": True}
    url = f"{server.url}/v1/completions"

    async def with_aiohttp() -> list[bytes]:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            return [line async for line in response.content]

    streams = [
        [line.decode().strip() for line in asyncio.run(with_aiohttp())],
        [line.decode() for line in requests.post(url, json=body, stream=True, timeout=100).iter_lines()],
    ]
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = {name: value for name, value in body.items() if name not in ("ignore_eos", "return_token_ids")}
    extra = {"ignore_eos": True, "return_token_ids": True}
    through_sdk = [chunk.model_dump() for chunk in sdk.completions.create(**asked, extra_body=extra)]
    for chunks in (*(list(read_events(iter(lines))) for lines in streams), through_sdk):
        prompt_rows, rows = rows_of_stream([drop_none(chunk) for chunk in chunks])
        tokens = [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids") or []]
        assert oracle.wrong(np.concatenate([prompt_rows, rows]), [*prompt, *tokens[:-1]]) == []


def drop_none(chunk: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chunk.items() if value is not None}


# ---- MessagePack ----


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("form", ["object", "npy", "raw", "list"])
def test_msgpack_is_the_same_answer(client: httpx.Client, path: str, form: str) -> None:
    body = body_for(path, prompt_of(1500, seed=3), 3, routed_experts_format=form, routed_experts_layout="split")
    expected = answer(client, path, body)
    response = client.post(path, json=body, headers={"Accept": "application/msgpack"})
    assert response.headers["content-type"] == "application/msgpack"
    packed = msgspec.msgpack.decode(response.content)

    def bare(body: dict[str, Any]) -> Any:
        once = {"id", "request_id", "created"}
        return {name: value for name, value in body.items() if name not in once}

    array = packed["prompt_routed_experts"]
    if form != "list":
        assert isinstance(array["data"] if form == "object" else array, bytes)
    assert bare(as_json(packed)) == bare(expected)


def as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def test_errors_and_streams_are_not_msgpack(client: httpx.Client) -> None:
    headers = {"Accept": "application/msgpack"}
    body = body_for("/v1/completions", [40, 41], 2)
    refused = client.post("/v1/completions", json={**body, "routed_experts_dtype": "int8"}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "routed_experts_dtype"
    streamed = client.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    assert streamed.headers["content-type"].startswith("text/event-stream")


# ---- histograms ----


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("start", [0, 7])
def test_histograms_count_the_rows_that_would_have_come(client: httpx.Client, path: str, start: int) -> None:
    body = body_for(path, prompt_of(90, seed=4), 9, routed_experts_prompt_start=start, routed_experts_format="object")
    whole = answer(client, path, {**body, "routed_experts_histogram": True})
    rows = decode(whole["prompt_routed_experts"]), decode(whole["choices"][0]["routed_experts"])
    expected = [
        {
            "counts": [np.bincount(layer.ravel(), minlength=16).tolist() for layer in each.transpose(1, 0, 2)],
            "rows": len(each),
            "missing": 0,
        }
        for each in rows
    ]
    assert whole["prompt_routed_experts_histogram"] == expected[0]
    assert whole["choices"][0]["routed_experts_histogram"] == expected[1]
    del body["routed_experts_format"]
    alone = {**body, "return_routed_experts": False, "routed_experts_histogram": True}
    counted = answer(client, path, alone)
    assert counted["prompt_routed_experts_histogram"] == expected[0]
    assert counted["choices"][0]["routed_experts_histogram"] == expected[1]
    assert not counted["choices"][0].get("routed_experts")
    chunks = chunks_of(client, path, alone)
    ends = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0].get("finish_reason")]
    assert [chunk for chunk in chunks if "routed_experts_histogram" in orjson.dumps(chunk).decode()] == ends
    assert ends[0]["prompt_routed_experts_histogram"] == expected[0]
    assert ends[0]["choices"][0]["routed_experts_histogram"] == expected[1]


# ---- defaults ----


def test_the_servers_default_and_a_requests_own_word(client: httpx.Client) -> None:
    body = body_for("/v1/completions", prompt_of(20, seed=5), 4)
    assert "prompt_routed_experts" in answer(client, "/v1/completions", body)
    plain = answer(client, "/v1/completions", {**body, "return_routed_experts": False})
    assert "routed_experts" not in orjson.dumps(plain).decode()
    typed = answer(client, "/v1/completions", {**body, "routed_experts_dtype": "uint8"})
    assert typed["choices"][0]["routed_experts"]["dtype"] == "uint8"


# ---- vLLM's token-in, token-out endpoint ----


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def moe_layers(rows: Any) -> np.ndarray:
    """The layers with experts of rows with every decoder layer; the tiny model's first is dense."""
    every = np.asarray(rows)
    assert every.shape[1] == 6
    assert not every[:, 0].any()
    return every[:, 1:]


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("start", [0, 5, 30])
def test_generate_in_vllms_own_form(client: httpx.Client, oracle: Oracle, mode: str, start: int) -> None:
    prompt = prompt_of(30, seed=6)
    params = {"routed_experts_prompt_start": start, "n": 2, "temperature": 1, "seed": 1}
    body = body_for("/inference/v1/generate", prompt, 6, params=params, output_mode=mode)
    whole = answer(client, "/inference/v1/generate", body)
    assert "prompt_routed_experts" not in whole
    for choice in whole["choices"]:
        rows = npy(choice["routed_experts"])
        assert rows.dtype == np.uint8
        assert oracle.wrong(moe_layers(rows), [*prompt, *choice["token_ids"][:-1]], start) == []
    chunks = chunks_of(client, "/inference/v1/generate", body)
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        tokens = [token for choice in own for token in choice["token_ids"] or []]
        pieces = [npy(choice["routed_experts"]) for choice in own if choice.get("routed_experts")]
        assert oracle.wrong(moe_layers(np.concatenate(pieces)), [*prompt, *tokens[:-1]], start) == []


def test_generate_for_a_client_that_asks_for_nothing(client: httpx.Client, oracle: Oracle) -> None:
    """vime: rows of all tokens but the last, in vLLM's form, from the server-wide default alone."""
    prompt = prompt_of(60, seed=12)
    params = {"max_tokens": 8, "temperature": 0, "top_p": 1.0, "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "tiny", "token_ids": prompt, "sampling_params": params}
    (choice,) = answer(client, "/inference/v1/generate", body)["choices"]
    tokens = [*prompt, *choice["token_ids"]]
    rows = consumers.vime(choice, tokens, num_layers=6, top_k=4, num_experts=16)
    consumers.vime_moe_layers(rows, range(1, 6))
    assert oracle.wrong(moe_layers(rows), tokens[:-1]) == []


def test_generate_with_our_fields(client: httpx.Client) -> None:
    prompt = prompt_of(40, seed=7)
    body = body_for("/inference/v1/generate", prompt, 5, routed_experts_format="object")
    generated = answer(client, "/inference/v1/generate", body)
    completed = answer(client, "/v1/completions", body_for("/v1/completions", prompt, 5))
    assert generated["prompt_routed_experts"] == completed["prompt_routed_experts"]
    assert generated["choices"][0]["routed_experts"] == completed["choices"][0]["routed_experts"]
    prompt_rows, rows = rows_of_stream(chunks_of(client, "/inference/v1/generate", body))
    assert np.array_equal(prompt_rows, decode(completed["prompt_routed_experts"]))
    assert np.array_equal(rows, decode(completed["choices"][0]["routed_experts"]))


def test_generate_refuses_two_starts_and_one_behind_the_prompt(client: httpx.Client) -> None:
    for fields, param in (
        (
            {"routed_experts_prompt_start": 3, "params": {"routed_experts_prompt_start": 2}},
            "routed_experts_prompt_start",
        ),
        ({"params": {"routed_experts_prompt_start": 31}}, "routed_experts_prompt_start"),
        ({"routed_experts_start_len": 31}, "routed_experts_start_len"),
    ):
        body = body_for("/inference/v1/generate", prompt_of(30, seed=8), 2, **fields)
        response = client.post("/inference/v1/generate", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_generate_without_routing_is_vllms(client: httpx.Client) -> None:
    body = body_for("/inference/v1/generate", prompt_of(10, seed=9), 3, return_routed_experts=False)
    plain = answer(client, "/inference/v1/generate", body)
    assert not plain["choices"][0].get("routed_experts")
    assert all(
        not chunk["choices"][0].get("routed_experts") for chunk in chunks_of(client, "/inference/v1/generate", body)
    )


# ---- limits ----


def test_an_answer_that_would_be_too_large_is_refused_at_once(client: httpx.Client) -> None:
    body = body_for("/v1/completions", prompt_of(2000, seed=10), 2, routed_experts_dtype="int32")
    for stream in (False, True):
        response = client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 400
        assert "--routed-experts-max-response-bytes" in response.json()["error"]["message"]
    assert answer(client, "/v1/completions", {**body, "routed_experts_prompt_start": 1500})


def test_a_stream_that_grows_too_large_ends_with_an_error(client: httpx.Client) -> None:
    """Chat has no limit of its own, so that nothing shows it beforehand."""
    body = body_for("/v1/chat/completions", prompt_of(900, seed=11), 1, routed_experts_dtype="int32")
    del body["max_tokens"]
    chunks = chunks_of(client, "/v1/chat/completions", body)
    assert "--routed-experts-max-response-bytes" in chunks[-1]["error"]["message"]
    assert chunks[-1]["error"]["code"] == 500
    prompt_rows, rows = rows_of_stream(chunks[:-1])
    assert (len(prompt_rows) + len(rows)) * 107 <= 150_000


# ---- other doors ----


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 2}),
    ],
)
def test_doors_without_routing_say_so(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    asked = {"model": "tiny", "temperature": 0, **body}
    refused = client.post(path, json={**asked, "return_routed_experts": True})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == "return_routed_experts" or "return_routed_experts" in error["message"]
    assert "/v1/completions" in error["message"]
    counted = client.post(path, json={**asked, "routed_experts_histogram": True})
    assert counted.status_code == 400, counted.text
    assert client.post(path, json=asked).status_code == 200  # the server's default is not for them


@pytest.mark.parametrize("path", ROUTES[:2])
def test_invocations_give_what_the_endpoint_behind_them_gives(client: httpx.Client, path: str) -> None:
    body = body_for(path, prompt_of(30, seed=12), 4)
    direct, dispatched = answer(client, path, body), answer(client, "/invocations", body)
    assert dispatched["prompt_routed_experts"] == direct["prompt_routed_experts"]
    assert dispatched["choices"][0]["routed_experts"] == direct["choices"][0]["routed_experts"]
    prompt_rows, _ = rows_of_stream(chunks_of(client, "/invocations", body))
    assert np.array_equal(prompt_rows, decode(direct["prompt_routed_experts"]))
    plain = answer(client, "/invocations", {**body, "return_routed_experts": False})
    assert "prompt_routed_experts" not in plain
    packed = client.post("/invocations", json=body, headers={"Accept": "application/msgpack"})
    assert packed.headers["content-type"] == "application/msgpack"
    for asked in (body, {**body, "return_routed_experts": False}):
        adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "not-there"}
        assert client.post("/invocations", json=asked, headers=adapter).status_code == 404
        assert client.post("/invocations", json={**asked, "model": "of another name"}).status_code == 200
    refused = client.post("/invocations", json={**body, "routed_experts_dtype": "int8"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "routed_experts_dtype"
