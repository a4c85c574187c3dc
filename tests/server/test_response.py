"""Whole responses: rows from hand-made final outputs to the bytes of the HTTP response, and which
form it has."""

import asyncio
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response as HttpResponse
from pydantic import BaseModel

from routed_experts.capture.wire.rows import combined
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.answers.response import (
    MSGPACK,
    CollectedRows,
    RoutedResponse,
    respond,
)
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput
from tests.server.known import (
    K,
    L,
    as_json,
    buffer_of,
    choice,
    encoder_of,
    output,
    positions,
    rows_of,
)

EXPERTS = 64


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
    outputs: list[RequestOutput], dtype: Any = "int16", is_list: bool = False, **options: Any
) -> tuple[RoutedResponse, CollectedRows]:
    requested = RoutingOptions(dtype=dtype, **options)
    rows = CollectedRows(requested, (L, K))
    for request_output in outputs:
        rows.collect(request_output)
    count = sum(len(request_output.outputs) for request_output in outputs)
    response = Response(choices=[Choice(index=index) for index in range(count)])
    encoder = encoder_of(requested, num_experts=EXPERTS)
    return RoutedResponse(response, rows, encoder, is_list), rows


def body_of(answer: RoutedResponse) -> dict[str, Any]:
    """The answer as JSON, and checked to be the same in MessagePack."""
    body = orjson.loads(asyncio.run(answer.prepare(packed=False)))
    assert as_json(msgspec.msgpack.decode(asyncio.run(answer.prepare(packed=True)))) == body
    return body


def placed(*outputs: RequestOutput, **options: Any) -> tuple[list[int] | None, list[list[int]]]:
    """The positions of the rows of the prompt, None without an array, and of each choice."""
    body = body_of(answer_of([*outputs], **options)[0])
    prompt = body.get("prompt_routed_experts")
    return prompt and positions(prompt), [
        positions(choice["routed_experts"]) for choice in body["choices"]
    ]


@dataclass(frozen=True)
class OddChoice:
    """A choice of whose rows some may be lost."""

    start: int  # position of the first row that is asked for
    prompt_len: int
    num_tokens: int
    has_prompt: bool  # whether its prompt's rows come with it
    lost: frozenset[int]  # positions of its own rows that do not arrive
    num_behind: int  # rows behind that of the last token, which may follow
    has_buffer_if_all_lost: bool

    @classmethod
    def random(cls, rng: random.Random, start: int, prompt_len: int) -> "OddChoice":
        num_tokens = rng.randint(1, 6)
        own_positions = range(prompt_len, prompt_len + num_tokens - 1)
        return cls(
            start,
            prompt_len,
            num_tokens,
            has_prompt=rng.random() < 0.8,
            lost=frozenset(at for at in own_positions if rng.random() < 0.1),
            num_behind=rng.choice([0, 2]),
            has_buffer_if_all_lost=rng.random() < 0.5,
        )

    @property
    def end(self) -> int:
        """The position after the last row: the last token has none."""
        return self.prompt_len + self.num_tokens - 1

    @property
    def rows(self) -> list[int]:
        """The positions of its own rows, -1 where they are lost."""
        return [-1 if at in self.lost else at for at in range(self.prompt_len, self.end)]

    @property
    def num_lost(self) -> int:
        num_prompt_rows = self.prompt_len - self.start
        return len(self.lost) + (0 if self.has_prompt else num_prompt_rows)

    def buffer(self) -> RowBuffer | None:
        first = self.start if self.has_prompt else self.prompt_len
        arrived = [at for at in range(first, self.end + self.num_behind) if at not in self.lost]
        buffer = buffer_of(*((at, rows_of(at, at + 1)) for at in arrived))
        return buffer if arrived or self.has_buffer_if_all_lost else None


class OddResponse:
    """A response to some prompts, with the same number of choices of each."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        num_choices = rng.randint(1, 3)
        self.start = rng.choice([0, 1, min(lengths)])
        self.of_prompts = [
            [OddChoice.random(rng, self.start, length) for _ in range(num_choices)]
            for length in lengths
        ]
        self.choices = [*itertools.chain(*self.of_prompts)]

    def prompt_rows(self, choices: list[OddChoice]) -> list[int]:
        """The positions of the rows of one prompt: -1 if they came with none of its choices."""
        positions = range(self.start, choices[0].prompt_len)
        is_known = any(one.has_prompt for one in choices)
        return [at if is_known else -1 for at in positions]

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prompt_rows(choices) for choices in self.of_prompts]

    def answer(self, **options: Any) -> tuple[RoutedResponse, CollectedRows]:
        outputs = [
            output(
                choices[0].prompt_len,
                *(choice(one.num_tokens, one.buffer(), at) for at, one in enumerate(choices)),
            )
            for choices in self.of_prompts
        ]
        return answer_of(outputs, is_list=True, prompt_start=self.start, **options)


ODD_RESPONSES = [OddResponse(seed) for seed in range(40)]


def test_split_rows_of_every_prompt_and_choice() -> None:
    for odd in ODD_RESPONSES:
        body = body_of(odd.answer()[0])
        of_prompts = body["prompt_routed_experts"]
        assert list(map(positions, of_prompts)) == odd.prompts
        assert {array["start"] for array in of_prompts} == {odd.start}
        for sent, expected in zip(body["choices"], odd.choices, strict=True):
            array = sent["routed_experts"]
            assert positions(array) == expected.rows
            assert array["start"] == expected.prompt_len


def test_joined_rows_of_every_choice() -> None:
    for odd in ODD_RESPONSES:
        body = body_of(odd.answer(layout="joined")[0])
        assert "prompt_routed_experts" not in body
        arrays = [choice["routed_experts"] for choice in body["choices"]]
        assert {array["start"] for array in arrays} == {odd.start}
        assert [positions(array) for array in arrays] == [
            odd.prompt_rows(choices) + one.rows for choices in odd.of_prompts for one in choices
        ]


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_all_rows_are_counted(layout: str) -> None:
    for odd in ODD_RESPONSES:
        answer, rows = odd.answer(layout=layout)
        assert rows.num_lost == sum(one.num_lost for one in odd.choices)
        body = body_of(answer)
        arrays = [*body.get("prompt_routed_experts", ())]
        arrays += [choice["routed_experts"] for choice in body["choices"]]
        num_rows = sum(array["shape"][0] for array in arrays)
        assert (rows.num_rows, rows.nbytes) == (num_rows, num_rows * L * K * 2)


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_histograms_of_every_prompt_and_choice(layout: str) -> None:
    """The rows of a prompt are not counted again for its choices."""
    for odd in ODD_RESPONSES:
        body = body_of(odd.answer(layout=layout, histogram=True)[0])
        for histogram, rows in zip(
            body["prompt_routed_experts_histogram"], odd.prompts, strict=True
        ):
            check_histogram(histogram, rows)
        for sent, one in zip(body["choices"], odd.choices, strict=True):
            check_histogram(sent["routed_experts_histogram"], one.rows)


def check_histogram(histogram: dict[str, Any], rows: list[int]) -> None:
    """Each row chose the expert of its position, K times in each layer."""
    assert (histogram["rows"], histogram["missing"]) == (len(rows), rows.count(-1))
    known = [K if at in rows else 0 for at in range(EXPERTS)]
    assert histogram["counts"] == [known] * L


def test_outputs_keep_no_rows() -> None:
    final = output(2, choice(3, buffer_of((0, rows_of(0, 4)))))
    answer_of([final])
    assert final.outputs[0].routed_experts is None


def test_words_of_weights_are_not_taken_for_lost_rows() -> None:
    """Of two choices with prompts of their own, as after new weights. One lost a generated row, not
    of its prompt."""
    weights = np.full((4, L, K), 0.25, dtype=np.float32)
    weights.view(np.int16)[0, 0, 0] = -1  # the first word of a known weight
    own = combined(rows_of(0, 4), weights)
    with_a_gap = buffer_of((0, own[:3]), (4, own[3:]))
    whole = buffer_of((0, combined(rows_of(10, 15), np.full((5, L, K), 0.5, dtype=np.float32))))
    rows = CollectedRows(RoutingOptions(weights=True, layout="joined"), (3 * L, K))
    rows.collect(output(3, choice(3, with_a_gap), choice(3, whole, 1)))
    assert rows.num_lost == 1
    prompts = [np.concatenate(prompt)[:, 0, 0].tolist() for prompt in rows.own_prompts]
    assert prompts == [[0, 1, 2], [10, 11, 12]]


def test_the_form_of_the_response() -> None:
    body = body_of(answer_of([output(3, choice(4, buffer_of((0, rows_of(0, 6)))))])[0])
    assert body["choices"][0]["text"] == Choice(index=0).text
    assert next(iter(body["choices"][0]["routed_experts"])) == "data"
    assert body["prompt_logprobs"] == {"7": -0.5}
    answer, rows = answer_of(
        [output(3, choice(2, buffer_of((0, rows_of(0, 4)))))], rows=False, histogram=True
    )
    counted = body_of(answer)
    assert rows.num_rows == 0
    assert "prompt_routed_experts" not in counted
    assert "routed_experts" not in counted["choices"][0]
    assert np.array(counted["prompt_routed_experts_histogram"]["counts"]).shape == (L, EXPERTS)


def test_choices_whose_prompts_went_through_other_weights() -> None:
    """The response's one prompt is the first choice's; where prompt and answer are joined, each has
    its own."""

    def made() -> RequestOutput:
        return output(
            2, *(choice(2, buffer_of((0, rows_of(10 * at, 10 * at + 3))), at) for at in (0, 1))
        )

    assert placed(made(), made(), is_list=True, layout="joined") == (
        None,
        [[0, 1, 2], [10, 11, 12]] * 2,
    )
    assert placed(made()) == ([0, 1], [[2], [12]])


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_abort_is_never_padded(finish: str) -> None:
    """Nor does one before the first token take the prompt away that another choice has."""
    aborted, whole = choice(0, None, 0, finish=finish), (0, rows_of(0, 5))
    assert placed(output(3, choice(4, buffer_of((0, rows_of(0, 4))), finish=finish))) == (
        [0, 1, 2],
        [[3]],
    )
    assert placed(output(3, aborted)) == ([], [[]])
    assert placed(output(3, aborted, choice(3, buffer_of(whole), 1))) == ([0, 1, 2], [[], [3, 4]])
    aborted.index = 1
    assert placed(output(3, choice(3, buffer_of(whole)), aborted)) == ([0, 1, 2], [[3, 4], []])


# ---- the HTTP response ----


def request(accept: str | None = None) -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode())]
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace()))
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "app": app})


def long_answer(rows: int, tokens: int = 1, choices: int = 1, **options: Any) -> RoutedResponse:
    prompt = np.zeros((rows, L, K), dtype=np.int16)
    return answer_of(
        [output(rows, *(choice(tokens, buffer_of((0, prompt)), at) for at in range(choices)))],
        **options,
    )[0]


async def sent(response: HttpResponse) -> tuple[bytes, int]:
    """The whole body, and in how many parts it came."""
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        if body := message.get("body"):
            parts.append(body)

    await response({"type": "http", "method": "POST"}, asyncio.Event().wait, send)
    return b"".join(parts), len(parts)


def answered(answer: Any, accept: str | None = None) -> tuple[HttpResponse, bytes, int]:
    async def run() -> tuple[HttpResponse, bytes, int]:
        response = await respond(answer, request(accept))
        return response, *await sent(response)

    return asyncio.run(run())


@pytest.mark.parametrize("accept", [None, "application/msgpack"])
@pytest.mark.parametrize("rows", [10, 100_000])
def test_long_answers_come_in_parts(rows: int, accept: str | None) -> None:
    response, body, parts = answered(long_answer(rows), accept)
    assert response.headers["content-type"] == (accept or "application/json")
    decoded = msgspec.msgpack.decode(body) if accept else orjson.loads(body)
    assert decoded["prompt_routed_experts"]["shape"] == [rows, L, K]
    assert (parts > 10) is (rows > 10)
    assert ("content-length" in response.headers) is (rows == 10)


def test_a_type_that_cannot_say_that_rows_are_lost_fails_before_the_first_byte() -> None:
    for rows, accept in itertools.product((10, 100_000), (None, "application/msgpack")):
        response, body, _ = answered(long_answer(rows, tokens=3, dtype="uint8"), accept)
        error = orjson.loads(body)["error"]
        assert (response.status_code, error["type"]) == (500, "InternalServerError")
        assert "2 rows are unknown" in error["message"]


def test_prompts_count_as_often_as_they_are_sent() -> None:
    """One of 24 KiB is little; joined with each of 64 choices it is not."""
    assert answered(long_answer(2000, choices=64, layout="split"))[2] == 1
    assert answered(long_answer(2000, choices=64, layout="joined"))[2] > 64


def test_answers_without_rows() -> None:
    plain = answer_of([output(1, choice(1, None, finish="abort"))])[0].response
    _, body, _ = answered(plain)
    expected = {
        "id": "r",
        "choices": [{"index": 0, "text": plain.choices[0].text}],
        "kv_transfer_params": None,
    }
    assert orjson.loads(body) == {**expected, "prompt_logprobs": {"7": -0.5}}
    packed, body, _ = answered(plain, "application/msgpack")
    assert as_json(msgspec.msgpack.decode(body)) == {**expected, "prompt_logprobs": {"7": -0.5}}
    assert packed.headers["content-type"] == MSGPACK
