"""Whole responses: rows from hand-made final outputs to the bytes of the HTTP response, and which form it has."""

import asyncio
import base64
import itertools
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response as HttpResponse
from pydantic import BaseModel

from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.response import MSGPACK, CollectedRows, RoutedResponse, respond, wants_msgpack
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput

L, K, EXPERTS = 2, 3, 64


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K] that say which position they belong to."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def buffer_of(*bounds: int) -> RowBuffer:
    """Rows between `bounds`, in one array each."""
    buffer = RowBuffer()
    for first, end in itertools.pairwise(bounds):
        buffer.push(first, rows_of(first, end))
    return buffer


def choice(tokens: int, buffer: RowBuffer | None, index: int = 0, finish: str = "stop") -> CompletionOutput:
    return CompletionOutput(index, "", list(range(tokens)), None, None, routed_experts=buffer, finish_reason=finish)  # type: ignore[arg-type]


def output(prompt_len: int, *choices: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, list(range(prompt_len)), None, list(choices), finished=True)


class Choice(BaseModel):
    index: int
    text: str = 'say "x":[{ \u2028'
    routed_experts: str | None = None


class Response(BaseModel):
    id: str = "r"
    choices: list[Choice]
    prompt_logprobs: dict[int, float] = {7: -0.5}  # vLLM's keys there are numbers
    kv_transfer_params: dict[str, Any] | None = None


def answer_of(
    outputs: list[RequestOutput], dtype: str = "int16", is_list: bool = False, **options: Any
) -> tuple[RoutedResponse, CollectedRows]:
    asked = RoutingOptions(**options)
    rows = CollectedRows(asked, (L, K))
    for each in outputs:
        rows.collect(each)
    count = sum(len(each.outputs) for each in outputs)
    response = Response(choices=[Choice(index=index) for index in range(count)])
    return RoutedResponse(response, rows, Encoder(asked.format, dtype, (L, K), EXPERTS), is_list), rows


def body_of(outputs: list[RequestOutput], **options: Any) -> dict[str, Any]:
    """The answer as JSON, and checked to be the same in MessagePack."""
    answer, _ = answer_of(outputs, **options)
    body = orjson.loads(b"".join(answer.prepare(packed=False)))
    packed = msgspec.msgpack.decode(b"".join(answer.prepare(packed=True)))
    assert as_json(packed) == body
    return body


def as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def positions(array: dict[str, Any]) -> list[int]:
    rows = decode(array)
    assert rows.shape[1:] == (L, K)
    assert array["missing"] == int((rows[:, 0, 0] == -1).sum())
    return [int(row[0, 0]) for row in rows]


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_every_row_of_every_choice(layout: str) -> None:
    for seed in range(60):
        check_response(random.Random(seed), layout)


def check_response(rng: random.Random, layout: str) -> None:
    lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    start, n = rng.choice([0, 1, min(lengths)]), rng.randint(1, 3)
    outputs, prompts, choices, num_lost = [], [], [], 0
    for prompt_len in lengths:
        buffers, arrived = [], []
        for index in range(n):
            tokens, buffer = rng.randint(1, 6), RowBuffer()
            end = prompt_len + tokens - 1
            has_prompt = rng.random() < 0.8
            lost = {at for at in range(prompt_len, end) if rng.random() < 0.1}
            for at in range(start, end + rng.choice([0, 2])):  # rows behind the last token may follow
                if (has_prompt or at >= prompt_len) and at not in lost:
                    buffer.push(at, rows_of(at, at + 1))
            if start == end:
                buffer.push(start, rows_of(start, start))
            arrived.append(has_prompt)
            num_lost += len(lost) + (0 if has_prompt else min(prompt_len, end) - start)
            buffers.append(choice(tokens, buffer, index))
            choices.append((prompt_len, [-1 if at in lost else at for at in range(prompt_len, end)]))
        prompts.append([at if any(arrived) else -1 for at in range(start, prompt_len)])
        outputs.append(output(prompt_len, *buffers))
    answer, rows = answer_of(outputs, is_list=True, layout=layout, prompt_start=start, histogram=True)
    body = orjson.loads(b"".join(answer.prepare(packed=False)))
    assert as_json(msgspec.msgpack.decode(b"".join(answer.prepare(packed=True)))) == body
    assert all(each.routed_experts is None for each_output in outputs for each in each_output.outputs)
    assert rows.num_lost == num_lost
    if layout == "joined":
        expected = [(start, prompts[at // n] + own) for at, (_, own) in enumerate(choices)]
        assert "prompt_routed_experts" not in body
    else:
        expected = choices
        assert [positions(array) for array in body["prompt_routed_experts"]] == prompts
        assert [array["start"] for array in body["prompt_routed_experts"]] == [start] * len(prompts)
    arrays = [each["routed_experts"] for each in body["choices"]]
    assert [(array["start"], positions(array)) for array in arrays] == expected
    sizes = [len(own) for _, own in expected] + ([] if layout == "joined" else [len(prompt) for prompt in prompts])
    assert (rows.num_rows, rows.nbytes) == (sum(sizes), sum(sizes) * L * K * 2)
    counted = [each["routed_experts_histogram"] for each in body["choices"]]
    for each, own in zip(
        [*body["prompt_routed_experts_histogram"], *counted], [*prompts, *(own for _, own in choices)], strict=True
    ):
        assert (each["rows"], each["missing"]) == (len(own), own.count(-1))
        known = {at for at in own if at >= 0}
        assert all(layer[at] == (K if at in known else 0) for layer in each["counts"] for at in range(12))


def test_the_form_of_the_response() -> None:
    body = body_of([output(3, choice(4, buffer_of(0, 3, 4, 6)))])
    assert body["choices"][0]["text"] == Choice(index=0).text
    assert next(iter(body["choices"][0]["routed_experts"])) == "data"
    assert body["prompt_logprobs"] == {"7": -0.5}
    answer, rows = answer_of([output(3, choice(2, buffer_of(0, 4)))], rows=False, histogram=True)
    counted = orjson.loads(b"".join(answer.prepare(packed=False)))
    assert rows.num_rows == 0
    assert "prompt_routed_experts" not in counted
    assert "routed_experts" not in counted["choices"][0]
    assert np.array(counted["prompt_routed_experts_histogram"]["counts"]).shape == (L, EXPERTS)


def test_all_rows_lost() -> None:
    answer, rows = answer_of([output(2, choice(4, None), choice(1, None, 1))])
    body = orjson.loads(b"".join(answer.prepare(packed=False)))
    assert rows.num_lost == 5 + 2
    assert positions(body["prompt_routed_experts"]) == [-1, -1]
    assert [positions(each["routed_experts"]) for each in body["choices"]] == [[-1] * 3, []]


def test_rows_are_taken_off_before_vllm_sees_the_output() -> None:
    rows = CollectedRows(RoutingOptions(), (L, K))

    async def results() -> AsyncIterator[RequestOutput]:
        yield output(2, choice(2, buffer_of(0, 3)))

    async def seen() -> list[Any]:
        return [each.outputs[0].routed_experts async for each in rows.collect_from(results())]

    assert asyncio.run(seen()) == [None]
    assert len(rows.choices) == 1


@pytest.mark.parametrize(("is_list", "kind"), [(True, list), (False, dict)])
def test_a_list_of_one_prompt_is_a_list(is_list: bool, kind: type) -> None:
    body = body_of([output(2, choice(1, buffer_of(0, 2)))], is_list=is_list, histogram=True)
    assert isinstance(body["prompt_routed_experts"], kind)
    assert isinstance(body["prompt_routed_experts_histogram"], kind)


def test_choices_whose_prompts_went_through_other_weights() -> None:
    """The response's one prompt is the first choice's; where prompt and answer are joined, each has its own."""

    def outputs() -> list[RequestOutput]:
        other = RowBuffer()
        other.push(0, rows_of(10, 13))
        return [output(2, choice(2, buffer_of(0, 3), 0), choice(2, other, 1))]

    joined = body_of(outputs() + outputs(), is_list=True, layout="joined")["choices"]
    assert [positions(each["routed_experts"]) for each in joined] == [[0, 1, 2], [10, 11, 12]] * 2
    split = body_of(outputs())
    assert positions(split["prompt_routed_experts"]) == [0, 1]
    assert [positions(each["routed_experts"]) for each in split["choices"]] == [[2], [12]]


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_prompt_is_whole_if_one_of_its_choices_has_it(aborted: int) -> None:
    """The other may have been aborted before its first token."""
    choices = [choice(3, buffer_of(0, 3, 5), index) for index in range(2)]
    choices[aborted] = choice(0, None, aborted, finish="abort")
    body = body_of([output(3, *choices)])
    assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    assert positions(body["choices"][1 - aborted]["routed_experts"]) == [3, 4]
    assert body["choices"][aborted]["routed_experts"]["shape"] == [0, L, K]


def test_an_abort_is_never_padded() -> None:
    body = body_of([output(3, choice(4, buffer_of(0, 4), finish="abort"))])
    assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    assert positions(body["choices"][0]["routed_experts"]) == [3]
    body = body_of([output(3, choice(0, None, finish="abort"))])
    assert positions(body["prompt_routed_experts"]) == []
    assert positions(body["choices"][0]["routed_experts"]) == []


def test_a_type_that_cannot_say_that_rows_are_lost_fails_before_the_first_byte() -> None:
    for rows, accept in itertools.product((10, 100_000), (None, "application/msgpack")):
        buffer = RowBuffer()
        buffer.push(0, np.zeros((rows, L, K), dtype=np.int16))
        answer = answer_of([output(rows, choice(3, buffer))], dtype="uint8")[0]
        response = asyncio.run(respond(answer, request(accept)))
        error = orjson.loads(response.body)["error"]
        assert (response.status_code, error["type"]) == (500, "InternalServerError")
        assert "2 rows are unknown" in error["message"]


# ---- the HTTP response ----


def test_which_form_a_client_gets() -> None:
    packed = ("application/msgpack", "Application/MsgPack", "application/json, application/msgpack")
    packed += ("application/msgpack;q=0.9, application/json;q=0.2", "text/html, application/msgpack; q=1.0, */*")
    plain = ("", "*/*", "application/json", "application/msgpack;q=0.5, application/json", "application/msgpack;q=0")
    for accept in (*packed, *plain, "application/msgpack;q=x", "application/msgpackx"):
        assert wants_msgpack(accept) is (accept in packed), accept


def request(accept: str | None = None) -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode())]
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace()))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "app": app})


def long_answer(rows: int, **options: Any) -> Any:
    buffer = RowBuffer()
    buffer.push(0, np.zeros((rows, L, K), dtype=np.int16))
    return answer_of([output(rows, choice(1, buffer))], **options)[0]


async def sent(response: HttpResponse) -> tuple[bytes, int]:
    """The whole body, and in how many parts it came."""
    if hasattr(response, "body_iterator"):
        parts = [part async for part in response.body_iterator]
        return b"".join(parts), len(parts)
    return response.body, 1


@pytest.mark.parametrize("accept", [None, "application/msgpack"])
@pytest.mark.parametrize("rows", [10, 100_000])
def test_long_answers_come_in_parts(rows: int, accept: str | None) -> None:
    async def answered() -> tuple[HttpResponse, bytes, int]:
        response = await respond(long_answer(rows), request(accept))
        return response, *await sent(response)

    response, body, parts = asyncio.run(answered())
    assert response.headers["content-type"] == (accept or "application/json")
    decoded = msgspec.msgpack.decode(body) if accept else orjson.loads(body)
    assert decoded["prompt_routed_experts"]["shape"] == [rows, L, K]
    assert (parts > 10) is (rows > 10)
    assert ("content-length" in response.headers) is (rows == 10)


def test_prompts_count_as_often_as_they_are_sent() -> None:
    """One of 24 KiB is little; joined with each of 64 choices it is not."""
    prompt = np.zeros((2000, L, K), dtype=np.int16)

    async def answered(layout: str) -> int:
        choices = []
        for index in range(64):
            buffer = RowBuffer()
            buffer.push(0, prompt)
            choices.append(choice(1, buffer, index))
        response = await respond(answer_of([output(2000, *choices)], layout=layout)[0], request())
        return (await sent(response))[1]

    assert asyncio.run(answered("split")) == 1
    assert asyncio.run(answered("joined")) > 64


def test_answers_without_rows() -> None:
    plain = answer_of([output(1, choice(1, None, finish="abort"))])[0].response
    response = asyncio.run(respond(plain, request()))
    expected = {
        "id": "r",
        "choices": [{"index": 0, "text": plain.choices[0].text}],
        "prompt_logprobs": {"7": -0.5},
        "kv_transfer_params": None,
    }
    assert orjson.loads(response.body) == expected
    packed = asyncio.run(respond(plain, request("application/msgpack")))
    assert msgspec.msgpack.decode(packed.body) == orjson.loads(response.body)
    assert packed.headers["content-type"] == MSGPACK
