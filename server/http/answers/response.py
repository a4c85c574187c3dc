"""Unstreamed responses: collects rows from final outputs and builds the HTTP response."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from routed_experts.capture.wire.rows import ids_of, without_steps
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.arrays.references import (
    AT_ONCE_BYTES,
    Delivery,
    cannot_store,
    count_references,
)
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import LostRowsError
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.requests.request import MSGPACK
from routed_experts.server.http.vllm_http import (
    ErrorResponse,
    create_error_response,
    metrics_header,
    with_sse_keep_alive,
)
from routed_experts.server.outputs.array_store import StoreError
from routed_experts.server.outputs.prefill_param import rows_nbytes, to_wire
from routed_experts.server.outputs.row_buffer import (
    Causes,
    RowBuffer,
    causes_of,
    is_complete,
    num_rows,
)
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, get_logger

logger = get_logger(__name__)


class ResponseArray(NamedTuple):
    """An array of ids; that of their weights is beside it."""

    choice: int | None  # its index; None for a prompt
    start: int  # position of the first row
    rows: list[Rows]

    @property
    def name(self) -> str:
        return "prompt_routed_experts" if self.choice is None else "routed_experts"


@dataclass
class CollectedRows:
    """The rows of one response."""

    options: RoutingOptions
    shape: tuple[int, int]  # of a row: (L, K), higher with weights and steps
    prompts: list[list[Rows]] = field(default_factory=list)  # P - start rows for each prompt
    # of each choice: new weights may have come in between
    own_prompts: list[list[Rows]] = field(default_factory=list)
    # first position and generated rows, in order
    choices: list[tuple[int, list[Rows]]] = field(default_factory=list)
    num_lost: int = 0  # between engine and API process
    causes: Causes = field(default_factory=Counter)  # why the engine does not know rows

    def collect(self, output: RequestOutput) -> None:
        """Collects the rows of a finished prompt."""
        own_prompts: list[tuple[int, list[Rows]]] = []  # each with its number of known rows
        buffers: list[RowBuffer] = []
        prompt: list[Rows] = []  # of the choice that has most of it
        most_known = -1
        for choice in output.outputs:
            buffer = choice.routed_experts
            choice.routed_experts = None
            if not isinstance(buffer, RowBuffer):
                buffer = RowBuffer(output.request_id)
            own_prompt = self._take(buffer, choice, len(output.prompt_token_ids or ()))
            known = num_rows(own_prompt)
            if buffer.num_lost:
                known -= sum(map(self.count_missing, own_prompt))
            if known > most_known:
                most_known = known
                prompt = own_prompt
            buffers.append(buffer)
            own_prompts.append((known, own_prompt))
            self.num_lost += buffer.num_lost
        self.causes += causes_of(buffers, joined=self.options.layout == "joined")
        if own_prompts:
            self.prompts.append(prompt)
            # A choice that has less lost some of it, and gets what the other has.
            self.own_prompts += [
                own_prompt if known == most_known else prompt for known, own_prompt in own_prompts
            ]

    def _take(self, buffer: RowBuffer, choice: CompletionOutput, prompt_len: int) -> list[Rows]:
        """Takes the rows of a choice; returns those of its prompt."""
        start = self.options.prompt_start
        end = max(prompt_len + len(choice.token_ids) - 1, start)
        shape = self.shape if is_complete(choice.finish_reason) else None
        own_prompt = buffer.take(start, min(prompt_len, end), shape)
        self.choices.append((prompt_len, buffer.take(prompt_len, end, shape)))
        return own_prompt

    def count_missing(self, rows: Rows) -> int:
        """Number of unknown rows in an array of them."""
        if self.options.steps:
            rows = without_steps(rows)
        return count_missing(ids_of(rows) if self.options.weights else rows)

    async def collect_from(
        self, outputs: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[RequestOutput]:
        async for output in outputs:
            self.collect(output)
            yield output

    @property
    def num_rows(self) -> int:
        """Of all arrays of the response."""
        if not self.options.rows:
            return 0
        return sum(num_rows(array.rows) for array in self.arrays())

    @property
    def nbytes(self) -> int:
        """Size of the rows that are encoded or counted: a joined prompt counts for each choice."""
        return sum(rows.nbytes for array in self.arrays() for rows in array.rows)

    def arrays(self) -> Iterator[ResponseArray]:
        """The arrays in the order of the response."""
        start = self.options.prompt_start
        if self.options.rows and self.options.layout == "joined":
            prompts_and_choices = zip(self.own_prompts, self.choices, strict=True)
            for index, (prompt, (_, rows)) in enumerate(prompts_and_choices):
                yield ResponseArray(index, start, [*prompt, *rows])
            return
        for index, (prompt_len, rows) in enumerate(self.choices):
            yield ResponseArray(index, prompt_len, rows)
        for prompt in self.prompts:
            yield ResponseArray(None, start, prompt)


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
        try:
            return await self.delivery.run(self.nbytes, self.encode, packed)
        except BaseException:  # as is raised where the client has left
            self.delivery.end()
            raise

    def encode(self, packed: bool) -> bytes | Iterator[bytes]:
        """As `prepare`, in this thread."""
        body = body_of(self.response, packed)
        inline = _InlineArrays(packed)
        self._put_arrays(body, inline)
        if self.rows.options.histogram:
            self._put_histograms(body)
        parts = inline.put_into(encoded(body, packed))
        return b"".join(parts) if self.nbytes <= AT_ONCE_BYTES or inline.is_empty else parts

    def _put_arrays(self, body: dict[str, Any], inline: "_InlineArrays") -> None:
        """Puts into `body` what stands there for each array: a reference, or a placeholder."""
        arrays = self._arrays()
        of_prompts: dict[str, list[Any]] = {}
        for array, references in zip(arrays, self._refer(arrays), strict=True):
            for name, encoder in self.encoder.named_encoders(array.name).items():
                value = references.get(name)
                if value is None:
                    value = inline.placeholder(encoder, array)
                if array.choice is None:
                    of_prompts.setdefault(name, []).append(value)
                else:
                    body["choices"][array.choice][name] = value
        for name, values in of_prompts.items():
            body[name] = self._one_or_list(values)

    def _arrays(self) -> list[ResponseArray]:
        """Those that are returned, inline or by reference."""
        options = self.rows.options
        if not options.rows:
            return []
        arrays = list(self.rows.arrays())
        # Which have the rows of one prompt, of several those of the first.
        goes_with_kv = rows_nbytes(self.response.kv_transfer_params) > 0
        if goes_with_kv and len(self.rows.prompts) == 1 and not options.asks_for_inline:
            return [array for array in arrays if array.choice is not None]
        return arrays

    def _put_histograms(self, body: dict[str, Any]) -> None:
        histogram = self.encoder.histogram
        of_prompts = [histogram(prompt) for prompt in self.rows.prompts]
        body["prompt_routed_experts_histogram"] = self._one_or_list(of_prompts)
        for choice, (_, rows) in zip(body["choices"], self.rows.choices, strict=True):
            choice["routed_experts_histogram"] = histogram(rows)

    def count(self) -> None:
        count_response(self.encoder, self.rows.num_lost, self.rows.causes)

    def _refer(self, arrays: list[ResponseArray]) -> list[dict[str, Any]]:
        """References to `arrays` and their weights, by name. Without those that are returned
        inline."""
        named = [(array.name, array.choice, array.start, array.rows) for array in arrays]
        made, failure = self.delivery.references(self.encoder, named)
        count_references(self.encoder, named, made)
        rows_inline = sum(
            num_rows(array.rows)
            for references, array in zip(made, arrays, strict=True)
            if not references
        )
        fits_inline = self.encoder.form.text_bytes(rows_inline) <= self.max_bytes
        if failure is not None and rows_inline and not fits_inline:
            raise failure
        return made

    def _one_or_list(self, items: list[Any]) -> Any:
        return items if self.is_list or len(items) > 1 else items[0]


class _InlineArrays:
    """The arrays that stand in a body: placeholders, until they are encoded in parts."""

    def __init__(self, packed: bool) -> None:
        self._packed = packed
        # random, so that no client can send it; behind it, the index of an array
        self._marker = secrets.token_bytes(16)
        self._arrays: list[Iterator[bytes]] = []

    @property
    def is_empty(self) -> bool:
        return not self._arrays

    def placeholder(self, encoder: Encoder, array: ResponseArray) -> msgspec.Raw:
        """A value of a body in place of an array."""
        index = len(self._arrays).to_bytes(4, "big")
        self._arrays.append(encoder.parts(array.rows, array.start, self._packed))
        return msgspec.Raw(self._marker + index)

    def put_into(self, body: bytes) -> Iterator[bytes]:
        """The parts of an encoded body, with its arrays."""
        first, *texts = body.split(self._marker)
        yield first
        for text in texts:
            yield from self._arrays[int.from_bytes(text[:4], "big")]
            yield text[4:]


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


async def respond(answer: Any, raw_request: Request) -> Response:
    """The HTTP response of vLLM's route for `answer`, with its routing."""
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not isinstance(answer, BaseModel | RoutedResponse):
        interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
        return StreamingResponse(
            with_sse_keep_alive(answer, interval), media_type="text/event-stream"
        )
    packed = MSGPACK in raw_request.headers.get("accept", "").lower()
    media_type = MSGPACK if packed else _JSON
    headers = metrics_header(raw_request.headers.get(_METRICS_HEADER, "")) or {}
    if not isinstance(answer, RoutedResponse):
        return _plain(answer, packed, headers)
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
    if isinstance(body, bytes):
        headers = {**headers, "content-length": str(len(body))}
        body = iter([body])
    response = _Response(_in_turns(answer, body), 200, headers, media_type)
    response.answer = answer
    return response


def _plain(answer: BaseModel, packed: bool, headers: dict[str, str]) -> Response:
    """vLLM's response to a request that does not ask for rows."""
    body = body_of(answer, packed)
    if packed:
        return Response(encoded(body, packed), 200, headers, MSGPACK)
    return JSONResponse(body, 200, headers)


class _Response(StreamingResponse):
    """Counts its rows, and deletes what was not sent, also where the body is not asked for, as the
    client left before."""

    answer: RoutedResponse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.count()
            self.answer.delivery.end()


async def _in_turns(answer: RoutedResponse, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Other tasks run between two parts."""
    part = next(parts)
    for following in parts:
        yield part
        await asyncio.sleep(0)
        part = following
    answer.delivery.hand_over()  # before the last one: nobody reads a part of a JSON object
    yield part
