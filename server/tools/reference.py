"""Runs a checkpoint in transformers and records the experts and scores of its routers.

The command imports torch and transformers only when it runs.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.protocol.routing import Routing
from routed_experts.server.cli.console import (
    CommandError,
    hide_transformers_progress,
    sentence_of,
)
from routed_experts.server.tools.differences import Ids, Scores, unmatched

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class Reference:
    """A checkpoint in transformers with hooks on its routers."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        import torch

        _check_device(device)
        self._model, stored_dtype = _load(model, getattr(torch, dtype), device)
        # The larger of two dtypes: of this forward pass, and of the stored checkpoint, which is a
        # server's default.
        epsilons = [torch.finfo(name).eps for name in (getattr(torch, dtype), stored_dtype)]
        self.epsilon = float(max(epsilons))
        self.layer_ids: list[int] = []  # decoder layer of each of the L routers
        self.top_k = 0
        self.num_experts = 0
        self._on_router: Callable[..., None] = self._learn  # called for each router that is run
        for name, module in self._model.named_modules():
            if hasattr(module, "top_k"):
                module.register_forward_hook(partial(self._watch, name), with_kwargs=True)
        self._forward([0])
        if not self.layer_ids:
            raise CommandError(
                f"{model} cannot be compared: its routers in transformers do not return the experts that they chose."
            )

    def run(self, ours: Routing) -> tuple[Rows, Scores]:
        """Runs the tokens of a response.

        Returns:
            The checkpoint's rows of them, [positions, L, K]; and gaps [positions, L] of the
            response's rows, as `score_gaps` has them.
        """
        tokens = ours.all_token_ids
        our_rows = np.full((len(tokens) - 1, len(self.layer_ids), self.top_k), UNKNOWN, np.int16)
        our_rows[ours.start : ours.end] = ours.rows
        rows: list[Ids] = []
        gaps: list[Scores] = []

        def take(_: str, chosen: Ids, scores: Scores) -> None:
            gaps.append(score_gaps(our_rows[:, len(rows)], chosen, scores))
            rows.append(chosen.astype(np.int16))

        self._on_router = take
        self._forward(tokens[:-1])
        return np.stack(rows, axis=1), np.stack(gaps, axis=1)

    def _forward(self, tokens: Sequence[int]) -> None:
        import torch

        device = self._model.get_input_embeddings().weight.device
        try:
            with torch.no_grad():
                # without the head, because its logits are large
                self._model.base_model(
                    input_ids=torch.tensor([list(tokens)], device=device), use_cache=False
                )
        # out of memory, or a token outside the vocabulary
        except (RuntimeError, IndexError) as error:
            raise CommandError(
                f"{len(tokens)} tokens cannot be scored: {_first_line(error)}"
            ) from error

    def _learn(self, name: str, chosen: Ids, scores: Scores) -> None:
        numbers = _LAYER_NUMBER.findall(f".{name}.")
        self.layer_ids.append(int(numbers[0]) if numbers else len(self.layer_ids))
        self.top_k = chosen.shape[1]
        self.num_experts = scores.shape[1]

    def _watch(self, name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Finds logits and choice in a router's output, in any order. Ignores other modules with
        `top_k`."""
        if not isinstance(output, tuple):
            return
        floats, integers = _by_kind(output)
        if len(integers) != 1 or not floats:
            return
        ids = integers[0]
        top_k = ids.shape[-1]
        logits = max(floats, key=lambda part: part.shape[-1])
        bias = getattr(module, "e_score_correction_bias", None)
        scores = _scores(logits, (bias, *args[1:], *kwargs.values()))
        self._on_router(name, ids.reshape(-1, top_k).cpu().numpy(), scores.cpu().numpy())


def score_gaps(ours: Ids, theirs: Ids, scores: Scores) -> Scores:
    """[n], the gap in `scores` [n, experts] between the experts [n, K] that only one side chose, in
    standard deviations of the token's scores; NaN where both chose the same."""
    only_ours, only_theirs = unmatched(ours, theirs)
    of_ours = np.where(only_ours, np.take_along_axis(scores, ours, axis=1), np.inf)
    of_theirs = np.where(only_theirs, np.take_along_axis(scores, theirs, axis=1), -np.inf)
    with np.errstate(invalid="ignore"):  # both are infinite if no expert differs
        gaps = np.abs(of_theirs.max(axis=1) - of_ours.min(axis=1))
    gaps[~only_ours.any(axis=1)] = np.nan
    return gaps / np.maximum(scores.std(axis=1), 1e-30)


def _by_kind(output: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The tensors of floats in a module's output, and those of integers."""
    tensors = [part for part in output if hasattr(part, "dtype")]
    floats = [part for part in tensors if part.dtype.is_floating_point]
    integers = [part for part in tensors if not part.dtype.is_floating_point]
    return floats, integers


def _scores(logits: Any, others: Iterable[Any]) -> Any:
    """What a router chooses by, [tokens, experts]: its logits; or, if a bias for each expert is
    among its `others`, their sigmoid with the bias."""
    scores = logits.float().reshape(-1, logits.shape[-1])
    for bias in others:
        if getattr(bias, "shape", None) == scores.shape[1:]:
            scores = scores.sigmoid() + bias.float()
    return scores


def _check_device(device: str) -> None:
    import torch

    try:
        if device != "auto":
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {device} cannot be used: {_first_line(error)}") from error


def _load(model: str, dtype: Any, device: str) -> tuple[Any, Any]:
    """The model on its device, and the dtype of its stored checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hide_transformers_progress()
    spread = {"device_map": "auto"} if device == "auto" else {}
    try:
        stored = getattr(AutoConfig.from_pretrained(model), "dtype", None)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **spread).eval()
        placed = loaded if spread else loaded.to(device)
    # transformers, safetensors and the hub client have their own exception classes
    except Exception as error:
        raise CommandError(f"{model} cannot be loaded: {sentence_of(error)}") from error
    return placed, stored if isinstance(stored, torch.dtype) else torch.float32


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
