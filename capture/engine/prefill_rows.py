"""Rows of a prompt that go with its KV from a prefill to a decode instance, on the schedulers' sides."""

from copy import copy
from functools import partial
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig
from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from routed_experts.capture import handoff
from routed_experts.capture.engine.distributor import RowSource, block_ids
from routed_experts.capture.engine.kv_transfer import transfer_params
from routed_experts.capture.engine.kv_transfer.remote_prefill import RemotePrefillRows
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.capture.rows import ids_of, ids_shape
from routed_experts.protocol.codec import Rows

logger = init_logger(f"vllm.routed_experts.{__name__}")

_TRANSFER_PARAMS = "kv_transfer_params"  # in `SamplingParams.extra_args`


def opt_in_of(request: Request) -> OptIn | None:
    """The request's opt-in; None if it did not opt in."""
    params = request.sampling_params
    return OptIn.decode(params.extra_args.get(OPT_IN_ARG)) if params and params.extra_args else None


def _set_transfer_params(request: Request, params: dict[str, Any] | None) -> None:
    """Sets them also in `extra_args`, which go to workers. Copies that object, because a program may own it."""
    request.kv_transfer_params = params
    if (sampling := request.sampling_params) is not None and sampling.extra_args:
        request.sampling_params = sampling = copy(sampling)
        sampling.extra_args = {**(sampling.extra_args or {}), _TRANSFER_PARAMS: params}


class PrefillRows:
    """Takes rows off `kv_transfer_params` of requests that come, and puts them on those of prefills that end."""

    def __init__(self, source: RowSource, has_weights: bool) -> None:
        self.pulls: RemotePrefillRows | None = None  # None as long as no connector has a known lease
        self._source = source
        self._has_weights = has_weights
        self._to_export: dict[str, bool] = {}  # requests whose rows go with their KV, and whether with it alone

    def receive(self, request: Request, config: KVTransferConfig | None) -> None:
        """Strips `routed_experts` from `kv_transfer_params` before the connector and the workers see it. Ignores params
        that would end the engine. Over HTTP such params get 400; programs can set any object."""
        given = request.kv_transfer_params
        if given is None:
            return
        try:
            transfer_params.check(given, config)
        except transfer_params.TransferParamsError as error:
            logger.warning("Request %r: its kv_transfer_params are ignored: %s.", request.request_id, error)
            _set_transfer_params(request, None)
            return
        if handoff.PARAM not in given:
            return
        params = {key: value for key, value in given.items() if key != handoff.PARAM}
        _set_transfer_params(request, params)
        if self.pulls is None:
            return
        if type(wish := given[handoff.PARAM]) in (bool, bytes):
            opt_in = opt_in_of(request)
            if opt_in is not None and not opt_in.best_effort and wish in (True, handoff.ALONE):
                self._to_export[request.request_id] = wish == handoff.ALONE and not request.resumable
        elif params.get("do_remote_prefill") and (handed := handoff.decode(given[handoff.PARAM])) is not None:
            rows, until = handed
            has_weights = handoff.has_weights(given[handoff.PARAM])
            opt_in = opt_in_of(request)
            if self._has_weights and not has_weights and opt_in and opt_in.weights and not opt_in.best_effort:
                _set_transfer_params(request, None)  # so that it computes the prompt, and its weights
                return
            if has_weights and not self._has_weights:
                rows, has_weights = ids_of(rows), False
            self._add_pull(self.pulls, request, params, handoff.HandedRows(rows, has_weights), until)

    def _add_pull(
        self, pulls: RemotePrefillRows, request: Request, params: dict[str, Any], rows: handoff.HandedRows, until: float
    ) -> None:
        if not self._takes(rows):
            rows = rows._replace(rows=rows.rows[:0])  # unknown
        opt_in = opt_in_of(request)
        is_first = opt_in is None or not opt_in.shared or request.request_id.startswith("0_")  # vLLM's name
        source = params.get("remote_engine_id"), params.get("remote_request_id")
        if pulls.add(request, rows, source, until, is_first):
            return
        logger.info("Request %r: its KV may have been freed, or pulled by another request.", request.request_id)
        if opt_in is not None and not opt_in.best_effort:
            _set_transfer_params(request, None)

    def _takes(self, handed: handoff.HandedRows) -> bool:
        """False for rows of another model, and as long as no step has run."""
        if (cache := self._source.cache) is None:
            return False
        shape = cache.row_shape
        return handed.rows.shape[1:] == (ids_shape(shape) if self._has_weights and not handed.has_weights else shape)

    def go_alone(self, request: Request) -> bool:
        """Whether a prompt's rows are not sent if they go with its KV."""
        return self._to_export.get(request.request_id, False)

    def forget(self, request: Request) -> None:
        """Called when a request ends."""
        if self.pulls is not None:
            self.pulls.forget(request.request_id)

    def fail_late_pulls(self, output: KVConnectorOutput) -> None:
        """Marks pulls that ended after the lease as failed, before vLLM processes the step's output."""
        if self.pulls is not None:
            late = {request_id for request_id in output.finished_recving or () if self.pulls.end(request_id)}
            for request_id in late - output.failed_recving:
                logger.warning("Request %r: its pull outlived the lease of the KV, and counts as failed.", request_id)
            output.failed_recving |= late

    def export(self, request: Request, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Adds a finished request's rows to `params`, with which another instance pulls its KV. Called while the
        request still has its blocks. Aborted requests get none: some rows may not have arrived."""
        is_wanted = self._to_export.pop(request.request_id, None) is not None
        if not is_wanted or not params or not params.get("do_remote_prefill"):
            return params
        handed = self._rows_to_hand_over(request)
        return {**params, handoff.PARAM: handed} if handed else params

    def _rows_to_hand_over(self, request: Request) -> dict[str, Any] | None:
        cache = self._source.cache
        if cache is None or self.pulls is None:
            return None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None
        count = min(request.num_prompt_tokens, request.num_computed_tokens)
        handed = self._encoded(cache, request, count, self.pulls.until())
        if handed is None:
            logger.warning("Request %r: the rows of %d tokens are too large to hand over.", request.request_id, count)
        return handed

    def _encoded(self, cache: HostCache, request: Request, count: int, until: float) -> dict[str, Any] | None:
        """The first `count` rows for another instance, with weights if they are asked for and not too many."""
        read = partial(cache.read, block_ids(self._source.block_table(request.request_id)))
        (height, top_k), opt_in = cache.row_shape, opt_in_of(request)
        if not self._has_weights:
            return handoff.encode(read, count, (height, top_k), until)
        if opt_in is not None and opt_in.weights:
            handed = handoff.encode(read, count, (height, top_k), until, has_weights=True)
            if handed is not None:
                return handed

        def read_ids(first: int, out: Rows) -> None:
            rows = np.empty((len(out), height, top_k), dtype=out.dtype)
            read(first, rows)
            out[:] = ids_of(rows)

        return handoff.encode(read_ids, count, ids_shape((height, top_k)), until)
