"""What an API process pays for arrays by reference: the CPU time of storing one, and of sending one from
a folder to a client, whole and in part, without a network.

    python -m bench.store [--place s3://bucket/prefix]
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from routed_experts.server.http.arrays.references import ROWS_PATH
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.routes.routes import router
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.folders import default_folder, remove_arrays

L, K = 48, 8
SHORT, LONG = 384, 43_000  # rows: 295 kB, 33 MB
PART = f"?layers=12:24&tokens=0:{LONG // 5}"


def cpu_s(function: Callable[[], Any], repeats: int) -> float:
    """CPU time of a call, the median of five series."""
    series = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats):
            function()
        series.append((time.process_time() - began) / repeats)
    return statistics.median(series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", help="folder or bucket; by default a folder in memory")
    parser.add_argument("--repeats", type=int, default=500, help="of an array of 295 kB")
    args = parser.parse_args()
    folder = args.place or default_folder("bench")
    store = ArrayStore(folder, 4 << 30)
    short = np.zeros((L, SHORT, K), np.int16)
    put = cpu_s(lambda: store.delete(store.put(short).id), args.repeats)
    print(f"to store and delete an array of {short.nbytes:,} bytes: {1e6 * put:.0f} µs of CPU")
    if store.folder is None:
        return
    app = FastAPI()
    app.include_router(router)
    app.state.routed_experts = ServerState(store=store)
    stored = store.put(np.zeros((L, LONG, K), np.int16))

    async def get(query: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return len((await client.get(f"{ROWS_PATH}/{stored.id}{query}")).content)

    for query in ("", PART):
        size = asyncio.run(get(query))
        sent = cpu_s(lambda query=query: asyncio.run(get(query)), 5)  # type: ignore[misc]
        print(f"to send {size:,} bytes of an array{query}: {1e3 * sent:.1f} ms of CPU")
    store.delete(stored.id)
    if args.place is None:
        remove_arrays(store.folder)


if __name__ == "__main__":
    main()
