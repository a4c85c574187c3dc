"""Prefill and decode in two instances on one machine, behind a proxy that knows nothing of routing.

    python examples/prefill_decode.py Qwen/Qwen3-30B-A3B --devices 0 1 [flags of routed-experts
    serve]

Needs NIXL (`pip install nixl`). Clients ask the proxy as they would ask one server; its instances
are at the two ports behind its own.
"""

import argparse
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import uvicorn
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
ON_CPU = {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}}
PARAMS, MSGPACK = "kv_transfer_params", "application/msgpack"
UNKNOWN = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
PASSED_ON = ("accept", "authorization", "content-type")
NOT_PASSED_BACK = (
    "connection",
    "content-encoding",
    "content-length",
    "date",
    "server",
    "transfer-encoding",
)


def start(model: str, port: int, device: str | None, flags: list[str]) -> subprocess.Popen[bytes]:
    """One instance, which uses a CPU if it is given no GPU."""
    env = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1000)}
    env |= {"UCX_TLS": "tcp,self,sm"} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    config = json.dumps(CONFIG | (ON_CPU if device is None else {}))
    command = [
        sys.executable,
        "-m",
        "routed_experts.server.cli",
        "serve",
        model,
        "--port",
        str(port),
    ]
    # In a process group of its own, so that Ctrl-C stops the proxy first: its requests still need
    # both instances.
    return subprocess.Popen(
        [*command, "--kv-transfer-config", config, *flags], env=env, process_group=0
    )


def wait_for(leg: subprocess.Popen[bytes], port: int) -> None:
    while leg.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit("an instance did not start")


class BadRequest(ValueError):
    """A request that is answered with 400. The second argument names its field, or is None."""


def from_client(content: bytes) -> dict[str, Any]:
    """A client's request without `kv_transfer_params`. They name the host and the blocks that KV is
    pulled from, and the experts that its tokens chose; only an instance may do that.

    Raises:
        BadRequest: it cannot be read. An instance may read what this proxy cannot, so it is never
            passed on.
    """
    try:
        body = msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
        raise BadRequest(f"The body is not valid JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", None)
    params = body.get("sampling_params", {})
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be a JSON object.", "sampling_params")
    # vLLM finds it in the engine's `extra_args`, which both of these become.
    for holder in (body, body.get("vllm_xargs"), params.get("extra_args")):
        if isinstance(holder, dict):
            holder.pop(PARAMS, None)
    return body


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request that computes the prompt, and leaves its KV to be fetched."""
    body = {**body, "stream": False}
    body[PARAMS] = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(UNKNOWN)}
    body.pop("stream_options", None)
    limits = dict(body["sampling_params"]) if "sampling_params" in body else body
    limits["max_tokens"] = 1
    limits.pop("min_tokens", None)
    if "max_completion_tokens" in limits:
        limits["max_completion_tokens"] = 1
    return {**body, "sampling_params": limits} if "sampling_params" in body else body


def error_response(status: int, kind: str, message: str, param: str | None = None) -> Response:
    """An error as OpenAI's API has it."""
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}, status
    )


def proxy(ports: list[int]) -> FastAPI:
    """Sends a request to the prefill instance, and with what that answers to the decode
    instance."""
    prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # As many as there are requests. vLLM closes those that were idle for 5 s, maybe while a
        # request is on its way.
        connections = TCPConnector(limit=0, keepalive_timeout=2)
        async with ClientSession(
            connector=connections, timeout=ClientTimeout(total=None)
        ) as app.state.session:
            yield

    app = FastAPI(lifespan=lifespan)

    async def passed_on(request: Request, content: bytes, **headers: str) -> Response:
        """What the decode instance answers."""
        url = f"{decode}{request.url.path}?{request.url.query}".rstrip("?")
        headers = {
            **{name: request.headers[name] for name in PASSED_ON if name in request.headers},
            **headers,
        }
        answer = await app.state.session.request(request.method, url, data=content, headers=headers)

        async def close() -> None:  # also of an answer that nobody waits for any more
            answer.close()

        headers = {
            name: value
            for name, value in answer.headers.items()
            if name.lower() not in NOT_PASSED_BACK
        }
        return StreamingResponse(
            answer.content.iter_any(), answer.status, headers, background=BackgroundTask(close)
        )

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    @app.post("/inference/v1/generate")
    async def relay(request: Request) -> Response:
        body = from_client(await request.body())
        first = msgspec.json.encode(for_prefill(body))
        headers = {
            "Authorization": request.headers.get("Authorization", ""),
            "Content-Type": "application/json",
        }
        headers["Accept"] = MSGPACK  # its rows need no base64 then
        async with app.state.session.post(
            prefill + request.url.path, data=first, headers=headers
        ) as answer:
            prefilled = await answer.read()
        if not answer.ok:
            return Response(prefilled, answer.status, media_type="application/json")
        body[PARAMS] = msgspec.msgpack.decode(prefilled).get(PARAMS)
        return await passed_on(request, msgspec.msgpack.encode(body), **{"content-type": MSGPACK})

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/{path:path}")
    @app.post("/tokenize")
    @app.post("/detokenize")
    @app.post("/v1/routed_experts/texts")
    async def others(request: Request) -> Response:
        return await passed_on(request, await request.body())

    @app.exception_handler(ClientError)
    async def unreachable(request: Request, error: ClientError) -> Response:
        return error_response(502, "BadGatewayError", f"An instance does not answer: {error}")

    @app.exception_handler(BadRequest)
    async def unreadable(request: Request, error: BadRequest) -> Response:
        message, param = error.args
        return error_response(400, "BadRequestError", message, param)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--port", type=int, default=8000, help="of the proxy; the instances take the next two"
    )
    parser.add_argument(
        "--devices", nargs=2, default=[None, None], help="GPUs of the two; default: run on a CPU"
    )
    for leg in ("prefill", "decode"):
        parser.add_argument(
            f"--{leg}",
            type=shlex.split,
            default=[],
            help=f"flags of the {leg} instance alone, in quotes",
        )
    args, flags = parser.parse_known_args()
    ports = [args.port + 1, args.port + 2]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    # A request takes two descriptors, and often 1,024 are given.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    own = (args.prefill, args.decode)
    legs = [
        start(args.model, port, device, [*flags, *of_leg])
        for port, device, of_leg in zip(ports, args.devices, own, strict=True)
    ]
    try:
        for leg, port in zip(legs, ports, strict=True):
            wait_for(leg, port)
        uvicorn.run(proxy(ports), host="127.0.0.1", port=args.port)
    finally:
        for leg in legs:
            leg.terminate()
        for leg in legs:
            leg.wait(60)


if __name__ == "__main__":
    main()
