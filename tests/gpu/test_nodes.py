"""Engines that are more than one machine's: Ray as executor, and two nodes that share a host, with
a GPU each."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import (
    SERVER_FLAGS,
    Oracle,
    Server,
    commands_in_session,
    free_port,
    headless,
    prompt_of,
    serving,
    wait_until_gone,
)
from tests.gpu.test_engines import GPUS, load, one

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 NVIDIA GPUs")]

RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
LIMIT_S = 90

# Two machines share no memory, and neither sees the other's GPUs, so these are off there.
APART = ("--disable-custom-all-reduce",)
APART_ENV = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_HOST_IP": "127.0.0.1"}


@RAY
@pytest.mark.parametrize("parallel", ["-tp", "-pp"])
def test_ray(parallel: str, tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, parallel, "2", "--distributed-executor-backend", "ray")
    with serving(tiny_model, tmp_path / "log", *flags) as server:
        exact(server, oracle, requests=500)
        assert any("raylet" in command for command in commands_in_session(server)), (
            "no process of Ray's"
        )
        end(server)
        wait_until_gone(server)


@pytest.mark.parametrize("parallel", ["-tp", "-pp"])
def test_one_engine_on_two_nodes(
    parallel: str, tiny_model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """Tensor parallel ranks, or pipeline stages, of which the last, that sends the rows, is not
    where they go."""
    together = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    flags = (*SERVER_FLAGS, *APART, parallel, "2", *together)
    two_nodes(flags, ("--node-rank", "0"), ("--node-rank", "1"), tiny_model, oracle, tmp_path)


@pytest.mark.parametrize(
    "expert_parallel", [(), ("--enable-expert-parallel",)], ids=["alone", "expert parallel"]
)
def test_data_parallel_on_two_nodes(
    expert_parallel: tuple[str, ...], tiny_model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    together = (
        "--data-parallel-address",
        "127.0.0.1",
        "--data-parallel-rpc-port",
        str(free_port()),
    )
    flags = (
        *SERVER_FLAGS,
        *APART,
        *expert_parallel,
        "-dp",
        "2",
        "--data-parallel-size-local",
        "1",
        *together,
    )
    two_nodes(flags, (), ("--data-parallel-start-rank", "1"), tiny_model, oracle, tmp_path)


def two_nodes(
    flags: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    model: Path,
    oracle: Oracle,
    folder: Path,
) -> None:
    """A server whose engine is on two nodes with a GPU each: exact, and gone when both were told to
    end."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")

    def env(node: int) -> dict[str, str]:
        return {**APART_ENV, "CUDA_VISIBLE_DEVICES": gpus[node]}

    with (
        headless(model, folder / "second", *flags, *second, env=env(1)) as node,
        serving(model, folder / "log", *flags, *first, env=env(0), beside=[node]) as server,
    ):
        exact(server, oracle, requests=200)
        end(server)
        node.process.terminate()
        node.process.wait(LIMIT_S)
        wait_until_gone(server)
        wait_until_gone(node)


def exact(server: Server, oracle: Oracle, requests: int) -> None:
    for length in (1, 32, 65, 150):
        one(server, oracle, prompt=prompt_of(length, length), max_tokens=9)
    rows, _ = load(server, oracle, requests)
    print(f"{requests} requests, {rows} rows exact")


def end(server: Server) -> None:
    """As a service manager ends it: the one process that it knows of is told to."""
    server.process.terminate()
    assert server.process.wait(LIMIT_S) == 0
