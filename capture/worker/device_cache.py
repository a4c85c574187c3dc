"""The buffer on the device that the MoE layers write their expert ids, and perhaps their weights,
into."""

import torch

from routed_experts.protocol.codec import UNKNOWN


class DeviceCache:
    """One contiguous `[N, K]` int32 view for each MoE layer, always written from row 0, as vLLM's
    top-k kernels write them, at addresses that never change: a CUDA graph writes to them at every
    replay."""

    def __init__(
        self,
        num_layers: int,
        *,
        max_tokens: int,
        top_k: int,
        device: torch.device,
        with_weights: bool = False,
    ) -> None:
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        self.top_k = top_k
        num_planes = 2 if with_weights else 1
        shape = (num_planes, num_layers, max_tokens, top_k)
        # [1, L, N, K], with weights [2, L, N, K]. One allocation, which one kernel resets.
        self.planes = torch.full(shape, UNKNOWN, dtype=torch.int32, device=device)
        self.ids = self.planes[0]  # [L, N, K]
        # [L, N, K], of which -1 in all bits is NaN.
        self.weights = self.planes[1].view(torch.float32) if with_weights else None

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The `[N, K]` int32 view of the layer at index `layer` of a row (not its index in the
        decoder), and the float32 view of its weights, if they are captured."""
        return self.ids[layer], None if self.weights is None else self.weights[layer]

    def reset_rows(self, num_tokens: int) -> None:
        """Puts -1 back into the first `num_tokens` rows of every layer, so that a layer that does
        not write in the next step leaves no ids of another step. Enqueues one kernel on the stream
        of both; the host does not wait."""
        self.planes[:, :, :num_tokens].fill_(UNKNOWN)
