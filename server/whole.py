"""Rows of answers that are not streamed: taken off the engine's final outputs, put into the response."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.rows import with_unknown
from routed_experts.capture.split import split_at_prompt
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.encoding import Encoder
from routed_experts.server.vllm_api import (
    ChatCompletionResponse,
    CompletionOutput,
    CompletionResponse,
    RequestOutput,
    get_logger,
)

logger = get_logger(__name__)


@dataclass
class CollectedRows:
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

    async def collect_from(
        self, outputs: AsyncIterator[RequestOutput], options: RoutingOptions, shape: tuple[int, int]
    ) -> AsyncIterator[RequestOutput]:
        """`outputs`, with their rows taken off."""
        async for output in outputs:
            self.collect(output, options, shape)
            yield output

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


@dataclass(frozen=True)
class WholeAnswer:
    """vLLM's response, and the rows that go with it."""

    response: CompletionResponse | ChatCompletionResponse
    rows: CollectedRows
