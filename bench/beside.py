"""How evenly an API process sends the tokens of 64 streams while it stores 16 arrays of 33 MB: the
gaps between two tokens of a stream, in an event loop that has nothing else to do.

    python -m bench.beside [--place s3://bucket/prefix]
"""

import argparse
import asyncio
import time
from typing import Any

import numpy as np

from bench.http_table import commit_and_device, described
from routed_experts.server.http.arrays.references import ReferenceMaker
from routed_experts.server.http.encoding.encoding import Encoder
from routed_experts.server.http.encoding.wire_form import WireForm
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder, remove_arrays

L, K, NUM_ROWS = 48, 8, 43_000
NUM_STREAMS, NUM_ARRAYS = 64, 16
STEP_S = 0.02
ALONE_S = 4.0
ROWS = np.zeros((NUM_ROWS, L, K), np.int16)


async def stream(gaps: list[float], ended: asyncio.Event) -> None:
    """A token every step; `gaps` gets the seconds between two."""
    before = time.perf_counter()
    due = before
    while not ended.is_set():
        due = max(due + STEP_S, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        now = time.perf_counter()
        gaps.append(now - before)
        before = now


async def store_all(store: ArrayStore) -> None:
    """The arrays of as many answers that end in the same step."""
    form = WireForm(ids_shape=(L, K), num_experts=1 << 15)
    arrays = [("routed_experts", 0, 0, [ROWS])]

    async def of_answer() -> None:
        maker = ReferenceMaker(store)
        made, failure = await maker.run(ROWS.nbytes, maker.references, Encoder(form), arrays)
        if failure is not None:
            raise failure
        await store.reader.run(store.discard, made[0]["routed_experts"]["id"])

    await asyncio.gather(*(of_answer() for _ in range(NUM_ARRAYS)))


async def gaps_during(coroutine: Any) -> tuple[list[float], float]:
    """The gaps of all streams while something runs, and the seconds that it takes."""
    ended = asyncio.Event()
    gaps: list[float] = []
    streams = [asyncio.create_task(stream(gaps, ended)) for _ in range(NUM_STREAMS)]
    began = time.perf_counter()
    await coroutine
    seconds = time.perf_counter() - began
    ended.set()
    await asyncio.gather(*streams)
    return gaps, seconds


def row(name: str, gaps: list[float], seconds: float) -> str:
    p50, p99 = (1e3 * float(np.quantile(gaps, share)) for share in (0.5, 0.99))
    return f"| {name} | {p50:.1f} | {p99:.1f} | {1e3 * max(gaps):.1f} | {seconds:.1f} |"


async def measure(store: ArrayStore, repeats: int) -> None:
    await store_all(store)
    print("| streams | gap p50 ms | p99 | max | seconds |\n| --- | --- | --- | --- | --- |")
    for _ in range(repeats):
        print(row("alone", *await gaps_during(asyncio.sleep(ALONE_S))), flush=True)
        print(row("beside puts", *await gaps_during(store_all(store))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", help="folder or bucket; by default a folder in memory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=None, help="what is measured, where git does not say")
    args = parser.parse_args()
    place = args.place or default_folder("bench")
    store = ArrayStore(place, 4 << 30)
    store.open()
    print(f"{described(commit_and_device('cpu', args.commit))}. {store.folder or args.place}\n")
    asyncio.run(measure(store, args.repeats))
    if args.place is None:
        remove_arrays(store.folder)


if __name__ == "__main__":
    main()
