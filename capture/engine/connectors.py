"""The KV connectors that were reviewed, in one table (`CONNECTORS`): where their KV comes from, and so
what is known of its rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.config import KVTransferConfig


class KVSource(Enum):
    """Where a KV connector's KV comes from, and with it what is done about its rows
    (`capture/scheduler/kv/children.py`)."""

    OFFLOAD = "offload"
    """Whole blocks that this engine computed and that vLLM's `OffloadingConnector`, or a class
    derived from it, copied to host memory: their rows are kept with them. With tiers, or a manager
    of a third party, chunks may come from elsewhere: refused (`OffloadChild.check`)."""

    TRANSFER = "transfer"
    """The prefill instance. Loaded even without rows, unless that instance may have freed it."""


@dataclass(frozen=True)
class KnownConnector:
    """A KV connector of vLLM's that was reviewed: all its loads are announced to the scheduler, run
    beside steps, and write only into blocks behind the request's prefix hit."""

    source: KVSource
    # Default of `kv_lease_duration`, in seconds; None if unknown. After the lease the blocks go to
    # other requests, and a later pull silently reads their KV.
    lease_s: float | None = None
    pull_fields: tuple[str, ...] = ()  # what `do_remote_prefill` needs in `kv_transfer_params`


_NIXL_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NIXL_PULL = KnownConnector(
    KVSource.TRANSFER,
    lease_s=30,
    pull_fields=(*_NIXL_FIELDS, "remote_block_ids"),
)
_NIXL_PUSH = KnownConnector(
    KVSource.TRANSFER,
    lease_s=30,
    pull_fields=(*_NIXL_FIELDS, "tp_size"),
)
_MOONCAKE = KnownConnector(
    KVSource.TRANSFER,
    pull_fields=("remote_engine_id", "remote_bootstrap_addr", "transfer_id"),
)

CONNECTORS: dict[str, KnownConnector] = {
    "NixlConnector": _NIXL_PULL,
    "NixlPullConnector": _NIXL_PULL,
    "NixlPushConnector": _NIXL_PUSH,
    "MooncakeConnector": _MOONCAKE,
    "OffloadingConnector": KnownConnector(KVSource.OFFLOAD),
}
"""By the name that `--kv-transfer-config` has. A new KV connector is one line here; without one it
is refused.

Absent: stores of KV, such as LMCache's, which do not say of which computation it is (their KV has no
rows), those that write over prefix hits (MoRIIOConnector), DecodeBenchConnector (its KV is made up),
HiSparseConnector (it moves KV of running requests), and KV connectors whose code was not
reviewed."""

MULTI = "MultiConnector"


def used_by(config: KVTransferConfig) -> list[KnownConnector | None]:
    """The KV connectors of a configuration, for a `MultiConnector` its children in order; None for
    an unknown one."""
    return [_known(child) for child in children_of(config)]


def num_transfers(config: KVTransferConfig) -> int:
    """Number of KV connectors that load KV from other instances."""
    return sum(known is not None and known.source is KVSource.TRANSFER for known in used_by(config))


def lease_of(config: KVTransferConfig) -> float | None:
    """Seconds for which a prefill instance keeps KV for another instance; None if unknown."""
    for child in children_of(config):
        known = _known(child)
        if known is not None and known.lease_s is not None:
            return float(_extra_config(child).get("kv_lease_duration", known.lease_s))
    return None


def children_of(config: KVTransferConfig) -> list[Mapping[str, Any]]:
    """The configuration of each KV connector, for a `MultiConnector` of its children in order."""
    if config.kv_connector == MULTI:
        return config.kv_connector_extra_config.get("connectors", [])
    names = ("kv_connector", "kv_role", "kv_connector_module_path", "kv_connector_extra_config")
    return [{name: getattr(config, name) for name in names}]


def _extra_config(child: Mapping[str, Any]) -> Mapping[str, Any]:
    return child.get("kv_connector_extra_config") or {}


def _known(config: Mapping[str, Any]) -> KnownConnector | None:
    """None for a class from another module, which may differ from vLLM's of that name."""
    if config.get("kv_connector_module_path"):
        return None
    return CONNECTORS.get(str(config.get("kv_connector")))
