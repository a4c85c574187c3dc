"""Families of routers, and tables for a layer of each."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from routed_experts.capture.worker.router_input.family import Family
from routed_experts.capture.worker.router_input.formula import Routing
from routed_experts.capture.worker.router_input.running import PlacedRows
from routed_experts.capture.worker.router_input.tables import Tables
from routed_experts.protocol.routing_input import Groups


class Sized(NamedTuple):
    """A family, and how many experts its router has."""

    name: str
    num_experts: int
    family: Family
    is_corrected: bool = False

    def on(self, device: torch.device) -> Family:
        """The family, with a correction on this device."""
        if not self.is_corrected:
            return self.family
        generator = torch.Generator().manual_seed(1)
        correction = 0.1 * torch.randn(self.num_experts, generator=generator)
        return replace(self.family, correction=correction.to(device))


FAMILIES = [
    Sized("Mixtral", 8, Family("softmax", 2, renormalize=True)),
    Sized("tiny", 16, Family("softmax", 4)),
    Sized("Qwen2-MoE", 60, Family("softmax", 4)),
    Sized("OLMoE", 64, Family("softmax", 8)),
    Sized("Qwen3-MoE", 128, Family("softmax", 8, renormalize=True)),
    Sized("Qwen3-Next", 512, Family("softmax", 10, renormalize=True)),
    Sized("DeepSeek-V2", 160, Family("softmax", 6, scale=16.0, groups=Groups(8, 3, 1))),
    Sized("softmax in groups", 64, Family("softmax", 6, True, groups=Groups(4, 2, 1))),
    Sized("Llama 4", 128, Family("sigmoid", 1)),
    Sized("sigmoid", 128, Family("sigmoid", 8, renormalize=True)),
    Sized("small groups", 32, Family("sigmoid", 4, True, groups=Groups(4, 2, 2)), True),
    Sized("DeepSeek-V3", 256, Family("sigmoid", 8, True, 2.5, groups=Groups(8, 4, 2)), True),
    Sized("Kimi K2", 384, Family("sigmoid", 8, True, 2.446), True),
    Sized("Nemotron", 512, Family("sigmoid", 22, True, 5.0), True),
    Sized("DeepSeek-V4", 256, Family("sqrtsoftplus", 6, True, 1.5), True),
]


@dataclass
class Case:
    """Tokens of a step, of which some are told something, and what a router chose for them."""

    tables: Tables
    family: Family
    logits: torch.Tensor
    routing: Routing
    is_told: torch.Tensor  # [n], whether it may be rewritten


LAYER = 1
_NUM_LAYERS = 3


def case_of(
    sized: Sized, dtype: torch.dtype, device: torch.device, num_tokens: int = 300, seed: int = 0
) -> Case:
    """A third of the requests give rows, of which some are the router's own, a third have a bias in
    some layers, and a third say nothing."""
    rng = np.random.default_rng(seed)
    num_experts = sized.num_experts
    family = sized.on(device)
    logits = torch.from_numpy(2 * rng.standard_normal((num_tokens, num_experts)))
    logits = logits.to(device=device, dtype=dtype)
    scores = family.scores(logits)
    own_ids = family.choose(family.preferences(scores))
    routing = Routing(family.weigh(scores, own_ids), own_ids.int())

    num_requests = 12
    offsets = np.linspace(0, num_tokens, num_requests + 1).astype(np.int64)
    biases = {
        request: (str(request), _bias(rng, sized, says_nothing_in_layer=request % 2 == 0))
        for request in range(0, num_requests, 3)
    }
    rows = [
        PlacedRows(int(offsets[request]), _rows(rng, sized, own_ids, offsets, request))
        for request in range(1, num_requests, 3)
    ]
    tables = Tables(
        _NUM_LAYERS,
        max_tokens=num_tokens + 7,
        top_k=family.top_k,
        num_experts=num_experts,
        max_requests=num_requests,
        max_steps_in_flight=1,
        device=device,
    )
    tables.fill(rows, biases, offsets)

    is_told = torch.zeros(num_tokens, dtype=torch.bool)
    for request, (_, bias) in biases.items():
        is_told[offsets[request] : offsets[request + 1]] = bool((bias[LAYER] != 0).any())
    for placed in rows:
        ids = torch.from_numpy(placed.rows[:, LAYER].astype(np.int64))
        own = own_ids[placed.first : placed.first + len(ids)].cpu()
        has_other_row = (ids >= 0).all(dim=1) & (ids != own).any(dim=1)
        is_told[placed.first : placed.first + len(ids)] = has_other_row
    return Case(tables, family, logits, routing, is_told.to(device))


def _bias(rng: np.random.Generator, sized: Sized, says_nothing_in_layer: bool) -> np.ndarray:
    bias = rng.normal(0, 0.7, (_NUM_LAYERS, sized.num_experts)).astype(np.float32)
    for of_layer in bias:
        never_1, never_2, always = rng.permutation(sized.num_experts)[:3]
        of_layer[always] = np.inf
        if sized.num_experts > 2 * sized.family.top_k + 2:
            of_layer[[never_1, never_2]] = -np.inf
    if says_nothing_in_layer:
        bias[LAYER] = 0
    return bias


def _rows(
    rng: np.random.Generator,
    sized: Sized,
    own_ids: torch.Tensor,
    offsets: np.ndarray,
    request: int,
) -> np.ndarray:
    first, end = offsets[request], offsets[request + 1]
    top_k = sized.family.top_k
    order = rng.random((end - first, _NUM_LAYERS, sized.num_experts)).argsort(axis=2)
    rows = order[:, :, :top_k].astype(np.int16)
    rows[::5, LAYER] = own_ids[first:end:5].cpu().numpy()
    rows[1::5, LAYER] = own_ids[first + 1 : end : 5].cpu().numpy()[:, ::-1]
    rows[2::5, LAYER, top_k - 1] = -1
    rows[3::5] = -1
    return rows
