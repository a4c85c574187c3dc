"""The rows of one choice, as `collect` returns them and `batch` and `ranks` take them.

Imports numpy and the standard library only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import Rows, Steps, count_missing

PROMPT_END_UNKNOWN = (
    "where the prompt ends is not known: give prompt_len, or ask with return_token_ids, "
    "or for the split layout"
)


class RoutingError(ValueError):
    """An incomplete or impossible response."""


def num_same(ours: ArrayLike, theirs: ArrayLike) -> int:
    """How many token ids both begin with."""
    our_ids = np.asarray(ours, np.int64)
    their_ids = np.asarray(theirs, np.int64)
    length = min(len(our_ids), len(their_ids))
    different = np.flatnonzero(our_ids[:length] != their_ids[:length])
    return int(different[0]) if len(different) else length


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of one choice, its prompt's first.

    The prompt has P tokens, the choice G generated ones, the model L MoE layers, and K experts are
    chosen for a token. The last token has no row.

    Attributes:
        rows: int16 [n, L, K], expert ids of the positions `start` to `end`; -1 in unknown rows.
        start: absolute position of the first row, in tokens.
        prompt_len: P; None if neither the response contains it (joined layout without token ids)
            nor the caller of `collect` gave it.
        index: the choice's index in the response.
        prompt_token_ids: [P], if the response has them (`return_token_ids`).
        token_ids: [G], the generated ones, likewise.
        finish_reason: None if the response was cut off.
        weights: float32 [n, L, K], the router's weights of the ids, if the response has them; NaN
            where unknown.
        logprobs: float64, log-probabilities of the G generated tokens, with `echo` of all P + G, if
            the response has them; NaN for a token without one (the first of a prompt). Of joined
            turns, of all P + G.
        texts: of the P + G tokens, None where unknown; if log-probabilities tell them.
        media: the hash of each picture, sound and block of embeddings of the prompt, in their
            order, or other names that differ where what the model sees differs; () if the prompt
            has none, None if nobody said.
        generated: [P + G], the tokens that were generated, of joined turns (`batch.generated_mask`
            has those of all responses).
        steps: uint32 [n], the engine's step that computed each row, if the response has them;
            `codec.UNKNOWN_STEP` where unknown. None of joined turns.

    Raises:
        TypeError: an argument has another type, or an array another kind of elements.
        ValueError: an array has another shape; `start` or `prompt_len` is negative.
    """

    rows: Rows
    start: int = 0
    prompt_len: int | None = None
    index: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    weights: NDArray[np.float32] | None = None
    logprobs: NDArray[np.float64] | None = None
    texts: tuple[str | None, ...] | None = None
    media: tuple[str, ...] | None = None
    generated: NDArray[np.bool_] | None = None
    steps: Steps | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", arguments.array("rows", self.rows, "iu", "nLK"))
        arguments.integer("start", self.start)
        if self.prompt_len is not None:
            arguments.integer("prompt_len", self.prompt_len)
        if self.weights is not None:
            weights = arguments.array("weights", self.weights, "f", "nLK")
            object.__setattr__(self, "weights", weights)
            if weights.shape != self.rows.shape:
                raise ValueError(
                    f"weights must have the shape of rows {self.rows.shape}, not {weights.shape}"
                )
        if self.steps is not None and len(arguments.array("steps", self.steps, "iu", "n")) != len(
            self.rows
        ):
            raise ValueError(f"steps must be of {len(self.rows)} rows, not {len(self.steps)}")

    @property
    def end(self) -> int:
        """The position after the last row.

        In a finished response that is the position of the last token.
        """
        return self.start + len(self.rows)

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """[P + G], the prompt's and the generated ones.

        Raises:
            RoutingError: the response does not have them.
        """
        if self.prompt_token_ids is None or self.token_ids is None:
            raise RoutingError("the response has no token ids: set return_token_ids in the request")
        return (*self.prompt_token_ids, *self.token_ids)

    @property
    def missing(self) -> int:
        """Number of rows with an unknown id."""
        return count_missing(self.rows)

    @property
    def prompt_rows(self) -> Rows:
        """[P - start, L, K], a view of `rows`.

        Raises:
            RoutingError: `prompt_len` is None.
        """
        return self.rows[: self._num_prompt_rows]

    @property
    def generated_rows(self) -> Rows:
        """[G - 1, L, K], a view of `rows`.

        Raises:
            RoutingError: `prompt_len` is None.
        """
        return self.rows[self._num_prompt_rows :]

    @property
    def _num_prompt_rows(self) -> int:
        if self.prompt_len is None:
            raise RoutingError(PROMPT_END_UNKNOWN)
        return max(self.prompt_len - self.start, 0)
