"""A browser, and the page by both who serve it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest

from routed_experts.protocol.saved import ModelInfo
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
    with serving(tiny_model) as server:
        yield server


@pytest.fixture(scope="session")
def weighing_api(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--enable-return-routed-expert-weights") as server:
        yield server


@contextmanager
def viewing(*answers: Any, text: str | None = None, given: ModelInfo | None = None) -> Iterator[str]:
    """Serves a file with answers, as `routed-experts view` does; gives the page's address."""
    text = "".join(json.dumps(one) + "\n" for one in answers) if text is None else text
    with viewing_files({"answers.jsonl": text}, given) as url:
        yield url


@contextmanager
def viewing_files(texts: Mapping[str, str], given: ModelInfo | None = None) -> Iterator[str]:
    """The same with the texts of files by name."""
    with TemporaryDirectory() as folder:
        files = []
        for place, (name, text) in enumerate(texts.items()):
            path = Path(folder, str(place))
            path.write_text(text, encoding="utf-8", newline="")
            files.append(ViewedFile(name, path, ModelInfo()))
        with ViewServer(files, 0, given) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield server.url
            server.shutdown()


@pytest.fixture
def viewed() -> Iterator[Viewed]:
    with ExitStack() as stack:
        yield lambda *answers, **about: stack.enter_context(viewing(*answers, **about))
