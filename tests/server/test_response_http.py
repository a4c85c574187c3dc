"""HTTP answers: which form a client gets, and that long ones leave others a turn."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response as HttpResponse

from routed_experts.server.http.response import MSGPACK, respond, wants_msgpack
from routed_experts.server.outputs.row_buffer import RowBuffer
from tests.server.test_response import K, L, answer_of, choice, output
from tests.server.turns import another_task


def request(accept: str | None = None) -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode())]
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace()))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "app": app})


@pytest.mark.parametrize(
    ("accept", "packed"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("Application/MsgPack", True),
        ("application/json, application/msgpack", True),
        ("application/msgpack;q=0.5, application/json", False),
        ("application/msgpack;q=0.9, application/json;q=0.2", True),
        ("application/msgpack;q=0", False),
        ("application/msgpack;q=x", False),
        ("text/html, application/msgpack; q=1.0, */*", True),
        ("application/msgpackx", False),
    ],
)
def test_which_form_a_client_gets(accept: str, packed: bool) -> None:
    assert wants_msgpack(accept) is packed


def long_answer(rows: int, **options: Any) -> Any:
    buffer = RowBuffer()
    buffer.push(0, np.zeros((rows, L, K), dtype=np.int16))
    return answer_of([output(rows, choice(1, buffer))], **options)[0]


async def body_of(response: HttpResponse) -> tuple[bytes, int]:
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
        return response, *await body_of(response)

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
        return (await body_of(response))[1]

    assert asyncio.run(answered("split")) == 1
    assert asyncio.run(answered("joined")) > 64


def test_nobody_waits_for_a_long_answer() -> None:
    """Between two parts another task gets its turn, though nothing of the answer has to be waited for."""

    async def run() -> int:
        async with another_task() as turns:
            response = await respond(long_answer(100_000), request())
            before = turns.count
            _, parts = await body_of(response)
            assert turns.count - before >= parts - 1
        return parts

    assert asyncio.run(run()) > 10


@pytest.mark.parametrize("accept", [None, "application/msgpack"])
@pytest.mark.parametrize("rows", [10, 100_000])
def test_lost_rows_that_the_type_cannot_say_are_the_servers_error(rows: int, accept: str | None) -> None:
    buffer = RowBuffer()
    buffer.push(0, np.zeros((rows, L, K), dtype=np.int16))
    answer = answer_of([output(rows, choice(2, buffer))], dtype="uint8")[0]
    response = asyncio.run(respond(answer, request(accept)))
    assert response.status_code == 500
    error = orjson.loads(response.body)["error"]
    assert error["type"] == "InternalServerError"
    assert "uint8 cannot hold" in error["message"]


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
