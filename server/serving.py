"""vLLM's serving classes, with routing put on what they answer."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from routed_experts.protocol import codec
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.alignment import Encoder, StreamAligner
from routed_experts.server.requests import RoutedChatRequest, RoutedCompletionRequest
from routed_experts.server.routing import Routing
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

OPT_IN = "return_routed_experts"


def _reject(message: str, param: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=param)


class _RoutedServing:
    """What both serving classes add to vLLM's."""

    routing: Routing | None

    def _check(self, request: CompletionRequest | ChatCompletionRequest) -> None:
        """Raises `VLLMValidationError` for a request whose routing this server cannot give."""
        if not isinstance(request, RoutedCompletionRequest | RoutedChatRequest):
            if (request.model_extra or {}).get(OPT_IN):
                _reject(
                    "This endpoint does not return routed experts: use /v1/completions or /v1/chat/completions.", OPT_IN
                )
            return
        options = request._options
        if options is None:
            return
        if self.routing is None:
            _reject(
                "This server does not capture routed experts: start it without --no-enable-return-routed-experts.",
                OPT_IN,
            )
        if request.use_beam_search:
            _reject("Routed experts cannot be returned with beam search.", OPT_IN)
        try:
            codec.resolve_dtype(options.dtype, self.routing.num_experts)
        except codec.CodecError as error:
            _reject(str(error), "routed_experts_dtype")

    def _check_prompt_start(self, request: Any, prompt_lens: list[int]) -> None:
        options = _options(request)
        if options is None:
            return
        for length in prompt_lens:
            if options.prompt_start > length:
                _reject(
                    f"{options.prompt_start_param} is {options.prompt_start}, but the prompt has {length} tokens",
                    options.prompt_start_param,
                )

    def encoder(self, options: RoutingOptions) -> Encoder:
        assert self.routing is not None
        return Encoder(options, codec.resolve_dtype(options.dtype, self.routing.num_experts))

    def aligner(self, options: RoutingOptions, num_choices: int, preface_chunks: int = 0) -> StreamAligner:
        assert self.routing is not None
        return StreamAligner(self.encoder(options), self.routing.shape, num_choices, preface_chunks)


def _options(request: Any) -> RoutingOptions | None:
    return request._options if isinstance(request, RoutedCompletionRequest | RoutedChatRequest) else None


class RoutedServingCompletion(_RoutedServing, OpenAIServingCompletion):
    """`POST /v1/completions`."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        self._check(request)
        return await super().create_completion(request, raw_request)

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        rendered = await super().render_completion_request(request)
        if not isinstance(rendered, ErrorResponse):
            self._check_prompt_start(request, [self._extract_prompt_len(prompt) for prompt in rendered])
        return rendered

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        options = _options(request)
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
    ) -> CompletionResponse:
        options = _options(request)
        if options is not None:
            assert self.routing is not None
            assert isinstance(request, RoutedCompletionRequest)
            for output in final_res_batch:
                request._collected.collect(output, options, self.routing.shape)
        return super().request_output_to_completion_response(final_res_batch, request, *args, **kwargs)


class RoutedServingChat(_RoutedServing, OpenAIServingChat):
    """`POST /v1/chat/completions`."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        self._check(request)
        return await super().create_chat_completion(request, raw_request)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        rendered = await super().render_chat_request(request)
        if not isinstance(rendered, ErrorResponse):
            self._check_prompt_start(request, [self._extract_prompt_len(prompt) for prompt in rendered[1]])
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
        options = _options(request)
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
    ) -> ErrorResponse | ChatCompletionResponse:
        options = _options(request)
        if options is not None:
            result_generator = self._collecting(request, options, result_generator)
        return await super().chat_completion_full_generator(request, result_generator, *args, **kwargs)

    async def _collecting(
        self, request: ChatCompletionRequest, options: RoutingOptions, results: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[RequestOutput]:
        assert self.routing is not None
        assert isinstance(request, RoutedChatRequest)
        async for output in results:
            request._collected.collect(output, options, self.routing.shape)
            yield output


def adopt(serving: Any, cls: type[_RoutedServing], routing: Routing | None) -> None:
    """Makes vLLM's serving object `serving` an instance of `cls`, a subclass of its class without state of its own.

    See `vllm_api.REPLACED` for why. Safe to repeat.
    """
    if not isinstance(serving, cls):
        if type(serving) is not cls.__mro__[2]:
            raise TypeError(f"{type(serving).__name__} is not the class that {cls.__name__} extends")
        serving.__class__ = cls
    serving.routing = routing
