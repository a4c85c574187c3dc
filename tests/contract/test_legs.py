"""A prefill and a decode server over HTTP, and a proxy that relays `kv_transfer_params`, as vLLM's
toy proxy does."""

import base64
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import current_thread
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from routed_experts.capture.wire import prefill_rows
from routed_experts.capture.wire.message import OPT_IN_ARG, OptIn
from routed_experts.capture.wire.prefill_rows import PARAM
from routed_experts.protocol.collect import collect
from routed_experts.server.http.requests.request import MSGPACK
from routed_experts.server.outputs.prefill_param import PrefillRowsParam
from tests.contract.engine import K, L, Tokens
from tests.contract.loads import PULL, Store, TracingExecutor, store
from tests.contract.served import (
    SIZES,
    Command,
    InProcessClient,
    ServedExecutor,
    ours,
    served,
    vllms,
)
from tests.contract.test_recording import lines_of
from tests.e2e.harness import ASK, Answer, Server, answers_of, answers_of_stream, decode

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
NO_KV = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class LegExecutor(TracingExecutor, ServedExecutor):
    """Answers what the API process asks, and numbers every computation."""


@dataclass
class Legs:
    """The two servers, and what a proxy does with a request."""

    prefill: Server
    decode: Server
    kv_store: Store

    def first(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The prefill leg's answer."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(NO_KV)}
        one = {"max_tokens": 1}
        limits = (
            {"sampling_params": {**body["sampling_params"], **one}} if path == GENERATE else one
        )
        return self.prefill._post(
            path, {**body, **limits, "stream": False, "kv_transfer_params": params}
        )

    def pull(self, path: str, what: dict[str, Any], first: dict[str, Any]) -> None:
        """The decode leg of a request that asks for nothing: it frees the KV of the prefill leg."""
        self.decode._post(
            path, {**what, "max_tokens": 1, "kv_transfer_params": first["kv_transfer_params"]}
        )

    def answers(
        self, path: str, body: dict[str, Any], stream: bool = False
    ) -> tuple[dict[str, Any], list[Answer]]:
        """The prefill leg's answer, and the choices of the decode leg's."""
        start, n = body.get("routed_experts_prompt_start", 0), body.get("n", 1)
        first = self.first(path, body)
        body = {**body, "kv_transfer_params": first["kv_transfer_params"]}
        if stream:
            return first, answers_of_stream(self.decode.stream(path, **body), start, n)
        return first, answers_of(self.decode._post(path, body), start)


FLAGS = (*SIZES, "--enable-scale-out", "--max-num-batched-tokens", "64")
FLAGS += ("--kv-transfer-config", json.dumps({"kv_connector": PULL, "kv_role": "kv_both"}))
FLAGS += ("--enable-log-requests", "--max-log-len", "100000000")


@contextmanager
def two_servers(model: Path, *more: str, command: Command = ours) -> Iterator[Legs]:
    a_server = partial(served, model, LegExecutor, *FLAGS, *more, command=command)
    with store() as kv_store, a_server() as one, a_server() as other:
        yield Legs(one, other, kv_store)


@pytest.fixture(scope="module")
def legs(tiny_model: Path) -> Iterator[Legs]:
    with two_servers(tiny_model) as both:
        yield both


def without_numbers(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[:, :2, -1] = 0
    return rows


def sent_rows(first: dict[str, Any]) -> np.ndarray:
    """The rows that come with the KV of a prefill leg's answer."""
    return decode({**first["kv_transfer_params"]["routed_experts"], "missing": 0})


def check(answer: Answer, prefill_rows: np.ndarray) -> None:
    """All P + G - 1 rows: the prefill leg's own, of the very computation whose KV was pulled, then
    the decode leg's."""
    p, sequence = len(answer.prompt), Tokens([*answer.prompt, *answer.tokens])
    expected = without_numbers(sequence.rows(answer.start, len(sequence) - 1))
    assert np.array_equal(
        without_numbers(np.concatenate([answer.prompt_rows, answer.rows])), expected
    )
    pulled = max(p - 1 - answer.start, 0)
    assert np.array_equal(answer.prompt_rows[:pulled], prefill_rows[:pulled])
    if answer.start < p:
        assert not np.array_equal(answer.prompt_rows[-1], prefill_rows[-1]), "it is computed again"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a completion" * 9, "max_tokens": 7},
        {"prompt": "some of it" * 9, "max_tokens": 3, "routed_experts_prompt_start": 20},
        {"prompt": "several" * 9, "max_tokens": 5, "n": 2, "temperature": 1.0},
        {"prompt": "one token" * 9, "max_tokens": 1},
        {"messages": "chat" * 9, "max_tokens": 7},
    ],
)
def test_every_row_is_there(legs: Legs, body: dict[str, Any], stream: bool) -> None:
    ((what, text),) = [
        (name, value) for name, value in body.items() if name in ("prompt", "messages")
    ]
    text = f"{stream} {text}"  # of its own, so that no prefix is hit
    path = COMPLETIONS if what == "prompt" else CHAT
    request = {
        **ASK,
        **body,
        what: text if what == "prompt" else [{"role": "user", "content": text}],
    }
    first, answers = legs.answers(path, request, stream)
    rows = sent_rows(first)[body.get("routed_experts_prompt_start", 0) :]
    assert "prompt_routed_experts" not in first
    assert len(answers) == body.get("n", 1)
    for answer in answers:
        check(answer, rows)


@pytest.mark.parametrize(
    ("path", "settings", "is_apart"),
    [
        (COMPLETIONS, {"routed_experts_prompt_start": 20}, False),
        (CHAT, {"routed_experts_delivery": "reference"}, False),
        ("/invocations", {"routed_experts_delivery": "inline"}, True),
        # the connector does not send what a stop ended
        (CHAT, {"stop_token_ids": list(range(259))}, True),
        (COMPLETIONS, {"MAX_BYTES": 64}, True),
    ],
    ids=["start", "reference", "inline", "stopped", "too large"],
)
def test_prompt_rows_stand_apart_if_asked_for_or_if_they_do_not_go_with_the_kv(
    legs: Legs, path: str, settings: dict[str, Any], is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{path} with {list(settings)}" * 2
    what = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with monkeypatch.context() as patch:
        patch.setattr(prefill_rows, "MAX_BYTES", settings.get("MAX_BYTES", prefill_rows.MAX_BYTES))
        fields = {name: value for name, value in settings.items() if name != "MAX_BYTES"}
        first = legs.first(path, {**ASK, **what, **fields})
    assert ("prompt_routed_experts" in first) == is_apart
    if is_apart:
        (answer,) = answers_of(first)
        rows = Tokens(answer.prompt).rows(0, len(answer.prompt))
        assert np.array_equal(without_numbers(answer.prompt_rows), without_numbers(rows))
    params = first["kv_transfer_params"] or {}
    assert (PARAM in params) == (
        not fields.keys() & {"stop_token_ids"} and "MAX_BYTES" not in settings
    )
    if params:
        legs.pull(path, what, first)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_and_out(legs: Legs, stream: bool) -> None:
    prompt = [(7 * i + stream) % 90 for i in range(100)]
    body: dict[str, Any] = {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 6},
        "return_routed_experts": True,
    }
    body |= {"routed_experts_format": "object", "routed_experts_layout": "joined"}
    first = legs.first(GENERATE, body)
    body["kv_transfer_params"] = first["kv_transfer_params"]
    messages = (
        legs.decode.stream(GENERATE, **body) if stream else [legs.decode._post(GENERATE, body)]
    )
    choices = [message["choices"][0] for message in messages]
    rows = np.concatenate([decode(choice["routed_experts"]) for choice in choices])
    tokens = [token for choice in choices for token in choice["token_ids"] or []]
    assert len(tokens) == 6
    check(
        Answer(prompt, tokens, 0, rows[:100], rows[100:]),
        decode(first["choices"][0]["routed_experts"]),
    )


def test_the_legs_answers_spliced_are_the_same(legs: Legs) -> None:
    """Where a proxy relays no rows."""
    body = {
        **ASK,
        "prompt": "without rows" * 9,
        "max_tokens": 5,
        "routed_experts_delivery": "inline",
    }
    first = legs.first(COMPLETIONS, body)
    params = dict(first["kv_transfer_params"])
    rows = params.pop("routed_experts")
    assert rows["shape"] == [len(first["choices"][0]["prompt_token_ids"]), L, K]

    def counted() -> np.ndarray:
        reasons = ("kv_transfer", "kv_store", "not_captured", "not_arrived")
        name = "routed_experts_rows_missing_total"
        return np.array(
            [legs.decode.metric(name, model_name="tiny", reason=reason) for reason in reasons]
        )

    before = counted()
    second = legs.decode._post(COMPLETIONS, {**body, "kv_transfer_params": params})
    missing = second["prompt_routed_experts"]["missing"]
    assert missing == rows["shape"][0] - 1
    assert (counted() - before).tolist() == [missing, 0, 0, 0]
    (whole,), (prefill,), (answer,) = collect(second), collect(first), answers_of(second)
    spliced = whole.rows.copy()
    is_unknown = (whole.prompt_rows < 0).any(axis=(1, 2))
    spliced[: len(is_unknown)][is_unknown] = prefill.prompt_rows[is_unknown]
    answer.prompt_rows, answer.rows = np.split(spliced, [len(answer.prompt)])
    check(answer, decode(first["prompt_routed_experts"]))


def test_rows_in_messagepack(legs: Legs) -> None:
    """A proxy that asks for it relays bytes. All other bytes of a request are text to the
    server."""
    body: dict[str, Any] = {"model": "tiny", **ASK, "prompt": "in bytes" * 9, "max_tokens": 5}
    opt_in = OptIn(0, bytes(16), shared=False).encode()
    with legs.prefill.client() as prefill, legs.decode.client() as decode_client:
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(NO_KV)}
        first = {**body, "max_tokens": 1, "kv_transfer_params": params}
        prefilled = msgspec.msgpack.decode(
            prefill.post(COMPLETIONS, json=first, headers={"Accept": MSGPACK}).content
        )
        data = prefilled["kv_transfer_params"]["routed_experts"]["data"]
        assert type(data) is bytes
        packed = {"Content-Type": MSGPACK}

        def post(**more: Any) -> httpx.Response:
            return decode_client.post(
                COMPLETIONS, content=msgspec.msgpack.encode({**body, **more}), headers=packed
            )

        whole = post(kv_transfer_params=prefilled["kv_transfer_params"]).json()
        prefilled_rows = np.frombuffer(data, np.int16).reshape(-1, L, K)
        check(answers_of(whole)[0], prefilled_rows)
        forged = {"prompt": "b", "return_routed_experts": False, "vllm_xargs": {OPT_IN_ARG: opt_in}}
        assert post(**forged).json()["error"]["param"] == f"vllm_xargs.{OPT_IN_ARG}"
        wrong = {**prefilled["kv_transfer_params"], "routed_experts": {"data": data[1:]}}
        assert (
            post(kv_transfer_params=wrong).json()["error"]["param"]
            == "kv_transfer_params.routed_experts"
        )
        for content in (b"", b"\xc1", b"\x81", msgspec.msgpack.encode([1])):
            assert (
                decode_client.post(COMPLETIONS, content=content, headers=packed).status_code == 400
            )


def test_several_prompts_have_their_own_rows(legs: Legs) -> None:
    """vLLM's answer has the `kv_transfer_params` of the first one only."""
    texts = ["one" * 9, "two" * 8]
    first = legs.first(COMPLETIONS, {"prompt": texts, **ASK})
    for text, array in zip(texts, first["prompt_routed_experts"], strict=True):
        assert len(decode(array)) == len(text)


def test_without_the_opt_in_nothing_is_handed_over(legs: Legs) -> None:
    body = {"prompt": "plain" * 20, "max_tokens": 4}
    first = legs.first(COMPLETIONS, body)
    assert PARAM not in first["kv_transfer_params"]
    second = legs.decode._post(
        COMPLETIONS, {**body, "kv_transfer_params": first["kv_transfer_params"]}
    )
    assert "routed_experts" not in second["choices"][0]


# ---- what is refused ----


def encoded(shape: tuple[int, ...], dtype: str = "int16", fill: int = 0) -> dict[str, Any]:
    data = base64.b64encode(np.full(shape, fill, dtype).tobytes()).decode()
    return {"data": data, "dtype": dtype, "shape": list(shape), "until": time.time() + 5}


FITS = encoded((2, L, K))
PULLED = {"do_remote_prefill": True, "remote_request_id": "none", "remote_engine_id": "an engine"}
WRONG_PULL = {**PULLED, "remote_engine_id": []}
WRONG: list[tuple[str, Any]] = [
    *(
        ("routed_experts", value)
        for value in (None, "AAAA", encoded((2, L, K + 1)), encoded((2, L, K), "int32"))
    ),
    *(("routed_experts", value) for value in (encoded((2, L, K), fill=-2), encoded((99, L, K)))),
    *(
        ("routed_experts", {**FITS, "data": data})
        for data in (None, FITS["data"] + "!", encoded((1, L, K))["data"])
    ),
    *(("routed_experts", {**FITS, "until": until}) for until in (None, -1, 1e300)),
    *(
        ("remote_engine_id", []),
        ("remote_request_id", None),
        ("remote_host", 1),
        ("remote_port", "5600; rm"),
    ),
    *(
        ("remote_block_ids", [1, 2]),
        ("tp_size", "1"),
        ("remote_num_tokens", 1.5),
        ("do_remote_prefill", "yes"),
    ),
]
"""A field of `kv_transfer_params`, and what may not be in it."""


SHORT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    GENERATE: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
    "/invocations": {"prompt": "abc", "max_tokens": 2, "return_routed_experts": True},
}


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={"model": "tiny", **SHORT[path], **fields})


def refused(server: Server, path: str, **fields: Any) -> str:
    """The field that a request is refused for."""
    response = post(server, path, **fields)
    assert response.status_code == 400, (fields, response.text)
    return str(response.json()["error"]["param"])


@pytest.mark.parametrize("path", SHORT)
def test_what_comes_in_is_checked(legs: Legs, path: str) -> None:
    """And the prefill instance is told to let its KV go, as after a refusal of vLLM's, if what that
    takes is right."""
    every_way = path == COMPLETIONS
    table = WRONG if every_way else [("routed_experts", None), ("remote_engine_id", [])]
    for index, (field, wrong) in enumerate(table):
        legs.kv_store.refused.clear()
        params = PULLED | (
            {} if field == "routed_experts" or index % 2 else {"routed_experts": FITS}
        )
        params |= {field.partition(".")[0]: wrong}
        param = refused(legs.decode, path, stream=index % 8 < 4, kv_transfer_params=params)
        assert param == f"kv_transfer_params.{field}", params
        legs.decode.complete(prompt="the next step", max_tokens=1)
        assert legs.kv_store.refused == ["none"] * (field == "routed_experts"), params
    if path == GENERATE:
        extra = "sampling_params.extra_args.kv_transfer_params"
        for value, param in (("text", extra), (WRONG_PULL, "kv_transfer_params.remote_engine_id")):
            assert (
                refused(
                    legs.decode, path, sampling_params={"extra_args": {"kv_transfer_params": value}}
                )
                == param
            )
    elif path in (COMPLETIONS, CHAT):
        param = refused(legs.decode, path, vllm_xargs={"kv_transfer_params": [1]})
        assert param == "vllm_xargs.kv_transfer_params"
    legs.decode.complete(prompt="it lives", max_tokens=1)


def test_rows_are_refused_where_nothing_transfers(tiny_model: Path) -> None:
    """What is beside them is nobody's there: without rows, such a request is answered as vLLM
    answers it."""
    with served(tiny_model, ServedExecutor, *SIZES, "--enable-scale-out") as server:
        for path in SHORT:
            params = {**WRONG_PULL, "routed_experts": encoded((1, L, K))}
            assert (
                refused(server, path, kv_transfer_params=params)
                == "kv_transfer_params.routed_experts"
            )
            assert post(server, path, kv_transfer_params=WRONG_PULL).status_code == 200


# ---- what becomes of the rows ----


@pytest.mark.parametrize(
    ("path", "level"), [(COMPLETIONS, logging.DEBUG), (GENERATE, logging.INFO)]
)
def test_rows_are_not_logged(
    legs: Legs,
    path: str,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With `--enable-log-requests`, and at each log level."""
    long = {
        "prompt": f"{level} is logged" * 5,
        "token_ids": [7 * level % 90] * 60,
        "routed_experts_format": "object",
    }
    body = {**ASK, **SHORT[path]}
    body |= {
        name: value for name, value in long.items() if (name == "prompt") == (path == COMPLETIONS)
    }
    first = legs.first(path, body)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(level, "vllm"):
        answer = legs.decode._post(
            path, {**body, "kv_transfer_params": first["kv_transfer_params"]}
        )
    assert answer["choices"]
    assert any("Received request" in line for line in caplog.messages)
    assert any("JSON body" in line for line in caplog.messages) == (level == logging.DEBUG)
    assert (
        max(map(len, caplog.messages))
        < len(first["kv_transfer_params"]["routed_experts"]["data"]) / 10
    )


def test_rows_go_to_the_engine_once(legs: Legs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first choice of a prompt, and not with the others; and the API process does not keep
    them, and reads them in a thread."""
    sizes: list[int] = []
    threads: list[str] = []
    send, parse = InProcessClient.add_request_async, PrefillRowsParam.parse

    def watched(*args: Any) -> None:
        threads.append(current_thread().name)
        parse(*args)

    async def measured(self: InProcessClient, request: EngineCoreRequest) -> None:
        sizes.append(sum(len(part) for part in MsgpackEncoder().encode(request)))
        await send(self, request)

    monkeypatch.setattr(InProcessClient, "add_request_async", measured)
    monkeypatch.setattr(PrefillRowsParam, "parse", watched)
    body = {**ASK, "prompt": "eight choices" * 9, "max_tokens": 2}
    first = legs.first(COMPLETIONS, body)
    sizes.clear()
    body |= {"n": 8, "temperature": 1, "kv_transfer_params": first["kv_transfer_params"]}
    answers = answers_of(legs.decode._post(COMPLETIONS, body), 0)
    row_bytes = len(base64.b64decode(first["kv_transfer_params"]["routed_experts"]["data"]))
    assert len(answers) == len(sizes) == 8
    assert row_bytes < sizes[0] < row_bytes + 5_000
    assert max(sizes[1:]) < 5_000
    assert threads == ["routed-experts-prefill-rows_0"]
    assert not any((answer.prompt_rows == -1).any() for answer in answers)


def test_vllms_own_command_and_flag(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "routed_experts")
    with two_servers(tiny_model, "--enable-return-routed-experts", command=vllms) as legs:
        body = {**ASK, "prompt": "in vLLM's way" * 9, "max_tokens": 5}
        first, (answer,) = legs.answers(COMPLETIONS, body)
        check(answer, sent_rows(first))


def test_clients_of_other_endpoints_get_no_rows(tiny_model: Path, tmp_path: Path) -> None:
    """Also not where their requests are recorded, as they are whatever their parameters hold."""
    record = ("--routed-experts-record", str(tmp_path))
    with (
        store(),
        served(tiny_model, LegExecutor, *FLAGS, *record) as server,
        server.client() as client,
    ):
        params = {"do_remote_decode": True, "do_remote_prefill": False, "routed_experts": True}
        body = {
            "model": "tiny",
            "input": "recorded " * 9,
            "max_output_tokens": 1,
            "kv_transfer_params": params,
        }
        response = client.post("/v1/responses", json=body)
        assert response.status_code == 200
        assert "routed_expert" not in response.text
    (line,) = (line for line in lines_of(tmp_path) if len(line["prompt_token_ids"]) > 50)
    assert line["prompt_routed_experts"]["missing"] == 0
