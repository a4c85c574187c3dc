"""vLLM's real API process with our plugin in it, over HTTP, and behind it vLLM's real scheduler
with ours: no model."""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import orjson
import pytest

from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.collect import collect
from routed_experts.server.http.routes.texts import TEXTS_PATH
from tests.contract.engine import K, L
from tests.contract.hostile import check_response
from tests.contract.served import DECODER_LAYERS, check, every_layer_of, rows_of, serving
from tests.e2e.harness import (
    ASK,
    Answer,
    Server,
    answers_of,
    answers_of_stream,
    decode,
    prompt_of,
    read_events,
    same,
)

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me something about experts."}]
}
SAMPLED = {"temperature": 1.0}  # which vLLM wants for several choices; here they differ anyway
ASKS = {"return_routed_experts": True}
MSGPACK = {"Accept": "application/msgpack"}


@pytest.fixture(scope="module")
def api(tiny_model: Path) -> Iterator[Server]:
    """With asynchronous scheduling, as vLLM has it; `test_scheduler` has both."""
    with serving(tiny_model, "--max-num-batched-tokens", "64", "--enable-scale-out") as server:
        yield server


def tokens_of(text: str) -> list[int]:
    """The tiny model's tokens are bytes, the printable ones first."""
    return [ord(character) - ord("!") for character in text]


def post(
    server: Server, path: str, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={"model": "tiny", **body}, headers=headers)


def pieces_of(parts: Iterable[dict[str, Any]], name: str = "routed_experts") -> Any:
    """The rows of chunks, or of what is in them, put together."""
    arrays = [decode(part[name]) for part in parts if name in part]
    return np.concatenate([np.zeros((0, L, K), dtype=np.int16), *arrays])


def both(server: Server, path: str = COMPLETIONS, **body: Any) -> list[Answer]:
    """The choices of an answer, asked for both ways, which must agree bit for bit."""
    start, n = body.get("routed_experts_prompt_start", 0), body.get("n", 1)
    whole = answers_of(server._post(path, {**ASK, **body}), start)
    for one, other in zip(
        whole, answers_of_stream(server.stream(path, **ASK, **body), start, n), strict=True
    ):
        same(one, other)
    return whole


PROMPTS = [prompt_of(length, length) for length in (3, 40, 17)]
CASES: list[dict[str, Any]] = [
    *({"prompt": prompt_of(length, length), "max_tokens": 5} for length in (1, 16, 65, 300)),
    *({"prompt": prompt_of(33, n), "max_tokens": m, "n": n} for n, m in ((1, 1), (5, 40))),
    {"prompt": PROMPTS, "n": 2, "max_tokens": 4},
    *(
        {"prompt": prompt_of(40, 1), "routed_experts_prompt_start": i, "max_tokens": 4}
        for i in (16, 40)
    ),
    {**MESSAGES, "n": 3, "max_tokens": 12},
]


@pytest.mark.parametrize("body", CASES)
def test_every_row_whole_and_streamed(api: Server, body: dict[str, Any]) -> None:
    answers = both(api, CHAT if "messages" in body else COMPLETIONS, **body, **SAMPLED)
    for answer in answers:
        check(answer, tokens=body["max_tokens"])
    n = body.get("n", 1)
    if body.get("prompt") is PROMPTS:
        assert [answer.prompt for answer in answers] == [p for p in PROMPTS for _ in range(n)]
        return
    assert len(answers) == n
    if n > 1 and body["max_tokens"] > 1:
        assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_a_list_of_one_prompt_is_answered_with_a_list(api: Server) -> None:
    (array,) = api.complete(prompt=["abc"], max_tokens=2, **ASKS)["prompt_routed_experts"]
    assert array["shape"] == [3, L, K]


def test_turns_of_a_conversation(api: Server, documented: list[str]) -> None:
    """Each row of each history is that of its tokens, and none was asked for twice but after the
    rewritten part."""
    client, starts = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0), []

    def create(**body: Any) -> Any:
        starts.append(body["extra_body"][START])
        return client.completions.create(**body)

    completions = SimpleNamespace(create=create)
    names: dict[str, Any] = {"client": SimpleNamespace(completions=completions), "model": "tiny"}
    names |= {
        "prompt": prompt_of(20, 1),
        "question": prompt_of(5, 2),
        "another_question": prompt_of(7, 3),
    }
    names["summary"] = [names["prompt"][15] ^ 1, *prompt_of(3, 4)]
    for block in documented:
        exec(block, names)
    assert starts == [0, 27, 27, 15]
    for name in ("first", "second", "branch", "shortened"):
        routing = names[name]
        tokens = [*routing.prompt_token_ids, *routing.token_ids]
        assert np.array_equal(routing.rows, rows_of(tokens[:-1])), name
    third = names["turn"](
        [*names["second"].prompt_token_ids, *names["second"].token_ids, *prompt_of(9, 5)],
        names["second"],
    )
    assert (starts[-1], third.end + 1) == (40, 58)  # as on the page


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_javascript(api: Server, documented: list[str]) -> None:
    (program,) = documented
    program = program.replace("http://localhost:8000", api.url).replace("tiny-moe", "tiny")
    command = ["node", "--input-type=module", "--eval", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    arrays = []
    for line in done.stdout.splitlines():
        start, shape, *ids = line.split()
        assert int(start) == sum(map(len, arrays))
        arrays.append(np.array(ids, np.int16).reshape([int(size) for size in shape.split("x")]))
    (answer,) = both(api, prompt="Hi", max_tokens=4)
    assert np.array_equal(np.concatenate(arrays), [*answer.prompt_rows, *answer.rows])


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 0), (2, 4)])
def test_echo(api: Server, n: int, max_tokens: int) -> None:
    """The prompt's text comes with the first token's; without `return_token_ids`, which would leave
    it out."""
    body = {
        "prompt": "What-a-prompt",
        "echo": True,
        "n": n,
        "max_tokens": max_tokens,
        **SAMPLED,
        **ASKS,
    }
    whole, chunks = api.complete(**body), api.stream(**body)
    prompt = whole["prompt_routed_experts"]
    assert np.array_equal(decode(prompt), rows_of(tokens_of("What-a-prompt")))
    with_prompt = [chunk for chunk in chunks if "prompt_routed_experts" in chunk]
    assert [chunk["prompt_routed_experts"] for chunk in with_prompt] == [prompt]
    assert len(whole["choices"]) == n
    for index, choice in enumerate(whole["choices"]):
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        check_rows_behind_an_echo(choice, deltas, max_tokens)


def check_rows_behind_an_echo(
    choice: dict[str, Any], deltas: list[dict[str, Any]], max_tokens: int
) -> None:
    """Its text begins with the prompt of 13 tokens, whose rows stand elsewhere."""
    rows = decode(choice["routed_experts"])
    tokens = tokens_of(choice["text"])
    assert np.array_equal(pieces_of(deltas), rows)
    assert len(tokens) == 13 + max_tokens
    assert np.array_equal(rows, rows_of(tokens, 13)[: max(max_tokens - 1, 0)])


def test_a_stop_string_that_the_engine_does_not_know(api: Server) -> None:
    """The engine has gone on when this process finds it: the rows behind it are not sent."""
    prompt = tokens_of("Something-to-begin-with")
    (whole,) = both(api, prompt=prompt, max_tokens=30)
    (answer,) = both(api, prompt=prompt, max_tokens=30, stop=whole.text[10:13])
    assert answer.finish_reason == "stop"
    assert 10 < len(answer.tokens) < 30
    check(answer)


def test_a_chat_message_that_is_continued(api: Server) -> None:
    """The stream has a second chunk for each choice before the first token: the message so far."""
    messages = [*MESSAGES["messages"], {"role": "assistant", "content": "Well, "}]
    for echo in (True, False):
        body = {
            "messages": messages,
            "add_generation_prompt": False,
            "n": 2,
            "max_tokens": 6,
            "echo": echo,
        }
        for answer in both(api, CHAT, **body, **SAMPLED):
            assert answer.text.startswith("Well, ") == echo
            check(answer, tokens=6)


def bytes_with_routing(chunks: list[dict[str, Any]]) -> int:
    """The bytes of all chunks that have any, together."""
    texts = [orjson.dumps(chunk) for chunk in chunks]
    return sum(len(text) for text in texts if b"routed" in text)


def test_the_limit_counts_what_is_sent(tiny_model: Path) -> None:
    """100 rows of K ids in int16 in each of 10 layers are 170,667 characters of base64, of 8 layers
    136,534."""
    assert (L, DECODER_LAYERS, K) == (8, 10, 64)
    default = '{"return_routed_experts": true, "routed_experts_layers": "all"}'
    flags = ("--routed-experts-max-response-bytes", "150000", "--routed-experts-default", default)
    body: dict[str, Any] = {"prompt": prompt_of(100, 1), "max_tokens": 1}
    with serving(tiny_model, *flags, "--max-model-len", "300") as server:
        for stream in (False, True):
            refused(server, COMPLETIONS, "return_routed_experts", **body, **ASKS, stream=stream)
        assert server.complete(**body, **ASKS, routed_experts_layers="moe")["prompt_routed_experts"]
        # In the joined layout, each choice has the rows of the prompt.
        two = {"prompt": prompt_of(60, 1), "max_tokens": 1, "n": 2, "temperature": 1}
        assert server.complete(**two, **ASKS)["prompt_routed_experts"]
        joined = {"routed_experts_layout": "joined"}
        refused(server, COMPLETIONS, "return_routed_experts", **two, **joined, **ASKS, stream=True)
        # Where only the server asks, vLLM's answer is better than none.
        assert b"routed" not in orjson.dumps([server.complete(**body), *server.stream(**body)])
        short = server.complete(prompt=prompt_of(50, 1), max_tokens=1)
        assert np.array_equal(
            decode(short["prompt_routed_experts"]), every_layer_of(prompt_of(50, 1))
        )
        # A chat that says no limit is known to be too large at its end, or when its stream comes
        # there.
        long = {**MESSAGES, "ignore_eos": True}
        *chunks, error = server.stream(CHAT, **long, **ASKS)
        assert error["error"]["code"] == 500
        assert "--routed-experts-max-response-bytes" in error["error"]["message"]
        assert bytes_with_routing(chunks) < 200_000
        assert server.chat(**long, max_tokens=3)["prompt_routed_experts"]
        # The first token of an answer has no row in it: the longest prompt that fits is not
        # refused.
        longest = {
            "messages": [{"role": "user", "content": "x" * 90}],
            "routed_experts_layers": "moe",
        }
        assert (
            len(pieces_of(server.stream(CHAT, **longest, **ASKS), "prompt_routed_experts")) == 109
        )
        assert b"routed" not in orjson.dumps(server.chat(**long))
        refused(server, CHAT, "return_routed_experts", **long, **ASKS)


def test_a_default_start_behind_a_prompt(tiny_model: Path) -> None:
    default = '{"return_routed_experts": true, "routed_experts_prompt_start": 20}'
    with serving(tiny_model, "--routed-experts-default", default) as server:
        assert server.complete(prompt=prompt_of(20, 1), max_tokens=2)["prompt_routed_experts"][
            "shape"
        ] == [0, L, K]
        assert "prompt_routed_experts" not in server.complete(prompt=prompt_of(19, 1), max_tokens=2)
        refused(server, COMPLETIONS, "routed_experts_prompt_start", prompt=prompt_of(19, 1), **ASKS)


# ---- what is refused ----

ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (CHAT, MESSAGES),
    (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 2}}),
    ("/invocations", {"prompt": "a"}),
    ("/invocations", MESSAGES),
]
CLOSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", {**MESSAGES, "max_tokens": 2}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES["messages"]] * 2, "max_tokens": 2}),
]


def refused(server: Server, path: str, param: str, **body: Any) -> str:
    """The message of a refusal in OpenAI's form, which names `param`."""
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (400, param)
    return str(error["message"])


@pytest.mark.parametrize(
    "value", [7, True, "1", OptIn(0, bytes(16), shared=False).encode().decode("latin-1")]
)
def test_no_client_can_forge_the_opt_in(api: Server, value: Any) -> None:
    """The key of our opt-in, set from outside, at every endpoint."""
    args = {OPT_IN_ARG: value}
    for path, body in (*ENDPOINTS, *CLOSED):
        more: dict[str, Any] = {
            "max_tokens": 2,
            "stream": path != CLOSED[-1][0],
            "vllm_xargs": args,
        }
        if path == GENERATE:
            more = {"stream": True, "sampling_params": {"max_tokens": 2, "extra_args": args}}
        answer = post(api, path, **{**body, **more})
        assert answer.status_code == 400, answer.text
        assert OPT_IN_ARG in answer.json()["error"]["param"]
    for answer in both(
        api, prompt=prompt_of(9, 1), n=2, max_tokens=3, **SAMPLED, vllm_xargs={"theirs": 1}
    ):
        check(answer, tokens=3)  # others' stay what they are


def test_structured_outputs_that_are_no_object(api: Server) -> None:
    """vLLM's validators take one for granted, and answer with 500."""
    for value, (path, body) in product((True, "json", [{}]), ENDPOINTS[:2]):
        said = refused(api, path, "structured_outputs", **body, structured_outputs=value)
        assert "structured_outputs" in said


START, SAMPLING = "routed_experts_prompt_start", "sampling_params"
LONG, FORMAT = {"routed_experts_start_len": 3}, "routed_experts_format"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    # what vLLM answers with 500
    (COMPLETIONS, "top_k", {"top_k": 1 << 70}, ""),
    (CHAT, "stream_interval", {"stream_interval": 1 << 63}, ""),
    (
        GENERATE,
        f"{SAMPLING}.trace_decode_token_ids",
        {SAMPLING: {"trace_decode_token_ids": []}},
        "",
    ),
    # names that nobody knows
    *(
        (path, name, {**body, name: True}, f"{name} is not a routing field: did you mean")
        for path, body in ENDPOINTS
        for name in ("return_routed_expert", "routed_experts_formt")
    ),
    # fields of ours in sampling_params
    (
        GENERATE,
        f"{SAMPLING}.routed_experts_promt_start",
        {SAMPLING: {"routed_experts_promt_start": True}},
        START,
    ),
    # where vLLM makes an integer of it, rows would begin elsewhere than the client thinks
    *(
        (GENERATE, START, {SAMPLING: {START: start}, **ASKS}, "")
        for start in ("2", 2.0, True, [2], 4)
    ),
    (GENERATE, START, {SAMPLING: {START: 1}, START: 2, **ASKS}, ""),
    *(
        (
            COMPLETIONS,
            *LONG,
            {"prompt": ["abcdef", "ab"], **ASKS, **LONG, "stream": stream},
            "prompt 1 (the first",
        )
        for stream in (False, True)
    ),
]
# Of completions and chats, whole and streamed: with our name of the field, before vLLM's model of
# the body is made.
REFUSED_OF_BOTH: list[tuple[str, dict[str, Any]]] = [
    *((name, {**ASKS, name: 999}) for name in (START, *LONG)),
    ("routed_experts_dtype", {**ASKS, "routed_experts_dtype": "uint8"}),
    ("routed_experts_layout", {**ASKS, "routed_experts_layout": None}),
    (FORMAT, {FORMAT: "npy"}),
    (FORMAT, {**ASKS, FORMAT: "x", "max_tokens": "many"}),
]


def test_what_cannot_be_given_is_refused_before_it_begins(api: Server) -> None:
    bodies = {**dict(reversed(ENDPOINTS)), GENERATE: {"token_ids": [1, 2, 3]}}
    of_both = product((COMPLETIONS, CHAT), REFUSED_OF_BOTH, ({}, {"stream": True}))
    more = [(path, param, {**fields, **stream}, "") for path, (param, fields), stream in of_both]
    for path, param, fields, reason in (*REFUSED, *more):
        assert reason in refused(api, path, param, **{**bodies[path], **fields})


BAD_JSON = (b"", b"{", b"[1, 2]", b'"text"', b"5", b"null", b"\x00", b"\xff\xfe")
BAD_JSON += (b'{"prompt": "\xff"}', b"[" * 5000, b"[" * 100_000)


def test_errors_that_are_not_ours_are_in_the_form_of_others(api: Server) -> None:
    with api.client() as client:
        for (path, _), content in product(ENDPOINTS[:4], BAD_JSON):
            headers = {"Content-Type": "application/json"}
            response = client.post(path, content=content, headers=headers)
            assert response.status_code == 400, (path, content[:20])
            check_response(response)
            assert "routed_experts" not in response.text
    for path, body in ENDPOINTS[:2]:
        request = {**body, **ASKS}
        assert post(api, path, **{**request, "model": "other"}).status_code == 404
        assert post(api, path, **{**request, "temperature": -1}).status_code == 400


# ---- clients, and other ways in ----


def test_pieces_fit_the_lines_of_aiohttp_and_openais_client_collects_them(api: Server) -> None:
    prompt = prompt_of(900, 3)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **ASK}
    url = f"{api.url}/v1/completions"

    async def lines() -> list[str]:
        """aiohttp gives up at lines of 128 KiB."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={**body, "stream": True}) as response,
        ):
            return [line.decode().strip() async for line in response.content]

    (whole,) = answers_of(api.complete(**body))
    chunks = list(read_events(iter(asyncio.run(lines()))))
    assert sum("prompt_routed_experts" in chunk for chunk in chunks) > 10
    (streamed,) = answers_of_stream(chunks)
    check(streamed, tokens=4)
    same(whole, streamed)
    sdk = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none")
    events = sdk.completions.create(
        model="tiny", prompt=prompt, max_tokens=4, stream=True, extra_body=ASK
    )
    (routing,) = collect(event.model_dump(exclude_none=True) for event in events)
    assert np.array_equal(routing.rows, rows_of([*prompt, *whole.tokens[:-1]]))


@pytest.mark.parametrize(("path", "fields"), ENDPOINTS[:2])
def test_invocations_give_what_the_endpoint_behind_them_gives(
    api: Server, path: str, fields: dict[str, Any]
) -> None:
    body, there = {"max_tokens": 4, **ASKS, **fields}, "/invocations"
    direct, dispatched = api._post(path, body), api._post(there, body)
    assert dispatched["prompt_routed_experts"] == direct["prompt_routed_experts"]
    assert dispatched["choices"][0]["routed_experts"] == direct["choices"][0]["routed_experts"]
    rows = pieces_of(api.stream(there, **body), "prompt_routed_experts")
    assert np.array_equal(rows, decode(direct["prompt_routed_experts"]))
    assert post(api, there, MSGPACK, **body).headers["content-type"] == MSGPACK["Accept"]
    plain = post(api, there, **{**body, "return_routed_experts": False})
    assert plain.status_code == 200
    assert b"prompt_routed_experts" not in plain.content
    adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "not-there"}
    assert post(api, there, adapter, **body).status_code == 404
    assert post(api, there, **body, model="of another name").status_code == 200
    refused(api, there, "routed_experts_dtype", **body, routed_experts_dtype="int8")


ALONE = (
    "--no-enable-prefix-caching",
    "--no-async-scheduling",
    "--stream-interval",
    "4",
    "--block-size",
    "16",
)


@pytest.mark.parametrize("flags", [(), ALONE], ids=["prefix cache", "none"])
def test_many_at_once_in_little_memory(tiny_model: Path, flags: tuple[str, ...]) -> None:
    """Requests that share prefixes, streamed and not, some without routing; some are preempted, and
    their prompts' blocks taken by others."""

    def run(index: int) -> None:
        dice = random.Random(f"2 {index}")
        prompt = prompt_of(90, 2)[: dice.randrange(1, 90)] + prompt_of(dice.randrange(3), index)
        body = {
            "prompt": prompt,
            "max_tokens": dice.randrange(1, 25),
            "n": dice.choice((1, 1, 3)),
            **SAMPLED,
        }
        answers: list[Answer] = []
        if dice.random() < 0.2:
            assert "prompt_routed_experts" not in server.complete(**body)
        elif dice.random() < 0.5:
            answers = answers_of(server.complete(**ASK, **body))
        else:
            answers = answers_of_stream(server.stream(**ASK, **body), 0, body["n"])
        for answer in answers:
            check(answer, body["max_tokens"])

    with serving(
        tiny_model, "--num-gpu-blocks-override", "16", "--max-model-len", "240", *flags
    ) as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(60)))
        assert server.metric("vllm:num_preemptions_total") > 0


def test_a_server_that_does_not_capture(tiny_model: Path) -> None:
    with (
        serving(tiny_model, "--no-enable-return-routed-experts") as server,
        server.client() as client,
    ):
        assert client.get("/v1/routed_experts").status_code == 404
        assert client.post(TEXTS_PATH, json={"token_ids": [1]}).status_code == 404
        for path, fields in ENDPOINTS[:2]:
            assert "prompt_routed_experts" not in server._post(path, {**fields, "max_tokens": 3})
            assert "does not capture" in refused(
                server, path, "return_routed_experts", **fields, **ASKS
            )
            refused(
                server, path, "routed_experts_histogram", **fields, routed_experts_histogram=True
            )
