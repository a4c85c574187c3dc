"""vLLM's real API process with our plugin in it, over HTTP, and behind it vLLM's real scheduler with ours: no model."""

import asyncio
import base64
import io
import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import openai
import orjson
import pytest
import requests

from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.collect import collect
from tests.contract.engine import NUM_EXPERTS, K, L
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, check, every_layer_of, rows_of, serving
from tests.e2e.harness import ASK, Answer, Server, answers_of, answers_of_stream, decode, prompt_of, read_events, same

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
USER = {"role": "user", "content": "Tell me something about experts."}
SAMPLED = {"temperature": 1.0}  # which vLLM wants for several choices; here they differ anyway


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    """With asynchronous scheduling, as vLLM has it; `test_scheduler` has both."""
    with serving(tiny_model, "--max-num-batched-tokens", "64", "--enable-scale-out") as server:
        yield server


def tokens_of(text: str) -> list[int]:
    """The tiny model's tokens are bytes, the printable ones first."""
    return [ord(character) - ord("!") for character in text]


def complete(server: Server, **body: Any) -> list[Answer]:
    """The choices of a completion, asked for both ways, which must agree bit for bit."""
    start, n = body.get("routed_experts_prompt_start", 0), body.get("n", 1)
    unstreamed = answers_of(server.complete(**ASK, **body), start)
    streamed = answers_of_stream(server.stream(**ASK, **body), start, per_prompt=n)
    return agreed(unstreamed, streamed)


def chat(server: Server, **body: Any) -> list[Answer]:
    """As `complete`, of a chat."""
    unstreamed = answers_of(server.chat(**ASK, **body))
    return agreed(unstreamed, answers_of_stream(server.stream(CHAT, **ASK, **body), per_prompt=body.get("n", 1)))


def agreed(unstreamed: list[Answer], streamed: list[Answer]) -> list[Answer]:
    for one, other in zip(unstreamed, streamed, strict=True):
        same(one, other)
    return unstreamed


def test_prompt_lengths(api: Server) -> None:
    for length in (1, 15, 16, 17, 47, 64, 65, 300):
        (answer,) = complete(api, prompt=prompt_of(length, length), max_tokens=5)
        check(answer, tokens=5)


def test_several_choices(api: Server) -> None:
    for n, max_tokens in ((1, 1), (1, 40), (2, 2), (5, 1), (5, 40)):
        answers = complete(api, prompt=prompt_of(33, n), n=n, max_tokens=max_tokens, **SAMPLED)
        assert len({tuple(answer.tokens) for answer in answers}) > (n > 1 and max_tokens > 1)
        for answer in answers:
            check(answer, tokens=max_tokens)


def test_lists_of_prompts(api: Server) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17)]
    for n in (1, 2):
        answers = complete(api, prompt=prompts, n=n, max_tokens=4, **SAMPLED)
        assert [answer.prompt for answer in answers] == [prompt for prompt in prompts for _ in range(n)]
        for answer in answers:
            check(answer, tokens=4)
    (array,) = api.complete(prompt=["abc"], max_tokens=2, return_routed_experts=True)["prompt_routed_experts"]
    assert array["shape"] == [3, L, K]  # a list of one is answered with a list


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 0), (1, 1), (2, 4)])
def test_echo(api: Server, n: int, max_tokens: int) -> None:
    """The prompt's text comes with the first token's; without `return_token_ids`, which would leave it out."""
    body = {"prompt": "What-a-prompt", "echo": True, "n": n, "max_tokens": max_tokens, **SAMPLED}
    whole = api.complete(**body, return_routed_experts=True)
    chunks = api.stream(**body, return_routed_experts=True)
    prompt_rows = decode(whole["prompt_routed_experts"])
    assert np.array_equal(prompt_rows, rows_of(tokens_of("What-a-prompt")))
    assert [chunk["prompt_routed_experts"] for chunk in chunks if "prompt_routed_experts" in chunk] == [
        whole["prompt_routed_experts"]
    ]
    assert len(whole["choices"]) == n
    for index, choice in enumerate(whole["choices"]):
        of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        pieces = [decode(delta["routed_experts"]) for delta in of_choice if "routed_experts" in delta]
        rows = decode(choice["routed_experts"])
        assert "".join(delta["text"] for delta in of_choice) == choice["text"]
        assert np.array_equal(np.concatenate([prompt_rows[:0], *pieces]), rows)
        tokens = tokens_of(choice["text"])
        assert len(tokens) == 13 + max_tokens
        assert np.array_equal(rows, rows_of(tokens, 13)[: max(max_tokens - 1, 0)])


def test_prompt_start(api: Server) -> None:
    prompt = prompt_of(40, 1)
    for start in (0, 1, 16, 39, 40):
        (answer,) = complete(api, prompt=prompt, routed_experts_prompt_start=start, max_tokens=4)
        check(answer, tokens=4)
        assert answer.prompt_rows.shape == (40 - start, L, K)


def test_a_stop_string_that_the_engine_does_not_know(api: Server) -> None:
    """The engine has gone on when this process finds it: the rows behind it are not sent."""
    prompt = tokens_of("Something-to-begin-with")
    (whole,) = complete(api, prompt=prompt, max_tokens=30)
    (answer,) = complete(api, prompt=prompt, max_tokens=30, stop=whole.text[10:13])
    assert answer.finish_reason == "stop"
    assert 10 < len(answer.tokens) < 30
    check(answer)


def test_tokens_that_come_in_groups(api: Server) -> None:
    prompt = prompt_of(20, 4)
    answers = answers_of_stream(api.stream(prompt=prompt, max_tokens=30, stream_interval=7, **ASK))
    same(*answers, *complete(api, prompt=prompt, max_tokens=30))


def test_chat(api: Server) -> None:
    for n in (1, 3):
        for answer in chat(api, messages=[USER], n=n, max_tokens=12, **SAMPLED):
            check(answer, tokens=12)


def test_usage_chunks(api: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *rest, last = api.stream(CHAT, messages=[USER], max_tokens=4, stream_options=options, return_routed_experts=True)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert "prompt_routed_experts" not in last
    rows = 0
    for chunk in (chunk for chunk in rest if "usage" in chunk):  # pieces of the prompt's rows have none
        rows += chunk["choices"][0].get("routed_experts", {"shape": [0]})["shape"][0]
        assert rows == max(chunk["usage"]["completion_tokens"] - 1, 0)
    assert rows == 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_message_that_is_continued(api: Server, n: int) -> None:
    """The stream has a second chunk for each choice before the first token: the message so far."""
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    body: dict[str, Any] = {"messages": messages, "add_generation_prompt": False, "n": n, "max_tokens": 6, **SAMPLED}
    for echo in (True, False):
        for answer in chat(api, echo=echo, **body):
            assert answer.text.startswith("Well, ") == echo
            check(answer, tokens=6)


def test_the_form_that_was_asked_for(api: Server) -> None:
    body = {"prompt": prompt_of(20, 5), "max_tokens": 3, **ASK}
    joined = api.complete(**body, routed_experts_layout="joined", routed_experts_format="list")
    (choice,) = joined["choices"]
    assert "prompt_routed_experts" not in joined
    assert np.array_equal(choice["routed_experts"], rows_of([*body["prompt"], *choice["token_ids"][:-1]]))
    chunks = api.stream(**body, routed_experts_layout="joined", routed_experts_format="list")
    pieces = [row for chunk in chunks for row in chunk["choices"][0].get("routed_experts", ())]
    assert pieces == choice["routed_experts"]


def test_tokens_in_and_tokens_out(api: Server) -> None:
    prompt = prompt_of(80, 6)
    body: dict[str, Any] = {"model": "tiny", "token_ids": prompt, "sampling_params": {"max_tokens": 7}}
    body |= {"return_routed_experts": True, "routed_experts_format": "object", "routed_experts_layout": "joined"}
    with api.client() as client:
        (whole,) = client.post(GENERATE, json=body).json()["choices"]
    chunks = api.stream(GENERATE, **body)
    pieces = [decode(chunk["choices"][0]["routed_experts"]) for chunk in chunks]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or []] == whole["token_ids"]
    assert len(whole["token_ids"]) == 7
    for rows in (decode(whole["routed_experts"]), np.concatenate(pieces)):
        assert np.array_equal(rows, rows_of([*prompt, *whole["token_ids"]][:-1]))


@pytest.mark.parametrize(
    ("form", "dtype", "layout"),
    [("object", "int16", "split"), ("npy", "int32", "joined"), ("raw", "int32", "split"), ("list", "int16", "joined")],
)
def test_every_decoder_layer(api: Server, form: str, dtype: str, layout: str) -> None:
    """Whole, in MessagePack, and streamed in pieces."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt_of(150, 11), "max_tokens": 4, **ASK}
    body |= {"routed_experts_format": form, "routed_experts_dtype": dtype}
    body |= {"routed_experts_layout": layout, "routed_experts_layers": "all"}
    shape: dict[str, Any] = {"dtype": dtype, "num_layers": DECODER_LAYERS, "top_k": K}
    with api.client() as client:
        whole = client.post("/v1/completions", json=body)
        packed = client.post("/v1/completions", json=body, headers={"Accept": "application/msgpack"})
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = list(response.iter_lines())
    assert len(lines) > 10
    assert max(map(len, lines)) <= (64 << 10) + 1000
    answers = [whole.json(), msgspec.msgpack.decode(packed.content), read_events(iter(lines))]
    for (routing,) in (collect(answer, **shape) for answer in answers):
        assert len(routing.token_ids or ()) == 4
        assert np.array_equal(routing.rows, every_layer_of([*body["prompt"], *routing.token_ids][:-1]))


def test_moe_layers_alone_are_the_default(api: Server) -> None:
    body: dict[str, Any] = {"prompt": prompt_of(20, 11), "max_tokens": 3, "return_routed_experts": True}
    plain, moe = (api.complete(**body, **fields) for fields in ({}, {"routed_experts_layers": "moe"}))
    assert plain["prompt_routed_experts"] == moe["prompt_routed_experts"]
    assert plain["prompt_routed_experts"]["shape"] == [20, L, K]


def test_a_histogram_of_every_decoder_layer(api: Server) -> None:
    """Dense layers have no counts: the zeros that stand for them in rows are no expert."""
    body: dict[str, Any] = {"prompt": prompt_of(30, 12), "max_tokens": 5, "routed_experts_histogram": True}
    whole = api.complete(**body, routed_experts_layers="all")
    chunks = api.stream(**body, routed_experts_layers="all")
    moe = api.complete(**body)
    (counted,) = [c["prompt_routed_experts_histogram"] for c in chunks if "prompt_routed_experts_histogram" in c]
    assert counted == whole["prompt_routed_experts_histogram"]
    for every, of_moe in (
        (whole["prompt_routed_experts_histogram"], moe["prompt_routed_experts_histogram"]),
        *(
            (one["routed_experts_histogram"], other["routed_experts_histogram"])
            for one, other in zip(whole["choices"], moe["choices"], strict=True)
        ),
    ):
        assert len(every["counts"]) == DECODER_LAYERS
        assert [every["counts"][layer] for layer in LAYER_IDS] == of_moe["counts"]
        for layer in set(range(DECODER_LAYERS)) - set(LAYER_IDS):
            assert every["counts"][layer] == [0] * NUM_EXPERTS
        assert (every["rows"], every["missing"]) == (of_moe["rows"], 0)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, "all"),
        ({"routed_experts_dtype": "int32"}, "all"),
        ({"routed_experts_layers": "moe"}, "moe"),
        ({"routed_experts_format": "npy", "routed_experts_layout": "joined"}, "moe"),
        ({"routed_experts_layout": "joined", "routed_experts_format": "npy", "routed_experts_layers": "all"}, "all"),
    ],
)
def test_layers_of_vllms_own_form(api: Server, fields: dict[str, Any], layers: str) -> None:
    prompt = prompt_of(20, 13)
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 5}, "return_routed_experts": True, **fields}
    with api.client() as client:
        (whole,) = client.post(GENERATE, json={"model": "tiny", **body}).json()["choices"]
    pieces = [c["choices"][0]["routed_experts"] for c in api.stream(GENERATE, **body)]
    tokens = [*prompt, *whole["token_ids"]][:-1]
    expected = every_layer_of(tokens) if layers == "all" else rows_of(tokens)
    for arrays in ([whole["routed_experts"]], pieces):
        rows = [np.load(io.BytesIO(base64.b64decode(array)), allow_pickle=False) for array in arrays]
        assert np.array_equal(np.concatenate(rows), expected)


def test_the_limit_counts_what_is_sent(tiny_model: Path) -> None:
    """100 rows of K ids in int16 in each of 10 layers are 170,667 characters of base64, of 8 layers 136,534."""
    assert (L, DECODER_LAYERS, K) == (8, 10, 64)
    default = '{"return_routed_experts": true, "routed_experts_layers": "all"}'
    flags = ("--routed-experts-max-response-bytes", "150000", "--routed-experts-default", default)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt_of(100, 1), "max_tokens": 1}
    asked = {**body, "return_routed_experts": True}
    with serving(tiny_model, *flags) as server, server.client() as client:
        for stream in (False, True):
            refused = client.post("/v1/completions", json={**asked, "stream": stream})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_routed_experts")
        assert server.complete(**{**asked, "routed_experts_layers": "moe"})["prompt_routed_experts"]
        # Where only the server asks, vLLM's answer is better than none.
        assert b"routed" not in orjson.dumps([server.complete(**body), *server.stream(**body)])
        short = server.complete(prompt=prompt_of(50, 1), max_tokens=1)
        assert np.array_equal(decode(short["prompt_routed_experts"]), every_layer_of(prompt_of(50, 1)))
        # A chat that says no limit is known to be too large at its end, or when its stream comes there.
        long = {"messages": [USER], "ignore_eos": True}
        *chunks, error = server.stream(CHAT, **long, return_routed_experts=True)
        assert error["error"]["code"] == 500
        assert "--routed-experts-max-response-bytes" in error["error"]["message"]
        assert len(orjson.dumps([chunk for chunk in chunks if b"routed" in orjson.dumps(chunk)])) < 200_000
        assert server.chat(**long, max_tokens=3)["prompt_routed_experts"]
        # The first token of an answer has no row in it: the longest prompt that fits is not refused.
        longest = {"messages": [{**USER, "content": "x" * 90}], "routed_experts_layers": "moe"}
        chunks = server.stream(CHAT, **longest, return_routed_experts=True)
        pieces = [chunk["prompt_routed_experts"]["shape"][0] for chunk in chunks if "prompt_routed_experts" in chunk]
        assert sum(pieces) == 109
        assert b"routed" not in orjson.dumps(server.chat(**long))
        refused = client.post(CHAT, json={"model": "tiny", **long, "return_routed_experts": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_routed_experts")


def test_a_default_start_behind_a_prompt(tiny_model: Path) -> None:
    default = '{"return_routed_experts": true, "routed_experts_prompt_start": 20}'
    with serving(tiny_model, "--routed-experts-default", default) as server, server.client() as client:
        assert server.complete(prompt=prompt_of(20, 1), max_tokens=2)["prompt_routed_experts"]["shape"] == [0, L, K]
        assert "prompt_routed_experts" not in server.complete(prompt=prompt_of(19, 1), max_tokens=2)
        body = {"model": "tiny", "prompt": prompt_of(19, 1), "return_routed_experts": True}
        refused = client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "routed_experts_prompt_start")


ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    (CHAT, {"messages": [USER]}),
    (GENERATE, {"token_ids": [1], "sampling_params": {}}),
    ("/invocations", {"prompt": "a"}),
    ("/invocations", {"messages": [USER]}),
]
CLOSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 2}),
    ("/v1/chat/completions/batch", {"messages": [[USER], [USER]], "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), CLOSED)
def test_endpoints_without_routing(api: Server, path: str, body: dict[str, Any]) -> None:
    asked = {"model": "tiny", **body}
    with api.client() as client:
        refused = client.post(path, json={**asked, "return_routed_experts": True})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == "return_routed_experts" or "return_routed_experts" in error["message"]
        assert "/v1/completions" in error["message"]
        assert client.post(path, json={**asked, "routed_experts_histogram": True}).status_code == 400
        assert client.post(path, json=asked).status_code == 200


@pytest.mark.parametrize("value", [7, True, "1", OptIn(0, bytes(16), shared=False).encode().decode("latin-1")])
def test_no_client_can_forge_the_opt_in(api: Server, value: Any) -> None:
    """The key of our opt-in, set from outside, at every endpoint: no routing comes out, and nothing breaks."""
    args = {OPT_IN_ARG: value}
    with api.client() as client:
        for path, body in (*ENDPOINTS, *CLOSED):
            more: dict[str, Any] = {"max_tokens": 2, "stream": path != CLOSED[-1][0], "vllm_xargs": args}
            if path == GENERATE:
                more = {"stream": True, "sampling_params": {"max_tokens": 2, "extra_args": args}}
            answer = client.post(path, json={"model": "tiny", **body, **more})
            assert answer.status_code == 200, answer.text
            assert "error" not in answer.text.replace('"error":null', "")
            assert not re.search(r'routed_experts": ?[^n]', answer.text)


@pytest.mark.parametrize("asks", [False, True])
def test_names_that_nobody_knows(api: Server, asks: bool) -> None:
    names = ["return_routed_expert", "routed_experts_formt"]
    names += ["return_routed_expert_weights", "routed_experts_delivery"]  # later parts of the contract
    with api.client() as client:
        for name, (path, body) in itertools.product(names, (*ENDPOINTS, *CLOSED)):
            asked = {"model": "tiny", **body, name: True, **({"return_routed_experts": True} if asks else {})}
            response = client.post(path, json=asked)
            assert response.status_code == 400, response.text
            assert f"{name} is not a routing field; the nearest is" in response.text
            if path != "/v1/messages":  # whose errors name no field
                assert response.json()["error"]["param"] == name


def refused(api: Server, path: str, param: str, **body: Any) -> str:
    """The message of a refusal in OpenAI's form, which names `param`."""
    with api.client() as client:
        response = client.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (400, param)
    return str(error["message"])


def test_routing_fields_in_sampling_params(api: Server) -> None:
    for name, reason in (
        ("return_routed_experts", "belongs at the top level"),
        ("routed_experts_promt_start", "routed_experts_prompt_start"),
    ):
        params = {"max_tokens": 2, name: True}
        said = refused(api, GENERATE, f"sampling_params.{name}", token_ids=[1, 2], sampling_params=params)
        assert reason in said


def test_structured_outputs_that_are_no_object(api: Server) -> None:
    """vLLM's validators take one for granted, and answer with 500."""
    for value, (path, body) in itertools.product((True, 0, 1.5, "", "json", [], [{}]), ENDPOINTS):
        field: dict[str, Any] = {"structured_outputs": value}
        is_vllms = path == GENERATE  # vLLM's own answer
        asked = {**body, **({"sampling_params": field} if is_vllms else field), "return_routed_experts": value == ""}
        said = refused(api, path, "body.sampling_params" if is_vllms else "structured_outputs", **asked)
        assert "structured_outputs" in said


def test_what_vllm_answers_with_500(api: Server) -> None:
    refused(api, "/v1/completions", "top_k", prompt="a", top_k=1 << 70)
    refused(api, "/invocations", "top_k", prompt="a", top_k=1 << 70)
    refused(api, CHAT, "stream_interval", messages=[USER], stream_interval=1 << 63)
    params = {"trace_decode_token_ids": []}
    refused(api, GENERATE, "sampling_params.trace_decode_token_ids", token_ids=[1], sampling_params=params)


def test_pieces_with_the_clients_that_people_have(api: Server) -> None:
    """Lines are short enough for all of them."""
    prompt = prompt_of(900, 3)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **ASK}
    url = f"{api.url}/v1/completions"

    def curl(*options: str, **fields: Any) -> bytes:
        command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", url, *options]
        command += ["--header", "Content-Type: application/json", "--data", "@-"]
        return subprocess.run(command, input=orjson.dumps({**body, **fields}), check=True, capture_output=True).stdout

    async def with_aiohttp() -> list[bytes]:
        async with aiohttp.ClientSession() as session, session.post(url, json={**body, "stream": True}) as response:
            return [line async for line in response.content]

    (whole,) = answers_of(api.complete(**body))
    streams = [
        [line.strip() for line in asyncio.run(with_aiohttp())],
        list(requests.post(url, json={**body, "stream": True}, stream=True, timeout=100).iter_lines()),
        *([curl(stream=True).splitlines()] if shutil.which("curl") else []),
    ]
    for lines in streams:
        assert max(map(len, lines)) <= (64 << 10) + 1000
        chunks = list(read_events(line.decode() for line in lines))
        assert sum("prompt_routed_experts" in chunk for chunk in chunks) > 10
        (streamed,) = answers_of_stream(chunks)
        check(streamed, tokens=4)
        same(whole, streamed)
    sdk = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none")
    chunks = sdk.completions.create(model="tiny", prompt=prompt, max_tokens=4, stream=True, extra_body=ASK)
    (routing,) = collect(chunk.model_dump(exclude_none=True) for chunk in chunks)
    assert np.array_equal(routing.rows, rows_of([*prompt, *whole.tokens[:-1]]))


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, GENERATE])
def test_messagepack_is_the_same_answer(api: Server, path: str) -> None:
    asked = {
        "/v1/completions": {"prompt": "messagepack", "max_tokens": 3},
        CHAT: {"messages": [USER], "max_tokens": 3},
        GENERATE: {"token_ids": prompt_of(70, 3), "sampling_params": {"max_tokens": 3}},
    }[path]
    headers = {"Accept": "application/msgpack"}

    def as_json(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: as_json(item) for name, item in value.items() if name not in ("id", "request_id", "created")}
        if isinstance(value, list):
            return [as_json(item) for item in value]
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    with api.client() as client:
        for form in ("object", "npy", "raw", "list"):
            fields = {"routed_experts_format": form, "routed_experts_layout": "split", "return_routed_experts": True}
            body = {"model": "tiny", **asked, **fields}
            packed = client.post(path, json=body, headers=headers)
            assert packed.headers["content-type"] == "application/msgpack"
            answer = msgspec.msgpack.decode(packed.content)
            array = answer["prompt_routed_experts"]
            assert form == "list" or isinstance(array["data"] if form == "object" else array, bytes)
            assert as_json(answer) == as_json(client.post(path, json=body).json())
        streamed = client.post(path, json={**body, "stream": True}, headers=headers)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        bad = client.post(path, json={**body, "routed_experts_dtype": "int8"}, headers=headers)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "routed_experts_dtype")


def test_histograms_count_the_rows_that_would_have_come(api: Server) -> None:
    for path, asked in (("/v1/completions", {"prompt": "a histogram"}), (CHAT, {"messages": [USER]})):
        ask = api.complete if path == "/v1/completions" else api.chat
        for start in (0, 7):
            both = {"return_routed_experts": True, "routed_experts_prompt_start": start}
            whole = ask(**asked, **both, max_tokens=9, routed_experts_histogram=True)
            (choice,) = whole["choices"]
            for holder, name in ((whole, "prompt_routed_experts"), (choice, "routed_experts")):
                rows = decode(holder[name])
                counted = holder[f"{name}_histogram"]
                assert (counted["rows"], counted["missing"]) == (len(rows), 0)
                for layer, counts in enumerate(counted["counts"]):
                    assert counts == np.bincount(rows[:, layer].ravel(), minlength=NUM_EXPERTS).tolist()
        alone = {**asked, "max_tokens": 9, "routed_experts_histogram": True}
        (end,) = [chunk for chunk in api.stream(path, **alone) if b"routed_experts" in orjson.dumps(chunk)]
        assert end["choices"][0]["finish_reason"] == "length"
        counted = ask(**alone)
        assert b'"routed_experts"' not in orjson.dumps([counted, end])
        assert end["prompt_routed_experts_histogram"] == counted["prompt_routed_experts_histogram"]
        assert end["choices"][0]["routed_experts_histogram"] == counted["choices"][0]["routed_experts_histogram"]


@pytest.mark.parametrize("asked", [{"prompt": "through another"}, {"messages": [USER]}])
def test_invocations_give_what_the_endpoint_behind_them_gives(api: Server, asked: dict[str, Any]) -> None:
    body = {"model": "tiny", "max_tokens": 4, "return_routed_experts": True, **asked}
    direct = api.complete(**body) if "prompt" in body else api.chat(**body)
    with api.client() as client:
        dispatched = client.post("/invocations", json=body).json()
        packed = client.post("/invocations", json=body, headers={"Accept": "application/msgpack"})
        assert packed.headers["content-type"] == "application/msgpack"
        plain = client.post("/invocations", json={**body, "return_routed_experts": False})
        adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "not-there"}
        assert client.post("/invocations", json=body, headers=adapter).status_code == 404
        assert client.post("/invocations", json={**body, "model": "of another name"}).status_code == 200
    assert b"prompt_routed_experts" not in plain.content
    chunks = api.stream("/invocations", **body)
    pieces = [decode(chunk["prompt_routed_experts"]) for chunk in chunks if "prompt_routed_experts" in chunk]
    assert np.array_equal(np.concatenate(pieces), decode(direct["prompt_routed_experts"]))
    assert dispatched["prompt_routed_experts"] == direct["prompt_routed_experts"]
    assert dispatched["choices"][0]["routed_experts"] == direct["choices"][0]["routed_experts"]
    refused(api, "/invocations", "routed_experts_dtype", **{**body, "routed_experts_dtype": "int8"})


CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"return_routed_experts": True, "routed_experts_prompt_start": 999}, "routed_experts_prompt_start"),
    ({"return_routed_experts": True, "routed_experts_start_len": 999}, "routed_experts_start_len"),
    ({"return_routed_experts": True, "routed_experts_dtype": "uint8"}, "routed_experts_dtype"),
    ({"return_routed_experts": True, "routed_experts_layout": None}, "routed_experts_layout"),
    ({"return_routed_experts": True, "use_beam_search": True, "n": 2}, "return_routed_experts"),
    ({"routed_experts_histogram": True, "use_beam_search": True, "n": 2}, "routed_experts_histogram"),
    ({"routed_experts_format": "npy"}, "routed_experts_format"),
    ({"return_routed_experts": True, "routed_experts_format": "x", "max_tokens": "many"}, "routed_experts_format"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_given_is_refused_before_it_begins(api: Server, stream: bool) -> None:
    """With our name of the field, before vLLM's model of the body is made."""
    for (path, asked), (fields, param) in itertools.product(ENDPOINTS[:2], CANNOT):
        if not (fields.get("use_beam_search") and stream):  # vLLM streams no beam search
            refused(api, path, param, stream=stream, **asked, **fields)
    several = {"prompt": ["abcdef", "ab"], "return_routed_experts": True, "stream": stream}
    said = refused(api, "/v1/completions", "routed_experts_start_len", **several, routed_experts_start_len=3)
    assert "the prompt has 2 tokens" in said


def test_a_start_in_vllms_own_place(api: Server) -> None:
    """It is an integer: vLLM makes one of most of these, so that rows would begin elsewhere than the client thinks."""
    name = "routed_experts_prompt_start"
    for start in ("2", 2.0, True, [2], 4):
        params = {"max_tokens": 2, name: start}
        refused(api, GENERATE, name, token_ids=[1, 2, 3], return_routed_experts=True, sampling_params=params)
    params = {"max_tokens": 2, name: 1}
    refused(api, GENERATE, name, token_ids=[1, 2, 3], sampling_params=params, **{name: 2}, return_routed_experts=True)


@pytest.mark.parametrize("content", ["", '{"model": "tiny"', "[1, 2]", '"text"', "null", b"\xff\xfe"])
def test_errors_that_are_not_ours_stay_vllms(api: Server, content: Any) -> None:
    with api.client() as client:
        for path, body in ENDPOINTS[:2]:
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == 400
            assert "routed_experts" not in response.text
            asked = {"model": "tiny", **body, "return_routed_experts": True}
            assert client.post(path, json={**asked, "model": "other"}).status_code == 404
            assert client.post(path, json={**asked, "temperature": -1}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_who_does_not_ask_gets_nothing(api: Server, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [USER]}
    chunks = api.stream(path, **asked, max_tokens=5)
    whole = api.complete(**asked, max_tokens=5) if "prompt" in asked else api.chat(**asked, max_tokens=5)
    assert whole["usage"]["completion_tokens"] == 5
    assert b"routed" not in orjson.dumps([whole, chunks])


def at_once(server: Server, requests: int, seed: int) -> None:
    """Requests that share prefixes, streamed and not, some without routing, which are all checked."""

    def run(index: int) -> None:
        dice = random.Random(f"{seed} {index}")
        prompt = prompt_of(90, seed)[: dice.randrange(1, 90)] + prompt_of(dice.randrange(3), index)
        body = {"prompt": prompt, "max_tokens": dice.randrange(1, 25), "n": dice.choice((1, 1, 3)), **SAMPLED}
        if dice.random() < 0.2:
            assert "prompt_routed_experts" not in server.complete(**body)
        elif dice.random() < 0.5:
            for answer in answers_of(server.complete(**ASK, **body)):
                check(answer, body["max_tokens"])
        else:
            for answer in answers_of_stream(server.stream(**ASK, **body), per_prompt=body["n"]):
                check(answer, body["max_tokens"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(requests)))


def test_many_at_once(api: Server) -> None:
    at_once(api, requests=40, seed=1)


def test_many_at_once_in_little_memory(tiny_model: Path) -> None:
    """So that some are preempted, and their prompts' blocks taken by others."""
    with serving(tiny_model, "--num-gpu-blocks-override", "16", "--max-model-len", "240") as server:
        at_once(server, requests=40, seed=2)
        assert server.metric("vllm:num_preemptions_total") > 0


def test_clients_that_leave(api: Server) -> None:
    """Nobody else's rows are the worse for it, and the engine goes on."""
    body = {"model": "tiny", "prompt": prompt_of(50, 9), "max_tokens": 400, "stream": True, **ASK}
    for lines in (1, 5, 50):
        with api.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            received = response.iter_lines()
            assert len([next(received) for _ in range(lines)]) == lines
        (answer,) = complete(api, prompt=body["prompt"], max_tokens=3)
        check(answer, tokens=3)


def test_what_the_rows_mean(api: Server) -> None:
    info = api.info()
    assert (info["model"], info["num_layers"], info["top_k"]) == ("tiny", L, K)


def test_a_server_that_does_not_capture(tiny_model: Path) -> None:
    with serving(tiny_model, "--no-enable-return-routed-experts") as server, server.client() as client:
        assert client.get("/v1/routed_experts").status_code == 404
        for path, asked in (("/v1/completions", {"prompt": "a"}), (CHAT, {"messages": [USER]})):
            body = {"model": "tiny", "max_tokens": 3, **asked}
            plain = client.post(path, json=body)
            assert plain.status_code == 200
            assert b"prompt_routed_experts" not in plain.content
            refused = client.post(path, json={**body, "return_routed_experts": True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "return_routed_experts"
            assert "does not capture" in refused.json()["error"]["message"]
            counted = client.post(path, json={**body, "routed_experts_histogram": True})
            assert (counted.status_code, counted.json()["error"]["param"]) == (400, "routed_experts_histogram")
