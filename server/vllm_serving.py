"""vLLM's serving classes, with routing put on what they answer."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from routed_experts.protocol import codec
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.captured_engine import CapturedEngine
from routed_experts.server.encoding import Encoder
from routed_experts.server.fields import OPT_IN, RoutedRequest
from routed_experts.server.stream import StreamAligner
from routed_experts.server.vllm_api import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    OpenAIServingChat,
    OpenAIServingCompletion,
    RequestOutput,
    VLLMValidationError,
)
from routed_experts.server.whole import CollectedRows, WholeAnswer


def _reject(message: str, param: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=param)


def options_of(request: Any) -> RoutingOptions | None:
    """How `request` wants its routing; None if it does not ask, or came through a route of vLLM's."""
    return request.routing if isinstance(request, RoutedRequest) else None


class RoutedServing:
    """What both serving classes add to vLLM's."""

    captured: CapturedEngine | None

    def check(self, request: CompletionRequest | ChatCompletionRequest) -> None:
        """Raises `VLLMValidationError` for a request whose routing this server cannot give."""
        if not isinstance(request, RoutedRequest):
            if (request.model_extra or {}).get(OPT_IN):
                _reject(
                    "This endpoint does not return routed experts: use /v1/completions or /v1/chat/completions.", OPT_IN
                )
            return
        options = request.routing
        if options is None:
            return
        if self.captured is None:
            _reject(
                "This server does not capture routed experts: start it without --no-enable-return-routed-experts.",
                OPT_IN,
            )
        if getattr(request, "use_beam_search", False):
            _reject("Routed experts cannot be returned with beam search.", OPT_IN)
        try:
            codec.resolve_dtype(options.dtype, self.captured.num_experts)
        except codec.CodecError as error:
            _reject(str(error), "routed_experts_dtype")

    def check_prompt_start(self, request: Any, prompt_lens: list[int]) -> None:
        """Raises `VLLMValidationError` if the request leaves out more rows than one of its prompts has."""
        options = options_of(request)
        if options is None:
            return
        for length in prompt_lens:
            if options.prompt_start > length:
                _reject(
                    f"{options.prompt_start_param} is {options.prompt_start}, but the prompt has {length} tokens",
                    options.prompt_start_param,
                )

    def encoder(self, options: RoutingOptions) -> Encoder:
        """How the arrays of a request with `options` are encoded."""
        assert self.captured is not None
        return Encoder(options, codec.resolve_dtype(options.dtype, self.captured.num_experts))

    def aligner(self, options: RoutingOptions, num_choices: int, preface_chunks: int = 0) -> StreamAligner:
        """What puts rows on the chunks of a stream; see `StreamAligner`."""
        assert self.captured is not None
        return StreamAligner(self.encoder(options), self.captured.shape, num_choices, preface_chunks)


class RoutedServingCompletion(RoutedServing, OpenAIServingCompletion):
    """`POST /v1/completions`."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse | WholeAnswer:
        self.check(request)
        return await super().create_completion(request, raw_request)

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        rendered = await super().render_completion_request(request)
        if not isinstance(rendered, ErrorResponse):
            self.check_prompt_start(request, [self._extract_prompt_len(prompt) for prompt in rendered])
        return rendered

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        options = options_of(request)
        if options is None:
            return super().completion_stream_generator(request, engine_inputs, result_generator, *args, **kwargs)
        aligner = self.aligner(options, num_choices=request.n)
        return aligner.rewrite(
            super().completion_stream_generator(
                request, engine_inputs, aligner.watch(result_generator), *args, **kwargs
            )
        )

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, *args: Any, **kwargs: Any
    ) -> CompletionResponse | WholeAnswer:
        options = options_of(request)
        make = super().request_output_to_completion_response
        if options is None:
            return make(final_res_batch, request, *args, **kwargs)
        assert self.captured is not None
        rows = CollectedRows()
        for output in final_res_batch:
            rows.collect(output, options, self.captured.shape)
        return WholeAnswer(make(final_res_batch, request, *args, **kwargs), rows)


class RoutedServingChat(RoutedServing, OpenAIServingChat):
    """`POST /v1/chat/completions`."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse | WholeAnswer:
        self.check(request)
        return await super().create_chat_completion(request, raw_request)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        rendered = await super().render_chat_request(request)
        if not isinstance(rendered, ErrorResponse):
            self.check_prompt_start(request, [self._extract_prompt_len(prompt) for prompt in rendered[1]])
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
        options = options_of(request)
        make = super().chat_completion_stream_generator
        if options is None:
            return make(request, result_generator, request_id, model_name, conversation, *args, **kwargs)
        num_choices = request.n or 1
        # A chunk with the role for each choice, and with `echo` one with the last message's text if it is the role's.
        preface = num_choices
        last = conversation[-1] if conversation else {}
        if request.echo and last.get("role") == self.get_chat_request_role(request) and last.get("content"):
            preface += num_choices
        aligner = self.aligner(options, num_choices, preface)
        watched = aligner.watch(result_generator)
        return aligner.rewrite(make(request, watched, request_id, model_name, conversation, *args, **kwargs))

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse | WholeAnswer:
        options = options_of(request)
        make = super().chat_completion_full_generator
        if options is None:
            return await make(request, result_generator, *args, **kwargs)
        assert self.captured is not None
        rows = CollectedRows()
        response = await make(
            request, rows.collect_from(result_generator, options, self.captured.shape), *args, **kwargs
        )
        return response if isinstance(response, ErrorResponse) else WholeAnswer(response, rows)


def adopt(serving: Any, cls: type[RoutedServing], captured: CapturedEngine | None) -> None:
    """Makes vLLM's serving object `serving` an instance of `cls`, a subclass of its class without state of its own.

    vLLM makes the object from two dozen arguments; making it a second time would copy that list and break with it.
    Until vLLM lets a plugin name its serving classes. Safe to repeat.
    """
    if not isinstance(serving, cls):
        if type(serving) is not cls.__mro__[2]:
            raise TypeError(f"{type(serving).__name__} is not the class that {cls.__name__} extends")
        serving.__class__ = cls
    serving.captured = captured
