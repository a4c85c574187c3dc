"""Rows of answers that are not streamed, from hand-made final outputs to the bytes of the HTTP answer."""

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from pydantic import BaseModel

from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder, LostRowsError
from routed_experts.server.http.response import CollectedRows, RoutedResponse
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput

L, K, EXPERTS = 2, 3, 30000


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


def test_prompt_and_generated_rows() -> None:
    body = body_of([output(3, choice(4, buffer_of(0, 3, 4, 6)))])
    assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    own = body["choices"][0]["routed_experts"]
    assert (positions(own), own["start"]) == ([3, 4, 5], 3)
    assert body["choices"][0]["text"] == Choice(index=0).text
    assert next(iter(own)) == "data"
    assert body["prompt_logprobs"] == {"7": -0.5}


def test_the_order_of_choices_and_prompts() -> None:
    outputs = [
        output(2, choice(2, buffer_of(0, 3), 0), choice(3, buffer_of(0, 2, 4), 1)),
        output(4, choice(1, buffer_of(0, 4), 0), choice(2, buffer_of(0, 5), 1)),
    ]
    body = body_of(outputs, is_list=True)
    assert [positions(array) for array in body["prompt_routed_experts"]] == [[0, 1], [0, 1, 2, 3]]
    assert [positions(each["routed_experts"]) for each in body["choices"]] == [[2], [2, 3], [], [4]]
    assert [each["routed_experts"]["start"] for each in body["choices"]] == [2, 2, 4, 4]


@pytest.mark.parametrize(("is_list", "kind"), [(True, list), (False, dict)])
def test_a_list_of_one_prompt_is_a_list(is_list: bool, kind: type) -> None:
    body = body_of([output(2, choice(1, buffer_of(0, 2)))], is_list=is_list, histogram=True)
    assert isinstance(body["prompt_routed_experts"], kind)
    assert isinstance(body["prompt_routed_experts_histogram"], kind)


def test_joined_rows_begin_with_their_own_prompt() -> None:
    outputs = [
        output(3, choice(2, buffer_of(1, 4), 0), choice(3, buffer_of(1, 5), 1)),
        output(2, choice(2, buffer_of(1, 3), 0), choice(1, buffer_of(1, 2), 1)),
    ]
    body = body_of(outputs, is_list=True, layout="joined", prompt_start=1)
    assert "prompt_routed_experts" not in body
    arrays = [each["routed_experts"] for each in body["choices"]]
    assert [positions(array) for array in arrays] == [[1, 2, 3], [1, 2, 3, 4], [1, 2], [1]]
    assert [array["start"] for array in arrays] == [1, 1, 1, 1]


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


def test_a_start_at_the_end_of_the_prompt() -> None:
    body = body_of([output(3, choice(2, buffer_of(3, 4)))], prompt_start=3)
    assert body["prompt_routed_experts"]["shape"] == [0, L, K]
    assert body["prompt_routed_experts"]["start"] == 3
    assert positions(body["choices"][0]["routed_experts"]) == [3]
    assert body["choices"][0]["routed_experts"]["start"] == 3


def test_one_token_behind_a_prompt_that_is_left_out() -> None:
    """There is no row at all, and none is missing."""
    buffer = RowBuffer()
    buffer.push(3, rows_of(3, 3))
    for asked in ({"layout": "split"}, {"layout": "joined"}):
        answer, rows = answer_of([output(3, choice(1, buffer))], prompt_start=3, **asked)
        body = orjson.loads(b"".join(answer.prepare(packed=False)))
        assert body["choices"][0]["routed_experts"]["shape"] == [0, L, K]
        assert rows.num_lost == 0


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_prompt_is_whole_if_one_of_its_choices_has_it(aborted: int) -> None:
    """The other may have been aborted before its first token."""
    choices = [choice(3, buffer_of(0, 3, 5), index) for index in range(2)]
    choices[aborted] = choice(0, None, aborted, finish="abort")
    body = body_of([output(3, *choices)])
    assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    assert positions(body["choices"][1 - aborted]["routed_experts"]) == [3, 4]
    assert body["choices"][aborted]["routed_experts"]["shape"] == [0, L, K]


def test_rows_behind_the_last_token_are_not_sent() -> None:
    body = body_of([output(2, choice(2, buffer_of(0, 2, 9)))])
    assert positions(body["choices"][0]["routed_experts"]) == [2]


@pytest.mark.parametrize("buffer", [buffer_of(0, 3), None])
def test_lost_rows_are_unknown(buffer: RowBuffer | None) -> None:
    answer, rows = answer_of([output(2, choice(4, buffer), choice(1, None, 1))])
    assert rows.num_lost == (2 if buffer else 5) + 2
    body = orjson.loads(b"".join(answer.prepare(packed=False)))
    lost = [-1, -1] if buffer else [-1, -1, -1]
    assert positions(body["prompt_routed_experts"]) == ([0, 1] if buffer else [-1, -1])
    assert positions(body["choices"][0]["routed_experts"]) == ([2, *lost] if buffer else lost)


def test_a_gap_is_filled_at_its_place() -> None:
    """Rows that came later do not move into it."""
    buffer = RowBuffer()
    for first, end in ((0, 2), (4, 5), (7, 8)):
        buffer.push(first, rows_of(first, end))
    answer, rows = answer_of([output(3, choice(6, buffer))])
    assert rows.num_lost == 4
    body = orjson.loads(b"".join(answer.prepare(packed=False)))
    assert positions(body["prompt_routed_experts"]) == [0, 1, -1]
    assert positions(body["choices"][0]["routed_experts"]) == [-1, 4, -1, -1, 7]


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_a_choice_whose_prompt_did_not_arrive_has_that_of_another(layout: str) -> None:
    late = RowBuffer()
    late.push(3, rows_of(3, 5))
    body = body_of([output(3, choice(3, late, 0), choice(3, buffer_of(0, 3, 5), 1))], layout=layout)
    if layout == "split":
        assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    first = 0 if layout == "joined" else 3
    assert [positions(each["routed_experts"]) for each in body["choices"]] == [list(range(first, 5))] * 2


def test_an_abort_is_never_padded() -> None:
    body = body_of([output(3, choice(4, buffer_of(0, 4), finish="abort"))])
    assert positions(body["prompt_routed_experts"]) == [0, 1, 2]
    assert positions(body["choices"][0]["routed_experts"]) == [3]
    body = body_of([output(3, choice(0, None, finish="abort"))])
    assert positions(body["prompt_routed_experts"]) == []
    assert positions(body["choices"][0]["routed_experts"]) == []


def test_a_type_that_cannot_say_that_rows_are_lost_fails_before_the_first_byte() -> None:
    answer, _ = answer_of([output(2, choice(4, buffer_of(0, 3)))], dtype="uint8")
    for packed in (False, True):
        with pytest.raises(LostRowsError, match="2 rows are not known"):
            answer.prepare(packed)


def test_histograms() -> None:
    outputs = [output(2, choice(2, buffer_of(0, 3), 0), choice(3, buffer_of(0, 2, 4), 1))]
    alone = body_of(outputs, rows=False, histogram=True)
    assert "prompt_routed_experts" not in alone
    assert "routed_experts" not in alone["choices"][0]
    prompt = alone["prompt_routed_experts_histogram"]
    assert (prompt["rows"], prompt["missing"]) == (2, 0)
    assert np.array(prompt["counts"]).shape == (L, EXPERTS)
    assert np.array(prompt["counts"])[:, :3].tolist() == [[K, K, 0]] * L
    own = [each["routed_experts_histogram"] for each in alone["choices"]]
    assert [each["rows"] for each in own] == [1, 2]
    assert np.array(own[1]["counts"])[0, :5].tolist() == [0, 0, K, K, 0]
    outputs = [output(2, choice(2, buffer_of(0, 3), 0), choice(3, buffer_of(0, 2, 4), 1))]
    both = body_of(outputs, histogram=True)
    assert both["prompt_routed_experts_histogram"] == prompt
    assert positions(both["prompt_routed_experts"]) == [0, 1]


def test_the_sizes_that_limits_look_at() -> None:
    split = answer_of([output(3, choice(2, buffer_of(0, 4), 0), choice(3, buffer_of(0, 5), 1))])[1]
    assert split.num_rows == 3 + 1 + 2
    assert split.nbytes == (3 + 1 + 2) * L * K * 2
    joined = answer_of([output(3, choice(2, buffer_of(0, 4), 0), choice(3, buffer_of(0, 5), 1))], layout="joined")[1]
    assert joined.num_rows == 4 + 5
    assert joined.nbytes == (4 + 5) * L * K * 2  # a prompt is encoded with each of its choices
    counted = answer_of([output(3, choice(2, buffer_of(0, 4)))], rows=False, histogram=True)[1]
    assert counted.num_rows == 0


def test_rows_are_taken_off_before_vllm_sees_the_output() -> None:
    """vLLM would take a buffer for an array."""
    rows = CollectedRows(RoutingOptions(), (L, K))
    outputs = [output(2, choice(2, buffer_of(0, 3)))]

    async def results() -> AsyncIterator[RequestOutput]:
        for each in outputs:
            yield each

    async def seen() -> list[Any]:
        return [each.outputs[0].routed_experts async for each in rows.collect_from(results())]

    assert asyncio.run(seen()) == [None]
    assert len(rows.choices) == 1
