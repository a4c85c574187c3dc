"""Rows in `kv_transfer_params`: base64 in JSON; bytes in MessagePack and between the processes of an instance."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from routed_experts.capture.handoff import MAX_BYTES, PARAM, WORDS, decode, has_weights, is_time, without_rows
from routed_experts.capture.rows import ids_of, joined, weights_of
from routed_experts.protocol.codec import UNKNOWN
from routed_experts.server.vllm_api import EngineCoreRequest

PARAMS = "kv_transfer_params"
FIELD = f"{PARAMS}.{PARAM}"

WEIGHTS = "weights"
"""Key of the weights (base64 of little-endian float32 [n, L, K]) beside `data`, over HTTP."""
_WEIGHT_BYTES = 4
_LARGEST_BYTE = 255

LARGE_TEXT = 1 << 20
"""Longer base64 is decoded and checked in a thread."""


class HandoffError(ValueError):
    """The value of `kv_transfer_params.routed_experts` is invalid."""


@dataclass(init=False, eq=False)
class Handover:
    """Stands for `kv_transfer_params.routed_experts` in a request, so that vLLM neither logs nor copies the rows.

    vLLM sees only `shape`. `put_rows` moves the rows into the message to the engine.
    """

    shape: list[int] | None  # [n, L, K]; None until `read`

    def __init__(self, value: Any) -> None:
        self.shape = None
        self._value = value
        self._rows: dict[str, Any] | None = None

    def __deepcopy__(self, memo: Any) -> "Handover":
        return self

    @property
    def is_large(self) -> bool:
        """Whether `read` takes long enough to delay other requests."""
        texts = [self._value.get(key) for key in ("data", WEIGHTS)] if isinstance(self._value, Mapping) else []
        return sum(len(text) for text in texts if isinstance(text, str | bytes)) > LARGE_TEXT

    def read(self, shape: tuple[int, int], num_experts: int, with_weights: bool = False) -> None:
        """Decodes and checks the rows for a model with `shape` (L, K). Drops weights if the server captures none."""
        value, self._value = self._value, None
        self._rows = from_wire(value, shape, num_experts)
        if with_weights and value.get(WEIGHTS) is not None:
            self._rows = _with_weights(self._rows, value[WEIGHTS])
        self.shape = self._rows["shape"]

    def take(self) -> dict[str, Any] | None:
        """The rows for the engine on the first call, an empty array later."""
        rows = self._rows
        if rows is not None:
            self._rows = without_rows(rows)
        return rows


def put_rows(request: EngineCoreRequest, index: int) -> None:
    """Puts the rows of a request into the message to the engine, for the first choice (`index` 0) only."""
    sampling = request.sampling_params
    params = sampling.extra_args.get(PARAMS) if sampling is not None and sampling.extra_args else None
    if not isinstance(params, dict) or (given := params.get(PARAM)) is None or isinstance(given, bool | bytes):
        return
    if isinstance(given, Handover):
        given = given.take()
    elif index and decode(given) is not None:  # from a program
        given = without_rows(given)
    request.sampling_params = sampling = copy(sampling)  # all choices share the object
    sampling.extra_args = {**sampling.extra_args, PARAMS: {**params, PARAM: given}}


def handed_bytes(params: dict[str, Any] | None) -> int:
    """Size of the rows in the `kv_transfer_params` of a response."""
    return len(params[PARAM]["data"]) if params and PARAM in params else 0


def to_wire(params: dict[str, Any] | None, packed: bool = False) -> dict[str, Any] | None:
    """`kv_transfer_params` of a response: rows in base64 for JSON, in bytes for MessagePack (`packed`); weights apart
    from ids."""
    if not params or PARAM not in params:
        return params
    handed = params[PARAM]
    if has_weights(handed) and (decoded := decode(handed)) is not None:
        rows = np.asarray(decoded[0], dtype=np.int16)
        ids = np.ascontiguousarray(ids_of(rows))
        is_narrow = ids.view(np.uint16).max(initial=0) <= _LARGEST_BYTE
        data = ids.astype(np.uint8 if is_narrow else "<i2").tobytes()
        handed = {**handed, "data": data, "dtype": "uint8" if is_narrow else "int16", "shape": list(ids.shape)}
        handed[WEIGHTS] = weights_of(rows).tobytes()
    if not packed:
        texts = {name: pybase64.b64encode_as_string(handed[name]) for name in ("data", WEIGHTS) if name in handed}
        handed = {**handed, **texts}
    return {**params, PARAM: handed}


def _bytes_of(value: Any, name: str, limit: int) -> bytes:
    """`value` from JSON (base64) or MessagePack (bytes)."""
    if not isinstance(value, str | bytes):
        raise HandoffError(f"{name} must be base64, or bytes in MessagePack")
    if len(value) > (limit if isinstance(value, bytes) else limit // 3 * 4 + 4):
        raise HandoffError(f"{name} has more than {limit} bytes")
    if isinstance(value, bytes):
        return value
    try:
        return pybase64.b64decode(value, validate=True)
    except ValueError as error:
        raise HandoffError(f"{name} is not base64: {error}") from None


def _with_weights(handed: dict[str, Any], text: Any) -> dict[str, Any]:
    """Rows for the engine from ids for the engine and weights of a request."""
    ids, _ = decode(handed) or (np.empty((0, 0, 0), np.int16), 0)
    size = ids.size * _WEIGHT_BYTES
    raw = _bytes_of(text, f"{FIELD}.{WEIGHTS}", size)
    if len(raw) != size:
        raise HandoffError(f"{FIELD}.{WEIGHTS} must be base64 of {size} bytes, a float32 for each id")
    rows = joined(ids, np.frombuffer(raw, dtype="<f4").reshape(ids.shape))
    return {**handed, "data": rows.tobytes(), "dtype": WORDS, "shape": list(rows.shape)}


def from_wire(value: Any, shape: tuple[int, int], num_experts: int) -> dict[str, Any]:
    """Decodes the rows in a request into the form for the engine; see `Handover.read`."""
    if not isinstance(value, Mapping):
        raise HandoffError(f"{FIELD} must be an object with data (base64), dtype, shape and until")
    if not is_time(value.get("until")):
        raise HandoffError(f"{FIELD}.until must be a Unix time in seconds")
    raw = _bytes_of(value.get("data"), f"{FIELD}.data", MAX_BYTES)
    handed = {"data": raw, **{name: value.get(name) for name in ("dtype", "shape", "until")}}
    rows, _ = decode(handed) or (None, None)
    if rows is None or has_weights(handed) or rows.shape[1:] != shape:
        raise HandoffError(
            f"{FIELD} must have shape [n, {shape[0]}, {shape[1]}], dtype uint8 or int16, and data of that size"
        )
    if rows.min(initial=0) < UNKNOWN or rows.max(initial=0) >= num_experts:
        raise HandoffError(f"{FIELD} has ids outside {UNKNOWN} to {num_experts - 1}")
    return handed
