"""The engine of `served` with each kind of KV connector, the scheduler's side of which is vLLM's own."""

import json
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

from tests.contract.loads import TracingExecutor, _Metadata
from tests.contract.offloading import NAME, OffloadingExecutor
from tests.contract.served import ServedExecutor

NIXL = "NixlConnector"


class UnreachableNixl(TracingExecutor):
    """The worker's side of NIXL where no other instance can be reached: every pull fails, and nobody comes for KV."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        given = scheduler_output.kv_connector_metadata
        children = given.metadata if isinstance(given, MultiKVConnectorMetadata) else (given,)
        (nixl,) = (child for child in children if isinstance(child, NixlConnectorMetadata))
        others = tuple(_Metadata([], []) if child is nixl else child for child in children)
        scheduler_output.kv_connector_metadata = MultiKVConnectorMetadata(others)
        result = super().execute_model(scheduler_output, non_block)
        assert self._output is not None
        report = self._output.kv_connector_output or KVConnectorOutput()
        pulls = {name for name, request in nixl.reqs_to_recv.items() if request.awaiting_kvs}
        report.finished_recving = (report.finished_recving or set()) | pulls
        report.failed_recving |= pulls
        report.finished_sending = (report.finished_sending or set()) | set(nixl.reqs_to_send)
        if not report.is_empty():
            self._output.kv_connector_output = report
        return result


class NixlExecutor(UnreachableNixl, ServedExecutor):
    pass


class Offloads(OffloadingExecutor, ServedExecutor):
    pass


class NixlAndOffloads(UnreachableNixl, OffloadingExecutor, ServedExecutor):
    pass


_CHILDREN: dict[str, dict[str, Any]] = {
    NIXL: {"kv_connector": NIXL, "kv_role": "kv_both"},
    NAME: {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 40 * 4096, "blocks_per_chunk": 1},
    },
}
KINDS: dict[str, tuple[type[ServedExecutor], dict[str, Any] | None]] = {
    "none": (ServedExecutor, None),
    "offloading": (Offloads, _CHILDREN[NAME]),
    "transfer": (NixlExecutor, _CHILDREN[NIXL]),
    "both": (
        NixlAndOffloads,
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(_CHILDREN.values())},
        },
    ),
}


def flags_of(kind: str) -> tuple[str, ...]:
    """Of `routed-experts serve`, for a kind of connector; a load that fails is computed again."""
    config = KINDS[kind][1]
    return (
        ()
        if config is None
        else (
            "--kv-transfer-config",
            json.dumps({**config, "kv_load_failure_policy": "recompute"}),
        )
    )
