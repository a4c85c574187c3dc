"""What the tiers share: the tiny model, its oracle and one server with the settings that provoke the most."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.envs import disable_envs_cache

from routed_experts.capture.seams.http import HAS_SCALE_OUT_FLAG
from tests.documentation import run_by
from tests.e2e.harness import ASYNC, ONE_PROCESS, SMALL_KV, Oracle, Server, serving

VLLM_PORT = 8000
BLOCK_SIZE = 32
CHUNK = 64
SHARED = "server"
"""The group of tests on the server below, which so starts once under `--dist loadgroup`."""
FIRST = (SHARED, "e2e/test_nixl", "e2e/test_torture", "e2e/test_situations", "e2e/test_stopping", "e2e/test_examples")
"""What takes longest."""
# Chunks and blocks much smaller than the defaults, so that short prompts cross both.
SERVER_FLAGS = (*SMALL_KV, "--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", str(CHUNK))
SERVER_FLAGS += ("--max-num-seqs", "16", "--max-model-len", "512")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files stay together, as their tests share engines; those of `tests/gpu` say themselves which do."""

    def order(item: pytest.Item) -> tuple[int, bool]:
        mark = item.get_closest_marker("xdist_group")
        rank = FIRST.index(mark.args[0]) if mark and mark.args[0] in FIRST else len(FIRST)
        return rank, item.get_closest_marker("e2e") is None

    for item in items:
        name = item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
        if item.get_closest_marker("xdist_group") is None and not name.startswith("gpu/"):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=order)


@pytest.fixture(autouse=True)
def environment_of_others() -> Iterator[None]:
    """vLLM's configurations set variables (one for an external launcher has no engine process): not for later tests.

    And an engine core in this process keeps vLLM's variables as they were at its start, for the whole process.
    """
    disable_envs_cache()
    with patch.dict(os.environ):
        yield
    disable_envs_cache()


@pytest.fixture(autouse=True)
def no_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may run beside the tests, on vLLM's default port: they bind only what `free_port` or the system gave."""
    bind = socket.socket.bind

    def bind_another(sock: socket.socket, address: Any) -> None:
        assert isinstance(address, str | bytes) or address[1] != VLLM_PORT, f"a test takes port {VLLM_PORT}"
        bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind_another)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from routed_experts.server.cli.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most end-to-end tests share: asynchronous scheduling, and KV blocks for few requests at once.

    It captures the routers' weights, too.
    """
    flags = (
        *SERVER_FLAGS,
        *ONE_PROCESS,
        "--num-gpu-blocks-override",
        "28",
        "--async-scheduling",
        "--enable-prompt-tokens-details",
    )
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-return-routed-expert-weights")
    flags += ("--enable-scale-out",) if HAS_SCALE_OUT_FLAG else ()
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache and /abort_requests
    with serving(tiny_model, tmp_path_factory.mktemp("server") / "log", *flags, module=ASYNC, env=env) as running:
        assert running.is_async()
        yield running


@pytest.fixture
def documented(request: pytest.FixtureRequest) -> list[str]:
    """The blocks of the documentation's pages that say that this test runs them."""
    found = run_by(re.split(r"[\[@]", request.node.nodeid)[0])
    assert found, "no page says that this test runs something of it"
    return found
