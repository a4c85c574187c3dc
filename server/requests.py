"""The request models of the two extended endpoints: vLLM's, with the routing fields."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from pydantic import PrivateAttr

from routed_experts.capture.message import PROMPT_START_ARG
from routed_experts.capture.split import split_at_prompt, with_unknown
from routed_experts.protocol.models import FieldError, RoutingFields, RoutingOptions, parse_options
from routed_experts.server.alignment import Encoder
from routed_experts.server.vllm_api import (
    ChatCompletionRequest,
    CompletionOutput,
    CompletionRequest,
    RequestOutput,
    SamplingParams,
    VLLMValidationError,
    get_logger,
)

logger = get_logger(__name__)


@dataclass
class CollectedRouting:
    """The rows of a response that is not streamed, taken off the engine's final outputs.

    Attributes:
        prompts: rows [P - start, L, K] of each prompt.
        choices: first position and rows [n, L, K] of each choice, in the order of the response.
    """

    prompts: list[NDArray[np.int16]] = field(default_factory=list)
    choices: list[tuple[int, NDArray[np.int16]]] = field(default_factory=list)

    def collect(self, output: RequestOutput, options: RoutingOptions, shape: tuple[int, int]) -> None:
        """Takes the rows of `output`; `shape` is (L, K)."""
        start, prompt_len = options.prompt_start, len(output.prompt_token_ids or ())
        prompt_rows: NDArray[np.int16] | None = None
        for choice in output.outputs:
            rows = _final_rows(choice, output.request_id, start, prompt_len, shape)
            if options.layout == "joined":
                self.choices.append((start, rows))
                continue
            before, rows = split_at_prompt(rows, start, prompt_len)
            self.choices.append((prompt_len, rows))
            if prompt_rows is None or len(before) > len(prompt_rows):
                prompt_rows = before
        if prompt_rows is not None:
            self.prompts.append(prompt_rows)

    @property
    def nbytes(self) -> int:
        """Size of all rows."""
        return sum(rows.nbytes for rows in (*self.prompts, *(rows for _, rows in self.choices)))

    def add_to(self, body: dict[str, Any], encoder: Encoder, is_list: bool) -> None:
        """Puts the arrays into the response `body`.

        Args:
            is_list: whether the request gave a list of prompts.
        """
        for choice, (start, rows) in zip(body["choices"], self.choices, strict=True):
            choice["routed_experts"] = encoder(rows, start)
        if encoder.options.layout == "split":
            prompts = [encoder(rows, encoder.options.prompt_start) for rows in self.prompts]
            body["prompt_routed_experts"] = prompts if is_list or len(prompts) > 1 else prompts[0]


def _final_rows(
    choice: CompletionOutput, request_id: str, start: int, prompt_len: int, shape: tuple[int, int]
) -> NDArray[np.int16]:
    """Rows [n, L, K] of a finished choice, from `start` on: exactly those of its prompt and its tokens but the last."""
    rows = choice.routed_experts
    choice.routed_experts = None
    if rows is None:
        rows = np.empty((0, *shape), dtype=np.int16)
    expected = max(prompt_len - start + len(choice.token_ids) - 1, 0)
    missing = expected - len(rows)
    if missing > 0 and choice.finish_reason != "abort":
        logger.error("Request %s: %d rows did not arrive and are sent as -1.", request_id, missing)
        rows = with_unknown(rows, expected)
    return rows[:expected]


class _Routed(RoutingFields):
    """What both request models add to vLLM's."""

    _options: RoutingOptions | None = PrivateAttr(default=None)
    _collected: CollectedRouting = PrivateAttr(default_factory=CollectedRouting)

    def opt_in(self, params: SamplingParams) -> SamplingParams:
        """`params`, telling the engine whether to send this request's rows."""
        args = dict(params.extra_args or {})
        args.pop(PROMPT_START_ARG, None)  # not a client's to set
        if self._options is not None:
            args[PROMPT_START_ARG] = self._options.prompt_start
        params.extra_args = args or None
        # vLLM's own field of that name is not used; it has its own check of it, which comes after a stream began.
        params.routed_experts_prompt_start = 0
        return params


class RoutedCompletionRequest(_Routed, CompletionRequest):
    """A completion request that may ask for routing."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        return self.opt_in(super().to_sampling_params(*args, **kwargs))


class RoutedChatRequest(_Routed, ChatCompletionRequest):
    """A chat completion request that may ask for routing."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        return self.opt_in(super().to_sampling_params(*args, **kwargs))


async def check_routing_fields(raw_request: Request) -> RoutingOptions | None:
    """The request's routing options, checked before vLLM's model of the body is.

    Raises:
        VLLMValidationError: with `parameter` set to the field's name.
    """
    try:
        body = await raw_request.json()
    except ValueError:
        return None  # vLLM answers bodies that are not JSON
    if not isinstance(body, dict):
        return None
    try:
        return parse_options(body)
    except FieldError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None
