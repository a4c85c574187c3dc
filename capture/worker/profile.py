"""How often each expert was chosen since the engine started, counted on the device."""

import time
from typing import Any

import torch


class ExpertProfile:
    """Counts the rows of every step of a worker that gives the model's output.

    All tokens of a forward pass count: prompts, generated tokens, drafts that are rejected later,
    and tokens that are computed again. What prefix hits skip does not count, nor does padding.
    """

    def __init__(
        self, num_layers: int, num_experts: int, with_weights: bool, device: torch.device
    ) -> None:
        # one column more than experts, for ids that are not known
        self._num_columns = num_experts + 1
        size = num_layers * self._num_columns
        self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._weights: torch.Tensor | None = None
        if with_weights:
            self._weights = torch.zeros(size, dtype=torch.float64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        first_columns = torch.arange(num_layers, dtype=torch.int64, device=device)
        self._first_columns = (first_columns * self._num_columns)[:, None]  # [L, 1]
        self._tokens = 0
        self._since = time.time()

    def count(self, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Counts `ids` ([n, L, K] int16, on the device) and sums up `weights` ([n, L, K] float32).
        Enqueues kernels on the current stream and waits for nothing."""
        self._tokens += len(ids)
        # the remainder of -1 is the last column
        columns = ids.to(torch.int64).remainder_(self._num_columns).add_(self._first_columns)
        flat = columns.flatten()
        self._counts.scatter_add_(0, flat, self._one.expand(len(flat)))
        if self._weights is not None and weights is not None:
            self._weights.scatter_add_(0, flat, weights.to(torch.float64).flatten())

    def read(self) -> dict[str, Any]:
        """What crosses to the API process: little-endian bytes of int64 and float64 ([L, E]). Waits
        for the steps that have been launched."""
        weights = self._weights
        return {
            "counts": self._bytes_of(self._counts),
            "weights": None if weights is None else self._bytes_of(weights),
            "tokens": self._tokens,
            "since": self._since,
        }

    def _bytes_of(self, columns: torch.Tensor) -> bytes:
        known = columns.view(-1, self._num_columns)[:, :-1]
        return known.cpu().numpy().tobytes()
