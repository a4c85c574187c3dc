"""Nested lists, against those of msgspec."""

import itertools

import msgspec
import numpy as np
import pytest

from routed_experts.server.http.nested_lists import json_rows, msgpack_rows


@pytest.mark.parametrize("num_experts", [1, 2, 10, 11, 100, 101, 128, 129, 256, 257, 1000, 1001, 16384])
def test_every_id(num_experts: int) -> None:
    rng = np.random.default_rng(num_experts)
    for num_rows, num_layers, top_k in itertools.product((0, 1, 2, 64), (1, 2, 15, 16, 48), (1, 2, 8, 15, 16, 17)):
        ids = rng.integers(-1, num_experts, (num_rows, num_layers, top_k), dtype=np.int16)
        assert b"[" + json_rows(ids, num_experts) + b"]" == msgspec.json.encode(ids.tolist())
        packed = b"\xdd" + num_rows.to_bytes(4, "big") + msgpack_rows(ids, num_experts)
        assert msgspec.msgpack.decode(packed) == ids.tolist()
    for encode, wrong in itertools.product((json_rows, msgpack_rows), (-2, num_experts)):
        with pytest.raises(IndexError, match="outside"):
            encode(np.array([[[0, wrong]]], dtype=np.int16), num_experts)
    every = np.arange(-1, num_experts, dtype=np.int16).reshape(-1, 1, 1)
    assert json_rows(every, num_experts) == msgspec.json.encode(every.tolist())[1:-1]
