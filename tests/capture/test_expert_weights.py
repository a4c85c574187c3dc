"""Rows with the routers' weights, from the routers' choice to the engine's messages: bit for bit, whatever the bits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from routed_experts.capture.envelope import ENVELOPE_ID, Unpacker, pack
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import PlacedRows
from routed_experts.capture.rows import ids_of, joined, lack_weights, row_shape, weights_of
from routed_experts.protocol.codec import UNKNOWN_WEIGHT, Rows

L, K = 3, 5
ODD = np.array([-1, 0x0000FFFF, -65536, 0x7FC00001, 0x80000000 - (1 << 32), 1, 0x3F800000], dtype=np.int32)
"""Bits of weights whose words are -1 or below, and that are NaN, -0.0 or the least above 0."""


def bits(count: int, seed: int = 0) -> np.ndarray:
    """[count, L, K] int32."""
    return np.random.default_rng(seed).choice(ODD, size=(count, L, K))


def words(count: int, seed: int = 0) -> Rows:
    """Rows [count, 3L, K] of ids that are known and weights of odd bits."""
    ids = np.random.default_rng(seed).integers(0, 400, size=(count, L, K)).astype(np.int16)
    return joined(ids, bits(count, seed).view(np.float32))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_ids_and_weights_of_rows(count: int) -> None:
    ids = np.arange(count * L * K, dtype=np.int16).reshape(count, L, K)
    rows = joined(ids, bits(count).view(np.float32))
    assert rows.shape == (count, *row_shape(L, K, with_weights=True)) == (count, 3 * L, K)
    assert np.array_equal(ids_of(rows), ids)
    assert np.array_equal(weights_of(rows).view(np.int32), bits(count))
    assert row_shape(L, K, with_weights=False) == (L, K)


def test_rows_that_are_not_known_and_rows_whose_ids_came_alone() -> None:
    rows = np.full((3, 3 * L, K), -1, dtype=np.int16)
    assert (ids_of(rows) == -1).all()
    assert (weights_of(rows).view(np.int32) == -1).all()
    rows[:2] = joined(np.zeros((2, L, K), np.int16), np.full((2, L, K), UNKNOWN_WEIGHT))
    rows[1] = joined(np.zeros((1, L, K), np.int16), np.full((1, L, K), 0.5, np.float32))
    assert lack_weights(rows).tolist() == [True, False, True]
    assert (ids_of(rows)[:2] == 0).all()
    assert (weights_of(rows)[0].view(np.int32) == -1).all()


def test_the_host_cache_keeps_them_with_the_ids() -> None:
    cache, rows = HostCache(4, 4, *row_shape(L, K, with_weights=True)), words(6)
    cache.write(np.arange(4, 10), rows)
    out = np.empty((8, 3 * L, K), dtype=np.int16)
    cache.read(np.array([1, 2]), 0, out)
    assert np.array_equal(out[:6], rows)
    assert (out[6:] == -1).all()


def output(name: str, rows: Rows | None, start: int = 0) -> Any:
    placed = None if rows is None else PlacedRows(start, rows)
    return SimpleNamespace(request_id=name, routed_experts=placed)


def unpacked(outputs: list[Any]) -> dict[str, tuple[int, Rows]]:
    packed = pack(outputs)
    outputs.insert(0, SimpleNamespace(request_id=ENVELOPE_ID, routed_experts=packed, kv_transfer_params=None))
    unpacker = Unpacker()
    unpacker.open(outputs, 1)
    return {each.request_id: (start, rows) for each, start, rows in unpacker.rows(outputs)}


def test_messages_with_and_without_weights() -> None:
    """In one message, small and large, in any order; of some requests the ids alone."""
    sent = {
        "ids": np.arange(2 * L * K, dtype=np.int16).reshape(2, L, K),
        "weights": words(3, seed=1),
        "one": words(1, seed=2),
        "none": words(2)[:0],
        "cut": ids_of(words(2, seed=3)),
        "long": words(600, seed=4),
        "long ids": ids_of(words(900, seed=5)),
        "last": words(1, seed=6),
    }
    names = list(sent)
    for order in (names, names[::-1], ["weights", "one"], ["ids", "cut"], ["one", "ids"], ["long", "ids"]):
        found = unpacked([output(name, sent[name], start) for start, name in enumerate(order)])
        assert list(found) == order
        for start, name in enumerate(order):
            assert found[name][0] == start
            assert found[name][1].shape == sent[name].shape
            assert np.array_equal(found[name][1], sent[name])
            assert found[name][1].flags.c_contiguous
