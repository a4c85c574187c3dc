"""Puts itself behind the routers of a worker, and rewrites what they return, in place."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.utils.torch_utils import direct_register_custom_op

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.wire.rows import INPUT_FLAG
from routed_experts.capture.worker.router_input.family import Family, family_of, prove
from routed_experts.capture.worker.router_input.formula import Routing, rewritten
from routed_experts.capture.worker.router_input.tables import Tables
from routed_experts.protocol.routing_input import ONE_GROUP, Groups

Route = Callable[..., tuple[Tensor, Tensor]]
"""vLLM's `_compute_routing`: weights and ids of hidden states and logits."""


def families_of(runners: Sequence[MoERunner], top_k: int) -> list[Family]:
    """The family of each layer's router.

    Raises `UnsupportedConfig` for a router that cannot be given an input.
    """
    families = []
    for runner in runners:
        try:
            num_experts = int(runner.moe_config.num_logical_experts)
            families.append(family_of(runner.router, num_experts, top_k))
        except UnsupportedConfig as error:
            raise UnsupportedConfig(
                f"{error}, so its experts cannot be set (layer {runner.layer_id}): remove "
                f"{INPUT_FLAG}."
            ) from None
    return families


def common_groups(families: Sequence[Family]) -> Groups:
    """The groups of all routers of a model. Raises `UnsupportedConfig` if they differ."""
    groups = {family.groups for family in families}
    if len(groups) > 1:
        raise UnsupportedConfig(
            f"The routers of the model's layers differ in their groups of experts: remove {INPUT_FLAG}."
        )
    return groups.pop() if groups else ONE_GROUP


def rewrite_behind(runner: MoERunner, tables: Tables, layer: int, family: Family) -> None:
    """Rewrites what the layer's router returns, of the tokens whose requests say something."""
    router = runner.router
    route: Route = router._compute_routing
    rewriter = Rewriter(tables, layer, family, route, name=f"layer {runner.layer_id}")
    key = next(_keys)
    _rewriters[key] = rewriter

    def compute_routing(
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        weights, ids = route(hidden_states, router_logits, indices_type, **options)
        if torch.compiler.is_compiling():
            # On CPUs, where vLLM's MoE operator is not opaque: a branch of Python would be decided
            # once, while the model is compiled.
            torch.ops.routed_experts.rewrite(weights, ids, router_logits, key)
        else:
            rewriter(weights, ids, router_logits)
        return weights, ids

    # On the instance, because the model creates its routers itself, and inside `select_experts`,
    # before ids are mapped to physical experts and captured. Needed until vLLM lets callers change
    # a router's choice.
    router._compute_routing = compute_routing


class Rewriter:
    """Behind one router."""

    def __init__(self, tables: Tables, layer: int, family: Family, route: Route, name: str) -> None:
        self._tables = tables
        self._layer = layer
        self._family = family
        self._route = route
        self._name = name
        self._is_ready = False

    def __call__(self, weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        if not self._is_ready:  # in the engine's own first forward pass
            self._prove(logits)
            self._compile(weights, ids, logits)
            self._is_ready = True
        routing = self._without_shared_experts(weights, ids)
        if logits.is_cuda:
            # A graph has the kernel always, for its replays. Where nobody is told anything, the
            # kernel leaves at once.
            if self._tables.is_used or torch.cuda.is_current_stream_capturing():
                self._run_kernel(routing, logits)
        elif self._tables.is_used:
            result = rewritten(self._tables, self._layer, self._family, routing, logits)
            routing.weights.copy_(result.weights)
            routing.ids.copy_(result.ids)

    def _prove(self, logits: Tensor) -> None:
        if prove(self._family, self._route, logits):
            return
        raise UnsupportedConfig(
            f"The router of {self._name} weighs experts in another way than is known, so they "
            f"cannot be set: remove {INPUT_FLAG}, and please report the model."
        )

    def _compile(self, weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        """Compiles the kernel in both its forms, as it cannot be compiled while a graph is
        captured."""
        if not logits.is_cuda:
            return
        from routed_experts.capture.worker.router_input import kernel

        routing = self._without_shared_experts(weights, ids)
        most = self._tables.index.shape[0]
        for num_tokens in (1, most):
            tokens = kernel.default_tokens_of_program(num_tokens, logits.shape[1])
            self._run_kernel(routing, logits, tokens)

    def _run_kernel(
        self, routing: Routing, logits: Tensor, tokens_of_program: int | None = None
    ) -> None:
        # Triton has no build for CPUs.
        from routed_experts.capture.worker.router_input import kernel

        kernel.rewrite(
            self._tables,
            self._layer,
            self._family,
            routing,
            logits,
            tokens_of_program=tokens_of_program,
        )

    def _without_shared_experts(self, weights: Tensor, ids: Tensor) -> Routing:
        """Views without the columns of shared experts, to which every token goes."""
        top_k = self._family.top_k
        return Routing(weights[:, :top_k], ids[:, :top_k])


_keys = itertools.count()
_rewriters: WeakValueDictionary[int, Rewriter] = WeakValueDictionary()
"""By the number that is in compiled code. The routers keep them: a process may have several engines,
one after the other, and each one's tables go with it."""


def _rewrite(weights: Tensor, ids: Tensor, logits: Tensor, key: int) -> None:
    _rewriters[key](weights, ids, logits)


def _rewrite_nothing(weights: Tensor, ids: Tensor, logits: Tensor, key: int) -> None:
    """For the compiler, which wants to know the shapes of what the operator returns: nothing."""


_LIBRARY = torch.library.Library("routed_experts", "FRAGMENT")  # type: ignore[no-untyped-call]

direct_register_custom_op(
    "rewrite",
    _rewrite,
    mutates_args=["weights", "ids"],
    fake_impl=_rewrite_nothing,
    target_lib=_LIBRARY,
)
