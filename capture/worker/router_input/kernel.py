"""What is rewritten behind a router, on GPUs: `formula.rewritten`, in one Triton kernel a layer."""

from typing import Any

from torch import Tensor
from vllm.triton_utils import tl, triton

from routed_experts.capture.worker.router_input.family import (
    ALWAYS,
    MARGIN,
    NEVER,
    UNSCORED,
    Family,
)
from routed_experts.capture.worker.router_input.formula import Routing
from routed_experts.capture.worker.router_input.tables import Tables

_SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}

_MOST_SINGLE = 1024
"""Up to so many tokens, each has a program of its own."""

_TOKENS_OF_PROGRAM = 8
"""Above that. Of 128 experts: with more experts, a program has fewer tokens."""


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "layer",
        "logits_stride",
        "ids_stride",
        "weights_stride",
        "scale",
    ]
)
# C901: a kernel is one program. Triton decides most of its branches when it compiles them.
def _rewrite_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0917
    ids_ptr,
    weights_ptr,
    logits_ptr,
    rows_ptr,
    index_ptr,
    steers_ptr,
    bias_ptr,
    correction_ptr,
    num_tokens,
    layer,
    logits_stride,
    ids_stride,
    weights_stride,
    scale,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,  # the next power of two
    PADDED_TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    UNSCORED: tl.constexpr,
    NEVER: tl.constexpr,
    ALWAYS: tl.constexpr,
    MARGIN: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    token_64 = token.to(tl.int64)
    slot = tl.arange(0, PADDED_TOP_K)
    is_slot = is_token[:, None] & (slot < TOP_K)[None, :]

    place = tl.load(index_ptr + token, mask=is_token, other=0)
    row_offset = (token_64[:, None] * LAYERS + layer) * TOP_K + slot[None, :]
    row = tl.load(rows_ptr + row_offset, mask=is_slot, other=0).to(tl.int32)
    has_row = (tl.min(row, 1) >= 0) & is_token
    is_steered = tl.load(steers_ptr + place * LAYERS + layer, mask=place > 0, other=0) > 0

    # Most programs leave here: nothing is said about their tokens.
    if tl.max((has_row | is_steered).to(tl.int32), 0) > 0:
        ids_offset = token_64[:, None] * ids_stride + slot[None, :]
        weights_offset = token_64[:, None] * weights_stride + slot[None, :]
        own_ids = tl.load(ids_ptr + ids_offset, mask=is_slot, other=0).to(tl.int32)
        differs = tl.max(((row != own_ids) & is_slot).to(tl.int32), 1) > 0
        is_rewritten = is_steered | (has_row & differs)

        # The logits of a router whose gate has the request's bias.
        expert = tl.arange(0, PADDED_EXPERTS)
        is_expert = (expert < EXPERTS)[None, :]
        logits = tl.load(
            logits_ptr + token_64[:, None] * logits_stride + expert[None, :],
            mask=is_token[:, None] & is_expert,
            other=0.0,
        ).to(tl.float32)
        bias = tl.load(
            bias_ptr + (place.to(tl.int64)[:, None] * LAYERS + layer) * EXPERTS + expert[None, :],
            mask=is_expert,
            other=float("-inf"),
        )
        is_never = bias == float("-inf")
        is_always = bias == float("inf")
        finite_bias = tl.where(is_never | is_always, 0.0, bias)
        logits = tl.where(is_never, float("-inf"), logits + finite_bias)
        best = tl.max(tl.where(logits == logits, logits, float("-inf")), 1)[:, None]
        logits = tl.where(is_always, best + MARGIN, logits)

        if SCORING == 0:
            exponents = tl.exp(logits - tl.max(logits, 1)[:, None])
            scores = exponents / tl.sum(exponents, 1)[:, None]
        elif SCORING == 1:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            softplus = tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits)))
            scores = tl.sqrt(softplus)

        preferences = scores
        if HAS_CORRECTION:
            correction = tl.load(correction_ptr + expert, mask=expert < EXPERTS, other=0.0)
            preferences += correction.to(tl.float32)[None, :]
        preferences = tl.where(preferences == preferences, preferences, UNSCORED)  # NaN
        preferences = tl.minimum(tl.maximum(preferences, UNSCORED), -UNSCORED)
        preferences = tl.where(is_never, NEVER, preferences)
        preferences = tl.where(is_always, ALWAYS, preferences)
        preferences = tl.where(is_expert, preferences, float("-inf"))

        scores = tl.where(scores == scores, scores, 0.0)  # has no weight

        if GROUPS > 1:
            group_of_expert = (expert // (EXPERTS // GROUPS))[None, :]
            group = tl.arange(0, PADDED_GROUPS)[None, :]
            of_group = tl.full((TOKENS, PADDED_GROUPS), float("-inf"), tl.float32)
            for number in tl.static_range(GROUPS):
                inside = tl.where(group_of_expert == number, preferences, float("-inf"))
                group_score = tl.max(inside, 1)
                if HAS_CORRECTION:  # the sum of the best two
                    first = tl.argmax(inside, 1)[:, None]
                    others = tl.where(expert[None, :] == first, float("-inf"), inside)
                    group_score += tl.max(others, 1)
                of_group = tl.where(group == number, group_score[:, None], of_group)
            is_inside = tl.zeros((TOKENS, PADDED_EXPERTS), tl.int32)
            for _ in tl.static_range(CHOSEN_GROUPS):
                best_group = tl.argmax(of_group, 1)[:, None]
                is_inside = is_inside | (group_of_expert == best_group).to(tl.int32)
                of_group = tl.where(group == best_group, float("-inf"), of_group)
            preferences = tl.where(is_inside > 0, preferences, float("-inf"))

        new_ids = tl.zeros((TOKENS, PADDED_TOP_K), tl.int32)
        new_weights = tl.zeros((TOKENS, PADDED_TOP_K), tl.float32)
        for number in tl.static_range(TOP_K):
            chosen = tl.argmax(preferences, 1)
            preferences = tl.where(expert[None, :] == chosen[:, None], float("-inf"), preferences)
            is_this_slot = (slot == number)[None, :]
            told = tl.sum(tl.where(is_this_slot, row, 0), 1)
            new_id = tl.where(has_row, told, chosen)
            is_this_expert = expert[None, :] == new_id[:, None]
            weight = tl.sum(tl.where(is_this_expert, scores, 0.0), 1)
            new_ids = tl.where(is_this_slot, new_id[:, None], new_ids)
            new_weights = tl.where(is_this_slot, weight[:, None], new_weights)
        if RENORMALIZE:
            total = tl.sum(new_weights, 1)[:, None]
            new_weights = new_weights / tl.where(total > 0, total, 1.0)
        new_weights = new_weights * scale

        is_stored = is_rewritten[:, None] & is_slot
        tl.store(ids_ptr + ids_offset, new_ids, mask=is_stored)
        tl.store(weights_ptr + weights_offset, new_weights, mask=is_stored)


def rewrite(
    tables: Tables,
    layer: int,
    family: Family,
    routing: Routing,
    logits: Tensor,
    *,
    tokens_of_program: int | None = None,
) -> None:
    """Rewrites the routing of a layer in place with what the tables say of its tokens."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    if num_tokens > tables.index.shape[0]:
        raise RuntimeError(
            f"a step of {num_tokens} tokens does not fit the tables of {tables.index.shape[0]}"
        )
    assert logits.stride(1) == routing.ids.stride(1) == routing.weights.stride(1) == 1
    tokens = tokens_of_program or default_tokens_of_program(num_tokens, num_experts)
    arguments: dict[str, Any] = {
        "LAYERS": tables.rows.shape[1],
        "EXPERTS": num_experts,
        "TOP_K": family.top_k,
        "PADDED_EXPERTS": triton.next_power_of_2(num_experts),
        "PADDED_TOP_K": max(2, triton.next_power_of_2(family.top_k)),
        "TOKENS": tokens,
        "SCORING": _SCORINGS[family.scoring],
        "RENORMALIZE": family.renormalize,
        "HAS_CORRECTION": family.correction is not None,
        "GROUPS": family.groups.count,
        "PADDED_GROUPS": triton.next_power_of_2(family.groups.count),
        "CHOSEN_GROUPS": family.groups.chosen,
        "UNSCORED": UNSCORED,
        "NEVER": NEVER,
        "ALWAYS": ALWAYS,
        "MARGIN": MARGIN,
        "num_warps": 1 if tokens == 1 else 4,
    }
    _rewrite_kernel[(triton.cdiv(num_tokens, tokens),)](
        routing.ids,
        routing.weights,
        logits,
        tables.rows,
        tables.index,
        tables.steers,
        tables.bias,
        logits if family.correction is None else family.correction,
        num_tokens,
        layer,
        logits.stride(0),
        routing.ids.stride(0),
        routing.weights.stride(0),
        float(family.scale),
        **arguments,
    )


def default_tokens_of_program(num_tokens: int, num_experts: int) -> int:
    """A program has one token, or several, a power of two."""
    if num_tokens <= _MOST_SINGLE:
        return 1
    width = max(128, triton.next_power_of_2(num_experts))
    return max(1, _TOKENS_OF_PROGRAM * 128 // width)
