"""How fast client processes fetch stored arrays, with `routed_experts.protocol.fetch`: from the
route of a server without an engine, or straight from a bucket.

    python -m bench.fetch [--place s3://bucket/prefix]
"""

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from bench.http_server import free_port
from bench.http_table import commit_and_device, described
from routed_experts.protocol.fetch import fetch
from routed_experts.server.http.arrays.references import ROWS_PATH
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.routes.routes import router
from routed_experts.server.outputs.array_store import ArrayStore

L, K = 48, 8
SHORT, LONG = 384, 43_000  # rows: 295 kB, 33 MB
FOLDER_BYTES = 1 << 30
FORK = multiprocessing.get_context("fork")  # or each client would import vLLM

CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "whole, of 384 rows": (SHORT, {}, 50),
    "whole, of 43,000 rows": (LONG, {}, 4),
    "12 layers of 8,600 rows, of 43,000": (LONG, {"layers": (12, 24), "tokens": (0, 8600)}, 20),
}
"""Rows of the array, the part that is fetched, and how often each client does so in a run."""


def serve(folder: Path, port: int) -> None:
    """The route in uvicorn, as vLLM runs it."""
    app = FastAPI()
    app.include_router(router)
    app.state.routed_experts = ServerState(store=ArrayStore(folder, FOLDER_BYTES))
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="error", loop="uvloop", http="httptools"
    )


def read(
    reference: dict[str, Any], base_url: str, part: dict[str, Any], count: int, turns: Barrier
) -> None:
    """A client: fetches an array, or a part of it, `count` times between two turns."""
    options = {**part, "base_url": base_url}
    fetch(reference, **options)
    turns.wait()
    for _ in range(count):
        fetch(reference, **options)
    turns.wait()


def fetches_per_s(
    reference: dict[str, Any], base_url: str, part: dict[str, Any], count: int, num_clients: int
) -> float:
    """Of all clients together."""
    turns = FORK.Barrier(num_clients + 1)
    options = (reference, base_url, part, count, turns)
    clients = [FORK.Process(target=read, args=options) for _ in range(num_clients)]
    for client in clients:
        client.start()
    turns.wait()
    began = time.perf_counter()
    turns.wait()
    seconds = time.perf_counter() - began
    for client in clients:
        client.join()
    return num_clients * count / seconds


def wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


def measure(place: str | Path, base_url: str, num_clients: int, repeats: int) -> None:
    store = ArrayStore(place, FOLDER_BYTES)
    print("| array | fetches/s | MB/s |\n| --- | --- | --- |")
    for name, (num_rows, part, count) in CASES.items():
        array = np.random.default_rng(0).integers(0, 128, (L, num_rows, K), dtype=np.int16)
        stored = store.put(array)
        # of a bucket, signed and absolute
        url = getattr(stored, "url", None) or f"{ROWS_PATH.removeprefix('/v1/')}/{stored.id}"
        reference = stored.reference(array, 0, 0, url=url)
        rates = [
            fetches_per_s(reference, base_url, part, count, num_clients) for _ in range(repeats)
        ]
        nbytes = fetch(reference, base_url=base_url, **part).nbytes
        rate = statistics.median(rates)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"| {name} | {rate:,.0f} ({spread}) | {rate * nbytes / 1e6:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", help="a bucket; by default a folder in memory and a server")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=None, help="what is measured, where git does not say")
    args = parser.parse_args()
    print(f"{described(commit_and_device('cpu', args.commit))}. {args.clients} clients.\n")
    if args.place is not None:
        measure(args.place, "", args.clients, args.repeats)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        folder = Path(parent) / "store"
        port = free_port()
        server = FORK.Process(target=serve, args=(folder, port))
        server.start()
        try:
            wait_for(port)
            measure(folder, f"http://127.0.0.1:{port}/v1", args.clients, args.repeats)
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()
