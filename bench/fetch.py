"""Fetches of stored arrays by several clients at once, beside the same bytes sent by `sendfile` and nothing else.

Both servers are processes of their own, take turns, and serve the same file: 12 of 48 layers of 32k tokens, top 8.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import uvicorn
from fastapi import FastAPI

from bench.http_table import commit_and_device, described
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.references import ROWS_PATH
from routed_experts.server.http.routes import router
from routed_experts.server.outputs.array_store import ArrayStore

LAYERS, TOKENS, TOP_K, WANTED = 48, 32 << 10, 8, (12, 24)
ROOM = 1 << 20


def serve_http(folder: Path, port: int) -> None:
    """Our route in uvicorn, as vLLM runs it."""
    app = FastAPI()
    app.include_router(router)
    app.state.routed_experts = ServerState(store=ArrayStore(folder, 1 << 40))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", loop="uvloop", http="httptools")


def serve_sendfile(path: Path, port: int, first: int, size: int) -> None:
    """Answers each request with the same part of a file, in a thread for each connection."""

    def answer(connection: socket.socket) -> None:
        with connection, open(path, "rb") as file:
            while connection.recv(ROOM):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                at = first
                while at < first + size:
                    at += os.sendfile(connection.fileno(), file.fileno(), at, first + size - at)

    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(64) as threads:
        while True:
            threads.submit(answer, server.accept()[0])


def read(port: int, request: bytes, size: int, count: int, start: "multiprocessing.synchronize.Barrier") -> None:
    """Sends a request `count` times, and reads each answer."""
    buffer = bytearray(ROOM)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start.wait()
        for _ in range(count):
            connection.sendall(request)
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(ROOM)
            head, _, body = head.partition(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise SystemExit(head.decode())
            left = size - len(body)
            while left:
                left -= connection.recv_into(buffer, min(left, ROOM))
        start.wait()


def rate(port: int, request: bytes, size: int, clients: int, count: int) -> float:
    """Bytes per second of all clients together."""
    barrier = multiprocessing.Barrier(clients + 1)
    processes = [
        multiprocessing.Process(target=read, args=(port, request, size, count, barrier)) for _ in range(clients)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - began
    for process in processes:
        process.join()
    return clients * count * size / seconds


def wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--fetches", type=int, default=20, help="by each client in a run")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ids = np.random.default_rng(0).integers(0, 128, (LAYERS, TOKENS, TOP_K), dtype=np.int16)
        stored = ArrayStore(Path(folder) / "store", 1 << 40).put(ids)
        layer = TOKENS * TOP_K * ids.itemsize
        first, size = stored.path.stat().st_size - LAYERS * layer + WANTED[0] * layer, (WANTED[1] - WANTED[0]) * layer
        ours, alone = free_ports(2)
        servers = [
            multiprocessing.Process(target=serve_http, args=(stored.path.parents[1], ours)),
            multiprocessing.Process(target=serve_sendfile, args=(stored.path, alone, first, size), daemon=True),
        ]
        for server in servers:
            server.start()
        try:
            path = f"{ROWS_PATH}/{stored.id}?layers={WANTED[0]}:{WANTED[1]}"
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            rates: dict[int, list[float]] = {ours: [], alone: []}
            for port in rates:
                wait_for(port)
                rate(port, request, size, 1, 2)
            for repeat in range(args.repeats):
                for port in (ours, alone) if repeat % 2 else (alone, ours):
                    rates[port].append(rate(port, request, size, args.clients, args.fetches))
        finally:
            for server in servers:
                server.terminate()
                server.join()
    print(f"{described(commit_and_device('cpu', None))}. {args.clients} clients, {size >> 20} MiB a fetch.\n")
    print("| server | GB/s | to sendfile |\n| --- | --- | --- |")
    for name, port in (("sendfile alone", alone), ("GET /v1/routed_experts/rows", ours)):
        print(f"| {name} | {median(rates[port]) / 1e9:.2f} | {median(rates[port]) / median(rates[alone]):.2f} |")


if __name__ == "__main__":
    main()
