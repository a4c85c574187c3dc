"""Unstreamed responses: collects rows from final outputs and builds the HTTP response."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from routed_experts.capture.rows import ids_of
from routed_experts.protocol.codec import Rows, count_missing
from routed_experts.protocol.expert_load import Histogram
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server import MAX_RESPONSE_BYTES
from routed_experts.server.http.encoding import Encoder, LostRowsError
from routed_experts.server.http.metrics import count_response
from routed_experts.server.http.references import ReferenceMaker, cannot_store
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
    own_prompts: list[list[Rows]] = field(default_factory=list)  # of each choice: new weights may have come in between
    choices: list[tuple[int, list[Rows]]] = field(default_factory=list)  # first position and generated rows, in order
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
            lost = sum(map(count_missing, map(self._ids, prompt))) if buffer.num_lost else 0
            prompts.append((_count(prompt) - lost, prompt))
            self.choices.append((prompt_len, buffer.take(prompt_len, end, shape)))
            self.num_lost += buffer.num_lost
        self.causes += causes_of(buffers, joined=self.options.layout == "joined")
        if prompts:
            most, prompt = max(prompts, key=lambda each: each[0])
            self.prompts.append(prompt)
            self.own_prompts += [rows if arrived == most else prompt for arrived, rows in prompts]

    def _ids(self, rows: Rows) -> Rows:
        return ids_of(rows) if self.options.weights else rows

    async def collect_from(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Yields `outputs` after collecting their rows."""
        async for output in outputs:
            self.collect(output)
            yield output

    @property
    def num_rows(self) -> int:
        """Number of rows in all arrays of the response."""
        return sum(_count(arrays) for *_, arrays in self.arrays()) if self.options.rows else 0

    @property
    def nbytes(self) -> int:
        """Size of the rows that are encoded or counted: a joined prompt counts for each choice."""
        return sum(rows.nbytes for *_, arrays in self.arrays() for rows in arrays)

    def arrays(self) -> Iterator[tuple[int | None, int, list[Rows]]]:
        """The arrays in the order of the response: index of the choice (None for a prompt), first position, rows."""
        start = self.options.prompt_start
        if self.options.rows and self.options.layout == "joined":
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
    """vLLM's response with its rows."""

    response: Any  # a pydantic model with `choices`
    rows: CollectedRows
    encoder: Encoder
    is_list: bool  # whether the request has a list of prompts
    references: ReferenceMaker | None = None  # if the request asks for references
    max_bytes: int = MAX_RESPONSE_BYTES  # of arrays that the store cannot take and that are returned inline

    @property
    def nbytes(self) -> int:
        """Size of all rows, including those in `kv_transfer_params`."""
        return self.rows.nbytes + rows_nbytes(self.response.kv_transfer_params)

    @property
    def num_arrays(self) -> int:
        """Number of all arrays, with those of weights."""
        return (len(self.rows.choices) + len(self.rows.prompts)) * len(self.encoder.by_name())

    @property
    def _prompt_goes_with_kv(self) -> bool:
        """Whether `kv_transfer_params` have all rows of the prompt. Of several, they have those of the first."""
        return len(self.rows.prompts) == 1 and has_prompt(self.response.kv_transfer_params, self.rows.options.weights)

    def prepare(self, packed: bool) -> tuple[list[bytes], list[Iterator[bytes]]]:
        """The texts of the response body, as JSON or MessagePack (`packed`), and the parts of each array between them.
        Stores the arrays if the request asks for references; if the store cannot take them, they must fit inline."""
        body = body_of(self.response, packed)
        arrays = list(self.rows.arrays()) if self.rows.options.rows else []
        if self._prompt_goes_with_kv and not self.rows.options.asks_for_inline:
            arrays = [array for array in arrays if array[0] is not None]
        marker = secrets.token_bytes(16)  # random, so that no client can send it; behind it, the index of an array
        inline: list[Iterator[bytes]] = []
        prompts: dict[str, list[Any]] = {}
        for *_, rows in arrays:
            self.encoder.check(rows)
        for (choice, start, rows), references in zip(arrays, self._refer(arrays), strict=True):
            for name, encoder in self.encoder.by_name(_name_of(choice)).items():
                value = references.get(name, msgspec.Raw(marker + len(inline).to_bytes(4, "big")))
                if name not in references:
                    inline.append(encoder.parts(rows, start, packed))
                if choice is None:
                    prompts.setdefault(name, []).append(value)
                else:
                    body["choices"][choice][name] = value
        body |= {name: self._one_or_list(values) for name, values in prompts.items()}
        if self.rows.options.histogram:
            of_prompts, of_choices = self.rows.histograms(self.encoder)
            body["prompt_routed_experts_histogram"] = self._one_or_list(of_prompts)
            for choice_body, counted in zip(body["choices"], of_choices, strict=True):
                choice_body["routed_experts_histogram"] = counted
        first, *texts = encoded(body, packed).split(marker)
        order = [int.from_bytes(text[:4], "big") for text in texts]
        return [first, *(text[4:] for text in texts)], [inline[index] for index in order]

    def _refer(self, arrays: list[tuple[int | None, int, list[Rows]]]) -> list[dict[str, Any]]:
        """References to `arrays` and their weights, by name. Without those that are returned inline."""
        if self.references is None:
            return [{} for _ in arrays]
        named = ((_name_of(choice), start, rows) for choice, start, rows in arrays)
        made, failure = self.references.references(self.encoder, named)
        inline = (rows for references, (*_, rows) in zip(made, arrays, strict=True) if not references)
        if failure is not None and (num_inline := sum(map(_count, inline))):
            if self.encoder.text_bytes(num_inline) > self.max_bytes:
                raise failure
            self.references.warn_of_inline(failure)
        return made

    def _one_or_list(self, items: list[Any]) -> Any:
        return items if self.is_list or len(items) > 1 else items[0]


def _name_of(choice: int | None) -> str:
    """Name of the array of a choice, or of a prompt (None)."""
    return "routed_experts" if choice is not None else "prompt_routed_experts"


def parts_of(texts: list[bytes], arrays: list[Iterator[bytes]]) -> Iterator[bytes]:
    yield texts[0]
    for array, text in zip(arrays, texts[1:], strict=True):
        yield from array
        yield text


def body_of(response: Any, packed: bool) -> dict[str, Any]:
    """vLLM's response as a dict for JSON or MessagePack (`packed`), without vLLM's own routing field."""
    body: dict[str, Any] = response.model_dump()
    if params := body.get("kv_transfer_params"):
        body["kv_transfer_params"] = to_wire(params, packed)
    if packed:
        body = msgspec.to_builtins(body, str_keys=True, builtin_types=(bytes, bytearray))
    for choice in body["choices"]:
        choice.pop("routed_experts", None)
    return body


def encoded(body: dict[str, Any], packed: bool) -> bytes:
    """`body` as JSON or MessagePack."""
    return msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)


_JSON = "application/json"
_METRICS_HEADER = "endpoint-load-metrics-format"
_AT_ONCE_BYTES, _AT_ONCE_LIST_BYTES = 512 << 10, 192 << 10
"""Larger responses are prepared in a thread and sent in parts, so that other tasks run in between. Smaller ones take at
most about 2 ms, which a thread would double."""


async def respond(answer: Any, raw_request: Request) -> Response:
    """The HTTP response of vLLM's route for `answer`, with its routing."""
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
    except StoreError as error:
        if not answer.rows.options.by_default:
            raise cannot_store(error) from None
        logger.info("Server-wide routing default ignored for a response: %s", error)
        return await respond(answer.response, raw_request)
    except LostRowsError as error:
        failure = create_error_response(str(error), "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
        return JSONResponse(failure.model_dump(), status_code=failure.error.code)


async def _with_rows(answer: RoutedResponse, packed: bool, headers: Any) -> Response:
    about = {"media_type": MSGPACK if packed else _JSON, "headers": headers}
    is_small = answer.nbytes <= (_AT_ONCE_LIST_BYTES if answer.encoder.fmt == "list" else _AT_ONCE_BYTES)
    if answer.references is not None:
        texts, arrays = await answer.references.run(answer.num_arrays, answer.nbytes, answer.prepare, packed)
    elif is_small:
        texts, arrays = answer.prepare(packed)
    else:
        texts, arrays = await run_in_threadpool(answer.prepare, packed)
    parts = parts_of(texts, arrays)
    if arrays and not is_small:
        return StreamingResponse(_in_turns(answer, parts), **about)
    body = b"".join(parts)
    count_response(answer.encoder.total, answer.rows.num_lost, answer.rows.causes)
    return _Response(answer.references, body, **about)


class _Response(Response):
    """Keeps stored arrays only if the client is there when it is sent."""

    def __init__(self, references: ReferenceMaker | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._references = references

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._references is not None:
            self._references.told()
        await super().__call__(scope, receive, send)


async def _in_turns(answer: RoutedResponse, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    try:
        if answer.references is not None:
            answer.references.told()
        for part in parts:
            yield part
            await asyncio.sleep(0)
    finally:
        count_response(answer.encoder.total, answer.rows.num_lost, answer.rows.causes)


def wants_msgpack(accept: str) -> bool:
    """Whether the `Accept` header names MessagePack and does not prefer JSON."""
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
