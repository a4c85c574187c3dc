"""Rows in `kv_transfer_params`: base64 over HTTP, bytes between the processes of an instance."""

from collections.abc import Mapping
from typing import Any

import pybase64

from routed_experts.capture.handoff import MAX_BYTES, PARAM, decode, is_time
from routed_experts.capture.rows import UNKNOWN

FIELD = f"kv_transfer_params.{PARAM}"


class HandoffError(ValueError):
    """What came in is not the rows of a prompt."""


def to_wire(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """`kv_transfer_params` of an answer, as JSON can say it."""
    if not params or PARAM not in params:
        return params
    handed = params[PARAM]
    return {**params, PARAM: {**handed, "data": pybase64.b64encode_as_string(handed["data"])}}


def from_wire(value: Any, shape: tuple[int, int], num_experts: int) -> dict[str, Any]:
    """What came in, as the engine takes it.

    Args:
        shape: (L, K) of the served model.

    Raises:
        HandoffError: says what is wrong.
    """
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str):
        raise HandoffError(f"{FIELD} must be an object with data (base64), dtype and shape")
    if len(data) > MAX_BYTES // 3 * 4 + 4:
        raise HandoffError(f"{FIELD} holds more than {MAX_BYTES} bytes")
    try:
        raw = pybase64.b64decode(data, validate=True)
    except ValueError as error:  # not in the alphabet, or not even ASCII
        raise HandoffError(f"{FIELD}.data is not base64: {error}") from None
    handed = {"data": raw, "dtype": value.get("dtype"), "shape": value.get("shape")}
    if (until := value.get("until")) is not None:
        if not is_time(until):
            raise HandoffError(f"{FIELD}.until must be a number: seconds since 1970")
        handed["until"] = until
    rows = decode(handed)
    if rows is None or rows.shape[1:] != shape:
        raise HandoffError(f"{FIELD} must be [n, {shape[0]}, {shape[1]}] of uint8 or int16, and data as long as that")
    if rows.min(initial=0) < UNKNOWN or rows.max(initial=0) >= num_experts:
        raise HandoffError(f"{FIELD} has ids outside of {UNKNOWN} to {num_experts - 1}")
    return handed


def length(handed: Mapping[str, Any]) -> int:
    """Of how many tokens the rows are that `from_wire` gave."""
    return int(handed["shape"][0])
