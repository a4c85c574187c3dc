"""A prefill and a decode server over HTTP, and a proxy that relays `kv_transfer_params`, as vLLM's toy proxy does."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.batch import splice
from routed_experts.protocol.collect import collect
from tests.contract.arithmetic import BLOCK, NUM_BLOCKS, K, L, Tokens
from tests.contract.loads import PULL, TracingExecutor, store
from tests.contract.served import ServedExecutor, served
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

    def first(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The prefill leg's answer."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(NO_KV)}
        one = {"max_tokens": 1}
        limits = {"sampling_params": {**body["sampling_params"], **one}} if path == GENERATE else one
        return self.prefill._post(path, {**body, **limits, "stream": False, "kv_transfer_params": params})

    def answers(self, path: str, body: dict[str, Any], stream: bool) -> tuple[dict[str, Any], list[Answer]]:
        """The prefill leg's answer, and the choices of the decode leg's."""
        start, n = body.get("routed_experts_prompt_start", 0), body.get("n", 1)
        first = self.first(path, body)
        body = {**body, "kv_transfer_params": first["kv_transfer_params"]}
        if stream:
            return first, answers_of_stream(self.decode.stream(path, **body), start, n)
        return first, answers_of(self.decode._post(path, body), start)


@pytest.fixture(scope="module")
def legs(tiny_model: Path) -> Iterator[Legs]:
    flags = ("--block-size", str(BLOCK), "--max-model-len", str(BLOCK * (NUM_BLOCKS - 1)), "--enable-scale-out")
    transfer = json.dumps({"kv_connector": PULL, "kv_role": "kv_both"})
    flags = (*flags, "--max-num-batched-tokens", "64", "--kv-transfer-config", transfer)
    with store(), served(tiny_model, LegExecutor, *flags) as one, served(tiny_model, LegExecutor, *flags) as other:
        yield Legs(one, other)


def without_numbers(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[:, :2, -1] = 0
    return rows


def handed(first: dict[str, Any]) -> np.ndarray:
    """The rows that come with the KV of a prefill leg's answer."""
    return decode({**first["kv_transfer_params"]["routed_experts"], "missing": 0})


def check(answer: Answer, prefill_rows: np.ndarray) -> None:
    """All P + G - 1 rows: the prefill leg's own, of the very computation whose KV was pulled, then the decode leg's."""
    p, sequence = len(answer.prompt), Tokens([*answer.prompt, *answer.tokens])
    expected = without_numbers(sequence.rows(answer.start, len(sequence) - 1))
    assert np.array_equal(without_numbers(np.concatenate([answer.prompt_rows, answer.rows])), expected)
    pulled = max(p - 1 - answer.start, 0)
    assert np.array_equal(answer.prompt_rows[:pulled], prefill_rows[:pulled])
    if answer.start < p:
        assert not np.array_equal(answer.prompt_rows[-1], prefill_rows[-1]), "it is computed again"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a completion" * 9, "max_tokens": 7}),
        (COMPLETIONS, {"prompt": "some of it" * 9, "max_tokens": 3, "routed_experts_prompt_start": 20}),
        (COMPLETIONS, {"prompt": "several" * 9, "max_tokens": 5, "n": 2, "temperature": 1.0}),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "one token" * 9, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "a chat" * 9}], "max_tokens": 7}),
    ],
)
def test_every_row_is_there(legs: Legs, path: str, body: dict[str, Any], stream: bool) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, str):  # of its own, so that no prefix is hit
        body = {**body, "prompt": f"{stream}{prompt}"}
    elif prompt is None:
        body = {**body, "messages": [{"role": "user", "content": f"{stream}{body['messages'][0]['content']}"}]}
    first, answers = legs.answers(path, {**ASK, **body}, stream)
    rows = handed(first)[body.get("routed_experts_prompt_start", 0) :]
    if "n" not in body:  # else there is KV of several choices, and only of one of them the rows
        assert np.array_equal(rows, decode(first["prompt_routed_experts"]))
    assert len(answers) == body.get("n", 1)
    if prompt == [5] and stream:
        return  # a second time, when both have its KV: that all rows are there was checked
    for answer in answers:
        check(answer, rows)


def test_a_stop_string(legs: Legs) -> None:
    body = {**ASK, "prompt": "it stops" * 9, "max_tokens": 20}
    _, (whole,) = legs.answers(COMPLETIONS, body, stream=False)
    body |= {"stop": [whole.text[4:6]], "prompt": "it stops" * 9}
    _, (stopped,) = legs.answers(COMPLETIONS, body, stream=True)
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) < 20
    assert not (np.concatenate([stopped.prompt_rows, stopped.rows]) == -1).any()


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_and_out(legs: Legs, stream: bool) -> None:
    prompt = [(7 * i + stream) % 90 for i in range(100)]
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": {"max_tokens": 6}, "return_routed_experts": True}
    body |= {"routed_experts_format": "object", "routed_experts_layout": "joined"}
    first = legs.first(GENERATE, body)
    body["kv_transfer_params"] = first["kv_transfer_params"]
    if stream:
        chunks = legs.decode.stream(GENERATE, **body)
        rows = np.concatenate([decode(chunk["choices"][0]["routed_experts"]) for chunk in chunks])
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or []]
    else:
        (choice,) = legs.decode._post(GENERATE, body)["choices"]
        rows, tokens = decode(choice["routed_experts"]), choice["token_ids"]
    assert len(tokens) == 6
    answer = Answer(prompt, tokens, 0, rows[:100], rows[100:])
    check(answer, decode(first["choices"][0]["routed_experts"]))


def test_the_legs_answers_spliced_are_the_same(legs: Legs) -> None:
    """Where a proxy relays no rows."""
    body = {**ASK, "prompt": "without rows" * 9, "max_tokens": 5}
    first = legs.first(COMPLETIONS, body)
    params = dict(first["kv_transfer_params"])
    rows = params.pop("routed_experts")
    assert rows["shape"] == [len(first["choices"][0]["prompt_token_ids"]), L, K]
    second = legs.decode._post(COMPLETIONS, {**body, "kv_transfer_params": params})
    assert second["prompt_routed_experts"]["missing"] == rows["shape"][0] - 1
    (whole,), (prefill,) = collect(second), collect(first)
    spliced = splice(decode=whole, prefill=prefill).rows
    answer = answers_of(second)[0]
    p = len(answer.prompt)
    answer.prompt_rows, answer.rows = spliced[:p], spliced[p:]
    check(answer, decode(first["prompt_routed_experts"]))


def test_without_the_opt_in_nothing_is_handed_over(legs: Legs) -> None:
    body = {"prompt": "plain" * 20, "max_tokens": 4}
    first = legs.first(COMPLETIONS, body)
    assert "routed_experts" not in first["kv_transfer_params"]
    second = legs.decode._post(COMPLETIONS, {**body, "kv_transfer_params": first["kv_transfer_params"]})
    assert "routed_experts" not in second["choices"][0]


def encoded(shape: tuple[int, ...], dtype: str = "int16", fill: int = 0) -> dict[str, Any]:
    data = base64.b64encode(np.full(shape, fill, dtype).tobytes()).decode()
    return {"data": data, "dtype": dtype, "shape": list(shape)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "AAAA",
        {},
        {**encoded((2, L, K)), "data": None},
        {**encoded((2, L, K)), "data": "!"},
        {**encoded((2, L, K)), "data": "é"},
        {**encoded((2, L, K)), "data": encoded((1, L, K))["data"]},
        encoded((2, L, K + 1)),
        encoded((2, L)),
        encoded((2, L, K), "int32"),
        encoded((2, L, K), fill=-2),
        encoded((99, L, K)),
        {**encoded((2, L, K)), "until": "noon"},
        {**encoded((2, L, K)), "until": 1e300},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_what_comes_in_is_checked(legs: Legs, path: str, wrong: Any, stream: bool) -> None:
    asked: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "abc"},
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
        GENERATE: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
    }
    params = {"do_remote_prefill": True, "remote_request_id": "none", "routed_experts": wrong}
    body = {"model": "tiny", "stream": stream, **asked[path], "kv_transfer_params": params}
    with legs.decode.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "kv_transfer_params.routed_experts"
