"""What people do on the page, and what they see."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.harness import wait_until
from tests.page.browser import Tab

PROMPT = "Tell me something about experts."
TOKENS, SELECTED = "#tokens-a .token", "#tokens-a .selected"
TIMES = "\u00d7"
GUTTER = 40  # of the drawings: where the layers' numbers stand


def ask(tab: Tab, prompt: str = PROMPT, tokens: int = 40, kind: str = "completion") -> None:
    tab.wait_for("#ask")
    tab.js("$('#ask').open = true")
    tab.choose("#kind", kind)
    tab.type("#max-tokens", str(tokens))
    tab.type("#prompt", prompt)
    tab.click("#send")


def ended(tab: Tab) -> None:
    tab.wait_for_text("#summary", "finish reason")


def show(tab: Tab, url: str, **window: Any) -> None:
    tab.open(url, **window)
    ended(tab)


def compare(tab: Tab, url: str, **window: Any) -> None:
    """Opens a file of two responses and compares them."""
    show(tab, url, **window)
    tab.choose("#pick-b", "1")
    tab.wait_for("#side-b")


def error_in(tab: Tab) -> str:
    tab.wait_for("#error")
    return tab.text("#error")


def selected(tab: Tab, token: int) -> None:
    tab.wait(f"$('{SELECTED}')?.dataset.i === '{token}'")


def choose(tab: Tab, token: int) -> None:
    """Clicks a token until it is the selected one: what a response that has just ended adds may
    move it meanwhile."""

    def is_selected() -> bool:
        tab.click(f"#tokens-a [data-i='{token}']")
        return bool(tab.js(f"$('{SELECTED}')?.dataset.i === '{token}'"))

    wait_until(is_selected, "another token is selected", 60)


def by_weight(weights: np.ndarray) -> np.ndarray:
    """The order of a layer's choices (the last axis) on the page: the heaviest first, those of
    unknown weight last."""
    known = np.where(np.isnan(weights), -np.inf, weights)
    return np.argsort(-known, axis=-1, kind="stable")


def shows(tab: Tab, rows: np.ndarray, column: int = 1) -> None:
    """Waits until the token in full is `rows` [L, K]; all of it is filled in when the keys rest."""
    chips = f"$$('#detail tbody tr').map(row => [...(row.children[{column}]?.querySelectorAll('.chip') ?? [])])"
    ids = f"{chips}.map(row => row.map(c => c.firstChild.data === '?' ? -1 : Number(c.firstChild.data)))"
    wait_until(
        lambda: tab.js(ids) == rows.tolist(), lambda: f"{tab.js(ids)}\nnot\n{rows.tolist()}", 60
    )


def shows_weights(tab: Tab, weights: np.ndarray) -> None:
    """The same for its weights [L, K], about: `test_weights_are_written_whole` has how they are
    written."""
    small = (
        "$$('#detail tbody tr').map(row => [...row.children[1].querySelectorAll('.chip small')])"
    )
    texts = f"{small}.map(row => row.map(c => c.textContent.trim()))"

    @np.errstate(invalid="ignore")  # some tests have any bits as weights
    def is_shown() -> bool:
        shown = np.array(
            [["nan" if text == "?" else text for text in row] for row in tab.js(texts)],
            dtype=np.float64,
        )
        return shown.shape == weights.shape and np.allclose(
            shown, weights, rtol=0.051, atol=0.00051, equal_nan=True
        )

    wait_until(is_shown, lambda: f"{tab.js(texts)}\nnot\n{weights}", 60)


def tips(tab: Tab, elements: str) -> list[tuple[str, list[list[tuple[str, str | None]]]]]:
    """What the pointer shows over each of some elements: a title, and ids and weights by layer."""
    chips = "[...row.querySelectorAll('.chip')].map(c => [c.firstChild.data, c.children[0]?.textContent ?? null])"
    tip = f"[$('#tip strong').textContent, $$('#tip tr').slice(1).map(row => {chips})]"
    move = "e.dispatchEvent(new MouseEvent('mousemove', {bubbles: true}))"
    rows: list[tuple[str, list[list[tuple[str, str | None]]]]] = tab.js(
        f"$$({elements!r}).map(e => ({move}, {tip}))"
    )
    return rows


def cells(tab: Tab, table: str) -> list[list[str]]:
    """The texts of a table's cells."""
    texts: list[list[str]] = tab.js(
        f"$$('{table} tbody tr').map(r => [...r.cells].map(c => c.textContent))"
    )
    return texts


def download(tab: Tab, button: str, name: str, folder: Path) -> bytes:
    """The file that a button writes."""
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    file = folder / name
    file.unlink(missing_ok=True)
    tab.click(button)
    wait_until(lambda: file.exists() and file.stat().st_size, f"no {name}", 60)
    return file.read_bytes()
