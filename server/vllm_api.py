"""Every name of vLLM's engine that the API process and programs use; `http.vllm_http` has those of
its HTTP server."""

import logging

from vllm import SamplingParams, envs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
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


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below vLLM's, which is the one that its command configures."""
    return _init_logger(f"vllm.{name}")


def rank_of_process(config: VllmConfig) -> tuple[int, int]:
    """The rank of this API process, and how many there are."""
    parallel = config.parallel_config
    # -1 is the rank of engines
    return max(parallel._api_process_rank, 0), parallel._api_process_count
