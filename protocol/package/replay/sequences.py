"""The sequences of a forward pass: which of its tokens are one text."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from routed_experts.replay.errors import ReplayError
from routed_experts.replay.kept_rows import TOKEN

_NOT_TOKENS = ("inputs_embeds", "pixel_values", "input_features", "input_values")
"""Beginnings of the names of arguments that tokens do not tell apart."""
_STARTS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
"""Names of the argument that has where packed sequences begin, and where the last one ends."""


@dataclass(frozen=True)
class Sequences:
    """Those of a forward pass, without padding.

    Attributes:
        shape: of the pass, [B, S].
        tokens: [N] `TOKEN`, of one sequence after the other.
        places: [N], where each token is among the B * S of the pass.
        bounds: where each sequence begins in `tokens`, and N.
        is_continued: the pass continues a KV cache, so that they are without their beginnings.
    """

    shape: tuple[int, int]
    tokens: NDArray[Any]
    places: NDArray[np.intp]
    bounds: NDArray[np.intp]
    is_continued: bool


def sequences_of(model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequences:
    """Cuts the tokens of a forward pass of `model` into sequences.

    One ends with its line, where its positions begin again at 0, where the mask has another number,
    and where `cu_seq_lens_q` says so.

    Raises:
        ReplayError: the model does not get tokens alone, or gets a part of a sequence, or a tree.
    """
    inputs = _by_name(model, args, kwargs)
    _check_tokens_alone(inputs)
    shape = tuple(inputs["input_ids"].shape)
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        on_host = _on_host({"input_ids": inputs["input_ids"]})
        tokens = on_host["input_ids"].astype(TOKEN)
        lines = np.arange(0, tokens.size + 1, shape[1])
        places = np.arange(tokens.size)
        return Sequences(shape, tokens.ravel(), places, lines, is_continued=True)
    _check_mask(inputs.get("attention_mask"), shape)
    names = ("input_ids", "attention_mask", "position_ids", *_STARTS)
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    on_host = _on_host(given)
    tokens = on_host["input_ids"].astype(TOKEN)
    mask = on_host.get("attention_mask")
    if mask is None:
        places, num_of_lines = np.arange(tokens.size), np.full(*shape)
    else:
        is_token = mask != 0
        places, num_of_lines = np.flatnonzero(is_token), is_token.sum(axis=1)
    ends_of_lines = np.cumsum(num_of_lines)
    begins = np.zeros(len(places) + 1, np.bool_)  # and one for the end
    begins[0] = True
    begins[ends_of_lines] = True
    if mask is not None and mask.max(initial=0) > 1:
        begins[1:-1] |= np.diff(mask.ravel()[places]) != 0
    for name in _STARTS:
        if (starts := on_host.get(name)) is not None:
            begins[np.searchsorted(places, starts)] = True
    if (positions := on_host.get("position_ids")) is not None:
        of_tokens = _positions(positions, shape)[places]
        begins[:-1] |= of_tokens == 0
        _check_positions(of_tokens, begins[:-1])
    bounds = np.flatnonzero(begins)
    return Sequences(shape, tokens.ravel()[places], places, bounds, is_continued=False)


def takes_tokens(module: Module) -> bool:
    return "input_ids" in inspect.signature(module.forward).parameters


def _by_name(model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    inputs = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            inputs.update(inputs.pop(name, {}))
    return inputs


def _check_tokens_alone(inputs: Mapping[str, Any]) -> None:
    for name, value in inputs.items():
        if value is not None and name.startswith(_NOT_TOKENS):
            raise ReplayError(
                f"the model gets {name}: rows are found by tokens, which do not tell one picture, sound or embedding "
                "from another. Use `replayed`"
            )
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise ReplayError(
            "the model gets no input_ids [B, S], by which rows are found: use `replayed`"
        )


def _on_host(inputs: Mapping[str, Tensor]) -> dict[str, NDArray[np.int32]]:
    """By one copy: each waits for the device."""
    device = inputs["input_ids"].device
    flat = [values.detach().flatten().to(device, torch.int32) for values in inputs.values()]
    together = torch.cat(flat).cpu().numpy()
    on_host: dict[str, NDArray[np.int32]] = {}
    end = 0
    for name, values in inputs.items():
        first = end
        end += values.numel()
        on_host[name] = together[first:end].reshape(values.shape)
    return on_host


def _check_mask(mask: Any, shape: tuple[int, int]) -> None:
    """It is [B, S], 0 for padding."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != shape:
        kind = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ReplayError(
            f"an attention mask {kind} for tokens {[*shape]}: rows are found for sequences that are padded or packed, "
            "not for trees of sequences or other masks. Use `replayed`"
        )


def _positions(positions: NDArray[np.int32], shape: tuple[int, int]) -> NDArray[np.int32]:
    """[B * S]. Models with pictures have three of them, which are equal for text."""
    of_text = positions[0] if positions.ndim == 3 else positions
    return np.broadcast_to(of_text, shape).ravel()


def _check_positions(positions: NDArray[np.int32], begins: NDArray[np.bool_]) -> None:
    """Refuses what is not sequences from their beginning on."""
    expected = np.append(-1, positions[:-1]) + 1
    expected[begins] = 0
    if (wrong := np.flatnonzero(positions != expected)).size:
        where = int(wrong[0])
        raise ReplayError(
            f"a token at position {positions[where]}, where {expected[where]} comes next: rows are found for whole "
            "sequences, not for slices of them (context parallelism, ring attention) or trees. Use `replayed`"
        )
