"""What the tiers share: the tiny model, its oracle and one server with the settings that provoke
the most.

Nothing here imports vLLM or torch before a fixture needs it: tests of modules that need neither
start in a second.
"""

import gc
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.documentation import run_by
from tests.long_runs import CASES
from tests.programs import fork_server

if TYPE_CHECKING:
    from tests.e2e.harness import Oracle, Server

# Drafts from n-grams start numba's threads, and torch then computes in as many, in a process that
# has one for all else: forward passes take ten times as long.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

for folder in ("capture", "clients", "contract", "e2e", "protocol", "server"):
    # Asserts of what its tests share say what they compared, too.
    pytest.register_assert_rewrite(f"tests.{folder}")

VLLM_PORT = 8000
LONG_LIMIT_S = 2 * 3600
SHOWN_CHARS = 2000
SHOWN_LINE = 300
PAGE = "tests/page/"
FIRST = [PAGE]
FIRST += [
    f"tests/e2e/test_{name}.py"
    for name in ("completions", "router_input", "new_weights", "stopping", "shapes")
]
FIRST += [f"tests/e2e/test_{name}.py" for name in ("situations", "torture", "models_in_motion")]
"""What takes longest, in `make test` and in `make test-release`."""


def group_of(nodeid: str) -> str:
    """Tests of a group run in one process: those of a file, all that share a browser or, in
    `tests/gpu`, those with a parameter."""
    file = nodeid.partition("::")[0]
    if file.startswith(PAGE):
        return PAGE
    if file.startswith("tests/gpu/"):
        return nodeid.partition("[")[2] or nodeid
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of pytest-xdist's own groups (3.8), which pytest 9.2 does not see."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log) if config.getvalue("dist") in ("loadfile", "loadgroup") else None


def pytest_configure(config: pytest.Config) -> None:
    running = ExitStack()
    running.enter_context(fork_server())
    config.add_cleanup(running.close)


def _hide_attributes_that_llvmlite_makes_up() -> None:
    """llvmlite's object for its library answers any name with a function, `__dict__` too. vLLM's
    engine on CPUs asks all objects of all modules for it, and ends there once a test before it in
    the same process has imported numba, as that of n-gram drafts does."""
    with suppress(ImportError):
        from llvmlite.binding import ffi

        library = type(ffi.lib)
        made_up = library.__getattr__

        def getattr_(self: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return made_up(self, name)

        library.__getattr__ = getattr_


_hide_attributes_that_llvmlite_makes_up()


MARKS_OF_FILE = re.compile(r"^pytestmark = (\[\n(    .*\n)+\]|.*)", re.MULTILINE)
LEFT_OUT = re.compile(r"(\w+ and )?not \(([\w ]+)\)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of which `-m "not (…)"` takes no test: in `make test-fast`, a third of them."""
    left_out = LEFT_OUT.fullmatch(config.option.markexpr)
    if not left_out or not collection_path.match("test_*.py"):
        return None
    marks = MARKS_OF_FILE.search(collection_path.read_text(encoding="utf-8"))
    names = re.findall(r"mark\.(\w+)", marks[0]) if marks else []
    return not set(names).isdisjoint(left_out[2].split(" or ")) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """What modules make as they are imported lives to the end: no collection of garbage looks at
    it, here or in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))

    def order(item: pytest.Item) -> tuple[int, bool]:
        group = group_of(item.nodeid)
        rank = FIRST.index(group) if group in FIRST else len(FIRST)
        return rank, item.get_closest_marker("e2e") is None

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """The end of what a test printed and logged: servers in its process may fill many screens."""
    report = yield
    report.sections = [
        (name, "\n".join(line[:SHOWN_LINE] for line in text[-SHOWN_CHARS:].splitlines()))
        for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def environment_of_others() -> Iterator[None]:
    """vLLM's configurations set variables (one for an external launcher has no engine process): not
    for later tests.

    And an engine core in this process keeps vLLM's variables as they were at its start, for the
    whole process.
    """
    _forget_variables()
    with patch.dict(os.environ):
        yield
    _forget_variables()


def _forget_variables() -> None:
    if envs := sys.modules.get("vllm.envs"):
        envs.disable_envs_cache()


@pytest.fixture(autouse=True)
def no_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may run beside the tests, on vLLM's default port: they bind only what `free_port` or
    the system gave."""
    bind = socket.socket.bind

    def bind_another(sock: socket.socket, address: Any) -> None:
        assert isinstance(address, str | bytes) or address[1] != VLLM_PORT, (
            f"a test takes port {VLLM_PORT}"
        )
        bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind_another)


class Cases:
    """How many cases a test has tried, for the report of `make test-long`."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int = 1) -> None:
        self.count += count


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[Cases]:
    counted = Cases()
    yield counted
    request.node.user_properties.append((CASES, counted.count))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from routed_experts.server.cli.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> "Oracle":
    from tests.e2e.harness import Oracle

    return Oracle(tiny_model)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """The server that most end-to-end tests share."""
    from tests.e2e.harness import serving_what_provokes_most

    with serving_what_provokes_most(tiny_model, tmp_path_factory.mktemp("server") / "log") as one:
        yield one


@pytest.fixture
def documented(request: pytest.FixtureRequest) -> list[str]:
    """The blocks of the documentation's pages that say that this test runs them."""
    blocks = run_by(request.node.nodeid.partition("[")[0])
    assert blocks, "no page says that this test runs something of it"
    return blocks
