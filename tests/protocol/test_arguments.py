"""Arguments that would give wrong rows get a sentence that names them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.protocol import batch, codec, collect, expert_load, fetch, ranks
from routed_experts.protocol.collect import Routing
from tests.protocol.answers import rows_of

ROWS = rows_of(8)
WEIGHTS = ROWS.astype(np.float32)
ROUTING = Routing(ROWS, prompt_len=5, weights=WEIGHTS)
REFERENCE = {"shape": [8, 3, 4], "dtype": "int16", "path": "/none"}

Values = dict[str, tuple[Any, ...]]
NOT_COUNTS = ("3", 1.5, True, np.array([1, 2]), torch.ones(3), -1)
NOT_IDS = (None, "x", [[1], [1, 2]], ROWS[0], WEIGHTS, torch.ones(2, 3, 4, dtype=torch.bfloat16))
RANKS = ((1,), (0, 1, 2), (1, 1), (0, 0), (0, 1.5), (-1, 2))
RANGES = ((1,), (1, 2, 3), (0, 1.5), (2, 1), (0, 99), (-1, 2))
ALIGN = {"routings": [ROUTING], "length": 9}
COUNTED: Values = {"rows": (*NOT_IDS, ROWS - 2, ROWS + 60), "num_experts": (*NOT_COUNTS, 0, 2**31)}

CASES: dict[Callable[..., Any], tuple[dict[str, Any], Values]] = {
    Routing: (
        {"rows": ROWS},
        {"rows": NOT_IDS, "start": NOT_COUNTS, "weights": (ROWS, WEIGHTS[0], WEIGHTS[:2])},
    ),
    collect.Collector: (
        {},
        {"prompt_start": NOT_COUNTS, "prompt_len": NOT_COUNTS, "n": (*NOT_COUNTS, 0)},
    ),
    batch.verify: ({"routing": ROUTING, "num_experts": 60}, {"num_experts": (*NOT_COUNTS, 0)}),
    batch.scaled: (
        {"weights": WEIGHTS, "info": {"weights_scale": [1.0] * 3}},
        {"info": ({}, {"weights_scale": "x"}, {"weights_scale": [1.0]})},
    ),
    batch.shared_prefix: (
        {"before": Routing(ROWS, prompt_token_ids=(1, 2), token_ids=()), "prompt": [1, 2]},
        {"prompt": ([1.5], ["1"], ROWS), "end": NOT_COUNTS},
    ),
    batch.spread_layers: (
        {"rows": ROWS, "layer_ids": [1, 2, 4], "num_hidden_layers": 5},
        {
            "rows": (ROWS[0, 0],),
            "layer_ids": ([1, 2], [1, 2, 5], [-1, 1, 2], [1, 1, 2], [1.5, 2, 3]),
            "num_hidden_layers": (*NOT_COUNTS, 4),
        },
    ),
    batch.align: (
        ALIGN,
        {
            "length": NOT_COUNTS,
            "padding": ("packed", 1.5, True, -1),
            "num_tokens": (["9"], [1.5], [-1], [], [9, 9]),
        },
    ),
    batch.align_values: (
        {**ALIGN, "values": [[1] * 9]},
        {"values": ([], [[1] * 9] * 2, ["x" * 9], [[[1] * 9]])},
    ),
    ranks.pack: ({"routings": [ROUTING]}, {"multiple": (*NOT_COUNTS, 0), "length": (-1, 1.5, 8)}),
    ranks.stage_layers: (
        {"layer_ids": [1, 2, 5], "num_hidden_layers": 6},
        {
            "layer_ids": ([2, 1], [1, 1], [1, 2, 6], [-1, 1, 2], [1.5, 2, 3]),
            "pipeline": (*RANKS, (0, 4)),
            "virtual": (*RANKS, (0, 5)),
            "counts": ([5], [3, 3], [6.0]),
        },
    ),
    ranks.token_spans: (
        {"cu_seqlens": [0, 8, 16]},
        {"cu_seqlens": ([8, 0], [0, 1.5], [-1, 8]), "context": RANKS, "sequence": RANKS},
    ),
    codec.resolve_dtype: ({"name": "auto", "num_experts": 60}, {"name": ("x", None, "float32")}),
    codec.count_missing: ({"rows": ROWS}, {"rows": (ROWS[0], WEIGHTS.astype(np.float64))}),
    codec.encode: (
        {"array": ROWS, "start": 0},
        {"array": (ROWS[0], ROWS.astype(np.int64)), "start": NOT_COUNTS},
    ),
    codec.decode: (
        {"value": [[[1]]]},
        {"dtype": ("x", None), "num_layers": (*NOT_COUNTS, 0), "top_k": (*NOT_COUNTS, 0)},
    ),
    expert_load.count_experts: ({"rows": ROWS, "num_experts": 60}, COUNTED),
    expert_load.sum_weights: (
        {"rows": ROWS, "weights": WEIGHTS, "num_experts": 60},
        {**COUNTED, "weights": (ROWS, WEIGHTS[:2])},
    ),
    expert_load.expert_load: (
        {"counts": [[1, 2]]},
        {"counts": ([1], [[]], [[-1]], [[0.5]], [[np.inf]], [[np.nan]], [[2**70]], [["x"]])},
    ),
    fetch.fetch: ({"reference": REFERENCE}, {"layers": RANGES, "tokens": RANGES}),
}


def fault_of(call: Callable[[], Any], name: str) -> str:
    """What is wrong with the answer to a wrong argument, if something is."""
    try:
        result = call()
    except (ValueError, TypeError) as error:
        return "" if name in str(error) else f"the message does not name it: {error!r}"
    return f"accepted: {str(result)[:60]}"


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__qualname__)
def test_wrong_arguments(function: Callable[..., Any]) -> None:
    right, wrong = CASES[function]
    faults = []
    for name, values in wrong.items():
        for value in values:
            call = {**right, name: value}
            if fault := fault_of(lambda call=call: function(**call), name):  # type: ignore[misc]
                faults.append(f"{name}={value!r:.60}: {fault}")
    assert not faults, "\n".join(faults)


def test_numbers_and_tensors_of_other_libraries() -> None:
    assert np.array_equal(batch.align([ROUTING], np.int64(9))[0, :8], ROWS)
    tensor = torch.from_numpy(ROWS.copy())
    for function, more in (
        (expert_load.count_experts, (60,)),
        (batch.spread_layers, ([1, 2, 4], 5)),
    ):
        assert np.array_equal(function(tensor, *more), function(ROWS, *more))
    assert np.array_equal(Routing(tensor).rows, ROWS)


def test_ids_beyond_int16_are_not_changed() -> None:
    wide = Routing(np.full((1, 1, 1), 40_000, np.uint16))
    assert batch.align([wide], 2).ravel().tolist() == [40_000, -1]
