"""What requests need of the rows of KV that could be loaded for them."""

import sys
from collections.abc import Mapping

from routed_experts.capture.scheduler.request_rows import RequestRows


class RowNeeds:
    """Which rows a request cannot do without: it computes their KV rather than load it without
    them."""

    def __init__(self, tracked: Mapping[str, RequestRows]) -> None:
        self._tracked = tracked  # the requests that opted in, by id

    def first_row(self, request_id: str) -> int:
        """Position of the first row that the request needs; beyond all positions if it needs
        none."""
        state = self._tracked.get(request_id)
        if state is None or state.opt_in.allow_missing:
            return sys.maxsize
        return state.first_needed
