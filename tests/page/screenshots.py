"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots docs/images

With --all, each at three widths in both themes, and as high as the page: python -m tests.page.screenshots FOLDER --all
"""

import io
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.served import serving_weights
from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab, browser
from tests.page.conftest import viewing

KV = ("--kv-cache-memory-bytes", "8388608", "--max-model-len", "2048")
# Width and theme of the pictures of each.
SHOWN = {
    "chat": [(1440, "light"), (420, "dark")],
    "two": [(1440, "dark")],
    "long": [],
}
ALL = list(itertools.product((1440, 1024, 390), ("light", "dark")))


def long() -> dict[str, str]:
    return {"long.jsonl": json.dumps(answer(rows_of(4000, 58, 8, 256), 400))}


def two() -> dict[str, str]:
    return {"two.jsonl": "\n".join(map(json.dumps, two_that_part(299, 60, at=110)))}


def select(tab: Tab, what: str) -> None:
    """Selects something to look at."""
    if what == "two":
        tab.choose("#pick-b", "1")
        tab.wait_for("#go")
        tab.click("#go")
    elif what == "long":
        tab.click("#fit")


def main(folder: Path, shown: dict[str, list[tuple[int, str]]], is_whole: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, browser() as tabs:
        tab, model = tabs(), Path(directory) / "model"
        make_tiny_model(model)
        with serving_weights(model, "--dtype", "float32", "--enforce-eager", *KV) as api:
            for width, theme in shown["chat"]:
                tab.open(f"{api.url}/routed_experts", width, 1000, theme)
                tab.wait_for("#ask")
                if is_whole:
                    take(tab, folder / f"page-empty-{width}-{theme}.png")
                tab.type("#max-tokens", "160")
                tab.type("#prompt", "Which experts does this question go to, and why?")
                tab.click("#send")
                tab.wait_for_text("#summary", "finish reason")
                tab.click("#tokens-a [data-i='80']")
                take(tab, folder / f"page-chat-{width}-{theme}.png", is_whole)
        saved: Iterable[Callable[[], dict[str, str]]] = (two, long)
        for files in saved:
            what = files.__name__
            with viewing(files()) as url:
                for width, theme in shown[what]:
                    tab.open(url, width, 1000, theme)
                    tab.wait_for_text("#summary", "finish reason")
                    select(tab, what)
                    take(tab, folder / f"page-{what}-{width}-{theme}.png", is_whole)


def take(tab: Tab, path: Path, is_whole: bool = False) -> None:
    tab.js("document.activeElement.blur(), scrollTo(0, 0), new Promise(done => setTimeout(done, 500))")
    with Image.open(io.BytesIO(tab.screenshot(is_whole))) as shot:  # 64 colours are a third of the bytes
        shot.convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    is_all = "--all" in sys.argv
    main(Path(sys.argv[1]), dict.fromkeys(SHOWN, ALL) if is_all else SHOWN, is_all)
