"""Wrong arguments of each public function of the client library get a sentence that names the
argument."""

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from routed_experts.protocol import batch, codec, collect, expert_load, fetch, models, ranks, sse
from routed_experts.protocol.collect import Routing
from tests.protocol.answers import RoutedPrompt, answer, rows_of

ROWS = rows_of(8)
WEIGHTS = ROWS.astype(np.float32)
ROUTING = Routing(
    ROWS, prompt_len=5, prompt_token_ids=(1, 2, 3, 4, 5), token_ids=(6, 7, 8, 9), weights=WEIGHTS
)
ANSWER = answer(RoutedPrompt(ROWS[:5], [ROWS[5:]]))
REFERENCE = {"shape": [8, 3, 4], "dtype": "int16", "path": "/none"}

NOT_INTEGERS = ("3", 1.5, True, [1], np.array([1, 2]), torch.int64, torch.ones(3), object())
NOT_COUNTS = (*NOT_INTEGERS, None, -1)
NOT_ROUTINGS = (None, 5, "x", ROWS, {"rows": ROWS}, [ROUTING, ROUTING])
NOT_LISTS_OF_ROUTINGS = (None, 5, "x", ROUTING, [ROWS], [None])
NOT_ARRAYS = (None, "x", b"abc", object(), torch.int64, [[1], [1, 2]], [["x"]], {"a": 1}, 3)
NOT_INTEGER_DTYPES = (
    "x",
    None,
    5,
    "float32",
    np.float32,
    torch.float32,
    torch.bfloat16,
    object(),
    "i4,i4",
    "(2,-1)i4",
)
NOT_WIRE_DTYPES = ("x", None, 5, "int64", np.int16, torch.int16, ["int16"])
NOT_MAPPINGS = (None, 5, "x", [1], ROWS)
LAST = ("repaet", None, True, 1.5, [1, 2, 3], 2**15, torch.int64)
NAMES = (5, b"x", ["x"])

Values = dict[str, tuple[Any, ...]]
WRONG: Values = {
    **dict.fromkeys(("routing", "decode", "prefill", "before"), NOT_ROUTINGS),
    **dict.fromkeys(("routings", "turns"), NOT_LISTS_OF_ROUTINGS),
    **dict.fromkeys(("length", "start", "num_hidden_layers"), NOT_COUNTS),
    **dict.fromkeys(("num_layers", "top_k"), (*NOT_INTEGERS, 0)),
    **dict.fromkeys(("prompt_len", "end"), (*NOT_INTEGERS, -1)),
    **dict.fromkeys(("rows", "array", "counts"), NOT_ARRAYS),
    **dict.fromkeys(("info", "reference", "defaults"), NOT_MAPPINGS),
    **dict.fromkeys(
        ("layers", "tokens"),
        (5, "ab", (1,), (1, 2, 3), (0, 1.5), (None, 2), (2, 1), (0, 99), (-1, 2)),
    ),
    **dict.fromkeys(("base_url", "api_key"), NAMES),
    "num_experts": (*NOT_COUNTS, 0),
    "weights": (*NOT_ARRAYS, WEIGHTS[0, 0], ROWS),
    "media": (5, "x", [1], [None]),
    "padding": ("packed", "", None, 1.5, True, [1, 2], torch.int64, np.array(["left"]), -1),
    "num_tokens": (5, "9", ["9"], [1.5], [-1], [], [9, 9], [None]),
    "timeout_s": ("1", None, [1.0], torch.float32, object()),
    "text": (None, 5, ["x"], object()),
}
"""Of a parameter of this name, whatever the function. What is None by default may be None."""

RANKS = (None, 5, "ab", (1,), (0, 1, 2), (1, 1), (0, 0), (0, 1.5), (-1, 2), (None, 2))
ALIGN = {"routings": [ROUTING], "length": 9}
IDS: Values = {
    "rows": (ROWS[0], ROWS[0, 0], WEIGHTS, [[["a"]]], torch.ones(2, 3, 4, dtype=torch.bfloat16))
}
COUNTED: Values = {"rows": (*IDS["rows"], ROWS - 2, ROWS + 60), "num_experts": (2**31,)}
FORM = {"num_layers": WRONG["num_layers"], "top_k": WRONG["top_k"]}
ASKED = {
    **FORM,
    "n": (*NOT_COUNTS, 0),
    "prompt_len": NOT_COUNTS,
    "prompt_start": (*NOT_INTEGERS, -1),
}
ASKED |= {"dtype": NOT_WIRE_DTYPES, "media": (5, "x", None, [1], [None]), "promt_len": (5,)}

CASES: dict[Callable[..., Any], tuple[dict[str, Any], Values]] = {
    batch.verify: ({"routing": ROUTING, "num_experts": 60}, {}),
    batch.scaled: (
        {"weights": WEIGHTS, "info": {"weights_scale": [1.0] * 3}},
        {"info": ({}, *({"weights_scale": scale} for scale in (5, "x", [1.0])))},
    ),
    batch.splice: ({"decode": ROUTING, "prefill": ROUTING}, {}),
    batch.shared_prefix: (
        {"before": ROUTING, "prompt": [1, 2]},
        {"prompt": (None, 5, "x", [1.5], ["1"], [None], ROWS, [[1], [1, 2]])},
    ),
    batch.generated_mask: (
        {"routing": replace(ROUTING, prompt_token_ids=(1,), token_ids=(2, 3))},
        {},
    ),
    batch.join_turns: ({"turns": [ROUTING]}, {"turns": ([],)}),
    batch.spread_layers: (
        {"rows": ROWS, "layer_ids": [1, 2, 4], "num_hidden_layers": 5},
        {
            "rows": (ROWS[0, 0],),
            "layer_ids": (
                None,
                5,
                "124",
                [1, 2],
                [1, 2, 5],
                [-1, 1, 2],
                [1, 1, 2],
                [1.5, 2, 3],
                [None] * 3,
            ),
            "num_hidden_layers": (4,),
            "fill": (None, "x", 1.5, 2**15, torch.int64, object()),
        },
    ),
    batch.align: (
        {**ALIGN, "last": -1},
        {
            "last": LAST,
            "pad": (None, "x", [1, 2, 3], [[1], [2]], 1.5, 2**15, np.nan, torch.int64, object()),
            "dtype": NOT_INTEGER_DTYPES,
        },
    ),
    batch.align_weights: (
        ALIGN,
        {"last": LAST[:2], "pad": ("x", [1, 2, 3], [[1], [2]], torch.int64)},
    ),
    batch.align_generated: (ALIGN, {}),
    batch.align_logprobs: (
        {**ALIGN, "routings": [replace(ROUTING, logprobs=np.zeros(4))]},
        {"pad": ("x", [1])},
    ),
    batch.align_values: (
        {**ALIGN, "values": [[1] * 9]},
        {
            "values": (None, 5, "x", [], [[1] * 9] * 2, ["x" * 9], [[[1] * 9]], [5]),
            "pad": ("x", [1]),
        },
    ),
    ranks.pack: (
        {"routings": [ROUTING]},
        {"multiple": (*NOT_COUNTS, 0), "length": (8,), "layers": (None,)},
    ),
    ranks.stage_layers: (
        {"layer_ids": [1, 2, 5], "num_hidden_layers": 6},
        {
            "layer_ids": (
                None,
                5,
                "124",
                [2, 1],
                [1, 1],
                [1, 2, 6],
                [-1, 1, 2],
                [1.5, 2, 3],
                [None] * 3,
            ),
            "pipeline": (*RANKS, (0, 4)),
            "virtual": (*RANKS, (0, 5)),
            "counts": (5, "6", [5], [3, 3], [6.0], [None]),
        },
    ),
    ranks.token_spans: (
        {"cu_seqlens": [0, 8, 16]},
        {
            "cu_seqlens": (None, 5, "x", [8, 0], [0, 1.5], [-1, 8]),
            "context": RANKS,
            "sequence": RANKS,
        },
    ),
    codec.resolve_dtype: (
        {"name": "auto", "num_experts": 60},
        {"name": (*NOT_WIRE_DTYPES, "float32")},
    ),
    codec.count_missing: ({"rows": ROWS}, {"rows": (ROWS[0], WEIGHTS.astype(np.float64))}),
    codec.encode: ({"array": ROWS, "start": 0}, {"array": (ROWS.astype(np.int64),)}),
    codec.decode: ({"value": [[[1]]]}, {"dtype": NOT_WIRE_DTYPES}),
    codec.decode_weights: ({"value": [[[1.0]]]}, {}),
    collect.collect: ({"source": ANSWER}, {"source": (None, 5, object(), torch.int64), **ASKED}),
    collect.collect_async: ({"source": None}, {"source": (None, 5, ANSWER, []), **ASKED}),
    collect.Collector: ({}, ASKED),
    Routing: ({"rows": ROWS}, {**IDS, "weights": (WEIGHTS[:2],)}),
    expert_load.count_experts: ({"rows": ROWS, "num_experts": 60}, COUNTED),
    expert_load.sum_weights: (
        {"rows": ROWS, "weights": WEIGHTS, "num_experts": 60},
        {**COUNTED, "weights": (WEIGHTS[:2],)},
    ),
    expert_load.expert_load: (
        {"counts": [[1, 2]]},
        {"counts": ([1], [[]], [[-1]], [[0.5]], [[np.inf]], [[np.nan]], [[1e300]], [[2**70]])},
    ),
    fetch.fetch: (
        {"reference": REFERENCE},
        {
            "reference": (
                {},
                *(
                    {**REFERENCE, "shape": value}
                    for value in (None, 5, "834", [8, 3], [8, 3, -1], [8, 3, 1.5])
                ),
                *({**REFERENCE, "dtype": value} for value in NOT_WIRE_DTYPES),
                *({**REFERENCE, "path": value} for value in NAMES),
            ),
        },
    ),
    models.check_defaults: ({"defaults": {}}, {}),
    sse.EventReader.feed: ({"self": sse.EventReader()}, {}),
}


def ends_in_a_sentence(call: Callable[[], Any], name: str) -> str:
    """What is wrong with the answer to a wrong argument, if something is."""
    try:
        result = call()
        if inspect.isgenerator(result):
            list(result)
        elif inspect.iscoroutine(result):
            asyncio.run(result)
    except (ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not str(last.line).startswith("raise"):
            return f"the exception is not ours: {error!r}"
        return "" if name in str(error) else f"the message does not name it: {error!r}"
    return f"accepted: {str(result)[:60]}"


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__qualname__)
def test_wrong_arguments(function: Callable[..., Any]) -> None:
    """Never an IndexError, a KeyError or numpy's message, and nothing wrong is taken."""
    right, more = CASES[function]
    parameters, faults = inspect.signature(function).parameters, []
    for name in {**parameters, **more}:
        for value in (*(WRONG.get(name, ()) if name in parameters else ()), *more.get(name, ())):
            if value is None and name in parameters and parameters[name].default is None:
                continue
            call = {**right, name: value}
            if fault := ends_in_a_sentence(lambda call=call: function(**call), name):  # type: ignore[misc]
                faults.append(f"{name}={value!r:.60}: {fault}")
    assert not faults, "\n".join(faults)


def test_types_of_torch() -> None:
    """torch's names of integer types, its tensors, and numpy's integers are taken."""
    for dtype in (torch.int64, torch.uint8, np.int64, "int32", np.dtype("<i4"), int):
        got = batch.align([ROUTING], np.int64(9), last="repeat", pad=0, dtype=dtype)
        assert got.dtype == np.dtype(
            str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        )
        assert np.array_equal(got[0, :8], ROWS)
    tensor = torch.from_numpy(ROWS.copy())
    for function, more in (
        (expert_load.count_experts, (60,)),
        (batch.spread_layers, ([1, 2, 4], 5)),
    ):
        assert np.array_equal(function(tensor, *more), function(ROWS, *more))
    routing = Routing(tensor)
    assert np.array_equal(routing.rows, ROWS)
    assert (routing.index, routing.start, routing.end) == (0, 0, len(ROWS))


def test_ids_beyond_int16_are_not_changed() -> None:
    wide = Routing(np.full((1, 1, 1), 40_000, np.uint16))
    assert batch.align([wide], 2, last="repeat", dtype="int32").ravel().tolist() == [40_000] * 2
    with pytest.raises(ValueError, match="int16 cannot hold all of"):
        batch.align([wide], 2, last="repeat")
