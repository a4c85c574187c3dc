"""Checks the fields of `kv_transfer_params` that vLLM's KV connectors use unchecked.

Connectors use clients' values as dict keys, as indices and in arithmetic, in the scheduler's
process and in workers, where an exception ends the engine. Written for vLLM 0.32; needed until vLLM
checks the values itself.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import KVTransferConfig

from routed_experts.capture.engine.connectors import children_of, lease_of, num_transfers, used_by

FIELD = "kv_transfer_params"

_MAX_INT = (1 << 31) - 1


class TransferParamsError(ValueError):
    """A value that would end the engine. `param` is its path, such as
    `kv_transfer_params.remote_engine_id`."""

    def __init__(self, message: str, *path: str) -> None:
        self.param = ".".join((FIELD, *path))
        super().__init__(f"{self.param} {message}")


def _is_int(value: Any, lowest: int = 0, highest: int = _MAX_INT) -> bool:
    return type(value) is int and lowest <= value <= highest


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_item, value))


_FEW_DIGITS = re.compile("[0-9]{1,9}")

Type = tuple[Callable[[Any], bool], str]
"""Whether a value is of the type, and what to say otherwise."""

_TEXT: Type = (lambda value: isinstance(value, str), "must be a string")
_FLAG: Type = (lambda value: isinstance(value, bool), "must be true or false")
_COUNT: Type = (_is_int, f"must be an integer from 0 to {_MAX_INT}")
_SIZE: Type = (lambda value: _is_int(value, 1, 65535), "must be an integer from 1 to 65535")
_TIME: Type = (
    lambda value: type(value) in (int, float) and abs(value) < 1 << 60,
    "must be a number of seconds",
)
_BLOCKS: Type = (
    lambda value: _is_list(value, lambda group: _is_list(group, _is_int)),
    "must be a list of block ids for each KV cache group",
)
_ANY_BLOCKS: Type = (
    lambda value: _is_list(value, lambda item: _is_int(item) or _is_list(item, _is_int)),
    "must be a list of block ids, or of lists of them",
)
_DIGITS: Type = (
    lambda value: _is_int(value) or (isinstance(value, str) and bool(_FEW_DIGITS.fullmatch(value))),
    "must be an integer that is not negative",
)

_FIELDS: dict[str, Type] = {
    **dict.fromkeys(("do_remote_prefill", "do_remote_decode"), _FLAG),
    **dict.fromkeys(("remote_engine_id", "remote_request_id", "transfer_id"), _TEXT),
    **dict.fromkeys(("remote_host", "remote_bootstrap_addr"), _TEXT),
    **dict.fromkeys(("remote_handshake_port", "remote_notify_port", "remote_dp_rank"), _DIGITS),
    **dict.fromkeys(
        ("remote_dp_size", "remote_dp_size_local", "remote_tp_size", "tp_size"), _DIGITS
    ),
    "remote_block_ids": _ANY_BLOCKS,
}
_NIXL_FIELDS: dict[str, Type] = {
    **dict.fromkeys(("remote_port", "tp_size", "dcp_size", "pp_size", "remote_block_size"), _SIZE),
    "remote_num_tokens": _COUNT,
    "remote_blocks_expiry_time": _TIME,
    "remote_block_ids": _BLOCKS,
}
"""Of connectors whose lease is known. MoRIIO has a `tp_size` of 0 too, and in older versions flat
block ids."""
_OBJECTS = ("remote_prefiller", "remote_decoder", "remote_kv_source")
"""Objects that tiers of OffloadingConnector read."""
_IN_OBJECTS: Mapping[str, Type] = {
    "kv_request_id": _TEXT,
    "remote_host": _TEXT,
    "remote_port": _DIGITS,
}


def takes_prefill_rows(config: KVTransferConfig | None) -> bool:
    """Whether rows can travel with KV: only if the lease of a connector's KV is known."""
    return config is not None and lease_of(config) is not None


def check(params: Any, config: KVTransferConfig | None) -> None:
    """Raises `TransferParamsError` for a value that would end the engine, in a field that a
    connector reads."""
    if params is None:
        return
    if not isinstance(params, dict):
        raise TransferParamsError("must be an object")
    if config is None:
        return
    if num_transfers(config):
        _check_types(params, _FIELDS | _NIXL_FIELDS if takes_prefill_rows(config) else _FIELDS)
    if params.get("do_remote_prefill"):
        _check_pull(params, config)
    for name in _OBJECTS:
        if (value := params.get(name)) is None:
            continue
        if not isinstance(value, dict):
            raise TransferParamsError("must be an object", name)
        _check_types(value, _IN_OBJECTS, name)


def _check_types(values: Mapping[str, Any], types: Mapping[str, Type], *path: str) -> None:
    for name, (is_right, rule) in types.items():
        if (value := values.get(name)) is not None and not is_right(value):
            raise TransferParamsError(rule, *path, name)


def _check_pull(params: Mapping[str, Any], config: KVTransferConfig) -> None:
    for child, known in zip(children_of(config), used_by(config), strict=True):
        for name in known.pull_fields if known is not None else ():
            if params.get(name) is None:
                raise TransferParamsError("is needed with do_remote_prefill", name)
            if name == "remote_block_ids" and not any(params[name]):
                raise TransferParamsError("is empty, which do_remote_prefill cannot pull", name)
        if (
            child.get("kv_connector") == "MooncakeConnector"
            and child.get("kv_role") == "kv_producer"
        ):
            raise TransferParamsError(
                "cannot be true on an instance whose kv_role is kv_producer", "do_remote_prefill"
            )
