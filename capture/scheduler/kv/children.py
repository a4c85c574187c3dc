"""What is done about the KV of each kind of KV connector.

vLLM has one KV connector, or several behind a `MultiConnector`, its *children*. For each there is an
object here: it says which loads a request may accept, which rows come with a load, and which rows
are to be stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from routed_experts.capture.engine.versions import UnsupportedConfig
from routed_experts.capture.scheduler.kv.loads import KVLoad
from routed_experts.capture.scheduler.kv.offloading import (
    OffloadedRows,
    OffloadLoad,
    OffloadStore,
)
from routed_experts.capture.scheduler.kv.pulls import Pulls
from routed_experts.capture.wire.message import Cause

Load = KVLoad | OffloadLoad
"""The rows of KV that is loaded: what the host cache has in its slots afterwards."""


class Child(ABC):
    """A KV connector: the only one, or one behind a `MultiConnector`."""

    description: str
    """What becomes of the rows of its KV, for the log."""

    @abstractmethod
    def accepts(self, request: Request, end: int) -> bool:
        """Whether `request` may load what this KV connector offers it: KV up to position `end`."""

    @abstractmethod
    def load(self, request_id: str, slots: NDArray[np.int64], first: int) -> Load:
        """The load of KV of the positions from `first` on into `slots` ([n])."""

    def stores(self, metadata: Any) -> list[OffloadStore]:
        """The stores whose rows are kept, of a step for which the KV connector made `metadata`."""
        return []

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are kept with its KV."""
        return 0


class OffloadChild(Child):
    """KV of this engine that was copied to host memory, with its rows."""

    description = "KV that is offloaded keeps its rows"

    def __init__(self, rows: OffloadedRows) -> None:
        self.rows = rows

    @staticmethod
    def check(connector: Any) -> None:
        """Raises `UnsupportedConfig` for tiers or a third-party manager, whose chunks may come from
        elsewhere."""
        if (
            not isinstance(connector, OffloadingConnector)
            or type(connector.scheduler.manager) is not CPUOffloadingManager
        ):
            raise UnsupportedConfig(
                "Offloading keeps rows with vLLM's CPUOffloadingManager only: remove spec_name, and what else chooses "
                "another, from kv_connector_extra_config in --kv-transfer-config."
            )

    def accepts(self, request: Request, end: int) -> bool:
        return True  # `OffloadedRows` has it offer only chunks with the rows that are needed

    def load(self, request_id: str, slots: NDArray[np.int64], first: int) -> Load:
        return self.rows.pop_load(request_id, slots, first)

    def stores(self, metadata: Any) -> list[OffloadStore]:
        return self.rows.pop_stores(metadata)

    @property
    def used_bytes(self) -> int:
        return self.rows.row_store.used_bytes


class TransferChild(Child):
    """KV of another instance, with the rows that came in `kv_transfer_params`. It is loaded even
    without rows, unless that instance may have freed it."""

    description = (
        "KV of another instance has the rows that come in kv_transfer_params, else none (-1)"
    )

    def __init__(
        self,
        pulls: Pulls,
        kv_cache_config: KVCacheConfig,
        *,
        kv_group: int,
        block_size: int,
    ) -> None:
        self._pulls = pulls
        self._kv_cache_config = kv_cache_config
        self._kv_group = kv_group
        self._block_size = block_size

    def accepts(self, request: Request, end: int) -> bool:
        """A prefill request that names remote KV would wait for it forever, or with
        `bidirectional_kv_xfer` read it back: it computes its prompt."""
        if self._pulls.lease_s is None:
            return True
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return False
        return self._is_offered(params, end) and not self._pulls.is_late(request.request_id)

    def _is_offered(self, params: Mapping[str, Any], end: int) -> bool:
        """Whether the other instance has KV up to position `end`: NIXL's worker ends the engine if
        it has fewer blocks, or other KV cache groups."""
        num_tokens = params.get("remote_num_tokens")
        if num_tokens is not None and self._num_blocks(num_tokens) < self._num_blocks(end):
            return False
        blocks_by_group = params.get("remote_block_ids")
        if not blocks_by_group:
            return True
        transferred = self._kv_cache_config.transfer_group_ids
        if len(blocks_by_group) != len(transferred):
            return False
        if self._kv_group not in transferred:
            return True
        # Only this group must hold every token. If the other instance's blocks are larger, the
        # prompt is recomputed.
        blocks = blocks_by_group[transferred.index(self._kv_group)]
        return len(blocks) * self._block_size >= end

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def load(self, request_id: str, slots: NDArray[np.int64], first: int) -> Load:
        rows = self._pulls.begin(request_id)
        if rows is not None:
            rows = rows._replace(rows=rows.rows[first : first + len(slots)])
        return KVLoad(slots, rows, Cause.KV_TRANSFER)
