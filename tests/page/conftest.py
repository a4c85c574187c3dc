"""A browser, and the page by both who serve it. All tests share the browser, its tab and the two
servers."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest

from routed_experts.server.tools.view import ViewedFile, ViewServer
from tests.contract.served import serving
from tests.e2e.harness import Server
from tests.page.browser import CHROMIUM, Tab, browser

Viewed = Callable[..., str]


@pytest.fixture(scope="session")
def the_tab() -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with browser() as tabs:
        yield tabs()


@pytest.fixture
def tab(the_tab: Tab) -> Iterator[Tab]:
    """A tab, whose console must stay empty; a test that expects messages clears it."""
    yield the_tab
    console = list(the_tab.console)
    the_tab.call("Page.navigate", url="about:blank")
    assert console == []


@pytest.fixture(scope="session")
def api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--enable-return-routed-expert-weights") as server:
        yield server


@contextmanager
def viewing(texts: Mapping[str, str]) -> Iterator[str]:
    """Serves files with these texts by name, as `routed-experts view` does; gives the page's
    address."""
    with TemporaryDirectory() as folder:
        files = []
        for number, (name, text) in enumerate(texts.items()):
            path = Path(folder, str(number))
            path.write_text(text, encoding="utf-8", newline="")
            files.append(ViewedFile(name, path))
        with ViewServer(files, 0) as server:
            Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server.url
            server.shutdown()


@pytest.fixture
def viewed() -> Iterator[Viewed]:
    """Serves a file with answers of a model of `num_experts`, or files with these texts by name."""
    with ExitStack() as stack:

        def serve(
            *answers: Any,
            texts: Mapping[str, str] | None = None,
            num_experts: int | None = None,
        ) -> str:
            bodies = [*answers]
            if num_experts is not None:
                bodies[0] = {**bodies[0], "routed_experts_info": {"num_experts": num_experts}}
            lines = "".join(json.dumps(one) + "\n" for one in bodies)
            return stack.enter_context(
                viewing({"answers.jsonl": lines} if texts is None else texts)
            )

        yield serve
