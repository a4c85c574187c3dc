"""What the captured rows of a request must be, by what it says about its experts."""

from copy import copy

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.message import PlacedRows
from routed_experts.protocol.codec import UNKNOWN, Rows
from routed_experts.protocol.routing_input import Bias, RoutingInput


class ExpectedRouting:
    """Of one running request. The finite values of its bias say nothing that rows could show."""

    def __init__(self, said: RoutingInput | None) -> None:
        self.has_bias = False
        self._rows: Rows | None = None
        self._start = 0
        self._end = 0
        self._limits: _Limits | None = None
        if said is None:
            return
        self.has_bias = said.bias is not None
        self._rows = said.rows
        self._start = said.start
        self._end = said.end
        if said.bias is not None and np.isinf(said.bias).any():
            self._limits = _Limits(said.bias)

    def recomputed(self, rows: PlacedRows) -> "ExpectedRouting":
        """What is expected in a step that computes tokens again, under `rows`. They are behind all
        that the request gives, or contain it."""
        expected = copy(self)
        expected._rows = rows.rows
        expected._start = rows.start
        expected._end = rows.start + len(rows.rows)
        return expected

    def completed(self, rows: PlacedRows) -> PlacedRows:
        """`rows`, and what the request gives for those of them that are not known."""
        num_given = self.num_given(rows.start, len(rows.rows))
        if self._rows is None or not num_given:
            return rows
        first = max(rows.start, self._start)
        given = self._rows[first - self._start :][:num_given]
        completed = rows.rows.copy()
        part = completed[first - rows.start :][:num_given]
        np.copyto(part, given, where=part == UNKNOWN)
        return PlacedRows(rows.start, completed)

    def num_given(self, start: int, num_tokens: int) -> int:
        """For how many of the `num_tokens` tokens from position `start` on there is a row."""
        first = max(start, self._start)
        end = min(start + num_tokens, self._end)
        return max(0, end - first)

    def is_followed(self, start: int, captured: Rows) -> bool:
        """Whether `captured` ([n, L, K]), of the tokens from position `start` on, are the rows that
        were given, and elsewhere a choice that the bias allows."""
        num_given = self.num_given(start, len(captured))
        if self._rows is None or not num_given:
            return self._limits is None or self._limits.are_kept(captured, None)
        first = max(start, self._start)
        given = self._rows[first - self._start :][:num_given]
        part = slice(first - start, first - start + num_given)
        is_same = np.array_equal(given, captured[part])  # most often, and fastest to see
        if is_same and self._limits is None:
            return True
        is_given = np.zeros(captured.shape[:2], np.bool_)
        is_given[part] = (given >= 0).all(axis=2)
        if not is_same:
            differs = (given != captured[part]).any(axis=2)
            if (is_given[part] & differs).any():
                return False
        return self._limits is None or self._limits.are_kept(captured, is_given)


_BANNED = 1000
"""In place of a count of activated experts, of which a token has fewer."""


class _Limits:
    """Which experts a bias [L, E] says are never or always chosen; in the layers where it says so
    of any."""

    def __init__(self, bias: Bias) -> None:
        self._layers = np.flatnonzero(np.isinf(bias).any(axis=1))
        bias = bias[self._layers]
        num_layers, num_experts = bias.shape
        width = num_experts + 1  # behind the last expert: for ids of -1, which count nothing
        counts = np.zeros((num_layers, width), np.float32)  # floats, which add up fastest
        counts[:, :num_experts][bias == np.inf] = 1
        counts[:, :num_experts][bias == -np.inf] = _BANNED
        self._counts = counts.ravel()
        self._first_of_layer = width * np.arange(num_layers)[:, None]
        self._num_activated = (bias == np.inf).sum(axis=1)

    def are_kept(self, captured: Rows, is_given: NDArray[np.bool_] | None) -> bool:
        """Whether no expert was chosen that must not be, and every one that must, where the router
        chose: in the layers of tokens that are not in `is_given` ([n, L]; None: nowhere given)."""
        captured = captured[:, self._layers]
        # An id of -1 counts as what is before the layer's first expert: the column of the layer
        # before it, or the last one of all.
        counts = self._counts.take(captured + self._first_of_layer, mode="wrap")
        num_activated = counts @ np.ones(captured.shape[2], np.float32)
        is_kept = num_activated == self._num_activated
        if is_kept.all():
            return True
        is_unknown = (captured < 0).any(axis=2) & (num_activated < self._num_activated)
        is_right = is_kept | is_unknown
        if is_given is not None:
            is_right |= is_given[:, self._layers]
        return bool(is_right.all())
