"""Routing as an input: makes what a request says about its tokens' experts ready for the engine.

The order matters, because arrays may have megabytes. Everything that can be wrong is refused
before they are read: by their positions, by their shapes, by the model and by the prompt. Then
their bytes are counted, and only then are they decoded, in a thread, one request at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from math import isfinite, prod
from typing import Any, TypeVar

import numpy as np
import pybase64
from fastapi import HTTPException, Request
from numpy.typing import NDArray

from routed_experts.capture.wire.rows import INPUT_FLAG
from routed_experts.protocol.codec import NUMPY_DTYPES, UNKNOWN, CodecError
from routed_experts.protocol.input_fields import (
    BiasArray,
    Data,
    FieldsOfInput,
    Replayed,
    ReplayedArray,
    parse_input,
    take_input,
)
from routed_experts.protocol.models import ACTIVATE, BIAS, DEACTIVATE, REPLAY, FieldError
from routed_experts.protocol.routing_input import (
    MAX_BIAS,
    EncodedInput,
    Groups,
    RoutingInput,
    RoutingInputError,
    indices_of,
    place_of,
    steering_bias,
)
from routed_experts.server.http.arrays.stored_arrays import run_in_thread
from routed_experts.server.http.engine import CapturedEngine, ServerState
from routed_experts.server.http.input_memory import INPUT_BYTES_FLAG, InputMemory
from routed_experts.server.http.requests.request import MSGPACK, PackedRequest, body_of
from routed_experts.server.outputs.array_store import (
    ArrayGoneError,
    ArrayStore,
    StoreError,
    UnknownArrayError,
)
from routed_experts.server.outputs.npy import NPY_HEADER_BYTES
from routed_experts.server.outputs.threads import Threads
from routed_experts.server.vllm_api import VLLMValidationError

T = TypeVar("T")

_SCOPE_KEY = "routed_experts.input"  # in the scope of a request
_FIELD_OF = {
    "rows": REPLAY,
    "start": REPLAY,
    "bias": BIAS,
    "activate": ACTIVATE,
    "deactivate": DEACTIVATE,
}
"""The field of a request for each argument of `RoutingInput` and `steering_bias`."""

JSON_BYTES = 8 << 20
"""Of the base64 of a request's arrays. The event loop takes 6 ms to parse so many (AMD EPYC,
2026-11-29), and all streams wait meanwhile. Bytes in MessagePack are neither parsed nor copied."""
_DECODER = Threads(1, "routed-experts-input")
"""One thread, so that many long arrays keep the event loop waiting no longer than one does."""


async def input_of(raw_request: Request) -> FieldsOfInput | None:
    """What the request says of its routing, with the server's defaults of the fields that it
    leaves out; None if it says nothing itself. Takes the fields out of the body, before vLLM
    validates it: no error or log can repeat them.

    `/invocations` asks twice, so the answer is kept.
    """
    body = await body_of(raw_request)
    fields = take_input(body) if body is not None else {}
    if fields:
        ours: ServerState = raw_request.app.state.routed_experts
        if ours.captured is None or not ours.captured.info.input:
            raise VLLMValidationError(
                f"This server takes no routing as an input: start it with {INPUT_FLAG}.",
                parameter=next(iter(fields)),
            )
        try:
            parsed = parse_input(fields)
        except FieldError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from None
        if parsed.text_bytes > JSON_BYTES and not isinstance(raw_request, PackedRequest):
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{parsed.first_field}: the arrays of a JSON body have at most {JSON_BYTES} bytes "
                f"of base64, and these have {parsed.text_bytes}: send the body as MessagePack "
                f"(Content-Type: {MSGPACK}), or the arrays by reference.",
            )
        whole = parsed.with_defaults(ours.settings.input_default, fields)
        body_bytes = len(await raw_request.body())
        raw_request.scope[_SCOPE_KEY] = replace(whole, body_bytes=body_bytes)
    said: FieldsOfInput | None = raw_request.scope.get(_SCOPE_KEY)
    return said


@dataclass(frozen=True)
class InputReader:
    """Reads the arrays of requests."""

    captured: CapturedEngine
    store: ArrayStore | None
    memory: InputMemory

    async def encode(
        self,
        fields: FieldsOfInput,
        prompt_lens: list[int],
        num_choices: int,
        request_end: ExitStack,
    ) -> EncodedInput:
        """What the engine is to know, for prompts of these lengths with `num_choices` each,
        until the request has ended.

        Raises:
            FieldError: the request is impossible with this model or these prompts.
            HTTPException: there is no memory, or the store does not answer.
        """
        self._check_prompts(fields, prompt_lens)
        self._check_bias_shape(fields)
        pieces = await self._pieces(fields.replay, prompt_lens[0]) if fields.replay else []
        self._take_memory(fields, pieces, len(prompt_lens) * num_choices, request_end)
        stored = {
            piece.key: await self._read_stored(piece.key, piece)
            for piece in pieces
            if piece.key is not None
        }
        return await _DECODER.run(self._encode, fields, pieces, stored)

    def encode_default(self, fields: FieldsOfInput) -> EncodedInput:
        """The same for the server's default, which is no array of rows. Raises `FieldError`."""
        self._check_bias_shape(fields)
        return self._encode(fields, [], {})

    def _check_prompts(self, fields: FieldsOfInput, prompt_lens: list[int]) -> None:
        if fields.replay and len(prompt_lens) != 1:
            raise FieldError(
                REPLAY,
                f"{REPLAY} is for one prompt, and this request has {len(prompt_lens)}: send a "
                "request for each",
            )

    def _check_bias_shape(self, fields: FieldsOfInput) -> None:
        if isinstance(fields.bias, BiasArray):
            expected = [self.captured.info.num_layers, self.captured.num_experts]
            if fields.bias.shape != expected:
                raise FieldError(
                    BIAS,
                    f"{BIAS} must have the shape {expected} ([layers, experts]), as this model "
                    f"has, not {fields.bias.shape}",
                )

    async def _pieces(self, arrays: Sequence[Replayed], prompt_len: int) -> list["_Piece"]:
        """The arrays that have rows, in the order of their positions, which fit the prompt.

        Each is held against those before it before the next is looked up in the store, so that a
        small body has few of them read.
        """
        _check_end(max(array.start for array in arrays), prompt_len)
        pieces: list[_Piece] = []
        headers: dict[str, _Header] = {}  # an array may be there several times
        end = 0
        for array in sorted(arrays, key=lambda array: array.start):
            piece = await self._piece(array, headers)
            if not piece.num_rows:
                continue
            if piece.start < end:
                raise FieldError(
                    REPLAY,
                    f"{REPLAY} has two arrays with a row of position {piece.start}: give one for "
                    "each position",
                )
            end = piece.end
            _check_end(end, prompt_len)
            pieces.append(piece)
        return pieces

    async def _piece(self, array: Replayed, headers: dict[str, "_Header"]) -> "_Piece":
        """Some rows, whose shape fits the model."""
        if isinstance(array, ReplayedArray):
            num_rows, num_layers, top_k = array.shape
            piece = _Piece(array.start, num_rows, num_layers, top_k, array.dtype, data=array.data)
        else:
            if array.id not in headers:
                headers[array.id] = await self._header_of(array.id)
            num_layers, num_rows, top_k, dtype = headers[array.id]
            piece = _Piece(array.start, num_rows, num_layers, top_k, dtype, key=array.id)
        self._check_shape(piece)
        return piece

    def _check_shape(self, piece: "_Piece") -> None:
        if (piece.num_layers, piece.top_k) == self.captured.shape:
            return
        num_layers, top_k = self.captured.shape
        hint = ""
        if piece.num_layers == self.captured.info.num_hidden_layers:
            hint = "; ask for rows with routed_experts_layers: moe"
        raise FieldError(
            REPLAY,
            f"{REPLAY} must have {num_layers} layers and {top_k} experts per token, as this model "
            f"has, not {piece.num_layers} and {piece.top_k}{hint}",
        )

    def _take_memory(
        self,
        fields: FieldsOfInput,
        pieces: list["_Piece"],
        num_requests: int,
        request_end: ExitStack,
    ) -> None:
        """The engine has the bytes once for each choice, and this process the body."""
        num_layers, top_k = self.captured.shape
        num_bytes = 0
        if pieces:
            num_bytes += 2 * (pieces[-1].end - pieces[0].start) * num_layers * top_k
        if fields.has_bias:
            num_bytes += 4 * num_layers * self.captured.num_experts
        num_bytes *= max(num_requests, 1)  # vLLM refuses a choice less than one, but later
        num_bytes += fields.body_bytes
        if num_bytes > self.memory.max_bytes:
            raise FieldError(
                fields.first_field,
                f"{fields.first_field}: what this request says of its routing takes, with its "
                f"body, {num_bytes} bytes, and the limit of this server is {self.memory.max_bytes} "
                f"({INPUT_BYTES_FLAG}): send fewer rows or choices",
            )
        self.memory.take(num_bytes, request_end)

    async def _header_of(self, key: str) -> "_Header":
        """Layers, rows, experts per token and dtype of a stored array."""
        header = await self._ask_store(lambda store: store.header(key))
        (num_layers, num_rows, top_k), dtype = header
        if dtype.kind not in "iu":
            raise FieldError(REPLAY, f"{REPLAY}: the array {key} has weights, and not rows")
        return num_layers, num_rows, top_k, dtype.name

    async def _read_stored(self, key: str, piece: "_Piece") -> NDArray[Any]:
        span = (NPY_HEADER_BYTES, NPY_HEADER_BYTES + piece.num_bytes)
        data = await self._ask_store(lambda store: store.read(key, [span]))
        layers_first = np.frombuffer(data, NUMPY_DTYPES[piece.dtype])
        shape = (piece.num_layers, piece.num_rows, piece.top_k)
        rows: NDArray[Any] = layers_first.reshape(shape).transpose(1, 0, 2)  # [n, L, K]
        return rows

    async def _ask_store(self, read: Callable[[ArrayStore], T]) -> T:
        """What the store says of an array that a request names."""
        if self.store is None:
            raise FieldError(REPLAY, f"{REPLAY}: this server stores no routed experts")
        try:
            return await run_in_thread(self.store, read, self.store)
        except UnknownArrayError:
            raise FieldError(REPLAY, f"{REPLAY}: there is no stored array with this id") from None
        except ArrayGoneError:
            raise FieldError(
                REPLAY, f"{REPLAY}: the stored array has expired or was deleted"
            ) from None
        except CodecError as error:
            raise FieldError(REPLAY, f"{REPLAY}: the stored array is damaged: {error}") from None
        except StoreError as error:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None

    def _encode(
        self, fields: FieldsOfInput, pieces: list["_Piece"], stored: dict[str, NDArray[Any]]
    ) -> EncodedInput:
        """In a thread: decodes the arrays, and checks what they hold."""
        info = self.captured.info
        try:
            rows = _joined(pieces, stored) if pieces else None
            said = RoutingInput(
                rows=rows,
                start=pieces[0].start if pieces else 0,
                bias=self._bias(fields) if fields.has_bias else None,
            )
            said.check(
                num_layers=info.num_layers,
                top_k=info.top_k,
                num_experts=info.num_experts,
                groups=Groups(*info.groups),
            )
        except RoutingInputError as error:
            name = _FIELD_OF[error.field]
            problem = error.in_model(info.layer_ids).problem
            raise FieldError(name, f"{name} {problem}") from None
        return said.encode()

    def _bias(self, fields: FieldsOfInput) -> NDArray[np.float32]:
        """[L, E]"""
        info = self.captured.info
        bias: NDArray[np.float32] | None = None
        if isinstance(fields.bias, BiasArray):
            data = _decoded(BIAS, fields.bias.data, 4 * prod(fields.bias.shape))
            bias = data.view("<f4").reshape(fields.bias.shape)
        elif fields.bias:
            bias = self._bias_of_experts(fields.bias)
        return steering_bias(
            layer_ids=info.layer_ids,
            num_experts=info.num_experts,
            activate=fields.activate,
            deactivate=fields.deactivate,
            bias=bias,
        )

    def _bias_of_experts(self, biases: tuple[tuple[int, int, float], ...]) -> NDArray[np.float32]:
        """[L, E], zeros but for these."""
        info = self.captured.info
        index_of_layer = indices_of(info.layer_ids)
        bias = np.zeros((info.num_layers, info.num_experts), np.float32)
        seen: set[tuple[int, int]] = set()
        for layer, expert, value in biases:
            place = place_of("bias", (layer, expert), index_of_layer, info.num_experts)
            if place in seen:
                raise FieldError(BIAS, f"{BIAS} has expert {expert} of decoder layer {layer} twice")
            if not isfinite(value) or abs(value) > MAX_BIAS:
                raise FieldError(
                    BIAS,
                    f"{BIAS} must be numbers of at most {MAX_BIAS:.0f} from 0: {ACTIVATE} stands "
                    f"for always, {DEACTIVATE} for never",
                )
            seen.add(place)
            bias[place] = value
        return bias


_Header = tuple[int, int, int, str]
"""Of a stored array: layers, rows, experts per token and dtype."""


@dataclass(frozen=True)
class _Piece:
    """Some rows of a request, not decoded yet: `data` of the request, or a stored array."""

    start: int
    num_rows: int
    num_layers: int
    top_k: int
    dtype: str
    data: Data | None = None
    key: str | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def num_bytes(self) -> int:
        size = NUMPY_DTYPES[self.dtype].itemsize
        return self.num_rows * self.num_layers * self.top_k * size

    def decode(self) -> NDArray[Any]:
        """[n, L, K]"""
        assert self.data is not None
        data = _decoded(REPLAY, self.data, self.num_bytes)
        shape = (self.num_rows, self.num_layers, self.top_k)
        return data.view(NUMPY_DTYPES[self.dtype]).reshape(shape)


def _check_end(end: int, prompt_len: int) -> None:
    if end > prompt_len:
        raise FieldError(
            REPLAY,
            f"{REPLAY}: rows must be of the prompt's {prompt_len} tokens, but they end at position "
            f"{end}. For experts of an answer, append it to the prompt.",
        )


def _joined(pieces: list[_Piece], stored: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """[n, L, K] from the first position on; -1 between arrays, where the router chooses."""
    arrays = [piece.decode() if piece.key is None else stored[piece.key] for piece in pieces]
    if len(arrays) == 1:
        return arrays[0]
    first = pieces[0]
    num_rows = pieces[-1].end - first.start
    dtype = np.result_type(np.int16, *arrays)
    whole = np.full((num_rows, first.num_layers, first.top_k), UNKNOWN, dtype)
    for piece, array in zip(pieces, arrays, strict=True):
        whole[piece.start - first.start : piece.end - first.start] = array
    return whole


def _decoded(name: str, data: Data, num_bytes: int) -> NDArray[np.uint8]:
    if isinstance(data, memoryview):
        # A copy, which is aligned, whatever stands before it in the body.
        decoded = np.frombuffer(data, np.uint8).copy()
    else:
        decoded = np.empty(0, np.uint8)
        with suppress(ValueError):  # whose message may repeat the text
            decoded = np.frombuffer(pybase64.b64decode(data, validate=True), np.uint8)
    if len(decoded) != num_bytes:
        raise FieldError(
            name,
            f"{name}: data must be the {num_bytes} bytes of an array of this shape and dtype, in "
            "JSON as base64",
        )
    return decoded
