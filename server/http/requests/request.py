"""Request fields for routing: reads them from the body, checks them and passes them to the
engine."""

import os
import secrets
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import (
    ModelWrapValidatorHandler,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from routed_experts.capture.wire.prefill_rows import PARAM, TRANSFER_PARAMS
from routed_experts.protocol.input_fields import FieldsOfInput, InputFields
from routed_experts.protocol.models import (
    BIAS,
    LABEL,
    OPT_IN,
    PREFIXES,
    PROMPT_START,
    REPLAY,
    FieldError,
    RoutingFields,
    RoutingOptions,
    check_names,
    parse_options,
)
from routed_experts.protocol.routing_input import INPUT_ARG
from routed_experts.server.http.vllm_http import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    VLLMClientError,
)
from routed_experts.server.outputs.held_input import HeldInput
from routed_experts.server.outputs.processor import opt_in
from routed_experts.server.settings import Settings
from routed_experts.server.vllm_api import SamplingParams, VLLMValidationError

MSGPACK = "application/msgpack"
ENDPOINTS = (
    "/v1/completions, /v1/chat/completions or, with --enable-scale-out, /inference/v1/generate"
)
_EXTRA_BODY = "extra_body"
_SAMPLING_PARAMS = "sampling_params"
_EXTRA_ARGS = "extra_args"
_WITH_FIELDS = (_SAMPLING_PARAMS, _EXTRA_ARGS, "vllm_xargs")
"""Objects of a request in which clients put more fields for vLLM."""
_WITH_ARRAYS = (REPLAY, BIAS)
_RawArray = dict[str, msgspec.Raw]
_BINARY = (b"\xc4", b"\xc5", b"\xc6")
"""The first byte of bytes in MessagePack."""
_MESSAGE_INTEGERS = {"top_k", "stream_interval"}
"""Integers that vLLM sends to its engine unchecked, with at most so many bits:"""
_MESSAGE_BITS = 63


class PackedRoute(APIRoute):
    """A route that also takes MessagePack, in which arrays need no base64."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def unpacking(raw_request: Request) -> Response:
            content_type = raw_request.headers.get("content-type", "")
            if content_type.partition(";")[0].strip().lower() == MSGPACK:
                raw_request = PackedRequest.of(raw_request)
            return await handle(raw_request)

        return unpacking


class PackedRequest(Request):
    """A request in MessagePack that FastAPI and vLLM read as JSON."""

    @classmethod
    def of(cls, raw_request: Request) -> Self:
        headers = [pair for pair in raw_request.scope["headers"] if pair[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        return cls({**raw_request.scope, "headers": headers}, raw_request.receive)

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            parts = [part async for part in self.stream()]
            self._body = await run_in_threadpool(b"".join, parts)  # which lets other threads run
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = unpacked(await self.body())
        return self._json


def unpacked(content: bytes) -> Any:
    """A MessagePack body as JSON's types, and the rows in its `kv_transfer_params`.

    Other bytes become text, because `opt_in` sends bytes to the engine that clients must not be
    able to send.
    """
    try:
        body = _without_copies(content)
        params = body.get(TRANSFER_PARAMS) if isinstance(body, dict) else None
        rows = params.pop(PARAM, None) if isinstance(params, dict) else None
        binary = _take_binary(body)
        body = msgspec.json.decode(msgspec.json.encode(body))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The body is not valid MessagePack: {error}") from None
    if rows is not None:
        body[TRANSFER_PARAMS][PARAM] = rows
    for array, data in zip(_arrays_of(body), binary, strict=True):
        if data is not None:
            array["data"] = data
    return body


def _without_copies(content: bytes) -> Any:
    """A MessagePack body, with views of it where arrays have bytes, which may be long: to copy 25 MB
    takes the event loop 13 ms."""
    try:
        fields = msgspec.msgpack.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # no object
        return msgspec.msgpack.decode(content)
    return {name: _with_views(name, value) for name, value in fields.items()}


def _with_views(name: str, field: msgspec.Raw) -> Any:
    if name in _WITH_ARRAYS:
        with suppress(msgspec.ValidationError):  # where it is no array
            arrays = msgspec.msgpack.decode(field, type=_RawArray | list[_RawArray])
            return [*map(_view, arrays)] if isinstance(arrays, list) else _view(arrays)
    return msgspec.msgpack.decode(field)


def _view(array: _RawArray) -> dict[str, Any]:
    return {
        name: msgspec.msgpack.decode(
            value, type=memoryview if bytes(memoryview(value)[:1]) in _BINARY else Any
        )
        for name, value in array.items()
    }


def _take_binary(body: Any) -> list[memoryview | None]:
    """Takes the bytes out of arrays that say which experts tokens take, in their order; None for an
    array without."""
    binary: list[memoryview | None] = []
    for array in _arrays_of(body):
        data = array.get("data")
        is_binary = isinstance(data, memoryview)
        binary.append(data if is_binary else None)
        if is_binary:
            array["data"] = ""
    return binary


def _arrays_of(body: Any) -> Iterator[dict[str, Any]]:
    """The objects in a request's body, of any form, that may hold arrays under `data`."""
    for name in _WITH_ARRAYS:
        value = body.get(name) if isinstance(body, dict) else None
        for array in value if isinstance(value, list) else [value]:
            if isinstance(array, dict):
                yield array


class RoutedRequest(RoutingFields, InputFields):
    """Extension of vLLM's request models. The `InputFields` are never filled: `input_of` has taken
    them out of the body."""

    # None if the request does not ask for routing
    _routing: RoutingOptions | None = PrivateAttr(default=None)
    # None if the request says nothing of its tokens' experts
    _input_fields: FieldsOfInput | None = PrivateAttr(default=None)
    _input: HeldInput | None = PrivateAttr(default=None)  # the same for the engine
    _request_end: ExitStack = PrivateAttr()  # of a request for routing
    _client_request_id: str = PrivateAttr("")  # of the same; a part of the response's `id`

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_odd_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Returns 400 for values of vLLM's own fields for which vLLM returns 500.

        Some of vLLM's validators run before the type check and assume a type. Integers that are too
        large for the message to the engine fail only when it is sent.
        """
        try:
            request = handler(data)
        except (ValueError, VLLMClientError):
            raise
        except Exception as error:
            raise _odd_field(cls, data) or VLLMValidationError(
                f"The request is not valid: {error}"
            ) from error
        for name in _MESSAGE_INTEGERS:
            if (field_of(request, name) or 0).bit_length() > _MESSAGE_BITS:
                raise VLLMValidationError(f"{name} is out of range", parameter=name)
        return request

    def opt_in(self, params: SamplingParams) -> SamplingParams:
        """Adds the opt-in for the engine to `params` if the request asks for routing."""
        if self._routing is not None:
            # vLLM's models have the field `stream` each, and not their common base.
            at_end = self._routing.at_end or not getattr(self, "stream", False)
            opt_in(
                params,
                self._routing.prompt_start,
                weights=self._routing.weights,
                steps=self._routing.steps,
                at_end=at_end,
                own_prompt=self._routing.layout == "joined",
            )
        if self._input is not None:
            params.extra_args = {**(params.extra_args or {}), INPUT_ARG: self._input}
        if LABEL in self.model_fields_set:  # for the recorder
            params.extra_args = {**(params.extra_args or {}), LABEL: self.routed_experts_label}
        # Not used here. vLLM checks its own field of this name too late, after a stream has begun.
        params.routed_experts_prompt_start = 0
        return params

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        return self.opt_in(super().to_sampling_params(*args, **kwargs))  # type: ignore[misc]


class RoutedCompletionRequest(RoutedRequest, CompletionRequest):
    """A completion request that may ask for routing."""


class RoutedChatRequest(RoutedRequest, ChatCompletionRequest):
    """A chat completion request that may ask for routing."""


class RoutedGenerateRequest(RoutedRequest, GenerateRequest):
    """A request with token ids that may ask for routing."""


def field_of(request: Any, name: str) -> Any:
    """A field of vLLM's request model; None if the model lacks it. Pydantic keeps unknown fields of
    a client as attributes too, so `getattr` alone would return them."""
    return getattr(request, name) if name in type(request).model_fields else None


def _odd_field(model: type[RoutedRequest], data: Any) -> VLLMValidationError | None:
    """The error for the first field with a wrong type; None if there is none."""
    for name, field in model.model_fields.items():
        if isinstance(data, dict) and name in data:
            try:
                TypeAdapter[Any](field.annotation or Any).validate_python(data[name])
            except ValidationError as error:
                return VLLMValidationError(f"{name}: {error.errors()[0]['msg']}", parameter=name)
    return None


async def routing_of(raw_request: Request) -> RoutingOptions | None:
    """The request's routing options. Runs before vLLM validates the body. An error names the field
    as `parameter`."""
    body = await body_of(raw_request)
    if body is None:
        return None
    _check_places(body)
    return _parse(body, raw_request, {})


async def generate_routing_of(raw_request: Request) -> RoutingOptions | None:
    """As `routing_of`, for vLLM's token-in, token-out endpoint, which also has fields of its own
    for routing."""
    body = await body_of(raw_request)
    if body is None:
        return None
    # `vllm serve --enable-return-routed-experts` opts in every request of this endpoint.
    vllms_default = (
        {OPT_IN: True} if raw_request.app.state.routed_experts.generate_returns_rows else {}
    )
    options = _parse(body, raw_request, vllms_default)
    params = _check_places(body, PROMPT_START)
    if options is None:
        return None
    start = params.get(PROMPT_START)
    if start:  # clients that send every field send 0
        if type(start) is not int:  # vLLM would convert some values
            raise VLLMValidationError(f"{PROMPT_START} must be an integer", parameter=PROMPT_START)
        if options.prompt_start_param in body and options.prompt_start != start:
            raise VLLMValidationError(
                f"{options.prompt_start_param} and sampling_params.{PROMPT_START} differ",
                parameter=options.prompt_start_param,
            )
        if start < 0:
            raise VLLMValidationError(
                f"{PROMPT_START} must not be negative", parameter=PROMPT_START
            )
        options = replace(
            options, prompt_start=start, prompt_start_param=PROMPT_START, by_default=False
        )
    return options.with_vllms_forms()


def api_keys(args: Namespace) -> list[str]:
    """The API keys that vLLM's routes accept; empty if they need none."""
    return [
        key for key in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if key
    ]


async def require_key(raw_request: Request) -> None:
    """Checks the API key at routes that are not below /v1, which is all that every supported vLLM
    guards."""
    keys = api_keys(getattr(raw_request.app.state, "args", Namespace()))
    scheme, _, key_of_client = raw_request.headers.get("Authorization", "").partition(" ")
    # all, so that the time says nothing
    known = [secrets.compare_digest(key_of_client.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(known)):
        raise HTTPException(401, "Unauthorized", {"WWW-Authenticate": "Bearer"})


def _check_places(body: Mapping[str, Any], *vllms: str) -> Mapping[str, Any]:
    """Refuses routing fields below the top level of `body`.

    Returns its `sampling_params`, in which vLLM knows no routing fields but `vllms`.
    """
    if isinstance(body.get(_EXTRA_BODY), dict):
        raise VLLMValidationError(
            f"{_EXTRA_BODY} is an argument of OpenAI's Python client: put its fields at the top level",
            parameter=_EXTRA_BODY,
        )
    for place, name in misplaced_fields(body):
        if place == _SAMPLING_PARAMS and name in vllms:
            continue
        try:
            check_names([name])
        except FieldError as error:
            raise VLLMValidationError(str(error), parameter=f"{place}.{error.param}") from None
        raise VLLMValidationError(
            f"{name} belongs at the top level of the request, not in {place}",
            parameter=f"{place}.{name}",
        )
    params = body.get(_SAMPLING_PARAMS)
    return params if isinstance(params, dict) else {}


def misplaced_fields(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The place of each routing field below the top level of `body`, such as `vllm_xargs`, and its
    name. Only the objects in which clients put more fields are looked into."""
    objects = {place: body.get(place) for place in _WITH_FIELDS}
    params = body.get(_SAMPLING_PARAMS)
    if isinstance(params, dict):
        objects[f"{_SAMPLING_PARAMS}.{_EXTRA_ARGS}"] = params.get(_EXTRA_ARGS)
    for place, fields in objects.items():
        if isinstance(fields, dict):
            yield from ((place, name) for name in fields if name.startswith(PREFIXES))


def _parse(
    body: Mapping[str, Any], raw_request: Request, vllms_default: Mapping[str, Any]
) -> RoutingOptions | None:
    settings: Settings = raw_request.app.state.routed_experts.settings
    try:
        return parse_options(body, {**vllms_default, **settings.routed_experts_default})
    except FieldError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None


async def body_of(raw_request: Request) -> dict[str, Any] | None:
    """The request's body if it is a JSON object; otherwise None, and vLLM reports the error."""
    try:
        body = await raw_request.json()
    except ValueError:
        return None
    except RecursionError:  # which vLLM does not report on /invocations
        raise VLLMValidationError("The body is not valid JSON: it is too deep") from None
    except ClientDisconnect:  # on /invocations, whose body FastAPI does not read
        raise HTTPException(400, "The client left before its body had come") from None
    return body if isinstance(body, dict) else None
