"""Rows in `kv_transfer_params`: base64 in JSON; bytes in MessagePack and between the processes of
an instance."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import pybase64

from routed_experts.capture.wire.prefill_rows import (
    MAX_BYTES,
    PARAM,
    TRANSFER_PARAMS,
    decode,
    is_time,
    without_rows,
)
from routed_experts.protocol.codec import UNKNOWN
from routed_experts.server.vllm_api import EngineCoreRequest

FIELD = f"{TRANSFER_PARAMS}.{PARAM}"


class PrefillRowsError(ValueError):
    """The value of `kv_transfer_params.routed_experts` is invalid."""


@dataclass(init=False, eq=False)
class PrefillRowsParam:
    """Stands for `kv_transfer_params.routed_experts` in a request, so that vLLM neither logs nor
    copies the rows.

    vLLM sees only `shape`. `put_rows` moves the rows into the message to the engine.
    """

    shape: list[int] | None  # [n, L, K]; None until `parse`

    def __init__(self, value: Any) -> None:
        self.shape = None
        self._value = value
        self._rows: dict[str, Any] | None = None

    def __deepcopy__(self, memo: Any) -> "PrefillRowsParam":
        return self

    def parse(self, shape: tuple[int, int], num_experts: int) -> None:
        """Decodes and checks the rows for a model with `shape` (L, K)."""
        value = self._value
        self._value = None
        if not isinstance(value, Mapping):
            raise PrefillRowsError(
                f"{FIELD} must be an object with data (base64), dtype, shape and until"
            )
        if not is_time(value.get("until")):
            raise PrefillRowsError(f"{FIELD}.until must be a Unix time in seconds")
        message = {name: value.get(name) for name in ("dtype", "shape", "until")}
        message["data"] = _bytes_of(value.get("data"), f"{FIELD}.data", MAX_BYTES)
        rows = decode(message)
        if rows is None or rows.rows.shape[1:] != shape:
            raise PrefillRowsError(
                f"{FIELD} must have shape [n, {shape[0]}, {shape[1]}], dtype uint8 or int16, and data of that size"
            )
        if rows.rows.max(initial=0) >= num_experts:
            raise PrefillRowsError(f"{FIELD} has ids outside {UNKNOWN} to {num_experts - 1}")
        self._rows = message
        self.shape = message["shape"]

    def take(self) -> dict[str, Any] | None:
        """The rows for the engine on the first call, an empty array later."""
        rows = self._rows
        if rows is not None:
            self._rows = without_rows(rows)
        return rows


def put_rows(request: EngineCoreRequest, index: int) -> None:
    """Puts the rows of a request into the message to the engine, for the first choice (`index` 0)
    only."""
    sampling = request.sampling_params
    if sampling is None or not sampling.extra_args:
        return
    params = sampling.extra_args.get(TRANSFER_PARAMS)
    value = params.get(PARAM) if isinstance(params, dict) else None
    if value is None or isinstance(value, bool):  # true asks a prefill instance for rows
        return
    if isinstance(value, PrefillRowsParam):
        value = value.take()
    elif index and decode(value) is not None:  # from a program
        value = without_rows(value)
    request.sampling_params = copy(sampling)  # all choices share the object
    extra_args = {**sampling.extra_args, TRANSFER_PARAMS: {**params, PARAM: value}}
    request.sampling_params.extra_args = extra_args


def rows_nbytes(params: dict[str, Any] | None) -> int:
    """Size of the rows in the `kv_transfer_params` of a response."""
    return len(params[PARAM]["data"]) if params and PARAM in params else 0


def to_wire(params: dict[str, Any] | None, packed: bool = False) -> dict[str, Any] | None:
    """`kv_transfer_params` of a response: rows in base64 or (`packed`) as bytes."""
    if packed or not params or PARAM not in params:
        return params
    value = params[PARAM]
    data = pybase64.b64encode_as_string(value["data"])
    return {**params, PARAM: {**value, "data": data}}


def _bytes_of(value: Any, name: str, limit: int) -> bytes:
    """`value` from JSON (base64) or MessagePack (bytes)."""
    if not isinstance(value, str | bytes):
        raise PrefillRowsError(f"{name} must be base64, or bytes in MessagePack")
    longest = limit if isinstance(value, bytes) else limit // 3 * 4 + 4
    if len(value) > longest:
        raise PrefillRowsError(f"{name} has more than {limit} bytes")
    if isinstance(value, bytes):
        return value
    try:
        return pybase64.b64decode(value, validate=True)
    except ValueError as error:
        raise PrefillRowsError(f"{name} is not base64: {error}") from None
