"""Unstreamed responses: collects rows from final outputs and builds the HTTP response."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from routed_experts.capture.wire.rows import ids_of
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import Encoder, LostRowsError
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.references import AT_ONCE_BYTES, Delivery, cannot_store
from routed_experts.server.http.request import MSGPACK
from routed_experts.server.http.vllm_http import (
    ErrorResponse,
    create_error_response,
    metrics_header,
    with_sse_keep_alive,
)
from routed_experts.server.outputs.array_store import StoreError
from routed_experts.server.outputs.prefill_param import has_prompt, rows_nbytes, to_wire
from routed_experts.server.outputs.row_buffer import Causes, RowBuffer, causes_of, is_complete
from routed_experts.server.vllm_api import RequestOutput, get_logger

logger = get_logger(__name__)


@dataclass
class CollectedRows:
    """The rows of one response."""

    options: RoutingOptions
    shape: tuple[int, int]  # of a row: (L, K), or (3L, K) with weights
    prompts: list[list[Rows]] = field(default_factory=list)  # P - start rows for each prompt
    # of each choice: new weights may have come in between
    own_prompts: list[list[Rows]] = field(default_factory=list)
    # first position and generated rows, in order
    choices: list[tuple[int, list[Rows]]] = field(default_factory=list)
    num_lost: int = 0  # between engine and API process
    causes: Causes = field(default_factory=Counter)  # why the engine does not know rows

    def collect(self, output: RequestOutput) -> None:
        """Collects the rows of a finished prompt."""
        start, prompt_len = self.options.prompt_start, len(output.prompt_token_ids or ())
        prompts: list[tuple[int, list[Rows]]] = []
        buffers: list[RowBuffer] = []
        for choice in output.outputs:
            buffer, choice.routed_experts = choice.routed_experts, None
            if not isinstance(buffer, RowBuffer):
                buffer = RowBuffer(output.request_id)
            buffers.append(buffer)
            end = max(prompt_len + len(choice.token_ids) - 1, start)
            shape = self.shape if is_complete(choice.finish_reason) else None
            prompt = buffer.take(start, min(prompt_len, end), shape)
            lost = sum(map(self.count_missing, prompt)) if buffer.num_lost else 0
            prompts.append((_count(prompt) - lost, prompt))
            self.choices.append((prompt_len, buffer.take(prompt_len, end, shape)))
            self.num_lost += buffer.num_lost
        self.causes += causes_of(buffers, joined=self.options.layout == "joined")
        if prompts:
            most, prompt = max(prompts, key=lambda each: each[0])
            self.prompts.append(prompt)
            self.own_prompts += [rows if arrived == most else prompt for arrived, rows in prompts]

    def count_missing(self, rows: Rows) -> int:
        """Number of unknown rows in an array of them."""
        return count_missing(ids_of(rows) if self.options.weights else rows)

    async def collect_from(
        self, outputs: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[RequestOutput]:
        async for output in outputs:
            self.collect(output)
            yield output

    @property
    def num_rows(self) -> int:
        return sum(_count(arrays) for *_, arrays in self.arrays()) if self.options.rows else 0

    @property
    def nbytes(self) -> int:
        """Size of the rows that are encoded or counted: a joined prompt counts for each choice."""
        return sum(rows.nbytes for *_, arrays in self.arrays() for rows in arrays)

    def arrays(self) -> Iterator[tuple[int | None, int, list[Rows]]]:
        """The arrays in the order of the response: index of the choice (None for a prompt), first
        position, rows."""
        start = self.options.prompt_start
        if self.options.rows and self.options.layout == "joined":
            for index, (prompt, (_, own)) in enumerate(
                zip(self.own_prompts, self.choices, strict=True)
            ):
                yield index, start, [*prompt, *own]
            return
        for index, (prompt_len, own) in enumerate(self.choices):
            yield index, prompt_len, own
        for prompt in self.prompts:
            yield None, start, prompt


def _count(arrays: list[Rows]) -> int:
    return sum(map(len, arrays))


@dataclass(frozen=True)
class RoutedResponse:
    """vLLM's response with its rows."""

    response: Any  # a pydantic model with `choices`
    rows: CollectedRows
    encoder: Encoder
    is_list: bool  # whether the request has a list of prompts
    delivery: Delivery = field(default_factory=Delivery)
    # of arrays that the store cannot take and that are returned inline
    max_bytes: int = MAX_RESPONSE_BYTES

    @property
    def nbytes(self) -> int:
        """Size of all rows, including those in `kv_transfer_params`."""
        return self.rows.nbytes + rows_nbytes(self.response.kv_transfer_params)

    async def prepare(self, packed: bool) -> bytes | Iterator[bytes]:
        """The response body as JSON or MessagePack (`packed`), in parts if it is long. Stores the
        arrays if the request asks for references; if the store cannot take them, they must fit
        inline."""
        return await self.delivery.run(self.nbytes, self.encode, packed)

    def encode(self, packed: bool) -> bytes | Iterator[bytes]:
        """As `prepare`, in this thread."""
        body = body_of(self.response, packed)
        arrays = list(self.rows.arrays()) if self.rows.options.rows else []
        options, transfer_params = self.rows.options, self.response.kv_transfer_params
        # Which have the rows of one prompt, of several those of the first.
        goes_with_kv = len(self.rows.prompts) == 1 and has_prompt(transfer_params, options.weights)
        if goes_with_kv and not options.asks_for_inline:
            arrays = [array for array in arrays if array[0] is not None]
        # random, so that no client can send it; behind it, the index of an array
        marker = secrets.token_bytes(16)
        inline: list[Iterator[bytes]] = []
        prompts: dict[str, list[Any]] = {}
        for (choice, start, rows), references in zip(arrays, self._refer(arrays), strict=True):
            for name, encoder in self.encoder.named_encoders(_name_of(choice)).items():
                value = references.get(name, msgspec.Raw(marker + len(inline).to_bytes(4, "big")))
                if name not in references:
                    inline.append(encoder.parts(rows, start, packed))
                if choice is None:
                    prompts.setdefault(name, []).append(value)
                else:
                    body["choices"][choice][name] = value
        body |= {name: self._one_or_list(values) for name, values in prompts.items()}
        if self.rows.options.histogram:
            count = self.encoder.histogram
            body["prompt_routed_experts_histogram"] = self._one_or_list(
                [*map(count, self.rows.prompts)]
            )
            for choice_body, (_, rows) in zip(body["choices"], self.rows.choices, strict=True):
                choice_body["routed_experts_histogram"] = count(rows)
        first, *texts = encoded(body, packed).split(marker)
        arrays_and_texts = (
            chain(inline[int.from_bytes(text[:4], "big")], [text[4:]]) for text in texts
        )
        parts = chain([first], chain.from_iterable(arrays_and_texts))
        return b"".join(parts) if self.nbytes <= AT_ONCE_BYTES or not inline else parts

    def count(self) -> None:
        count_response(self.encoder, self.rows.num_lost, self.rows.causes)

    def _refer(self, arrays: list[tuple[int | None, int, list[Rows]]]) -> list[dict[str, Any]]:
        """References to `arrays` and their weights, by name. Without those that are returned
        inline."""
        named = ((_name_of(choice), choice, start, rows) for choice, start, rows in arrays)
        made, failure = self.delivery.references(self.encoder, named)
        inline = sum(
            _count(rows)
            for references, (*_, rows) in zip(made, arrays, strict=True)
            if not references
        )
        if failure is not None and inline and self.encoder.text_bytes(inline) > self.max_bytes:
            raise failure
        return made

    def _one_or_list(self, items: list[Any]) -> Any:
        return items if self.is_list or len(items) > 1 else items[0]


def _name_of(choice: int | None) -> str:
    return "routed_experts" if choice is not None else "prompt_routed_experts"


def body_of(response: Any, packed: bool) -> dict[str, Any]:
    """vLLM's response as a dict for JSON or MessagePack (`packed`), without vLLM's own routing
    field."""
    body: dict[str, Any] = response.model_dump()
    if params := body.get("kv_transfer_params"):
        body["kv_transfer_params"] = to_wire(params, packed)
    if packed:
        body = msgspec.to_builtins(body, str_keys=True, builtin_types=(bytes, bytearray))
    for choice in body["choices"]:
        choice.pop("routed_experts", None)
    return body


def encoded(body: dict[str, Any], packed: bool) -> bytes:
    return msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)


_JSON = "application/json"
_METRICS_HEADER = "endpoint-load-metrics-format"
_WEIGHT = re.compile(r"(?:^|;) *q=(\d+(?:\.\d*)?)?")  # one that is no number is 0


async def respond(answer: Any, raw_request: Request) -> Response:
    """The HTTP response of vLLM's route for `answer`, with its routing."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not isinstance(answer, BaseModel | RoutedResponse):
        interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
        return StreamingResponse(
            with_sse_keep_alive(answer, interval), media_type="text/event-stream"
        )
    packed = wants_msgpack(raw_request.headers.get("accept", ""))
    headers = metrics_header(raw_request.headers.get(_METRICS_HEADER, "")) or {}
    if not isinstance(answer, RoutedResponse):
        plain = body_of(answer, packed)
        return (
            Response(encoded(plain, packed), 200, headers, MSGPACK)
            if packed
            else JSONResponse(plain, 200, headers)
        )
    try:
        body = await answer.prepare(packed)
    except StoreError as error:
        if not answer.rows.options.by_default:
            raise cannot_store(error) from None
        logger.info("Server-wide routing default ignored for a response: %s", error)
        return await respond(answer.response, raw_request)
    except LostRowsError as error:
        failure = create_error_response(
            str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR
        )
        return JSONResponse(failure.model_dump(), status_code=failure.error.code)
    parts = iter([body]) if isinstance(body, bytes) else body
    if isinstance(body, bytes):
        headers = {**headers, "content-length": str(len(body))}
    response = _Response(_in_turns(answer, parts), 200, headers, MSGPACK if packed else _JSON)
    response.answer = answer
    return response


class _Response(StreamingResponse):
    """Counts its rows, also where the body is not asked for, as the client left before."""

    answer: RoutedResponse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.count()


async def _in_turns(answer: RoutedResponse, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Other tasks run between two parts."""
    part = next(parts)
    for following in parts:
        yield part
        await asyncio.sleep(0)
        part = following
    answer.delivery.hand_over()  # before the last one: nobody reads a part of a JSON object
    yield part


def wants_msgpack(accept: str) -> bool:
    """Whether the `Accept` header names MessagePack and does not prefer JSON."""
    weights = {_JSON: 0.0, MSGPACK: 0.0}
    for item in accept.lower().split(","):
        name, _, params = item.partition(";")
        if name.strip() in weights:
            weight = _WEIGHT.search(params)
            weights[name.strip()] = 1.0 if weight is None else float(weight[1] or 0)
    return weights[MSGPACK] > 0 and weights[MSGPACK] >= weights[_JSON]
