"""vLLM's serving classes, extended with routing."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import Request

from routed_experts.capture.engine import transfer_params
from routed_experts.capture.wire.prefill_rows import PARAM, TRANSFER_PARAMS
from routed_experts.capture.wire.rows import WEIGHTS_FLAG
from routed_experts.protocol import codec
from routed_experts.protocol.input_fields import FieldsOfInput
from routed_experts.protocol.models import (
    HISTOGRAM,
    OPT_IN,
    REPLAY,
    WEIGHTS,
    FieldError,
    RoutingOptions,
)
from routed_experts.server.http.answers.response import CollectedRows, RoutedResponse
from routed_experts.server.http.answers.streaming import SSERewriter, StreamLimitError
from routed_experts.server.http.arrays.references import Delivery, ReferenceMaker
from routed_experts.server.http.drain import request_end_of
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import LostRowsError, WireForm
from routed_experts.server.http.engine import CapturedEngine, ServerState
from routed_experts.server.http.metrics import NotRecorded
from routed_experts.server.http.requests.request import (
    RoutedGenerateRequest,
    RoutedRequest,
    field_of,
)
from routed_experts.server.http.requests.routing_input import InputReader
from routed_experts.server.http.seams import STREAMS_CHOICES, set_output_kind
from routed_experts.server.http.vllm_http import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    GenerateRequest,
    OpenAIServingChat,
    OpenAIServingCompletion,
    ServingTokens,
)
from routed_experts.server.outputs.held_input import HeldInput
from routed_experts.server.outputs.prefill_param import (
    FIELD,
    PrefillRowsError,
    PrefillRowsParam,
    to_wire,
)
from routed_experts.server.outputs.threads import Threads
from routed_experts.server.vllm_api import (
    VLLM_VERSION,
    RequestOutput,
    VLLMValidationError,
    get_logger,
)

logger = get_logger(__name__)

_PROMPT_UNKNOWN = (
    "counts the tokens of the whole prompt, which is known only after content_parts are processed: "
    "send features instead (/v1/chat/completions/render)"
)
_TRACE = "sampling_params.trace_decode_token_ids"
_N = "sampling_params.n"
_PREFILL_ROWS_READER = Threads(1, "routed-experts-prefill-rows")
"""One thread, so that large rows of many requests leave the server's own threads to others."""


def _reject(message: str, param: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=param)


def _cannot(request: Any, options: RoutingOptions, message: str, param: str) -> None:
    """Rejects a request whose routing cannot be returned. If only the server-wide default asks,
    drops the routing."""
    if not options.by_default:
        _reject(message, param)
    logger.info("Server-wide routing default ignored for a request: %s", message)
    request._routing = None


def _start_beyond_prompt(options: RoutingOptions, prompt_lens: list[int]) -> str | None:
    """Which prompt is shorter than its rows' start; None if none is."""
    for index, length in enumerate(prompt_lens):
        if options.prompt_start <= length:
            continue
        which = f"prompt {index} (the first is 0)" if len(prompt_lens) > 1 else "the prompt"
        start = f"{options.prompt_start_param} is {options.prompt_start}"
        return f"{start}, but {which} has {length} tokens"
    return None


def options_of(request: Any) -> RoutingOptions | None:
    """Routing options of `request`; None if it does not ask for routing or came through one of
    vLLM's routes."""
    return request._routing if isinstance(request, RoutedRequest) else None


def input_fields_of(request: Any) -> FieldsOfInput | None:
    """What `request` says of its routing, not decoded; None if it says nothing."""
    return request._input_fields if isinstance(request, RoutedRequest) else None


def _move_transfer_params(request: Any) -> None:
    """Moves `kv_transfer_params` from vLLM's extra arguments to the field of that name."""
    sampling = field_of(request, "sampling_params")
    name = "vllm_xargs"
    extra = field_of(request, name)
    if sampling is not None:
        extra = sampling.extra_args
        name = "sampling_params.extra_args"
    if not isinstance(extra, dict) or extra.get(TRANSFER_PARAMS) is None:
        return
    if not isinstance(extra[TRANSFER_PARAMS], dict):
        _reject(f"{name}.{TRANSFER_PARAMS} must be an object", f"{name}.{TRANSFER_PARAMS}")
    params = extra.pop(TRANSFER_PARAMS)
    if request.kv_transfer_params is None:
        request.kv_transfer_params = params


def _expands(request: GenerateRequest) -> bool:
    """Whether vLLM puts the tokens of images into the prompt later. Its older versions have no such
    field."""
    return bool(field_of(request, "content_parts"))


class RoutedServing:
    """Extension of vLLM's serving classes."""

    server: ServerState
    model_config: Any  # of the engine, which vLLM sets

    @property
    def captured(self) -> CapturedEngine | None:
        """None if the capture is off."""
        return self.server.captured

    @property
    def _max_bytes(self) -> int:
        return self.server.settings.routed_experts_max_response_bytes

    def begin(self, request: Any, raw_request: Request | None) -> None:
        """Prepares a request for vLLM's own handling: checks `kv_transfer_params`, and moves rows
        out of them into a `PrefillRowsParam`.

        If vLLM or `check` rejects the request later, vLLM passes these params to the engine, so
        that the prefill instance frees its KV.
        """
        takes_routing = input_fields_of(request) is not None
        if raw_request is not None and (options_of(request) is not None or takes_routing):
            request._request_end = request_end_of(raw_request)
            request._client_request_id = raw_request.headers.get(
                "X-Request-Id", getattr(request, "request_id", "")
            )
        _move_transfer_params(request)
        try:
            transfer_params.check(request.kv_transfer_params, self._kv_transfer_config)
        except transfer_params.TransferParamsError as error:
            _reject(str(error), error.param)
        if request.kv_transfer_params:
            request.kv_transfer_params = self._with_prefill_rows(
                request.kv_transfer_params, asks_for_routing=options_of(request) is not None
            )

    @property
    def _kv_transfer_config(self) -> Any:
        return self.engine_client.vllm_config.kv_transfer_config  # type: ignore[attr-defined]

    def _with_prefill_rows(self, params: dict[str, Any], asks_for_routing: bool) -> dict[str, Any]:
        """`kv_transfer_params` with rows of the prompt as a `PrefillRowsParam`, if they came from a
        prefill instance; or with what asks this instance for them, if it is one."""
        captures = self.captured is not None
        exchanges = captures and transfer_params.takes_prefill_rows(self._kv_transfer_config)
        if PARAM in params:
            if exchanges:
                return {**params, PARAM: PrefillRowsParam(params[PARAM])}
            if captures:
                _reject(f"{FIELD}: the KV connector of this server cannot receive rows", FIELD)
            return {key: value for key, value in params.items() if key != PARAM}
        if exchanges and asks_for_routing and params.get("do_remote_decode"):
            return {**params, PARAM: True}
        return params

    def check(self, request: Any) -> None:
        """Raises `VLLMValidationError` for routing that this server cannot take or return."""
        self._check_input(request)
        options = options_of(request)
        if options is None:
            return
        opt_in_field = OPT_IN if options.rows else HISTOGRAM
        if self.captured is None:
            _reject(
                "This server does not capture routed experts: start it without --no-enable-return-routed-experts.",
                opt_in_field,
            )
        if field_of(request, "use_beam_search"):
            message = "Routed experts cannot be returned with beam search."
            _cannot(request, options, message, opt_in_field)
        if options.weights and not self.captured.info.weights:
            message = (
                f"This server does not capture the routers' weights: start it with {WEIGHTS_FLAG}."
            )
            _cannot(request, options, message, WEIGHTS)
        try:
            codec.resolve_dtype(options.dtype, self.captured.num_experts)
        except codec.CodecError as error:
            _reject(str(error), "routed_experts_dtype")

    def _check_input(self, request: Any) -> None:
        """Raises `VLLMValidationError` for routing as an input where none can be."""
        fields = input_fields_of(request)
        if fields is None:
            return
        is_beam_search = field_of(request, "use_beam_search")
        if fields.says_nothing:
            if is_beam_search:
                _reject(
                    "The server's default holds for beams, and no empty field lifts it: leave it out, or "
                    "use_beam_search.",
                    "use_beam_search",
                )
            return
        name = fields.first_field
        if is_beam_search:
            _reject(f"{name} cannot be used with beam search.", name)
        if request.kv_transfer_params:
            _reject(f"{name} cannot be used with {TRANSFER_PARAMS}.", name)

    async def encode_input(self, request: Any, prompt_lens: list[int], num_choices: int) -> None:
        """Makes what the request says of its routing ready for the engine. Raises
        `VLLMValidationError` if it is impossible with this model or these prompts."""
        fields = input_fields_of(request)
        if fields is None:
            return
        request._input_fields = None  # which has the text of the arrays
        if fields.says_nothing:
            request._input = HeldInput(None)
            return
        assert self.captured is not None
        reader = InputReader(self.captured, self.server.store, self.server.input_memory)
        try:
            encoded = await reader.encode(fields, prompt_lens, num_choices, request._request_end)
        except FieldError as error:
            _reject(str(error), error.param)
        request._input = HeldInput(encoded)

    async def check_prefill_rows(self, request: Any, prompt_lens: list[int]) -> None:
        """Raises `VLLMValidationError` for rows from a prefill instance that do not fit the
        prompt."""
        rows = (request.kv_transfer_params or {}).get(PARAM)
        if self.captured is None or not isinstance(rows, PrefillRowsParam):
            return
        captured = self.captured
        try:
            await _PREFILL_ROWS_READER.run(rows.parse, captured.shape, captured.num_experts)
        except PrefillRowsError as error:
            _reject(str(error), FIELD)
        count, *_ = rows.shape or [0]
        if len(prompt_lens) != 1 or count > prompt_lens[0]:
            _reject(
                f"{FIELD} has rows for {count} tokens, but the prompts have {prompt_lens} tokens",
                FIELD,
            )

    def check_lengths(
        self,
        request: Any,
        prompt_lens: list[int],
        num_choices: int,
        max_tokens: int | None,
        min_tokens: int,
    ) -> None:
        """Raises `VLLMValidationError` if the prompt start exceeds a prompt, or the response would
        be too large.

        `max_tokens` is what the request says of it, None if nothing.
        """
        options = options_of(request)
        if options is None:
            return
        problem = _start_beyond_prompt(options, prompt_lens)
        if problem is not None:
            _cannot(request, options, problem, options.prompt_start_param)
            return
        prompt_rows = sum(length - options.prompt_start for length in prompt_lens)
        if options.layout == "joined":
            prompt_rows *= num_choices
        num_tokens = max_tokens or min_tokens
        known_rows = sum(self._known_rows(length, num_tokens) for length in prompt_lens)
        self.check_size(request, options, prompt_rows + num_choices * known_rows)

    def _known_rows(self, prompt_len: int, num_tokens: int) -> int:
        """How many rows a choice surely has that may have `num_tokens` tokens, or must: vLLM ends
        it where the context ends."""
        room = self.model_config.max_model_len - prompt_len
        return max(min(num_tokens, room), 1) - 1

    def delivery(self, request: Any, options: RoutingOptions) -> Delivery:
        if not options.by_reference:
            return Delivery()
        assert self.captured is not None
        assert self.server.store is not None
        return ReferenceMaker(
            self.server.store,
            names_files=self.server.settings.routed_experts_store_paths,
            part="joined" if options.layout == "joined" else "generated",
            metadata={
                "request": request._client_request_id,
                "model": getattr(request, "model", None) or self.captured.info.model,
            },
        )

    async def beam_search(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        if self.captured is not None:
            self.captured.buffers.recorder.leave_out(NotRecorded.BEAM_SEARCH)
        async for output in super().beam_search(*args, **kwargs):  # type: ignore[misc]
            yield output

    def check_size(self, request: Any, options: RoutingOptions, num_rows: int) -> None:
        """Raises `VLLMValidationError` if `num_rows` rows exceed the maximum size of a response. Of
        those by reference nothing is known before they are stored."""
        num_bytes = self.form(options).text_bytes(num_rows)
        if not options.rows or options.by_reference or num_bytes <= self._max_bytes:
            return
        message = (
            f"The routing of {num_rows} tokens would take {num_bytes} bytes, and the limit of this "
            f"server is {self._max_bytes} (--routed-experts-max-response-bytes): ask for fewer "
            "tokens, a higher routed_experts_prompt_start or a narrower routed_experts_dtype"
        )
        if options.weights:
            message += f", or leave out {WEIGHTS}"
        _cannot(request, options, message, OPT_IN)

    def form(self, options: RoutingOptions) -> WireForm:
        """The form of the arrays that the options ask for."""
        assert self.captured is not None
        captured = self.captured
        decoder_layers = captured.decoder_layers if options.layers == "all" else None
        return WireForm(
            format=options.format,
            dtype=codec.resolve_dtype(options.dtype, captured.num_experts),
            ids_shape=captured.shape,
            num_experts=captured.num_experts,
            decoder_layers=decoder_layers,
            has_weights=options.weights,
            has_steps=options.steps,
        )

    def stream(
        self,
        make: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
        request: Any,
        results: AsyncIterator[Any],
        num_choices: int,
        **of_rewriter: Any,
    ) -> AsyncIterator[str]:
        """The stream that vLLM's generator `make` builds from `results`, with its rows.
        `of_rewriter`: further arguments of `SSERewriter`."""
        options = options_of(request)
        if options is None:
            return make(results)
        rewriter = SSERewriter(
            options,
            Encoder(self.form(options)),
            num_choices,
            self._error_event,
            max_bytes=self._max_bytes,
            delivery=self.delivery(request, options),
            **of_rewriter,
        )
        return rewriter.rewrite(make(rewriter.watch(results)))

    async def collect(
        self,
        make: Callable[..., Awaitable[Any]],
        request: Any,
        results: AsyncIterator[RequestOutput],
        *args: Any,
    ) -> Any:
        """The unstreamed response that vLLM's generator `make` builds from `results`, with its
        rows."""
        options = options_of(request)
        if options is None:
            return await make(request, results, *args)
        rows = self.rows_of(options)
        response = await make(request, rows.collect_from(results), *args)
        if isinstance(response, ErrorResponse):
            return response
        return self.whole(request, response, rows)

    def rows_of(self, options: RoutingOptions) -> CollectedRows:
        assert self.captured is not None
        return CollectedRows(options, self.captured.row_shape(options.weights, options.steps))

    def whole(self, request: Any, response: Any, rows: CollectedRows, is_list: bool = False) -> Any:
        """`response` with its rows; without them if only a server-wide default asks and they are
        too large."""
        assert self.captured is not None
        self.check_size(request, rows.options, rows.num_rows)
        if options_of(request) is None:
            response.kv_transfer_params = to_wire(response.kv_transfer_params)
            return response
        return RoutedResponse(
            response,
            rows,
            Encoder(self.form(rows.options)),
            is_list,
            self.delivery(request, rows.options),
            self._max_bytes,
        )

    def _error_event(self, error: Exception) -> Any:
        text = "The server failed to encode the routing of this response."
        if isinstance(error, LostRowsError | StreamLimitError):
            text = str(error)
        return self.create_streaming_error_response(  # type: ignore[attr-defined]
            text,
            err_type="InternalServerError",
            status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
        )


class RoutedServingCompletion(RoutedServing, OpenAIServingCompletion):
    """`POST /v1/completions`."""

    async def create_completion(self, request: CompletionRequest, raw_request: Any = None) -> Any:
        self.begin(request, raw_request)
        return await super().create_completion(request, raw_request)

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        # here, so that vLLM tells the prefill instance if the request is rejected
        self.check(request)
        rendered = await super().render_completion_request(request)
        if not isinstance(rendered, ErrorResponse):
            lengths = [self._extract_prompt_len(prompt) for prompt in rendered]
            await self.check_prefill_rows(request, lengths)
            self.check_lengths(
                request, lengths, request.n or 1, request.max_tokens, request.min_tokens
            )
            await self.encode_input(request, lengths, request.n or 1)
        return rendered

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        make = partial(super().completion_stream_generator, request, engine_inputs)
        return self.stream(
            lambda results: make(results, *args, **kwargs),
            request,
            result_generator,
            request.n or 1,
        )

    def request_output_to_completion_response(
        self,
        final_res_batch: list[RequestOutput],
        request: CompletionRequest,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        options = options_of(request)
        make = super().request_output_to_completion_response
        if options is None:
            return make(final_res_batch, request, *args, **kwargs)
        rows = self.rows_of(options)
        for output in final_res_batch:
            rows.collect(output)
        prompt = request.prompt
        is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        return self.whole(request, make(final_res_batch, request, *args, **kwargs), rows, is_list)


class RoutedServingChat(RoutedServing, OpenAIServingChat):
    """`POST /v1/chat/completions`."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> Any:
        self.begin(request, raw_request)
        return await super().create_chat_completion(request, raw_request)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        self.check(request)
        rendered = await super().render_chat_request(request)
        if not isinstance(rendered, ErrorResponse):
            lengths = [self._extract_prompt_len(prompt) for prompt in rendered[1]]
            max_tokens = request.max_completion_tokens or request.max_tokens
            await self.check_prefill_rows(request, lengths)
            self.check_lengths(request, lengths, request.n or 1, max_tokens, request.min_tokens)
            await self.encode_input(request, lengths, request.n or 1)
        return rendered

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        conversation: Any,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        make = partial(super().chat_completion_stream_generator, request)
        args = (request_id, model_name, conversation, *args)
        preface = num_choices = request.n or 1
        # One chunk with the role per choice, and with `echo` one with the last message if it has
        # the same role.
        last = conversation[-1] if conversation else {}
        if (
            request.echo
            and last.get("role") == self.get_chat_request_role(request)
            and last.get("content")
        ):
            preface += num_choices
        return self.stream(
            lambda results: make(results, *args, **kwargs),
            request,
            result_generator,
            num_choices,
            preface_chunks=preface,
        )

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        make = partial(super().chat_completion_full_generator, **kwargs)
        return await self.collect(make, request, result_generator, *args)


class RoutedServingTokens(RoutedServing, ServingTokens):
    """`POST /inference/v1/generate`."""

    async def serve_tokens(self, request: GenerateRequest, raw_request: Any = None) -> Any:
        self.begin(request, raw_request)
        return await self._with_kv_transfer_rejection_cleanup(
            self._serve_tokens(request, raw_request), request, raw_request
        )

    async def _serve_tokens(self, request: GenerateRequest, raw_request: Any) -> Any:
        self.check(request)
        await self.check_prefill_rows(request, [self._longest_prompt(request)])
        if isinstance(request, RoutedGenerateRequest):
            self._check_trace(request)
            self._check_choices(request)
            self._check_prompt_start(request)
            self._check_length(request)
            self._check_replay(request)
            await self.encode_input(request, [len(request.token_ids)], request.sampling_params.n)
            request.sampling_params = request.opt_in(request.sampling_params)
            set_output_kind(request.sampling_params, bool(request.stream))
        return await super().serve_tokens(request, raw_request)

    def _longest_prompt(self, request: GenerateRequest) -> int:
        """How many tokens the prompt may have."""
        if _expands(request):
            return int(self.model_config.max_model_len)
        return len(request.token_ids)

    def _check_trace(self, request: RoutedGenerateRequest) -> None:
        """vLLM would check the tokens of a trace first, and return 500."""
        trace = getattr(request.sampling_params, "trace_decode_token_ids", None)
        if trace is not None and not self.model_config.enable_trace_replay:
            _reject("trace_decode_token_ids needs a server with --enable-trace-replay", _TRACE)

    def _check_choices(self, request: RoutedGenerateRequest) -> None:
        if request._routing is None or STREAMS_CHOICES:
            return
        if request.stream and request.sampling_params.n > 1:
            _reject(
                f"vLLM {VLLM_VERSION} cannot stream several choices here: set n to 1, or stream to "
                "false",
                _N,
            )

    def _check_prompt_start(self, request: RoutedGenerateRequest) -> None:
        options = request._routing
        if options is None or not options.prompt_start or not _expands(request):
            return
        name = options.prompt_start_param
        _cannot(request, options, f"{name} {_PROMPT_UNKNOWN}, or leave it out", name)

    def _check_replay(self, request: RoutedGenerateRequest) -> None:
        fields = input_fields_of(request)
        if fields is None or not fields.replay or not _expands(request):
            return
        _reject(f"{REPLAY} {_PROMPT_UNKNOWN}", REPLAY)

    def _check_length(self, request: RoutedGenerateRequest) -> None:
        params = request.sampling_params
        max_tokens = None
        if request.is_sampling_param_provided("max_tokens"):
            max_tokens = params.max_tokens
        prompt_lens = [len(request.token_ids)]
        self.check_lengths(request, prompt_lens, params.n, max_tokens, params.min_tokens)

    def serve_tokens_stream_generator(
        self,
        request: GenerateRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        make = partial(super().serve_tokens_stream_generator, request)
        n = request.sampling_params.n
        return self.stream(
            lambda results: make(results, *args, **kwargs),
            request,
            result_generator,
            n,
            has_own_field=True,
        )

    async def serve_tokens_full_generator(
        self,
        request: GenerateRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        make = partial(super().serve_tokens_full_generator, **kwargs)
        return await self.collect(make, request, result_generator, *args)


def rebind_class(serving: Any, cls: type[RoutedServing], server: ServerState) -> None:
    """Changes the class of vLLM's `serving` to its stateless subclass `cls`. Safe to repeat.

    vLLM builds the object from two dozen arguments, so building it again would break with each
    change of that list. Can go when a plugin can name vLLM's serving classes.
    """
    if not isinstance(serving, cls):
        if type(serving) is not cls.__mro__[2]:
            raise TypeError(f"{cls.__name__} does not extend {type(serving).__name__}")
        serving.__class__ = cls
    serving.server = server
