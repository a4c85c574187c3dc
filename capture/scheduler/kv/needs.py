"""What requests need of the rows of KV that could be loaded for them."""

import sys
from collections.abc import Mapping

from routed_experts.capture.scheduler.request_rows import RequestRows


class RowNeeds:
    """Which rows a request cannot do without: it computes their KV rather than load it without
    them."""

    def __init__(
        self,
        tracked: Mapping[str, RequestRows],  # the requests that opted in, by id
        *,
        has_weights: bool,
    ) -> None:
        self._tracked = tracked
        self._has_weights = has_weights  # whether the engine captures weights

    def first_row(self, request_id: str) -> int:
        """Position of the first row that the request needs; beyond all positions if it needs
        none."""
        state = self._asking(request_id)
        return sys.maxsize if state is None else state.first_needed

    def weights(self, request_id: str) -> bool:
        """Whether it needs the weights of these rows too."""
        state = self._asking(request_id)
        return self._has_weights and state is not None and state.opt_in.weights

    def _asking(self, request_id: str) -> RequestRows | None:
        """The state of a request whose rows are worth computing again."""
        state = self._tracked.get(request_id)
        if state is None or state.opt_in.allow_missing:
            return None
        return state
