"""vLLM's other routes: all reject routing fields but `/invocations`, which dispatches to our
routes."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from tempfile import SpooledTemporaryFile
from typing import IO, Any
from urllib.parse import unquote_plus

from fastapi import Depends, FastAPI, HTTPException, Request, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from routed_experts.protocol.models import INPUT_FIELDS, OPT_IN, PREFIXES, PROMPT_START
from routed_experts.server.http import routes
from routed_experts.server.http.forms import (
    CheckedForm,
    FormNames,
    RoutingFieldError,
    routing_fields_of,
)
from routed_experts.server.http.misplaced import unread_fields
from routed_experts.server.http.request import (
    ENDPOINTS,
    LongRoute,
    RoutedChatRequest,
    RoutedCompletionRequest,
    refuse_odd_values,
    require_key,
    routing_of,
)
from routed_experts.server.http.routing_input import input_of
from routed_experts.server.http.vllm_http import CompletionRequest
from routed_experts.server.vllm_api import VLLMValidationError

INVOCATIONS = "/invocations"
"""SageMaker's endpoint for all kinds of requests."""

_OURS = __name__.partition(".")[0]
_MULTIPART = "multipart/"
_URL_ENCODED = "application/x-www-form-urlencoded"
_LONGEST_NAME = 64
_MOST_FIELDS = 2000
"""Of a form that may name our fields: FastAPI reads at most 1000 fields and 1000 files."""
_MOST_NAME_BYTES = 256 << 10
"""Of the names of all fields together."""
_MOST_FORM_BYTES = 64 << 20
"""Of a form that no route has declared. vLLM takes 25 MiB of audio."""
_FORM_BYTES_IN_MEMORY = 1 << 20  # as many as Starlette holds of a file
_PIECE_BYTES = 64 << 10
_PLAIN = (*(prefix.encode() for prefix in PREFIXES), b"\0")  # a NUL is in each letter of UTF-16
_ESCAPED = re.compile(rb"\\u00[5-7]")  # a letter or underscore, which no encoder of JSON escapes
_PERCENT = re.compile(b"%")


def attach(app: FastAPI) -> None:
    """Replaces SageMaker's endpoint by one that returns routing: a plugin's route wins over vLLM's
    of the same path."""
    routes = (
        route for route in app.routes if isinstance(route, APIRoute) and route.path == INVOCATIONS
    )
    if (route := next((route for route in routes if "POST" in route.methods), None)) is not None:
        app.router.add_api_route(
            INVOCATIONS,
            _dispatching(route.endpoint),
            methods=["POST"],
            dependencies=[Depends(require_key), *route.dependencies],
            response_model=route.response_model,
            responses=route.responses,
            summary=route.summary,
            name=route.name,
            route_class_override=LongRoute,
        )


def refuse_on_other_routes(app: FastAPI) -> None:
    """Has every route of `app` that is not ours reject routing fields. Called when all routes are
    there."""
    for route in app.routes:
        if (
            isinstance(route, Route | Mount)
            and not is_ours(route)
            and not isinstance(route.app, _RefusingRoute)
        ):
            # Where vLLM renders a prompt, it puts routing fields of its own into the request for
            # our endpoint.
            vllms = CompletionRequest.model_fields.keys() if route.path.endswith("/render") else ()
            route.app = _RefusingRoute(route, {PROMPT_START}.intersection(vllms))


def other_paths(app: FastAPI) -> list[str]:
    """Paths to which a body can be sent, of routes that are not ours."""
    posts = (
        route
        for route in app.routes
        if isinstance(route, Route) and "POST" in (route.methods or ())
    )
    return [route.path for route in posts if not is_ours(route) and not route.param_convertors]


def is_ours(route: Route | Mount) -> bool:
    return (
        str(getattr(getattr(route, "endpoint", None), "__module__", "")).partition(".")[0] == _OURS
    )


class _RefusingRoute:
    """A route that rejects routing fields but those `allowed`. Bodies are parsed only if they may
    have some."""

    def __init__(self, route: Route | Mount, allowed: Collection[str]) -> None:
        self._app = route.app
        self._allowed = allowed
        # a mounted application reads what it wants, and may take uploads of any size
        self._passes_forms = isinstance(route, Mount) or _takes_forms(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        content_type = Headers(scope=scope).get("content-type", "")
        if self._passes_forms and _is(content_type, _MULTIPART):  # it has files
            await self._pass_form(scope, CheckedForm(content_type, receive, send))
            return
        # Others may do what they do without a look at the body, so that it is read before.
        if _is(content_type, _MULTIPART):
            with _temporary_file() as file:
                receive = await _checked_form(FormNames(content_type), receive, file, self._allowed)
                await self._app(scope, receive, send)
            return
        receive = await _checked(receive, _reader_of(content_type), self._allowed)
        await self._app(scope, receive, send)

    async def _pass_form(self, scope: Scope, form: CheckedForm) -> None:
        # not all applications answer what is raised while they read
        with suppress(RoutingFieldError):
            await self._app(scope, form.receive, form.send)
        if form.routing_field is not None:
            raise _refusal(form.routing_field)


async def _checked(
    receive: Receive, read_names: Callable[[bytes], Iterator[str]], allowed: Collection[str]
) -> Receive:
    """Reads a request's body; returns what gives it again. Raises `VLLMValidationError` for fields
    but `allowed`."""
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body", False):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)
    _refuse_fields(read_names(body), allowed)
    unread = iter(messages)

    async def again() -> Message:
        return next(unread, None) or await receive()

    return again


async def _checked_form(
    form: FormNames, receive: Receive, file: IO[bytes], allowed: Collection[str]
) -> Receive:
    """The same for a form of several parts, which is looked into as it comes and goes into `file`.
    What is no form may be JSON that is called one."""
    counted = _CountedNames()

    def check(chunk: bytes) -> None:
        for name in form.read(chunk):
            counted.add(name)
            _refuse_fields(routing_fields_of(name), allowed)

    last_message = await _receive_form(receive, file, check)
    if not _begins_as_form(file):
        _refuse_fields(_routing_fields(file.read()), allowed)
    file.seek(0)
    has_left = last_message["type"] == "http.disconnect"
    is_at_end = False

    async def again() -> Message:
        nonlocal is_at_end
        if is_at_end:
            return await receive()
        piece = file.read(_PIECE_BYTES)
        is_at_end = not piece
        if is_at_end and has_left:
            return await receive()
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    return again


async def _receive_form(
    receive: Receive, file: IO[bytes], check: Callable[[bytes], None]
) -> Message:
    """Reads a body into `file`, and has each chunk of it checked; returns the last message. Reads to
    the end before it raises an error, so that the client hears of it."""
    refusal: VLLMValidationError | HTTPException | None = None
    num_bytes = 0
    message: Message = {"more_body": True}
    while message.get("more_body", False):
        message = await receive()
        if refusal is not None:
            continue
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        try:
            _check_size(num_bytes)
            _write(file, chunk)
            check(chunk)
        except (VLLMValidationError, HTTPException) as error:
            refusal = error
    if refusal is not None:
        raise refusal
    return message


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MOST_FORM_BYTES:
        raise HTTPException(413, f"The form has more than {_MOST_FORM_BYTES >> 20} MiB.")


def _write(file: IO[bytes], chunk: bytes) -> None:
    try:
        file.write(chunk)
        file.flush()  # a disk that is full says so here
    except OSError:  # also where there is no folder for temporary files
        raise HTTPException(503, "The server has no room for a form of so many bytes.") from None


def _begins_as_form(file: IO[bytes]) -> bool:
    """Leaves the file at its start."""
    file.seek(0)
    begin = file.read(_PIECE_BYTES)
    file.seek(0)
    return begin.lstrip(b"\r\n").startswith(b"--")


@contextmanager
def _temporary_file() -> Iterator[IO[bytes]]:
    file = SpooledTemporaryFile(_FORM_BYTES_IN_MEMORY)  # noqa: SIM115
    try:
        yield file
    finally:
        # What a full disk did not take is written once more here.
        with suppress(OSError):
            file.close()


def _refuse_fields(names: Iterator[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise _refusal(name)


class _CountedNames:
    """Holds the names of a form's fields against their limits."""

    def __init__(self) -> None:
        self._num_fields = 0
        self._num_bytes = 0

    def add(self, name: str | bytes) -> None:
        self._num_fields += 1
        self._num_bytes += len(name)
        if self._num_fields > _MOST_FIELDS:
            raise VLLMValidationError(f"The form has more than {_MOST_FIELDS} fields and files.")
        if self._num_bytes > _MOST_NAME_BYTES:
            raise VLLMValidationError(
                f"The names of the form's fields take more than {_MOST_NAME_BYTES >> 10} KiB."
            )


def _refusal(name: str) -> VLLMValidationError:
    name = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()  # without lone surrogates
    message = f"{name}: this endpoint does not return routed experts: use {ENDPOINTS}"
    if name in INPUT_FIELDS:
        message = f"{name}: this endpoint takes no routing: use {ENDPOINTS}"
    return VLLMValidationError(message, parameter=name)


def _takes_forms(route: Route | Mount) -> bool:
    """Whether a route declares that it takes a form, so that FastAPI reads it to its end."""
    return (
        isinstance(route, APIRoute)
        and route.body_field is not None
        and isinstance(route.body_field.field_info, params.Form)
    )


def _is(content_type: str, kind: str) -> bool:
    return content_type.lower().startswith(kind)


def _reader_of(content_type: str) -> Callable[[bytes], Iterator[str]]:
    """What finds the names of the routing fields in a body of this type."""
    return _names_in_url_encoded if _is(content_type, _URL_ENCODED) else _routing_fields


def _may_have_names(body: bytes, escape: re.Pattern[bytes]) -> bool:
    """Whether a routing field's name may be in a body, as it is or with what `escape` finds. To parse
    one of many parts takes seconds."""
    return any(part in body for part in _PLAIN) or escape.search(body) is not None


def _names_in_url_encoded(body: bytes) -> Iterator[str]:
    """Names of the routing fields in a form without files, or in JSON that is called one."""
    if _may_have_names(body, _PERCENT):
        counted = _CountedNames()
        for field in body.split(b"&", _MOST_FIELDS):
            name, _, _ = field.partition(b"=")
            counted.add(name)
            yield from routing_fields_of(unquote_plus(name.decode("latin-1")))
    yield from _routing_fields(body)


def _routing_fields(body: bytes) -> Iterator[str]:
    """Names of the routing fields in a JSON body, those of responses included."""
    if _may_have_names(body, _ESCAPED):
        try:
            yield from unread_fields(json.loads(body))
        except (ValueError, RecursionError):  # not JSON, which vLLM reports
            return


def _dispatching(vllms: Any) -> Any:
    """SageMaker's endpoint: requests for routing go to the route that fits their body, others to
    `vllms` endpoint."""
    # Imported here, after vLLM, which resets the log levels that this import changes.
    import model_hosting_container_standards.sagemaker as standards

    @standards.stateful_session_manager()
    @standards.inject_adapter_id(adapter_path="model")  # the adapter comes in a header
    async def routed(raw_request: Request) -> Response:
        routing_input = await input_of(raw_request)
        routing = await routing_of(raw_request)
        body = await raw_request.json()
        try:
            if body.get("messages") is not None:
                chat = RoutedChatRequest.model_validate(body)
                return await routes.create_chat_completion(
                    request=chat,
                    raw_request=raw_request,
                    routing_input=routing_input,
                    routing=routing,
                )
            if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
                completion = RoutedCompletionRequest.model_validate(body)
                return await routes.create_completion(
                    request=completion,
                    raw_request=raw_request,
                    routing_input=routing_input,
                    routing=routing,
                )
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        if routing_input is not None:
            name = routing_input.first_field
            raise VLLMValidationError(f"{name} is for {ENDPOINTS}", parameter=name)
        if routing is not None and not routing.by_default:
            raise VLLMValidationError(
                f"This request does not return routed experts: use {ENDPOINTS}", parameter=OPT_IN
            )
        response: Response = await vllms(raw_request=raw_request)
        return response

    async def invocations(raw_request: Request) -> Response:
        routing_input = await input_of(raw_request)
        routing = await routing_of(raw_request)
        is_vllms = routing is None and routing_input is None
        try:
            response: Response = await (vllms if is_vllms else routed)(raw_request=raw_request)
        except Exception:
            await refuse_odd_values(raw_request)
            raise
        return response

    return invocations
