"""The known KV connectors. KV that was computed elsewhere, or earlier, arrives without rows."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.config import KVTransferConfig

ON_LOAD_FLAG = "--routed-experts-on-load"
ON_LOAD_VARIABLE = "ROUTED_EXPERTS_ON_LOAD"
"""Carries the flag's value to every process of the engine."""

RECOMPUTE, MISSING = "recompute", "missing"


class Kind(Enum):
    """Where a connector's KV comes from."""

    STORE = "store"  # an earlier computation of the same tokens, which a request can recompute
    # the prefill instance: loaded even without rows, unless that instance may have freed it
    TRANSFER = "transfer"


@dataclass(frozen=True)
class Connector:
    """A KV connector whose loads are all announced to the scheduler."""

    kind: Kind
    # Whether loads never overwrite blocks of a prefix hit. Other connectors may fetch whole chunks
    # and overwrite KV that this engine computed.
    writes_behind_hit: bool
    # Default of `kv_lease_duration`, in seconds; None if unknown. After the lease the blocks go to
    # other requests, and a later pull silently reads their KV.
    lease_s: float | None = None
    pull_fields: tuple[str, ...] = ()  # what `do_remote_prefill` needs in `kv_transfer_params`


_NIXL_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NIXL_PULL = Connector(
    Kind.TRANSFER,
    writes_behind_hit=True,
    lease_s=30,
    pull_fields=(*_NIXL_FIELDS, "remote_block_ids"),
)
_NIXL_PUSH = Connector(
    Kind.TRANSFER, writes_behind_hit=True, lease_s=30, pull_fields=(*_NIXL_FIELDS, "tp_size")
)
_MOONCAKE_FIELDS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")

CONNECTORS: dict[str, Connector] = {
    "NixlConnector": _NIXL_PULL,
    "NixlPullConnector": _NIXL_PULL,
    "NixlPushConnector": _NIXL_PUSH,
    "MooncakeConnector": Connector(
        Kind.TRANSFER, writes_behind_hit=True, pull_fields=_MOONCAKE_FIELDS
    ),
    # The fields that a pull needs depend on its mode and on the request id, which may contain the
    # address.
    "MoRIIOConnector": Connector(Kind.TRANSFER, writes_behind_hit=False),
    "OffloadingConnector": Connector(Kind.STORE, writes_behind_hit=True),
    "SimpleCPUOffloadConnector": Connector(Kind.STORE, writes_behind_hit=True),
    "LMCacheConnectorV1": Connector(Kind.STORE, writes_behind_hit=False),
    "LMCacheMPConnector": Connector(Kind.STORE, writes_behind_hit=False),
    "MooncakeStoreConnector": Connector(Kind.STORE, writes_behind_hit=False),
    "FlexKVConnectorV1": Connector(Kind.STORE, writes_behind_hit=False),
    "HF3FSKVConnector": Connector(Kind.STORE, writes_behind_hit=False),
    "ExampleConnector": Connector(Kind.STORE, writes_behind_hit=False),
}
"""By name. Absent: DecodeBenchConnector (its KV is made up), ExampleHiddenStatesConnector,
HiSparseConnector (it moves KV of running requests), and connectors whose code was not reviewed."""

MULTI = "MultiConnector"


def used_by(config: KVTransferConfig) -> list[Connector | None]:
    """The connectors of a configuration, for a `MultiConnector` its children in order; None for an
    unknown one."""
    return [_known(child) for child in children_of(config)]


def num_transfers(config: KVTransferConfig) -> int:
    """Number of connectors that load KV from other instances."""
    return sum(known is not None and known.kind is Kind.TRANSFER for known in used_by(config))


def lease_of(config: KVTransferConfig) -> float | None:
    """Seconds for which a prefill instance keeps KV for another instance; None if unknown."""
    for child in children_of(config):
        known = _known(child)
        if known is not None and known.lease_s is not None:
            return float(
                (child.get("kv_connector_extra_config") or {}).get(
                    "kv_lease_duration", known.lease_s
                )
            )
    return None


def reads_back(config: KVTransferConfig) -> bool:
    """Whether prefill instances read KV of decode instances too (NIXL's
    `bidirectional_kv_xfer`)."""
    extra = (child.get("kv_connector_extra_config") or {} for child in children_of(config))
    return any(each.get("bidirectional_kv_xfer", False) for each in extra)


def children_of(config: KVTransferConfig) -> list[Mapping[str, Any]]:
    """The configuration of each connector, for a `MultiConnector` of its children in order."""
    if config.kv_connector == MULTI:
        return config.kv_connector_extra_config.get("connectors", [])
    names = ("kv_connector", "kv_role", "kv_connector_module_path", "kv_connector_extra_config")
    return [{name: getattr(config, name) for name in names}]


def _known(config: Mapping[str, Any]) -> Connector | None:
    """None for a class from another module, which may differ from vLLM's of that name; LMCache has
    its own classes."""
    path = config.get("kv_connector_module_path") or ""
    if path and not path.startswith("lmcache."):
        return None
    return CONNECTORS.get(str(config.get("kv_connector")))


def on_load() -> str:
    """The policy for KV without rows if a request asks for rows: `recompute` or `missing`."""
    return os.environ.get(ON_LOAD_VARIABLE, RECOMPUTE)


def describe(config: KVTransferConfig, policy: str, keep_rows: Sequence[bool]) -> str:
    """One log line on what a configuration means for rows. `keep_rows`: for each connector, whether
    rows are kept."""
    transfer = "KV of another instance has the rows that come in kv_transfer_params, else none (-1)"
    kept = "KV that is offloaded keeps its rows"
    store = (
        "KV of a store comes without rows (-1)"
        if policy == MISSING
        else "requests that ask for rows compute what they would load from a store"
    )
    children = [child for child in used_by(config) if child is not None]
    said = [
        transfer if child.kind is Kind.TRANSFER else kept if keeps else store
        for child, keeps in zip(children, keep_rows, strict=True)
    ]
    return f"KV connector {config.kv_connector}: {'; '.join(dict.fromkeys(said))}."
