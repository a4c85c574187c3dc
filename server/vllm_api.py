"""Every name of vLLM that requests meet in the API process: the list to check when vLLM's version changes."""

import logging

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateRequest,
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import RetryableRequestError, VLLMClientError, VLLMNotFoundError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger as _init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM, InputStreamError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)
from vllm.version import __version__ as VLLM_VERSION

__all__ = [
    "VLLM_VERSION",
    "AsyncLLM",
    "BeamSearchOfflineMixin",
    "BeamSearchOnlineMixin",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "CompletionOutput",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionResponseChoice",
    "EngineClient",
    "EngineCoreOutput",
    "EngineCoreRequest",
    "ErrorResponse",
    "GenerateRequest",
    "GenerateTokensChoice",
    "GenerateTokensResponse",
    "InputStreamError",
    "LLMEngine",
    "OpenAIServingChat",
    "OpenAIServingCompletion",
    "OutputProcessor",
    "OutputProcessorOutput",
    "RequestOutput",
    "RequestOutputCollector",
    "RequestOutputKind",
    "RequestState",
    "RetryableRequestError",
    "SamplingParams",
    "ServingTokens",
    "VLLMClientError",
    "VLLMNotFoundError",
    "VLLMValidationError",
    "create_error_response",
    "get_logger",
    "load_aware_call",
    "metrics_header",
    "tokens_input",
    "validate_json_request",
    "with_cancellation",
    "with_sse_keep_alive",
]


def get_logger(name: str) -> logging.Logger:
    """A logger below vLLM's, which is the one that its command configures."""
    return _init_logger(f"vllm.routed_experts.{name}")
