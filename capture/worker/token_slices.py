"""Finds this rank's tokens among those that a router sees."""

from collections.abc import Callable

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker import ubatching

from routed_experts.capture.worker.capturer import LocalTokenSlice


def local_token_slice(dp_rank: int, sp_rank: int = 0, sp_size: int = 1) -> LocalTokenSlice:
    """Returns a function that finds a data-parallel rank's tokens in a router's ids ([n, >= K]):
    those, or the gathered tokens of all ranks in rank order. It belongs to one layer.

    With sequence-parallel MoE, each tensor-parallel rank (`sp_rank` of `sp_size`) has an equal part
    of the tokens, the last part padded. The function raises `RuntimeError` if the number of ids is
    neither.
    """
    first_of_microbatch = _microbatch_counter()

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            if sp_size > 1:
                raise RuntimeError(
                    "vLLM does not say how the tokens of a step are spread over the ranks"
                )
            return 0, ids
        counts = metadata.num_tokens_across_dp_cpu.tolist()  # [ranks]
        num_own = counts[dp_rank]
        parts = [-(-count // sp_size) for count in counts]
        part = parts[dp_rank]
        if ids.shape[0] == part:
            own = ids
        elif ids.shape[0] == sum(parts) * sp_size:
            # its own part here too: each rank writes its rows only
            start = sum(parts[:dp_rank]) * sp_size + sp_rank * part
            own = ids[start : start + part]
        else:
            raise RuntimeError(
                f"a router saw {ids.shape[0]} tokens: neither this rank's part, {part}, nor all ranks' {counts}"
            )
        first = min(sp_rank * part, num_own)  # of this part, among the rank's tokens
        return first_of_microbatch(num_own) + first, own[: num_own - first]  # without padding

    return own_tokens


def _microbatch_counter() -> Callable[[int], int]:
    """Returns a function that says, for a microbatch of so many tokens, which token of the step is
    its first; 0 where the step is not split.

    With dual-batch overlap, the microbatches of a step, each with its own thread and context, pass
    through each layer in order.
    """
    counts: list[int] = []  # token counts of the step's microbatches that came to this layer

    def first_token(count: int) -> int:
        if not ubatching.dbo_enabled():
            return 0
        current = ubatching.dbo_current_ubatch_id()
        if current == 0:
            counts.clear()  # left over from a failed forward pass
        # as after any error in vLLM, the other threads then wait forever
        if len(counts) != current:
            raise RuntimeError(
                f"microbatch {current} of a step came to a router as number {len(counts)}"
            )
        first = sum(counts)
        counts.append(count)
        if len(counts) == ubatching._NUM_UBATCHES:
            counts.clear()
        return first

    return first_token
