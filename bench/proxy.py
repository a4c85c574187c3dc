"""What the rows of a prompt take of the proxy in front of a prefill and a decode instance: CPU time for each request.

The proxy is that of `examples/prefill_decode.py`; in place of the instances are programs that give ready-made answers,
as large as those of 48 layers that choose 8 of up to 256 experts.
"""

import argparse
import asyncio
import multiprocessing
import runpy
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from bench.http_server import cpu_seconds, free_port
from bench.http_table import commit_and_device, described
from bench.long_answers import K, L
from routed_experts.server.http.encoding import LINE_BYTES

PROMPTS = (128, 1536, 16384)
PATH = "/v1/completions"
EXAMPLE = Path(__file__).parent.parent / "examples/prefill_decode.py"


def instance(port: int, tokens: int) -> None:
    """Both legs' answers to a prompt of so many tokens whose rows are asked for; with none, to one without rows."""
    app = FastAPI()
    ids = tokens * L * K
    params = {"do_remote_prefill": True, "remote_block_ids": [1, 2, 3]}
    rows = "A" * (2 * ids // 3 * 4)
    first = {"choices": [{"index": 0, "text": "a"}], "kv_transfer_params": params}
    if tokens:
        first["kv_transfer_params"] = {**params, "routed_experts": {"data": bytes(ids), "dtype": "uint8"}}
    answer = msgspec.msgpack.encode(first)
    lines = [rows[begin : begin + LINE_BYTES].encode() for begin in range(0, len(rows), LINE_BYTES)]

    @app.post(PATH)
    async def answered(request: Request) -> Response:
        is_packed = request.headers["content-type"] == "application/msgpack"
        body = (msgspec.msgpack if is_packed else msgspec.json).decode(await request.body())
        if body["kv_transfer_params"].get("do_remote_decode"):
            return Response(answer, media_type="application/msgpack")

        async def stream() -> AsyncIterator[bytes]:
            for line in [*lines, b'{"choices":[{"index":0,"text":"a"}]}']:
                yield b"data: " + line + b"\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(stream(), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def relay(port: int, ports: list[int]) -> None:
    """The example's proxy."""
    proxy = runpy.run_path(str(EXAMPLE))["proxy"]
    uvicorn.run(proxy(ports), host="127.0.0.1", port=port, log_level="error")


async def milliseconds(tokens: int, requests: int, repeats: int) -> float:
    """CPU time of the proxy for each of so many requests at once, in the fastest of the repeats."""
    ports = [free_port() for _ in range(3)]
    processes = [multiprocessing.Process(target=instance, args=(port, tokens), daemon=True) for port in ports[:2]]
    processes.append(multiprocessing.Process(target=relay, args=(ports[2], ports[:2]), daemon=True))
    for process in processes:
        process.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[2]}", timeout=120) as client:
            await _until(client, "/health")
            for port in ports[:2]:
                await _until(client, f"http://127.0.0.1:{port}/openapi.json")
            times = []
            for _ in range(1 + repeats):
                began = cpu_seconds(processes[2].pid or 0)
                answers = [client.post(PATH, json={"prompt": [1] * tokens, "stream": True}) for _ in range(requests)]
                for answer in await asyncio.gather(*answers):
                    answer.raise_for_status()
                times.append(cpu_seconds(processes[2].pid or 0) - began)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return 1e3 * min(times[1:]) / requests


async def _until(client: httpx.AsyncClient, url: str) -> None:
    for _ in range(300):
        try:
            if (await client.get(url)).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    args = parser.parse_args()
    about = commit_and_device("cpu", None)
    print(described(about))
    for tokens in (0, *PROMPTS):
        took = asyncio.run(milliseconds(tokens, args.requests, args.repeats))
        print(f"| {tokens:,} tokens | {took:.1f} ms |" if tokens else f"| without rows | {took:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
