"""Checks the fields of `kv_transfer_params` that vLLM's KV connectors use unchecked.

Connectors use clients' values as dict keys, as indices and in arithmetic, in the scheduler's process and in workers,
where an exception ends the engine. Written for vLLM 0.32; needed until vLLM checks the values itself.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import KVTransferConfig

from routed_experts.capture.engine.kv_transfer.connectors import children_of, lease_of

FIELD = "kv_transfer_params"

_MAX_INT = (1 << 31) - 1


class TransferParamsError(ValueError):
    """A value that would end the engine. `param` is its path, such as `kv_transfer_params.remote_engine_id`."""

    def __init__(self, message: str, *path: str) -> None:
        self.param = ".".join((FIELD, *path))
        super().__init__(f"{self.param} {message}")


def _is_int(value: Any, lowest: int = 0, highest: int = _MAX_INT) -> bool:
    return type(value) is int and lowest <= value <= highest


def _is_blocks(value: Any) -> bool:
    """Whether `value` has a list of block ids for each KV cache group."""
    return isinstance(value, list | tuple) and all(
        isinstance(group, list | tuple) and all(map(_is_int, group)) for group in value
    )


_FEW_DIGITS = re.compile("[0-9]{1,9}")

Check = tuple[Callable[[Any], bool], str]

_TEXT: Check = (lambda value: isinstance(value, str), "must be a string")
_FLAG: Check = (lambda value: isinstance(value, bool), "must be true or false")
_COUNT: Check = (_is_int, f"must be an integer from 0 to {_MAX_INT}")
_SIZE: Check = (lambda value: _is_int(value, 1, 65535), "must be an integer from 1 to 65535")
_PORT: Check = (lambda value: _is_int(value, 0, 65535), "must be a port number")
_TIME: Check = (
    lambda value: type(value) in (int, float) and abs(value) < 1 << 60,
    "must be a number of seconds",
)
_BLOCKS: Check = (_is_blocks, "must be a list of block ids for each KV cache group")

_LEGS: Mapping[str, Check] = {"do_remote_prefill": _FLAG, "do_remote_decode": _FLAG, "remote_engine_id": _TEXT}

NIXL: Mapping[str, Check] = {
    **_LEGS,
    **dict.fromkeys(("remote_request_id", "remote_host"), _TEXT),
    **dict.fromkeys(("tp_size", "dcp_size", "pp_size", "remote_block_size"), _SIZE),
    "remote_port": _PORT,
    "remote_num_tokens": _COUNT,
    "remote_blocks_expiry_time": _TIME,
    "remote_block_ids": _BLOCKS,
}
_DIGITS: Check = (
    lambda value: _is_int(value) or (isinstance(value, str) and bool(_FEW_DIGITS.fullmatch(value))),
    "must be an integer that is not negative",
)
_MORIIO: Mapping[str, Check] = {
    **_LEGS,
    **dict.fromkeys(("transfer_id", "remote_host"), _TEXT),
    **dict.fromkeys(("remote_handshake_port", "remote_notify_port", "remote_dp_rank"), _DIGITS),
    **dict.fromkeys(("remote_dp_size", "remote_dp_size_local", "remote_tp_size", "tp_size"), _DIGITS),
}
_MOONCAKE: Mapping[str, Check] = {**_LEGS, "remote_bootstrap_addr": _TEXT, "transfer_id": _TEXT}

READ_BY: dict[str, tuple[Mapping[str, Check], tuple[str, ...]]] = {
    "NixlConnector": (
        NIXL,
        ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"),
    ),
    "NixlPullConnector": (
        NIXL,
        ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"),
    ),
    "NixlPushConnector": (NIXL, ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")),
    # The fields that a pull needs depend on its mode and on the request id, which may contain the address.
    "MoRIIOConnector": (_MORIIO, ()),
    "MooncakeConnector": (_MOONCAKE, ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")),
}
"""For each connector: the fields that it reads, and those that `do_remote_prefill` needs."""

_OBJECTS = ("remote_prefiller", "remote_decoder", "remote_kv_source")
"""Objects that tiers of OffloadingConnector read."""
_IN_OBJECTS: Mapping[str, Check] = {"kv_request_id": _TEXT, "remote_host": _TEXT, "remote_port": _DIGITS}


def hands_rows_over(config: KVTransferConfig | None) -> bool:
    """Whether rows can travel with KV: only if the lease of a connector's KV is known."""
    return config is not None and lease_of(config) is not None


def check(params: Any, config: KVTransferConfig | None) -> None:
    """Raises `TransferParamsError` for a value that would end the engine. Null counts as absent. Fields that no
    configured connector reads are not checked."""
    if params is None:
        return
    if not isinstance(params, dict):
        raise TransferParamsError("must be an object")
    if config is None:
        return
    for child in children_of(config):
        fields, needed = READ_BY.get(str(child.get("kv_connector")), ({}, ()))
        for name, (is_right, rule) in fields.items():
            if (value := params.get(name)) is not None and not is_right(value):
                raise TransferParamsError(rule, name)
        if params.get("do_remote_prefill"):
            _check_pull(params, child, needed)
    for name in _OBJECTS:
        if (value := params.get(name)) is None:
            continue
        if not isinstance(value, dict):
            raise TransferParamsError("must be an object", name)
        for inner, (is_right, rule) in _IN_OBJECTS.items():
            if value.get(inner) is not None and not is_right(value[inner]):
                raise TransferParamsError(rule, name, inner)


def _check_pull(params: Mapping[str, Any], child: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    for name in needed:
        if params.get(name) is None:
            raise TransferParamsError("is needed with do_remote_prefill", name)
    if "remote_block_ids" in needed and not any(params["remote_block_ids"]):
        raise TransferParamsError("is empty, which do_remote_prefill cannot pull", "remote_block_ids")
    if child.get("kv_connector") == "MooncakeConnector" and child.get("kv_role") == "kv_producer":
        raise TransferParamsError("cannot be true on an instance whose kv_role is kv_producer", "do_remote_prefill")
