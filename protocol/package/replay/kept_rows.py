"""Rows of responses, until a forward pass asks for them by its tokens."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.batch import scaled
from routed_experts.protocol.routing import Routing
from routed_experts.replay.errors import ReplayError

TOKEN = ">u4"
"""The type of tokens in keys."""


@dataclass(eq=False)
class Kept:
    """Rows of a sequence.

    Attributes:
        key: the sequence's tokens.
        start: position of the first.
        rows: int16 [n, L, K].
        weights: float32 [n, L, K].
        number: counts all that were put.
        is_used: a forward pass asked for them.
    """

    key: bytes
    start: int
    rows: NDArray[np.int16]
    weights: NDArray[np.float32] | None
    number: int
    is_used: bool = False

    @property
    def num_bytes(self) -> int:
        num_bytes = len(self.key) + self.rows.nbytes
        return num_bytes if self.weights is None else num_bytes + self.weights.nbytes


class KeptRows:
    """By the tokens of their sequences.

    What is put again takes the place of what was there. If there is no room, the rows go whose last
    use is longest ago, and then the oldest of those that were not used.

    Attributes:
        num_lost: sequences whose rows went unused.
    """

    def __init__(self, max_bytes: int, info: Any, has_weights: bool) -> None:
        self.num_lost = 0
        self._max_bytes = max_bytes
        self._info = info
        self._has_weights = has_weights
        self._num_bytes = 0
        self._num_put = 0
        self._kept: dict[bytes, Kept] = {}  # first what goes first, among used and unused each
        self._ordered: list[bytes] | None = None
        self._lock = Lock()  # rollouts may come while a step is under way

    def put(self, routings: Iterable[Routing]) -> None:
        new = {kept.key: kept for kept in map(self._kept_of, routings)}
        size = sum(kept.num_bytes for kept in new.values())
        if size > self._max_bytes:
            raise ReplayError(
                f"rows and tokens of {size} bytes, and room for {self._max_bytes}: set max_bytes"
            )
        with self._lock:
            if len({kept.rows.shape[1:] for kept in (*new.values(), *self._kept.values())}) > 1:
                raise ReplayError(
                    "rows of several models: their layers or experts per token differ"
                )
            for key in new:
                self._remove(key)
            self._make_room(size)
            self._kept.update(new)
            self._num_bytes += size
            self._ordered = None

    def find(self, tokens: NDArray[Any]) -> Kept | None:
        """Rows of the sequence, or of a longer one that begins with it: causal models give the
        beginning of both the same experts. Of several, those that begin first, and of these the
        newest."""
        with self._lock:
            found = self._newest(_key(tokens))
            if found is None:
                return None
            kept = self._kept.pop(found)
            kept.is_used = True
            self._kept[found] = kept
            return kept

    def _newest(self, key: bytes) -> bytes | None:
        if self._ordered is None:
            self._ordered = sorted(self._kept)
        first = bisect_left(self._ordered, key)
        num_tokens = len(key) // np.dtype(TOKEN).itemsize
        found: dict[bytes, tuple[int, int]] = {}
        for index in range(first, len(self._ordered)):
            other = self._ordered[index]
            if not other.startswith(key):
                break
            kept = self._kept[other]
            if kept.start < num_tokens:
                found[other] = (-kept.start, kept.number)
        return max(found, key=lambda other: found[other], default=None)

    def _make_room(self, size: int) -> None:
        if self._num_bytes + size <= self._max_bytes:
            return
        used = [key for key, kept in self._kept.items() if kept.is_used]
        unused = [key for key, kept in self._kept.items() if not kept.is_used]
        for key in (*used, *unused):
            if self._num_bytes + size <= self._max_bytes:
                return
            self.num_lost += not self._kept[key].is_used
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes

    def _kept_of(self, routing: Routing) -> Kept:
        key = _key_of(routing)
        weights = None
        if self._has_weights:
            if routing.weights is None:
                raise ReplayError(
                    "the response has no weights: ask with return_routed_expert_weights"
                )
            has_scale = self._info is not None and "weights_scale" in self._info
            weights = (
                scaled(routing.weights, self._info) if has_scale else np.array(routing.weights)
            )
        self._num_put += 1
        return Kept(key, routing.start, routing.rows.astype(np.int16), weights, self._num_put)


def _key_of(routing: Routing) -> bytes:
    if routing.prompt_token_ids is None or routing.token_ids is None:
        raise ReplayError(
            "the response has no token ids, by which rows are found: ask with return_token_ids"
        )
    if routing.media:
        raise ReplayError(
            "the prompt has pictures or sounds, which tokens do not tell apart: use `replayed`"
        )
    tokens = np.array([*routing.prompt_token_ids, *routing.token_ids])
    if routing.start + len(routing.rows) > len(tokens):
        raise ReplayError(
            f"{len(routing.rows)} rows from position {routing.start} on, of a response of {len(tokens)} tokens"
        )
    return _key(tokens)


def _key(tokens: NDArray[Any]) -> bytes:
    """In the order of the tokens, so that longer sequences follow their beginnings."""
    return tokens.astype(TOKEN, copy=False).tobytes()
