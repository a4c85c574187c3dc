"""Takes prompt rows off requests that come with KV of a prefill instance, and adds them to prefills
that end."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig
from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture.engine import transfer_params
from routed_experts.capture.scheduler.kv.pulls import Arrival, Pulls
from routed_experts.capture.scheduler.row_source import RowSource, block_ids
from routed_experts.capture.wire import prefill_rows
from routed_experts.capture.wire.message import OptIn
from routed_experts.capture.wire.prefill_rows import PARAM, TRANSFER_PARAMS

logger = init_logger(f"vllm.{__name__}")


def _set_transfer_params(request: Request, params: dict[str, Any] | None) -> None:
    """Sets them also in `extra_args`, which go to workers. Copies that object, because a program
    may own it."""
    request.kv_transfer_params = params
    if request.sampling_params is None or not request.sampling_params.extra_args:
        return
    sampling = copy(request.sampling_params)
    sampling.extra_args = {**sampling.extra_args, TRANSFER_PARAMS: params}
    request.sampling_params = sampling


@dataclass
class TakenParams:
    """What `kv_transfer_params` had for this capture, until vLLM has accepted the request."""

    asks_for_rows: bool = False  # whether its rows are to go with its KV
    arrival: Arrival | None = None  # if it came with rows


class PrefillRowsExchange:
    """The prompt rows in `kv_transfer_params` on the schedulers' sides of both instances."""

    def __init__(self, source: RowSource, pulls: Pulls) -> None:
        self.pulls = pulls
        self._source = source
        self._to_export: set[str] = set()  # requests whose rows go with their KV

    def receive(self, request: Request, config: KVTransferConfig | None) -> TakenParams:
        """Strips `routed_experts` from `kv_transfer_params` before the connector and the workers
        see it. Ignores params that would end the engine. Over HTTP such params get 400; programs
        can set any object.

        Keeps nothing of the request before `add`, because vLLM may refuse it.
        """
        params = self._without_invalid(request, config)
        if params is None or PARAM not in params:
            return TakenParams()
        params_of_connector = dict(params)
        value = params_of_connector.pop(PARAM)
        _set_transfer_params(request, params_of_connector)
        if self.pulls.lease_s is None:  # no KV connector exchanges rows
            return TakenParams()
        if value is True:  # this is a prefill instance
            opt_in = OptIn.of(request.sampling_params)
            return TakenParams(asks_for_rows=opt_in is not None and not opt_in.allow_missing)
        rows = prefill_rows.decode(value)
        if rows is None or not params_of_connector.get("do_remote_prefill"):
            return TakenParams()
        arrival = self._arrival(request, rows)
        if arrival.pull is None:
            _set_transfer_params(request, None)  # it computes its prompt
        return TakenParams(arrival=arrival)

    def _without_invalid(
        self, request: Request, config: KVTransferConfig | None
    ) -> dict[str, Any] | None:
        """The request's `kv_transfer_params`; None if it has none. Takes off those that would end
        the engine."""
        params: dict[str, Any] | None = request.kv_transfer_params
        try:
            transfer_params.check(params, config)
        except transfer_params.TransferParamsError as error:
            logger.warning(
                "Request %r: its kv_transfer_params are ignored: %s.", request.request_id, error
            )
            _set_transfer_params(request, None)
            return None
        return params

    def add(self, request: Request, taken: TakenParams) -> None:
        """Called when vLLM has accepted a request, with what `receive` took off it."""
        if taken.asks_for_rows:
            self._to_export.add(request.request_id)
        if taken.arrival is not None:
            self.pulls.add(request, taken.arrival)

    def _arrival(self, request: Request, rows: prefill_rows.PrefillRows) -> Arrival:
        """What a request may do that came with `rows`."""
        opt_in = OptIn.of(request.sampling_params)
        # vLLM's name of a prompt's first choice
        is_first = opt_in is None or not opt_in.shared or request.request_id.startswith("0_")
        params = request.kv_transfer_params or {}
        source = (params.get("remote_engine_id"), params.get("remote_request_id"))
        arrival = self.pulls.arrival(request, self._fitting(rows), source, is_first)
        if arrival.pull is None:
            logger.info(
                "Request %r: its KV may have been freed, or pulled by another request, or clocks differ.",
                request.request_id,
            )
        return arrival

    def _fitting(self, rows: prefill_rows.PrefillRows) -> prefill_rows.PrefillRows:
        """The rows as this engine uses them; none of another model's, and as long as no step has
        run."""
        if rows.rows.shape[1:] != self._source.cache.row_shape:
            return rows._replace(rows=rows.rows[:0])
        return rows

    def fail_late_pulls(self, output: KVConnectorOutput) -> None:
        """Marks pulls that ended too late as failed, before vLLM processes the step's output."""
        received = output.finished_recving or set()
        late = {request_id for request_id in received if self.pulls.end(request_id)}
        for request_id in late - output.failed_recving:
            logger.warning(
                "Request %r: its pull outlived the lease of the KV, and counts as failed.",
                request_id,
            )
        output.failed_recving |= late

    def export(self, request: Request, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Adds a finished request's rows to `params`, with which another instance pulls its KV.
        Called while the request still has its blocks. Aborted requests get none: some rows may not
        have arrived."""
        is_wanted = request.request_id in self._to_export
        self._to_export.discard(request.request_id)
        has_ended = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        if not (is_wanted and has_ended and params and params.get("do_remote_prefill")):
            return params
        count = min(request.num_prompt_tokens, request.num_computed_tokens)
        value = self._encoded(request, count)
        if value is None:
            logger.warning(
                "Request %r: the rows of %d tokens are too large to send.",
                request.request_id,
                count,
            )
            return params
        return {**params, PARAM: value}

    def _encoded(self, request: Request, count: int) -> dict[str, Any] | None:
        """The first `count` rows; None if they are too many."""
        cache = self._source.cache
        num_layers, top_k = cache.row_shape
        if count * num_layers * top_k > prefill_rows.MAX_BYTES:
            return None
        rows = np.empty((count, *cache.row_shape), dtype=np.int16)
        cache.read(block_ids(self._source.block_table(request.request_id)), 0, rows)
        return prefill_rows.encode(rows, self.pulls.until())
