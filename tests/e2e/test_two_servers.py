"""Two servers with one bucket, a router before them and a trainer behind them, while one of the
servers is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import ASK, SMALL_KV, free_port, prompt_of, serving, wait_until
from tests.weed import environment, weed

pytestmark = [pytest.mark.e2e, pytest.mark.release]

ROUTER = "vllm-router==0.1.17"
REQUESTS = 1000


@contextmanager
def routing(folder: Path, *urls: str) -> Iterator[str]:
    """The address of vllm-router before these servers."""
    package = folder / "router"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", package]
    subprocess.run([*install, ROUTER], check=True)
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--policy", "round_robin", "--worker-urls", *urls]
    command += ["--prometheus-port", str(free_port(port))]
    with (folder / "router.log").open("w") as log:
        router = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(package)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_up(f"{address}/health"), (folder / "router.log").read_text, 60)
        yield address
    finally:
        router.kill()
        router.wait()


def is_up(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_no_reference_is_lost_with_the_server_that_sent_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        bucket = stack.enter_context(weed(tmp_path / "weed"))
        env = {**os.environ, **environment(bucket.port)}
        flags = (*SMALL_KV, "--max-model-len", "512", "--routed-experts-store", "s3://bucket/trial")
        servers = [
            stack.enter_context(serving(tiny_model, tmp_path / f"log{index}", *flags, env=env))
            for index in range(2)
        ]
        router = stack.enter_context(routing(tmp_path, *(server.url for server in servers)))
        client = stack.enter_context(httpx.Client(base_url=router, timeout=120))
        answers: list[dict[str, Any]] = []
        half = threading.Event()

        def ask(number: int) -> None:
            prompt = prompt_of(5 + number % 20, number)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 3 + number % 4}
            body |= {**ASK, "routed_experts_delivery": "reference"}
            response = client.post("/v1/completions", json=body)
            if response.status_code != 200:  # the server that was killed had it
                return
            (choice,) = response.json()["choices"]
            references = [response.json()["prompt_routed_experts"], choice["routed_experts"]]
            answers.append({"tokens": [*prompt, *choice["token_ids"]], "references": references})
            if len(answers) >= REQUESTS // 2:
                half.set()

        def kill_one() -> None:
            assert half.wait(500)
            os.killpg(servers[0].process.pid, signal.SIGKILL)  # as where a pod is killed

        threading.Thread(target=kill_one, daemon=True).start()
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(ask, range(REQUESTS)))
        assert servers[0].process.poll() is not None
        assert REQUESTS - 40 <= len(answers) <= REQUESTS
        for answer in answers:
            assert all(
                server["uri"].startswith("s3://bucket/trial/") for server in answer["references"]
            )
        lines = "".join(f"{json.dumps(answer)}\n" for answer in answers)
        trainer = [sys.executable, "-m", "tests.e2e.bucket_trainer", str(tiny_model)]
        done = subprocess.run(trainer, input=lines, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert int(done.stdout.split()[-1]) == len(answers)
