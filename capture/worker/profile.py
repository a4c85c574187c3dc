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
        shape = num_layers, num_experts + 1  # the last column for ids that are not known
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._weights: torch.Tensor | None = None
        if with_weights:
            self._weights = torch.zeros(shape, dtype=torch.float64, device=device)
        self._tokens = 0
        self._since = time.time()

    def count(self, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Counts `ids` ([n, L, K] int16, on the device) and sums up `weights` ([n, L, K] float32).
        Enqueues kernels on the current stream and waits for nothing."""
        self._tokens += len(ids)
        if ids.is_cuda:
            from routed_experts.capture.worker import profile_kernel

            profile_kernel.count(self._counts, self._weights, ids, weights)
        else:
            count_with_torch(self._counts, self._weights, ids, weights)

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
        return columns[:, :-1].cpu().numpy().tobytes()


def count_with_torch(
    counts: torch.Tensor, sums: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """What the kernel for GPUs does, in several. Counts unknown ids in the last column."""
    num_layers, num_columns = counts.shape
    first_columns = torch.arange(num_layers, device=ids.device)[:, None] * num_columns  # [L, 1]
    # the remainder of -1 is the last column
    columns = (ids.to(torch.int64).remainder_(num_columns) + first_columns).flatten()
    counts.view(-1).scatter_add_(0, columns, torch.ones_like(columns))
    if sums is not None and weights is not None:
        sums.view(-1).scatter_add_(0, columns, weights.to(torch.float64).flatten())
