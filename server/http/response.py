"""Whole responses: rows from the engine's final outputs, and the HTTP response that carries them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.expert_load import Histogram
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder, LostRowsError
from routed_experts.server.http.metrics import count_answer
from routed_experts.server.http.vllm_http import (
    ErrorResponse,
    create_error_response,
    metrics_header,
    with_sse_keep_alive,
)
from routed_experts.server.outputs.kv_handoff import handed_bytes, to_wire
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput


@dataclass
class CollectedRows:
    """The rows of one response.

    Attributes:
        options: what the request asks for.
        shape: (L, K)
        prompts: rows of each prompt, P - start in all.
        own_prompts: prompt rows of each choice; they differ if the weights changed before it began.
        choices: first position and rows of each choice, in the order of the response.
        num_lost: how many rows did not arrive.
    """

    options: RoutingOptions
    shape: tuple[int, int]
    prompts: list[list[Rows]] = field(default_factory=list)
    own_prompts: list[list[Rows]] = field(default_factory=list)
    choices: list[tuple[int, list[Rows]]] = field(default_factory=list)
    num_lost: int = 0

    def collect(self, output: RequestOutput) -> None:
        """Takes the rows of a finished prompt."""
        start, prompt_len = self.options.prompt_start, len(output.prompt_token_ids or ())
        prompts: list[tuple[int, list[Rows]]] = []
        for choice in output.outputs:
            buffer, choice.routed_experts = choice.routed_experts, None
            if not isinstance(buffer, RowBuffer):
                buffer = RowBuffer(output.request_id)
            end = max(prompt_len + len(choice.token_ids) - 1, start)
            shape = self.shape if choice.finish_reason != "abort" else None
            prompt = buffer.take(start, min(prompt_len, end), shape)
            lost = sum(map(count_missing, prompt)) if buffer.num_lost else 0
            prompts.append((_count(prompt) - lost, prompt))
            self.choices.append((prompt_len, buffer.take(prompt_len, end, shape)))
            self.num_lost += buffer.num_lost
        if prompts:
            most, prompt = max(prompts, key=lambda each: each[0])
            self.prompts.append(prompt)
            self.own_prompts += [rows if arrived == most else prompt for arrived, rows in prompts]

    async def collect_from(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """`outputs`, with their rows taken off."""
        async for output in outputs:
            self.collect(output)
            yield output

    @property
    def num_rows(self) -> int:
        """Of all arrays that the response will have."""
        return sum(_count(arrays) for arrays in self._sent()) if self.options.rows else 0

    @property
    def nbytes(self) -> int:
        """Size of the rows that are encoded or counted: of each prompt, as often as the response has it."""
        return sum(rows.nbytes for arrays in self._sent() for rows in arrays)

    def _sent(self) -> Iterator[list[Rows]]:
        is_joined = self.options.rows and self.options.layout == "joined"
        yield from self.own_prompts if is_joined else self.prompts
        yield from (rows for _, rows in self.choices)

    def arrays(self) -> Iterator[tuple[int | None, int, list[Rows]]]:
        """What the response has: the index of a choice or None for a prompt's, first position, rows."""
        if not self.options.rows:
            return
        start = self.options.prompt_start
        if self.options.layout == "joined":
            for index, (prompt, (_, own)) in enumerate(zip(self.own_prompts, self.choices, strict=True)):
                yield index, start, [*prompt, *own]
            return
        for index, (prompt_len, own) in enumerate(self.choices):
            yield index, prompt_len, own
        for prompt in self.prompts:
            yield None, start, prompt

    def histograms(self, encoder: Encoder) -> tuple[list[Histogram], list[Histogram]]:
        """Histograms of the prompts, and of the choices."""
        return [*map(encoder.histogram, self.prompts)], [encoder.histogram(arrays) for _, arrays in self.choices]


def _count(arrays: list[Rows]) -> int:
    return sum(map(len, arrays))


@dataclass(frozen=True)
class RoutedResponse:
    """vLLM's response, and the rows that go with it.

    Attributes:
        response: a pydantic model with `choices`.
        encoder: how the request wants its arrays.
        is_list: whether the request gave a list of prompts.
    """

    response: Any
    rows: CollectedRows
    encoder: Encoder
    is_list: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, including those in `kv_transfer_params`."""
        return self.rows.nbytes + handed_bytes(self.response.kv_transfer_params)

    def prepare(self, packed: bool) -> Iterator[bytes]:
        """The body of the HTTP response in parts, as JSON or MessagePack (`packed`). Arrays are encoded as it is read.

        Raises:
            LostRowsError: a row is not known, and the type asked for cannot say so.
        """
        body = body_of(self.response, packed)
        arrays = list(self.rows.arrays())
        place = secrets.token_bytes(16)  # stands for each array until it is encoded; nobody can guess it
        hole = msgspec.Raw(place)
        prompts: list[Any] = []
        for choice, _, rows in arrays:
            self.encoder.check(rows)
            if choice is None:
                prompts.append(hole)
            else:
                body["choices"][choice]["routed_experts"] = hole
        if prompts:
            body["prompt_routed_experts"] = self._one_or_list(prompts)
        if self.rows.options.histogram:
            of_prompts, of_choices = self.rows.histograms(self.encoder)
            body["prompt_routed_experts_histogram"] = self._one_or_list(of_prompts)
            for choice_body, counted in zip(body["choices"], of_choices, strict=True):
                choice_body["routed_experts_histogram"] = counted
        return self._parts(encoded(body, packed).split(place), arrays, packed)

    def _parts(
        self, texts: list[bytes], arrays: list[tuple[int | None, int, list[Rows]]], packed: bool
    ) -> Iterator[bytes]:
        encode = self.encoder.msgpack_parts if packed else self.encoder.json_parts
        yield texts[0]
        for text, (_, start, rows) in zip(texts[1:], arrays, strict=True):  # both in the order of the body
            yield from encode(rows, start)
            yield text

    def _one_or_list(self, items: list[Any]) -> Any:
        return items if self.is_list or len(items) > 1 else items[0]


def body_of(response: Any, packed: bool) -> dict[str, Any]:
    """vLLM's response as JSON or MessagePack (`packed`) can say it, without vLLM's own field for routing."""
    body: dict[str, Any] = response.model_dump()
    if params := body.get("kv_transfer_params"):
        body["kv_transfer_params"] = to_wire(params)
    if packed:
        body = msgspec.to_builtins(body, str_keys=True)
    for choice in body["choices"]:
        choice.pop("routed_experts", None)
    return body


def encoded(body: dict[str, Any], packed: bool) -> bytes:
    """`body` as JSON or in MessagePack."""
    if packed:
        return msgspec.msgpack.encode(body)
    return msgspec.json.encode(body)


MSGPACK = "application/msgpack"
_JSON = "application/json"
_METRICS_HEADER = "endpoint-load-metrics-format"
_AT_ONCE_BYTES, _AT_ONCE_LIST_BYTES = 512 << 10, 192 << 10
"""Responses with more bytes of rows are prepared in a thread and sent in parts, with other tasks between them. Smaller
ones take at most about 2 ms; a thread and parts would double that."""


async def respond(answer: Any, raw_request: Request) -> Response:
    """The HTTP response that vLLM's route would send for `answer`, with the routing that belongs to it."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not isinstance(answer, BaseModel | RoutedResponse):
        interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
        return StreamingResponse(with_sse_keep_alive(answer, interval), media_type="text/event-stream")
    packed = wants_msgpack(raw_request.headers.get("accept", ""))
    headers = metrics_header(raw_request.headers.get(_METRICS_HEADER, ""))
    if not isinstance(answer, RoutedResponse):
        body = body_of(answer, packed)
        if packed:
            return Response(encoded(body, packed), media_type=MSGPACK, headers=headers)
        return JSONResponse(body, headers=headers)
    try:
        return await _with_rows(answer, packed, headers)
    except LostRowsError as error:
        failure = create_error_response(str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
        return JSONResponse(failure.model_dump(), status_code=failure.error.code)


async def _with_rows(answer: RoutedResponse, packed: bool, headers: Any) -> Response:
    media_type = MSGPACK if packed else _JSON
    if answer.nbytes <= (_AT_ONCE_LIST_BYTES if answer.encoder.fmt == "list" else _AT_ONCE_BYTES):
        body = b"".join(answer.prepare(packed))
        count_answer(answer.encoder.sent, answer.rows.num_lost)
        return Response(body, media_type=media_type, headers=headers)
    parts = await run_in_threadpool(answer.prepare, packed)
    return StreamingResponse(_in_turns(answer, parts), media_type=media_type, headers=headers)


async def _in_turns(answer: RoutedResponse, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    try:
        for part in parts:
            yield part
            await asyncio.sleep(0)
    finally:
        count_answer(answer.encoder.sent, answer.rows.num_lost)


def wants_msgpack(accept: str) -> bool:
    """Whether the header `Accept` names MessagePack, and JSON not rather."""
    weights = {_JSON: 0.0, MSGPACK: 0.0}
    for item in accept.lower().split(","):
        name, *params = (part.strip() for part in item.split(";"))
        if name in weights:
            weights[name] = _weight(params)
    return weights[MSGPACK] > 0 and weights[MSGPACK] >= weights[_JSON]


def _weight(params: list[str]) -> float:
    for param in params:
        if param.startswith("q="):
            try:
                return float(param[2:])
            except ValueError:
                return 0.0
    return 1.0
