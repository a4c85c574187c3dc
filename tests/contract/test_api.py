"""vLLM's real API process with our plugin in it, over HTTP, and behind it vLLM's real scheduler with ours: no model."""

import base64
import io
import random
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from routed_experts.protocol.collect import collect
from tests.contract.engine import NUM_EXPERTS, K, L, Rows, Tokens
from tests.contract.served import DECODER_LAYERS, LAYER_IDS, serving
from tests.e2e.harness import ASK, Answer, Server, answers_of, answers_of_stream, decode, prompt_of, read_events, same

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Tell me something about experts."}
SAMPLED = {"temperature": 1.0}  # which vLLM wants for several choices; here they differ anyway


@pytest.fixture(scope="module", params=["--async-scheduling", "--no-async-scheduling"])
def api(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, request.param, "--max-num-batched-tokens", "64", "--enable-scale-out") as server:
        yield server


def rows_of(tokens: Iterable[int], first: int = 0) -> Rows:
    """The rows of `tokens` from position `first` on."""
    sequence = Tokens(tokens)
    return sequence.rows(first, len(sequence))


def every_layer_of(tokens: Iterable[int], first: int = 0) -> Rows:
    """The same with every decoder layer, as vLLM's own capture has it."""
    rows = rows_of(tokens, first)
    every = np.zeros((len(rows), DECODER_LAYERS, K), dtype=rows.dtype)
    for row, layer in np.ndindex(len(rows), L):
        every[row, LAYER_IDS[layer]] = rows[row, layer]
    return every


def check(answer: Answer, tokens: int | None = None) -> None:
    """Every row of an answer, which must be of `tokens` tokens, is the one that its tokens have."""
    sequence = [*answer.prompt, *answer.tokens]
    assert tokens in (None, len(answer.tokens))
    assert np.array_equal(answer.prompt_rows, rows_of(answer.prompt, answer.start))
    assert np.array_equal(answer.rows, rows_of(sequence[:-1], len(answer.prompt)))


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


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 64, 65, 300])
def test_prompt_lengths(api: Server, length: int) -> None:
    (answer,) = complete(api, prompt=prompt_of(length, length), max_tokens=5)
    check(answer, tokens=5)


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_several_choices(api: Server, n: int, max_tokens: int) -> None:
    answers = complete(api, prompt=prompt_of(33, n), n=n, max_tokens=max_tokens, **SAMPLED)
    assert len({tuple(answer.tokens) for answer in answers}) > (n > 1 and max_tokens > 1)
    for answer in answers:
        check(answer, tokens=max_tokens)


@pytest.mark.parametrize("n", [1, 2])
def test_lists_of_prompts(api: Server, n: int) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17)]
    answers = complete(api, prompt=prompts, n=n, max_tokens=4, **SAMPLED)
    assert [answer.prompt for answer in answers] == [prompt for prompt in prompts for _ in range(n)]
    for answer in answers:
        check(answer, tokens=4)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
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


@pytest.mark.parametrize("n", [1, 3])
def test_chat(api: Server, n: int) -> None:
    for answer in chat(api, messages=[USER], n=n, max_tokens=12, **SAMPLED):
        check(answer, tokens=12)


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
    body = {"prompt": prompt_of(20, 5), "max_tokens": 3, "return_routed_experts": True, "return_token_ids": True}
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
        (whole,) = client.post("/inference/v1/generate", json=body).json()["choices"]
    chunks = api.stream("/inference/v1/generate", **body)
    pieces = [decode(chunk["choices"][0]["routed_experts"]) for chunk in chunks]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or []] == whole["token_ids"]
    assert len(whole["token_ids"]) == 7
    for rows in (decode(whole["routed_experts"]), np.concatenate(pieces)):
        assert np.array_equal(rows, rows_of([*prompt, *whole["token_ids"]][:-1]))


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("dtype", ["int16", "int32"])
@pytest.mark.parametrize("form", ["object", "npy", "raw", "list"])
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
        (whole,) = client.post("/inference/v1/generate", json={"model": "tiny", **body}).json()["choices"]
    pieces = [c["choices"][0]["routed_experts"] for c in api.stream("/inference/v1/generate", **body)]
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
        # A chat that says no limit is known to be too large at its end.
        long = {"messages": [USER], "ignore_eos": True}
        assert server.chat(**long, max_tokens=3)["prompt_routed_experts"]
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


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {"messages": [USER]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
        ("/invocations", {"prompt": "a"}),
        ("/invocations", {"messages": [USER]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 2}),
        ("/v1/chat/completions/batch", {"messages": [[USER]]}),
    ],
)
def test_names_that_nobody_knows(api: Server, path: str, body: dict[str, Any], asks: bool) -> None:
    names = ["return_routed_expert", "routed_experts_formt"]
    names += ["return_routed_expert_weights", "routed_experts_delivery"]  # later parts of the contract
    with api.client() as client:
        for name in names:
            asked = {"model": "tiny", **body, name: True, **({"return_routed_experts": True} if asks else {})}
            response = client.post(path, json=asked)
            assert response.status_code == 400, response.text
            assert f"{name} is not a routing field; the nearest is" in response.text
            if path != "/v1/messages":  # whose errors name no field
                assert response.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("return_routed_experts", "belongs at the top level"),
        ("routed_experts_promt_start", "routed_experts_prompt_start"),
    ],
)
def test_routing_fields_in_sampling_params(api: Server, name: str, reason: str) -> None:
    body = {"model": "tiny", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2, name: True}}
    with api.client() as client:
        error = client.post("/inference/v1/generate", json=body).json()["error"]
    assert (error["code"], error["param"]) == (400, f"sampling_params.{name}")
    assert reason in error["message"]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "structured_outputs"),
        (CHAT, {"messages": [USER]}, "structured_outputs"),
        ("/invocations", {"prompt": "a"}, "structured_outputs"),
        ("/invocations", {"messages": [USER]}, "structured_outputs"),
        ("/inference/v1/generate", {"token_ids": [1]}, "body.sampling_params"),  # vLLM's own answer
    ],
)
def test_structured_outputs_that_are_no_object(
    api: Server, path: str, body: dict[str, Any], param: str, asks: bool
) -> None:
    """vLLM's validators take one for granted, and answer with 500."""
    with api.client() as client:
        for value in (True, 0, 1.5, "", "json", [], [{}]):
            field = {"structured_outputs": value}
            asked = {"model": "tiny", **body, **({"sampling_params": field} if "token_ids" in body else field)}
            response = client.post(path, json={**asked, "return_routed_experts": asks})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param
            assert "structured_outputs" in response.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "top_k": 1 << 70}, "top_k"),
        (CHAT, {"messages": [USER], "stream_interval": 1 << 63}, "stream_interval"),
        ("/invocations", {"prompt": "a", "top_k": 1 << 70}, "top_k"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"trace_decode_token_ids": []}},
            "sampling_params.trace_decode_token_ids",
        ),
    ],
)
def test_what_vllm_answers_with_500(api: Server, path: str, body: dict[str, Any], param: str) -> None:
    with api.client() as client:
        response = client.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reads_pieces_and_messagepack(api: Server) -> None:
    prompt = prompt_of(900, 3)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **ASK}

    def curl(*options: str, **fields: Any) -> bytes:
        command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", f"{api.url}/v1/completions", *options]
        command += ["--header", "Content-Type: application/json", "--data", "@-"]
        return subprocess.run(command, input=orjson.dumps({**body, **fields}), check=True, capture_output=True).stdout

    lines = curl(stream=True).decode().splitlines()
    assert max(map(len, lines)) <= (64 << 10) + 1000
    chunks = list(read_events(iter(lines)))
    assert sum("prompt_routed_experts" in chunk for chunk in chunks) > 10
    (streamed,) = answers_of_stream(chunks)
    check(streamed, tokens=4)
    (whole,) = answers_of(orjson.loads(curl()))
    same(whole, streamed)
    packed = msgspec.msgpack.decode(curl("--header", "Accept: application/msgpack"))["prompt_routed_experts"]
    assert packed["data"] == rows_of(prompt).tobytes()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_routed_experts": True, "routed_experts_prompt_start": 999}, "routed_experts_prompt_start"),
        ({"return_routed_experts": True, "routed_experts_dtype": "uint8"}, "routed_experts_dtype"),
        ({"return_routed_experts": True, "use_beam_search": True, "n": 2}, "return_routed_experts"),
        ({"routed_experts_histogram": True, "use_beam_search": True, "n": 2}, "routed_experts_histogram"),
        ({"routed_experts_format": "npy"}, "routed_experts_format"),
    ],
)
def test_what_cannot_be_given_is_refused_before_it_begins(
    api: Server, path: str, stream: bool, fields: dict[str, Any], param: str
) -> None:
    if fields.get("use_beam_search") and stream:
        pytest.skip("vLLM streams no beam search")
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [USER]}
    with api.client() as client:
        response = client.post(path, json={"model": "tiny", "stream": stream, **asked, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("start", ["2", 2.0, True, [2]])
def test_a_start_in_vllms_own_place_is_an_integer(api: Server, start: Any) -> None:
    """vLLM makes one of most of these, so that rows would begin elsewhere than the client thinks."""
    body = {"token_ids": [1, 2, 3], "return_routed_experts": True}
    body["sampling_params"] = {"max_tokens": 2, "routed_experts_prompt_start": start}
    with api.client() as client:
        response = client.post("/inference/v1/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "routed_experts_prompt_start")


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
            assert b"routed" not in plain.content
            refused = client.post(path, json={**body, "return_routed_experts": True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "return_routed_experts"
            assert "does not capture" in refused.json()["error"]["message"]
            counted = client.post(path, json={**body, "routed_experts_histogram": True})
            assert (counted.status_code, counted.json()["error"]["param"]) == (400, "routed_experts_histogram")
