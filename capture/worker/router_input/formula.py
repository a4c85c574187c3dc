"""What is rewritten behind a router, in plain torch: for CPUs, and what the kernel for GPUs is
compared with."""

from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.capture.worker.router_input.family import (
    ALWAYS,
    MARGIN,
    NEVER,
    UNSCORED,
    Family,
)
from routed_experts.capture.worker.router_input.tables import Tables


class Routing(NamedTuple):
    """What a router returns, of n tokens."""

    weights: Tensor  # [n, K] float
    ids: Tensor  # [n, K] int


def rewritten(
    tables: Tables, layer: int, family: Family, routing: Routing, logits: Tensor
) -> Routing:
    """The routing of a layer with what the tables say of its tokens; the router's own where they
    say nothing. `logits` ([n, E]) are the router's."""
    num_tokens = logits.shape[0]
    place = tables.index[:num_tokens].long()
    is_steered = (tables.steers[:, layer][place] > 0)[:, None]
    told_ids = tables.rows[:num_tokens, layer].long()
    has_row = (told_ids >= 0).all(dim=1, keepdim=True)
    # A row that is the router's own choice, in its order, changes nothing: its weights are rounded
    # otherwise than ours.
    differs = (told_ids != routing.ids).any(dim=1, keepdim=True)
    is_rewritten = is_steered | (has_row & differs)

    bias = tables.bias[:, layer][place]  # [n, E]
    scores, preferences = _steered(family, logits.float(), bias)
    chosen = family.choose(preferences)
    ids = torch.where(has_row, told_ids, torch.where(is_steered, chosen, routing.ids.long()))
    weights = family.weigh(scores, ids.clamp(min=0))  # padding has ids of -1
    return Routing(
        torch.where(is_rewritten, weights.to(routing.weights.dtype), routing.weights),
        torch.where(is_rewritten, ids.to(routing.ids.dtype), routing.ids),
    )


def _steered(family: Family, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and preferences of a router whose gate has this bias."""
    is_never = bias == float("-inf")
    is_always = bias == float("inf")
    steered = logits + bias.masked_fill(is_never | is_always, 0.0)
    steered = steered.masked_fill(is_never, float("-inf"))
    best = steered.masked_fill(steered.isnan(), float("-inf")).amax(dim=1, keepdim=True)
    steered = torch.where(is_always, best + MARGIN, steered)
    scores = family.scores(steered)
    # Also in the choice: an expert's correction may be greater than others' scores.
    # No number, and no score however large or small, stands above or below what is said.
    preferences = family.preferences(scores).nan_to_num(nan=UNSCORED).clamp(UNSCORED, -UNSCORED)
    preferences = preferences.masked_fill(is_never, NEVER).masked_fill(is_always, ALWAYS)
    return scores, preferences
