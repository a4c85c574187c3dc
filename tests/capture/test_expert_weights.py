"""Rows with the routers' weights, from the routers' choice to the engine's messages: bit for bit, whatever the bits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.capture.capturer import Capturer, RowShape
from routed_experts.capture.envelope import ENVELOPE_ID, Unpacker, pack
from routed_experts.capture.host_cache import HostCache
from routed_experts.capture.message import OptIn, PlacedRows
from routed_experts.capture.rows import ids_of, joined, row_shape, weights_of
from routed_experts.protocol.codec import Rows

CPU = torch.device("cpu")
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


def test_rows_that_are_not_known() -> None:
    rows = np.full((2, 3 * L, K), -1, dtype=np.int16)
    assert (ids_of(rows) == -1).all()
    assert np.isnan(weights_of(rows)).all()


def capturer(stage: int = 0, layers: tuple[int, ...] = (1, 2), with_weights: bool = True) -> Capturer:
    shape = RowShape(tuple(range(sum(layers))), 400, K)
    return Capturer(shape, layers, stage, 16, 2, CPU, with_weights)


def choice(layer: int, tokens: int, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router chooses for each token, and with which weights; `extra` columns are of shared experts."""
    ids = torch.arange(tokens * (K + extra), dtype=torch.int32).reshape(tokens, K + extra) % 400 + layer
    weights = torch.from_numpy(bits(tokens, layer)[:, 0].copy()).view(torch.float32)
    return ids, torch.cat([weights, torch.full((tokens, extra), 7.0)], dim=1)


def check(rows: Rows, tokens: int, layers: int = 3) -> None:
    for layer in range(layers):
        ids, weights = choice(layer, tokens)
        assert np.array_equal(ids_of(rows)[:, layer], ids.numpy())
        assert np.array_equal(weights_of(rows)[:, layer].view(np.int32), weights.view(torch.int32).numpy())


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("deferred", [[], [1], [0, 1, 2]])
def test_a_step(deferred: list[int], extra: int) -> None:
    """Stored at once or at the end; padding (9 and 10) is not sent."""
    one = capturer(layers=(3,))
    one.reset_rows(9)
    one.defer_stores()
    for layer in range(3):
        ids, weights = choice(layer, 9)
        padded = torch.zeros(2, K + extra)
        ids = torch.cat([torch.cat([ids, torch.zeros(9, extra, dtype=torch.int32)], 1), padded.int()])
        weights = torch.cat([torch.cat([weights, torch.zeros(9, extra)], 1), padded])
        one.sink(layer, may_defer=layer in deferred)(ids, weights)
        if layer not in deferred:
            weights.fill_(1.0)  # as some kernels do
    one.flush_stores()
    check(one.submit(torch.arange(9), np.array([0, 4, 9])).result().rows, 9)


def test_rows_of_earlier_stages() -> None:
    first, last = capturer(0), capturer(1)
    first.sink(0)(*choice(0, 6))
    for row in range(2):
        last.sink(row)(*choice(row + 1, 6))
    upstream = first.downstream(6, None)
    assert upstream.shape == (6, 1, 2 * K)
    check(last.submit(torch.arange(6), np.array([0, 6]), upstream).result().rows, 6)


def test_a_ranks_own_tokens() -> None:
    """Which of a router's tokens are its own is asked once: it counts the microbatches of a step."""
    one, asked = capturer(layers=(3,)), []

    def own_tokens(ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        asked.append(len(ids))
        return 1, ids[3:7]

    ids, weights = choice(0, 9, extra=1)
    one.sink(0, own_tokens)(ids, weights)
    assert asked == [9]
    assert torch.equal(one.cache.ids[0, 1:5], ids[3:7, :K])
    assert one.cache.weights is not None
    assert torch.equal(one.cache.weights[0, 1:5].view(torch.int32), weights[3:7, :K].view(torch.int32))
    one.cache.planes[:, 0, 1:5] = -1
    assert (one.cache.planes == -1).all()


def test_a_layer_that_skips_a_step() -> None:
    one = capturer(layers=(3,))
    for step in range(2):
        one.reset_rows(4)
        for layer in (0, 2) if step else range(3):
            one.sink(layer)(*choice(layer, 4))
        rows = one.submit(torch.arange(4), np.array([0, 4])).result().rows
    assert (ids_of(rows)[:, 1] == -1).all()
    assert np.isnan(weights_of(rows)[:, 1]).all()
    assert (ids_of(rows)[:, ::2] >= 0).all()


def test_without_weights_nothing_is_kept_or_sent_but_ids() -> None:
    """The memory is that of the ids alone, and a router's weights, where a sink is given them, change nothing."""
    one, with_weights = capturer(layers=(3,), with_weights=False), capturer(layers=(3,))
    assert one.cache.weights is one.cache.weights_view(0) is None
    assert one.cache.planes.nbytes == one.pipeline.device_bytes == 3 * 16 * K * 4
    assert with_weights.pipeline.device_bytes == 2 * one.pipeline.device_bytes
    for layer in range(3):
        one.sink(layer)(*choice(layer, 4))
    rows = one.submit(torch.arange(4), np.array([0, 4])).result().rows
    assert rows.shape == (4, 3, K)
    assert one.downstream(4, None).shape == (4, 3, K)


def test_the_host_cache_keeps_them_with_the_ids() -> None:
    cache, rows = HostCache(4, 4, *row_shape(L, K, with_weights=True)), words(6)
    cache.write(np.arange(4, 10), rows)
    out = np.empty((8, 3 * L, K), dtype=np.int16)
    cache.read(np.array([1, 2]), 0, out)
    assert np.array_equal(out[:6], rows)
    assert (out[6:] == -1).all()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_opt_in_says_whether_weights_are_asked_for(weights: bool, shared: bool) -> None:
    asked = OptIn(7, bytes(range(16)), shared, weights, best_effort=not shared)
    assert OptIn.decode(asked.encode()) == asked
    assert OptIn(7, bytes(16), shared=True).encode() == bytes([7, *bytes(23), 1])  # as before there were weights


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


def test_a_message_of_ids_alone_is_the_same_with_weights_captured() -> None:
    rows = [words(count, seed=count) for count in (1, 2, 700)]
    cut = [output(str(index), ids_of(each)) for index, each in enumerate(rows)]
    alone = [output(str(index), ids_of(each).copy()) for index, each in enumerate(rows)]
    ours, theirs = pack(cut), pack(alone)
    assert ours is not None
    assert theirs is not None
    assert ours.tobytes() == theirs.tobytes()
    assert [each.routed_experts is None or each.routed_experts.tobytes() for each in cut] == [
        each.routed_experts is None or each.routed_experts.tobytes() for each in alone
    ]
