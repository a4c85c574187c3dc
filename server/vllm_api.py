"""Every name of vLLM that the API process uses, in one place: the list to check when vLLM's version changes.

Written against vLLM 0.32.0. What is replaced in vLLM rather than subclassed stands in `REPLACED`.
"""

import logging

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger as _init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
from vllm.version import __version__ as VLLM_VERSION

from routed_experts.capture.replaced import Replacement

__all__ = [
    "REPLACED",
    "VLLM_VERSION",
    "AsyncLLM",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "CompletionOutput",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionResponseChoice",
    "EngineClient",
    "EngineCoreOutput",
    "ErrorResponse",
    "OpenAIServingChat",
    "OpenAIServingCompletion",
    "OutputProcessor",
    "OutputProcessorOutput",
    "RequestOutput",
    "RequestOutputKind",
    "RequestResponseMetadata",
    "RequestState",
    "SamplingParams",
    "VLLMValidationError",
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


REPLACED: tuple[Replacement, ...] = (
    Replacement(
        OutputProcessor,
        "process_outputs",
        why="vLLM collects a request's rows until it finishes, and keeps only the last ones when outputs merge for a "
        "slow reader; AsyncLLM makes its OutputProcessor itself, so a subclass cannot be given to it.",
        until="vLLM streams routed experts itself.",
    ),
    Replacement(
        OpenAIServingCompletion,
        "__class__",
        why="init_generate_state makes the instance from two dozen arguments; making it a second time would copy "
        "that list and break with it.",
        until="vLLM lets a plugin name its serving classes.",
    ),
    Replacement(
        OpenAIServingChat,
        "__class__",
        why="as for OpenAIServingCompletion.",
        until="vLLM lets a plugin name its serving classes.",
    ),
)
