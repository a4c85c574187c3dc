"""`TokenReplay`: rows for a trainer that calls the model by itself, found by the tokens of each
forward pass."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module

from routed_experts.protocol.codec import UNKNOWN, UNKNOWN_WEIGHT
from routed_experts.protocol.routing import Routing
from routed_experts.replay.block import Block
from routed_experts.replay.errors import ReplayError
from routed_experts.replay.finding import routers_of
from routed_experts.replay.kept_rows import KeptRows
from routed_experts.replay.loss import replayed_loss
from routed_experts.replay.recomputation import ForwardPass, in_recomputed_pass, naming
from routed_experts.replay.replacing import is_replaced
from routed_experts.replay.sequences import Sequences, sequences_of, takes_tokens


class TokenReplay:
    """Within, every forward pass of the models replays the rows that were `put`.

    Nothing has to travel through the trainer's batches: padding on any side, batches that are
    shuffled, cut into chunks or packed, several passes in a step, gradient checkpointing and adapters
    that are switched off need no code. Rows are found by all tokens of a sequence, from its first one
    on. They are of the newest response with these tokens, or with more behind them, whose rows begin
    first.

    Each process of a trainer needs the rows of its own batches.

    Attributes:
        passes: forward passes with rows so far; recomputed ones do not count.
        replayed: rows that were replayed so far, counted in each layer.
        without_rows: sequences so far for which none were found.

    Args:
        models: of transformers: the policy, and a reference with weights of its own. What wraps
            them (PEFT, DDP, FSDP2, torch.compile) may be given, or wrap them later.
        info: the response of `GET /v1/routed_experts`. By default the rows' layers are those of the
            routers, and weights are not scaled.
        weights: the server's weights take the place of the router's own, as in `replayed`.
        aux_loss: where a model computes its load-balancing loss, it counts the replayed experts.
        missing: a sequence without rows is an error, or runs with the live router and is counted.
        max_bytes: of rows, weights and tokens, on the host.

    Raises:
        ReplayError: as from `replayed`; or a forward pass has a sequence without rows, or parts or
            trees of sequences, or something other than tokens; or, at the end, there was none.
    """

    def __init__(
        self,
        *models: Module,
        info: Mapping[str, Any] | None = None,
        weights: bool = False,
        aux_loss: bool = False,
        missing: Literal["error", "live"] = "error",
        max_bytes: int = 8 << 30,
    ) -> None:
        self.passes = self.replayed = self.without_rows = 0
        self._layer_ids = None if info is None else info["layer_ids"]
        self._has_weights = weights
        self._aux_loss = aux_loss
        self._missing = missing
        self._kept = KeptRows(max_bytes, info, weights)
        self._models = [module for model in models for module in _models_of_tokens(model)]
        self._running: Module | None = None  # the outermost one whose forward pass is under way
        self._pass = ExitStack()
        self._block: Block | None = None
        self._live = ForwardPass()  # all that have no rows
        self._hooks = ExitStack()
        self._is_open = False

    def put(self, routings: Iterable[Routing]) -> None:
        """Keeps rows of responses, as from `collect`.

        Raises:
            ReplayError: a response has no token ids or, if they are replayed, no weights; a prompt
                has media; or the rows need more than `max_bytes`.
        """
        self._kept.put(routings)

    def __enter__(self) -> "TokenReplay":
        begin = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]
        end = torch.compiler.disable(self._end)  # type: ignore[no-untyped-call]
        for module in self._models:
            for handle in (
                module.register_forward_pre_hook(begin, with_kwargs=True),
                module.register_forward_hook(end, with_kwargs=True, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        routers = {router for module in self._models for _, _, router in routers_of(module)}
        for router in routers:
            handle = router.register_forward_pre_hook(self._check_recomputed)
            self._hooks.callback(handle.remove)
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._is_open = False
        self._running = None
        self._hooks.close()
        self._pass.close()
        if kind is None and not self.passes and not self.without_rows:
            raise ReplayError(
                "no forward pass of the models was seen: nothing was replayed. Give the model that the trainer calls"
            )

    def _begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Compiled code may call hooks that are no longer there.
        if not self._is_open or self._running is not None:
            return
        if in_recomputed_pass():
            _check_begun_before(module)
            return
        sequences = sequences_of(module, args, kwargs)
        rows, weights = self._rows_of(sequences)
        if rows is not None:
            self._block = Block(module, rows, weights, layer_ids=self._layer_ids)
            self._pass.enter_context(self._block.forward_pass())
            if self._aux_loss:
                self._pass.enter_context(replayed_loss(module, self._block.layers))
        else:
            self._pass.enter_context(naming(self._live, nullcontext))
        self._running = module

    def _end(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """`output` is None if there was an exception."""
        if module is not self._running:
            return
        block, self._block = self._block, None
        self._running = None
        self._pass.close()
        if block is not None and output is not None:
            block.replay.check()
            self.passes += 1
            self.replayed += block.replay.replayed

    def _check_recomputed(self, router: Module, _: Any) -> None:
        """Refuses checkpointing that is not torch's: a block has ended when the pass is recomputed."""
        if torch.compiler.is_compiling() or not in_recomputed_pass():
            return
        if not is_replaced(router) and not self._live.num_recomputed:
            raise ReplayError(
                "a forward pass is recomputed without its rows, as its checkpointing is not torch's: have "
                "torch.utils.checkpoint recompute layers, or use `replayed` around the backward pass"
            )

    def _rows_of(
        self, sequences: Sequences
    ) -> tuple[NDArray[np.int16] | None, NDArray[np.float32] | None]:
        """Rows and weights [B * S, L, K]; None if no sequence has rows."""
        rows = weights = None
        for first, end in zip(sequences.bounds[:-1], sequences.bounds[1:], strict=True):
            tokens = sequences.tokens[first:end]
            kept = None if sequences.is_continued else self._kept.find(tokens)
            if kept is None:
                self._miss(tokens, sequences)
                continue
            if rows is None:
                shape = (sequences.shape[0] * sequences.shape[1], *kept.rows.shape[1:])
                rows = np.full(shape, UNKNOWN, np.int16)
                weights = np.full(shape, UNKNOWN_WEIGHT, np.float32) if self._has_weights else None
            places = sequences.places[first:end][kept.start :][: len(kept.rows)]
            rows[places] = kept.rows[: len(places)]
            if weights is not None and kept.weights is not None:
                weights[places] = kept.weights[: len(places)]
        return rows, weights

    def _miss(self, tokens: NDArray[Any], sequences: Sequences) -> None:
        if not sequences.is_continued and (tokens == tokens[0]).all():
            return  # padding of a packed batch
        self.without_rows += 1
        if self._missing == "live":
            return
        if sequences.is_continued:
            raise ReplayError(
                "a forward pass continues a KV cache, so that the beginning of its sequences is not known: generate "
                "outside of TokenReplay"
            )
        shown = ", ".join(map(str, tokens[:8].tolist()))
        lost = f"; rows of {self._kept.num_lost} sequences went unused, as max_bytes is small"
        raise ReplayError(
            f"no rows for a sequence of {len(tokens)} tokens that begins with [{shown}]: `put` its response first. "
            "Rows are found by all tokens of a sequence: one that was changed after its rollout, packed without "
            "position_ids or cu_seq_lens_q, or cut into slices (context parallelism) has none"
            f"{lost if self._kept.num_lost else ''}"
        )


def _models_of_tokens(model: Module) -> list[Module]:
    """The modules that get tokens and have all routers of `model`, from the outside in. A trainer may
    call any of them: the model in a wrapper, or without its head."""
    names = [name for name, _, _ in routers_of(model)]
    models = [
        module
        for name, module in model.named_modules()
        if all(name == "" or router.startswith(f"{name}.") for router in names)
        and takes_tokens(module)
    ]
    if not models:
        raise ReplayError(f"{type(model).__name__} takes no input_ids, by which rows are found")
    return models


def _check_begun_before(module: Module) -> None:
    """A checkpoint around the model begins before the forward pass does, and so does not know it."""
    if not any(is_replaced(router) for _, _, router in routers_of(module)):
        raise ReplayError(
            "gradient checkpointing recomputes the whole model: have it recompute layers, as "
            "gradient_checkpointing_enable does"
        )
