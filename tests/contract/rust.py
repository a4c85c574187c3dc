"""vLLM's front end in Rust, the real program, in front of an engine of `engine.py`."""

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import vllm
import zmq
from vllm.utils.network_utils import make_zmq_listener, make_zmq_socket
from vllm.v1.engine import (
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.contract.engine import BLOCK, NUM_BLOCKS, Core
from tests.e2e.harness import wait_until

BINARY_VARIABLE = "TEST_RUST_FRONT_END"
"""Path of a `vllm-rs`; without it, that of the installed vLLM."""


def binary() -> Path:
    """The program, of 0.33 or later. Skips the test if there is none."""
    path = Path(os.environ.get(BINARY_VARIABLE) or Path(vllm.__file__).parent / "vllm-rs")
    if not path.exists():
        pytest.skip(f"vLLM's CPU builds have no vllm-rs: set {BINARY_VARIABLE} to a CUDA wheel's")
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if tuple(map(int, re.findall(r"\d+", said)[:2])) < (0, 33):
        pytest.skip(f"{said.strip()} returns no routed experts")
    return path


@dataclass
class RustFrontEnd:
    url: str
    core: Core
    arrived: list[EngineCoreRequest]  # what has reached the engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            return client.post(path, json={"model": "tiny", **body})

    def generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        response = self.post("/inference/v1/generate", token_ids=prompt, sampling_params=sampling)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice


@contextmanager
def rust_front_end(core: Core, model: Path, folder: Path) -> Iterator[RustFrontEnd]:
    """Runs the program as vLLM's `RustFrontendProcessManager` does, and the engine in a thread."""
    program = binary()
    to_engine = make_zmq_listener(f"ipc://{folder}/in", zmq.ROUTER)
    from_engine = make_zmq_listener(f"ipc://{folder}/out", zmq.PULL)
    listening = socket.create_server(("127.0.0.1", 0))
    sockets = (listening, to_engine.socket, from_engine.socket)
    for inherited in sockets:
        inherited.set_inheritable(True)
    args = {
        "model_tag": str(model),
        "served_model_name": ["tiny"],
        "enable_scale_out": True,
        "engine_ready_timeout_secs": 60,
        "http_timeout_keep_alive": 5,
    }
    names = ("--listen-fd", "--input-listener-fd", "--output-listener-fd")
    command = [str(program), "frontend", "--engine-count", "1", "--args-json", json.dumps(args)]
    for name, inherited in zip(names, sockets, strict=True):
        command += [name, str(inherited.fileno())]
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    process = subprocess.Popen(command, pass_fds=[inherited.fileno() for inherited in sockets])
    for inherited in sockets:
        inherited.close()
    ends = threading.Event()
    arrived: list[EngineCoreRequest] = []
    engine = threading.Thread(target=_run_engine, args=(core, folder, arrived, ends), daemon=True)
    engine.start()
    try:
        _wait_until_healthy(url)
        yield RustFrontEnd(url, core, arrived)
    finally:
        process.terminate()
        process.wait(60)
        ends.set()
        engine.join(60)


def _run_engine(
    core: Core, folder: Path, arrived: list[EngineCoreRequest], ends: threading.Event
) -> None:
    """What the threads of vLLM's engine process do, in one."""
    with zmq.Context() as context:
        identity = (0).to_bytes(2, "little")
        requests = make_zmq_socket(
            context, f"ipc://{folder}/in", zmq.DEALER, identity=identity, bind=False, linger=0
        )
        outputs = make_zmq_socket(context, f"ipc://{folder}/out", zmq.PUSH, linger=0)
        requests.send(msgspec.msgpack.encode(_ready()))
        decoder, encoder = MsgpackDecoder(EngineCoreRequest), MsgpackEncoder()
        while not ends.is_set():
            while requests.poll(0 if core.is_busy() else 20):
                kind, *frames = requests.recv_multipart()
                if kind == EngineCoreRequestType.ADD.value:
                    arrived.append(decoder.decode(frames))
                    core.take(arrived[-1])
                elif kind == EngineCoreRequestType.ABORT.value:
                    core.abort_requests(MsgpackDecoder().decode(frames))
            core.turn()
            while not core.output_queue.empty():
                _, message = core.output_queue.get()
                outputs.send_multipart([bytes(part) for part in encoder.encode(message)])
        requests.close()
        outputs.close()


def _ready() -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        max_model_len=BLOCK * (NUM_BLOCKS - 1),
        num_gpu_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        dp_stats_address=None,
        dtype="float32",
        vllm_version=vllm.__version__,
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        instance_id="one",
        supports_lora=False,
        max_loras=0,
    )


def _wait_until_healthy(url: str) -> None:
    def is_healthy() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    wait_until(is_healthy, "the front end does not become healthy")
