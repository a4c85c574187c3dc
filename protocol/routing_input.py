"""What a request says about the experts of its own tokens.

Imports numpy and the standard library only. In a program:
`SamplingParams(extra_args=routing_args(rows=rows))`.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol import arguments
from routed_experts.protocol.codec import MAX_EXPERTS, MAX_LAYERS, UNKNOWN, Rows

INPUT_ARG = "routed_experts.input"
"""Key in `SamplingParams.extra_args`; its value is `RoutingInput.encode()`."""

_VERSION = 1
# the version, the digest, the start, the shapes of both arrays, and the largest expert in rows
_HEADER = struct.Struct("<B32sq5Ii")
_DIGEST = slice(1, 33)

MAX_BIAS = 10_000.0
"""Finite values of a bias are at most this, so that a sum with a logit stays finite."""

Bias = NDArray[np.float32]
"""[L, E]: what is added to the router's logits. -inf: the expert is never chosen; +inf: always."""

Pair = tuple[int, int]
"""A decoder layer, and an expert of it."""


_LAYER = "{layer}"

_PIECE_ROWS = 1 << 16
"""Rows of one layer that are checked at once: 1 MB with 8 experts, which stays in a CPU's cache."""


class RoutingInputError(ValueError):
    """A request says something about its routing that is impossible.

    Attributes:
        field: which argument: `rows`, `start`, `bias`, `activate` or `deactivate`.
        problem: the rest of the sentence that begins with the field.
    """

    def __init__(self, field: str, problem: str, layer: int | None = None) -> None:
        """`layer` is the index in a row of the layer that `{layer}` in `problem` stands for."""
        self.field = field
        self.problem = problem.replace(_LAYER, f"MoE layer {layer}")
        self._template = problem
        self._layer = layer
        super().__init__(f"{field} {self.problem}")

    def in_model(self, layer_ids: Sequence[int]) -> "RoutingInputError":
        """The same error, with the number of the decoder layer, where a model with these decoder
        layers is known."""
        if self._layer is None or self._layer >= len(layer_ids):
            return self
        layer = f"decoder layer {layer_ids[self._layer]}"
        return RoutingInputError(self.field, self._template.replace(_LAYER, layer))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self._template, self._layer)


@dataclass(frozen=True)
class Groups:
    """How a router limits its choice to some groups of experts."""

    count: int = 1
    """Groups of equal size, of neighbouring experts."""
    chosen: int = 1
    """How many groups a token's experts come from."""
    summed: int = 1
    """A group is as good as the sum of so many of its best experts."""


ONE_GROUP = Groups()


@dataclass(frozen=True, slots=True, eq=False)
class EncodedInput:
    """An encoded `RoutingInput`, of up to some 25 MB. Logs and dumps of a request show its size
    only.

    A dataclass, because vLLM's messages can have one anywhere. Its arrays are a numpy array, which
    they carry beside the message, as a frame of its own, so that nobody copies it. The header is
    bytes, which JSON cannot have: so clients that fill `extra_args` cannot forge it.

    Attributes:
        header: what `_HEADER` says.
        arrays: uint8 [bytes], the rows and then the bias, in C order, little-endian.
    """

    header: bytes
    arrays: NDArray[np.uint8]

    def __repr__(self) -> str:
        return f"<routing input of {len(self)} bytes>"

    def __len__(self) -> int:
        return len(self.header) + len(self.arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedInput):
            return NotImplemented
        return self.header == other.header and np.array_equal(self.arrays, other.arrays)

    def __hash__(self) -> int:
        return hash(self.header)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EncodedInput":
        return self  # nobody writes into it

    @property
    def digest(self) -> bytes:
        """From the header: equal only for equal inputs."""
        return self.header[_DIGEST]

    @classmethod
    def of(cls, params: Any) -> "EncodedInput | None":
        """What a request with these `SamplingParams` says; None if it says nothing.

        What a message brought and nobody joined with its frame (`InputDecoder` does) has no arrays:
        `RoutingInput.decode` refuses it.
        """
        if params is None or not params.extra_args:
            return None
        value = params.extra_args.get(INPUT_ARG)
        if isinstance(value, Mapping):
            header = value.get("header")
            return cls(header, _NO_BYTES) if isinstance(header, bytes) else None
        return value if isinstance(value, cls) else None


_NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True, eq=False)
class RoutingInput:
    """What a request says about the experts of its tokens.

    The model has L MoE layers with E experts, of which K are chosen for a token. Layers are counted
    as in rows: MoE layers only.

    Attributes:
        rows: int16 [n, L, K], the experts of the prompt's tokens from `start` on. The router
            chooses where a layer of a row has a -1.
        start: position of the first row.
        bias: float32 [L, E], for all tokens of the request. A layer of zeros stays the router's own.
        largest: the largest expert in `rows`; -1 if there is none.

    Raises:
        TypeError: an argument has another type.
        RoutingInputError: an argument is impossible with any model.
    """

    rows: Rows | None = None
    start: int = 0
    bias: Bias | None = None
    largest: int = field(init=False, default=UNKNOWN)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _start(self.start))
        if self.rows is not None:
            rows, largest = _rows(self.rows)
            object.__setattr__(self, "rows", rows)
            object.__setattr__(self, "largest", largest)
        if self.bias is not None:
            object.__setattr__(self, "bias", _bias(self.bias))
        if self.rows is None and self.bias is None:
            raise RoutingInputError("rows", "and bias are both missing: give one of them")
        if self.rows is None and self.start:
            raise RoutingInputError("start", "is the position of the first row: give rows, too")
        _check_rows_are_allowed(self.rows, self.bias)

    def encode(self) -> EncodedInput:
        """As bytes, with a digest in their header, so that the engine need not hash them. They are a
        copy, which nobody can write into."""
        rows = np.zeros((0, 0, 0), "<i2")
        bias = np.zeros((0, 0), "<f4")
        if self.rows is not None:
            rows = self.rows.astype("<i2", copy=False)
        if self.bias is not None:
            bias = self.bias.astype("<f4", copy=False)
        # As large arrays are copied and hashed, other threads run.
        arrays = np.concatenate([array.reshape(-1).view(np.uint8) for array in (rows, bias)])
        arrays.setflags(write=False)
        digest = hashlib.sha256(struct.pack("<q5I", self.start, *rows.shape, *bias.shape))
        digest.update(arrays.data)
        header = _HEADER.pack(
            _VERSION, digest.digest(), self.start, *rows.shape, *bias.shape, self.largest
        )
        return EncodedInput(header, arrays)

    @classmethod
    def decode(cls, encoded: EncodedInput) -> "RoutingInput":
        """What `encode` made into bytes. The arrays are views of them, and are not checked again.

        Raises:
            ValueError: `encode` did not make them.
        """
        header = encoded.header
        if len(header) != _HEADER.size or header[0] != _VERSION:
            raise ValueError("these bytes are no routing input: make them with RoutingInput.encode")
        _, _, start, *shapes, largest = _HEADER.unpack(header)
        rows_shape = tuple(shapes[:3])
        bias_shape = tuple(shapes[3:])
        num_ids = math.prod(rows_shape)
        num_values = math.prod(bias_shape)
        data = encoded.arrays
        if len(data) != 2 * num_ids + 4 * num_values:
            raise ValueError("these bytes are a routing input that was cut or joined")
        rows = np.frombuffer(data, "<i2", num_ids)
        bias = np.frombuffer(data, "<f4", num_values, 2 * num_ids)
        decoded = object.__new__(cls)
        object.__setattr__(decoded, "rows", rows.reshape(rows_shape) if num_ids else None)
        object.__setattr__(decoded, "start", start)
        object.__setattr__(decoded, "largest", largest)
        object.__setattr__(decoded, "bias", bias.reshape(bias_shape) if num_values else None)
        return decoded

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + (0 if self.rows is None else len(self.rows))

    def check(
        self,
        *,
        num_layers: int,
        top_k: int,
        num_experts: int,
        num_prompt_tokens: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Raises `RoutingInputError` for what this model, or this prompt, cannot have."""
        if self.rows is not None:
            if self.rows.shape[1:] != (num_layers, top_k):
                raise RoutingInputError(
                    "rows",
                    f"must have {num_layers} layers and {top_k} experts per token, as this model "
                    f"has, not {self.rows.shape[1]} and {self.rows.shape[2]}",
                )
            if self.largest >= num_experts:
                raise RoutingInputError(
                    "rows",
                    f"have expert {self.largest}, but the model's are 0 to {num_experts - 1}",
                )
            if num_prompt_tokens is not None and self.end > num_prompt_tokens:
                raise RoutingInputError(
                    "rows",
                    f"must be of the prompt's {num_prompt_tokens} tokens, but they end at "
                    f"position {self.end}: to set experts of an answer, send it in the prompt",
                )
        if self.bias is not None:
            if self.bias.shape != (num_layers, num_experts):
                raise RoutingInputError(
                    "bias",
                    f"must have {num_layers} layers and {num_experts} experts, as this model has, "
                    f"not {self.bias.shape[0]} and {self.bias.shape[1]}",
                )
            for layer, of_layer in enumerate(self.bias):
                _check_choice(layer, of_layer, top_k, groups or ONE_GROUP)


def routing_args(
    *,
    rows: Any = None,
    start: int = 0,
    activate: Iterable[Pair] = (),
    deactivate: Iterable[Pair] = (),
    bias: Any = None,
    info: Mapping[str, Any] | None = None,
) -> dict[str, EncodedInput]:
    """For `SamplingParams(extra_args=routing_args(…))`, with the capture in the program's engine.

    Args:
        rows: [n, L, K] experts of the prompt's tokens; -1 in a layer: the router chooses.
        start: position of the first row.
        activate: (decoder layer, expert) of those that are chosen for every token.
        deactivate: (decoder layer, expert) of those that are never chosen.
        bias: float32 [L, E], added to the router's logits.
        info: what the engine's `collective_rpc("routed_experts_info")[0]` or
            `GET /v1/routed_experts` returned; needed with `activate` and `deactivate`.

    Raises:
        TypeError, RoutingInputError: an argument is impossible.
    """
    activated = list(activate)
    deactivated = list(deactivate)
    if activated or deactivated:
        if info is None:
            raise RoutingInputError(
                "activate" if activated else "deactivate", "needs info, which names the layers"
            )
        bias = steering_bias(
            layer_ids=info["layer_ids"],
            num_experts=info["num_experts"],
            activate=activated,
            deactivate=deactivated,
            bias=bias,
        )
    try:
        said = RoutingInput(rows=rows, start=start, bias=bias)
    except RoutingInputError as error:
        raise (error if info is None else error.in_model(info["layer_ids"])) from None
    return {INPUT_ARG: said.encode()}


def steering_bias(
    *,
    layer_ids: Sequence[int],
    num_experts: int,
    activate: Iterable[Pair] = (),
    deactivate: Iterable[Pair] = (),
    bias: Any = None,
) -> Bias:
    """float32 [L, E]: `bias`, or zeros, with +inf for activated and -inf for deactivated experts.

    Raises `RoutingInputError` for a layer or an expert that the model does not have, and for an
    expert that is to be chosen always and never.
    """
    shape = (len(layer_ids), num_experts)
    result = np.zeros(shape, np.float32) if bias is None else _bias(bias).copy()
    if result.shape != shape:
        raise RoutingInputError(
            "bias", f"must have the shape {list(shape)}, not {list(result.shape)}"
        )
    index_of_layer = indices_of(layer_ids)
    for argument, pairs, value in (
        ("activate", activate, np.inf),
        ("deactivate", deactivate, -np.inf),
    ):
        for layer, expert in pairs:
            index = place_of(argument, (layer, expert), index_of_layer, num_experts)
            if result[index] == -value:
                raise RoutingInputError(
                    argument,
                    f"has expert {expert} of decoder layer {layer}, which another field says to "
                    f"choose {'never' if value > 0 else 'always'}",
                )
            result[index] = value
    return result


def indices_of(layer_ids: Sequence[int]) -> dict[int, int]:
    """The index in a row of each decoder layer with experts."""
    return {layer: index for index, layer in enumerate(layer_ids)}


def place_of(
    field: str, pair: Pair, index_of_layer: Mapping[int, int], num_experts: int
) -> tuple[int, int]:
    """Where in [L, E] an expert of a decoder layer is. Raises `RoutingInputError` if the model does
    not have it."""
    layer, expert = pair
    if layer not in index_of_layer:
        raise RoutingInputError(
            field,
            f"has decoder layer {layer}, which has no experts: those with experts are "
            f"{_listed(list(index_of_layer))}",
        )
    if not 0 <= expert < num_experts:
        raise RoutingInputError(
            field,
            f"has expert {expert} of decoder layer {layer}, but the model's are 0 to "
            f"{num_experts - 1}",
        )
    return index_of_layer[layer], expert


def _start(value: Any) -> int:
    try:
        return arguments.integer("start", value, most=np.iinfo(np.int64).max >> 1)
    except ValueError as error:
        raise RoutingInputError("start", str(error).removeprefix("start ")) from None


def _rows(value: Any) -> tuple[Rows, int]:
    """The rows, and the largest expert in them."""
    rows = arguments.array("rows", value, "iu")
    if rows.ndim != 3 or 0 in rows.shape:
        raise RoutingInputError(
            "rows",
            f"must have the shape [tokens, layers, experts per token], not {list(rows.shape)}",
        )
    if rows.shape[1] > MAX_LAYERS:
        raise RoutingInputError("rows", f"must have at most {MAX_LAYERS} layers")
    # What is checked is what is sent: a program may write into its own array meanwhile.
    result = np.array(rows, order="C")
    smallest = int(result.min())
    largest = int(result.max())
    if smallest < UNKNOWN or largest >= MAX_EXPERTS:
        wrong = smallest if smallest < UNKNOWN else largest
        raise RoutingInputError(
            "rows", f"must be ids of experts, or -1 where the router chooses, not {wrong}"
        )
    result = result.astype(np.int16, copy=False)
    _check_distinct(result)
    return result, largest


def _check_distinct(rows: Rows) -> None:
    """In pieces, with the columns of a piece as arrays of their own: numpy is slow on short rows."""
    num_tokens, num_layers, top_k = rows.shape
    flat = rows.reshape(num_tokens * num_layers, top_k)
    for first in range(0, len(flat), _PIECE_ROWS):
        columns = np.ascontiguousarray(flat[first : first + _PIECE_ROWS].T)  # [K, rows]
        twice = np.zeros(columns.shape[1], np.bool_)
        for apart in range(1, top_k):
            same = columns[apart:] == columns[:-apart]
            same &= columns[apart:] >= 0
            twice |= same.any(axis=0)
        if twice.any():
            token, layer = divmod(first + int(twice.argmax()), num_layers)
            raise RoutingInputError(
                "rows",
                f"have an expert twice in {_LAYER} of row {token}: "
                f"{_listed(rows[token, layer].tolist())}; an unknown row has -1 everywhere",
                layer,
            )


def _bias(value: Any) -> Bias:
    bias = arguments.array("bias", value, "iuf")
    if bias.ndim != 2 or 0 in bias.shape:
        raise RoutingInputError(
            "bias", f"must have the shape [layers, experts], not {list(bias.shape)}"
        )
    if bias.shape[0] > MAX_LAYERS or bias.shape[1] > MAX_EXPERTS:
        raise RoutingInputError("bias", f"of the shape {list(bias.shape)} fits no model")
    bias = np.array(bias, order="C")  # what is checked is what is sent
    if np.isnan(bias).any():
        raise RoutingInputError("bias", "must be numbers, but it has NaN")
    # Not by their absolute value: the least of an integer type has none.
    is_beyond = (bias < -MAX_BIAS) | (bias > MAX_BIAS)
    if (np.isfinite(bias) & is_beyond).any():
        raise RoutingInputError(
            "bias",
            f"must be at most {MAX_BIAS:.0f} from 0; -inf stands for never, inf for always",
        )
    return bias.astype(np.float32, copy=False)


def _check_rows_are_allowed(rows: Rows | None, bias: Bias | None) -> None:
    """Refuses a row with an expert that is never to be chosen."""
    if rows is None or bias is None or rows.shape[1] != bias.shape[0]:
        return
    for layer, of_layer in enumerate(bias):
        never = np.flatnonzero(of_layer == -np.inf)
        ids = rows[:, layer]
        is_wrong = np.isin(ids, never)
        if is_wrong.any():
            token, column = (int(index) for index in np.argwhere(is_wrong)[0])
            raise RoutingInputError(
                "rows",
                f"have expert {int(ids[token, column])} in {_LAYER} of row {token}, which is "
                "never to be chosen there",
                layer,
            )


def _check_choice(layer: int, bias: Bias, top_k: int, groups: Groups) -> None:
    """Refuses a layer's bias `[E]` that leaves the router no choice of K experts."""
    always = bias == np.inf
    num_always = int(always.sum())
    if num_always > top_k:
        raise RoutingInputError(
            "activate",
            f"has {num_always} experts of {_LAYER}, but {top_k} are chosen for a token",
            layer,
        )
    num_left = int((bias > -np.inf).sum())
    if num_left < top_k:
        raise RoutingInputError(
            "deactivate",
            f"leaves {num_left} experts in {_LAYER}, but {top_k} are chosen for a token",
            layer,
        )
    if groups.count == 1:
        return
    always_of_group = always.reshape(groups.count, -1).any(axis=1)
    if always_of_group.sum() > groups.chosen:
        raise RoutingInputError(
            "activate",
            f"has experts in {int(always_of_group.sum())} groups of {_LAYER}, but a token's "
            f"experts are of {groups.chosen}",
            layer,
        )
    left_of_group = (bias > -np.inf).reshape(groups.count, -1).sum(axis=1)
    worst = _fewest_left(left_of_group, always_of_group, groups)
    if worst < top_k:
        raise RoutingInputError(
            "deactivate",
            f"may leave {worst} experts in the {groups.chosen} groups of {_LAYER} that are "
            f"chosen for a token, which has {top_k}",
            layer,
        )


def _fewest_left(
    left_of_group: NDArray[np.int64], always_of_group: NDArray[np.bool_], groups: Groups
) -> int:
    """How many experts are left, at worst, in the groups that a token's experts may come from.

    Groups with an expert that is always chosen come first. Of the others, those come last that have
    fewer experts left than a group's score has summands.
    """
    others = sorted(
        left_of_group[~always_of_group].tolist(),
        key=lambda left: (-min(left, groups.summed), left),
    )
    num_others = groups.chosen - int(always_of_group.sum())
    num_left: int = left_of_group[always_of_group].sum() + sum(others[:num_others])
    return num_left


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:16]))
    return f"{shown} and others" if len(values) > 16 else shown
