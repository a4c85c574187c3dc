"""What it takes to cut a packed batch for eight ranks, in multiples of copying its bytes."""

import argparse
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from routed_experts.protocol.collect import Routing
from routed_experts.protocol.ranks import Packed, pack, stage_layers, take, token_spans

SEQUENCES, TOKENS, LAYERS, TOP_K = 8, 16_384, 48, 8
SPLITS = {
    "context 8": (1, 8, 1),
    "context 4, sequence 2": (1, 4, 2),
    "pipeline 2, context 2, sequence 2": (2, 2, 2),
}
SPLITS |= {"pipeline 4, context 2": (4, 2, 1), "pipeline 8": (8, 1, 1)}


def seconds(call: Callable[[], Any], repeats: int = 15) -> float:
    """Of this process on a core, in the best of some runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
        del result
    return min(times)


def cut(packed: Packed, pp: int, cp: int, tp: int) -> list[np.ndarray[Any, Any]]:
    """The rows of each rank."""
    parts = []
    for p, c, t in product(range(pp), range(cp), range(tp)):
        layers = stage_layers(range(LAYERS), LAYERS, pipeline=(p, pp))
        spans = token_spans(packed.cu_seqlens.tolist(), context=(c, cp), sequence=(t, tp))
        parts.append(take(packed.rows[:, layers], spans))
    return parts


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    shape = (TOKENS - 1, LAYERS, TOP_K)
    routings = [
        Routing(np.random.default_rng(seed).integers(128, size=shape, dtype=np.int16))
        for seed in range(SEQUENCES)
    ]
    packed = pack(routings, multiple=16)
    copy = seconds(packed.rows.copy)
    print(
        f"copying {packed.rows.nbytes / 1e6:.0f} MB takes {1000 * copy:.1f} ms; in multiples of it:"
    )
    print(f"packing: {seconds(lambda: pack(routings)) / copy:.2f}")
    for name, split in SPLITS.items():
        print(f"{name}: {seconds(lambda split=split: cut(packed, *split)) / copy:.2f}")  # type: ignore[misc]


if __name__ == "__main__":
    main()
