"""Checks the fields of `kv_transfer_params` that vLLM's KV connectors use unchecked.

Connectors use clients' values as dict keys, as indices and in arithmetic, in the scheduler's
process and in workers, where an exception ends the engine. Written for vLLM 0.32; needed until vLLM
checks the values itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig

from routed_experts.capture.engine.connectors import (
    KnownConnector,
    children_of,
    lease_of,
    num_transfers,
    used_by,
)
from routed_experts.capture.wire.prefill_rows import TRANSFER_PARAMS

_MAX_INT = (1 << 31) - 1


class TransferParamsError(ValueError):
    """A value that would end the engine. `param` says where it is, such as
    `kv_transfer_params.remote_engine_id`."""

    def __init__(self, message: str, *path: str) -> None:
        self.param = ".".join((TRANSFER_PARAMS, *path))
        super().__init__(f"{self.param} {message}")


def _is_int(value: Any, lowest: int = 0, highest: int = _MAX_INT) -> bool:
    return type(value) is int and lowest <= value <= highest


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_item, value))


class FieldType(NamedTuple):
    """What values of a field may be."""

    is_right: Callable[[Any], bool]
    rule: str  # what an error says of other values


_TEXT = FieldType(lambda value: isinstance(value, str), "must be a string")
_FLAG = FieldType(lambda value: isinstance(value, bool), "must be true or false")
_COUNT = FieldType(_is_int, f"must be an integer from 0 to {_MAX_INT}")
_SIZE = FieldType(
    lambda value: _is_int(value, lowest=1, highest=65535), "must be an integer from 1 to 65535"
)
_TIME = FieldType(
    lambda value: type(value) in (int, float) and abs(value) < 1 << 60,
    "must be a number of seconds",
)
_BLOCKS = FieldType(
    lambda value: _is_list(value, lambda group: _is_list(group, _is_int)),
    "must be a list of block ids for each KV cache group",
)

_FIELDS: dict[str, FieldType] = {
    "do_remote_prefill": _FLAG,
    "do_remote_decode": _FLAG,
    "remote_engine_id": _TEXT,
    "remote_request_id": _TEXT,
    "remote_host": _TEXT,
    "remote_port": _SIZE,
    "tp_size": _SIZE,
    "dcp_size": _SIZE,
    "pp_size": _SIZE,
    "remote_block_size": _SIZE,
    "remote_num_tokens": _COUNT,
    "remote_blocks_expiry_time": _TIME,
    "remote_block_ids": _BLOCKS,
    # Mooncake's
    "transfer_id": _TEXT,
    "remote_bootstrap_addr": _TEXT,
}


def takes_prefill_rows(config: KVTransferConfig | None) -> bool:
    """Whether rows can travel with KV: only if the lease of a KV connector's KV is known."""
    return config is not None and lease_of(config) is not None


def check(params: Any, config: KVTransferConfig | None) -> None:
    """Raises `TransferParamsError` for a value that would end the engine, in a field that a KV
    connector of `config` reads. `params` is the value of `kv_transfer_params`."""
    if params is None:
        return
    if not isinstance(params, dict):
        raise TransferParamsError("must be an object")
    if config is None:
        return
    if num_transfers(config):
        _check_types(params)
    if params.get("do_remote_prefill"):
        for child, known in zip(children_of(config), used_by(config), strict=True):
            _check_pull(params, child, known)


def _check_types(params: Mapping[str, Any]) -> None:
    """Checks the fields that are there."""
    for name, field_type in _FIELDS.items():
        value = params.get(name)
        if value is not None and not field_type.is_right(value):
            raise TransferParamsError(field_type.rule, name)


def _check_pull(
    params: Mapping[str, Any], child: Mapping[str, Any], known: KnownConnector | None
) -> None:
    """Checks what a KV connector, whose configuration is `child`, needs for a pull."""
    if known is not None:
        for name in known.pull_fields:
            if params.get(name) is None:
                raise TransferParamsError("is needed with do_remote_prefill", name)
            if name == "remote_block_ids" and not any(params[name]):
                raise TransferParamsError("is empty, which do_remote_prefill cannot pull", name)
    is_producer = child.get("kv_role") == "kv_producer"
    if child.get("kv_connector") == "MooncakeConnector" and is_producer:
        raise TransferParamsError(
            "cannot be true on an instance whose kv_role is kv_producer", "do_remote_prefill"
        )
