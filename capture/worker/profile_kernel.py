"""What `ExpertProfile` counts, on GPUs: in one Triton kernel a step."""

from torch import Tensor
from vllm.triton_utils import tl, triton

_TOKENS_OF_PROGRAM = 32
"""A program counts so many tokens of one layer, and adds to the sums of an expert once."""


@triton.jit(do_not_specialize=["num_tokens", "ids_stride", "weights_stride"])
def _count_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    counts_ptr,  # int64 [L, COLUMNS]
    sums_ptr,  # float64 [L, COLUMNS]
    ids_ptr,  # int16 [n, L, K]
    weights_ptr,  # float32 [n, L, K]
    num_tokens,
    ids_stride,  # of a token
    weights_stride,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # the next power of two
    TOKENS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    layer = tl.program_id(0)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = tl.arange(0, PADDED_COLUMNS)
    counts = tl.zeros((PADDED_COLUMNS,), tl.int32)
    sums = tl.zeros((PADDED_COLUMNS,), tl.float64)
    for slot in tl.static_range(TOP_K):
        place = layer * TOP_K + slot
        # an id that is not known, and that of a token behind the last, is no column
        expert = tl.load(ids_ptr + token * ids_stride + place, mask=token < num_tokens, other=-1)
        is_chosen = expert.to(tl.int32)[:, None] == column[None, :]  # [TOKENS, columns]
        counts += tl.sum(is_chosen.to(tl.int32), 0)
        if HAS_WEIGHTS:
            weights_at = weights_ptr + token * weights_stride + place
            weight = tl.load(weights_at, mask=token < num_tokens, other=0.0).to(tl.float64)
            sums += tl.sum(tl.where(is_chosen, weight[:, None], 0.0), 0)
    is_counted = (column < COLUMNS) & (counts > 0)
    tl.atomic_add(counts_ptr + layer * COLUMNS + column, counts.to(tl.int64), mask=is_counted)
    if HAS_WEIGHTS:
        tl.atomic_add(sums_ptr + layer * COLUMNS + column, sums, mask=is_counted)


def count(counts: Tensor, sums: Tensor | None, ids: Tensor, weights: Tensor | None) -> None:
    """Adds `ids` ([n, L, K] int16) to `counts` ([L, columns] int64), and their `weights` (float32)
    to `sums` (float64) if there are some. Ids of -1 are not counted."""
    num_tokens, num_layers, top_k = ids.shape
    if num_tokens == 0:
        return
    has_weights = sums is not None and weights is not None
    arrays = (ids, weights) if weights is not None else (ids,)
    assert all(array.stride()[1:] == (top_k, 1) for array in arrays)
    _count_kernel[(num_layers, triton.cdiv(num_tokens, _TOKENS_OF_PROGRAM))](
        counts,
        counts if sums is None else sums,
        ids,
        ids if weights is None else weights,
        num_tokens,
        ids.stride(0),
        arrays[-1].stride(0),
        TOP_K=top_k,
        COLUMNS=counts.shape[1],
        PADDED_COLUMNS=triton.next_power_of_2(counts.shape[1]),
        TOKENS=_TOKENS_OF_PROGRAM,
        HAS_WEIGHTS=has_weights,
    )
