"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots docs/images"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.served import serving_weights
from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab, browser
from tests.page.conftest import viewing

KV = ("--kv-cache-memory-bytes", "8388608", "--max-model-len", "2048")
SAVED = {"long": lambda: [answer(rows_of(4000, 60, 10, 512), 400)], "two": lambda: two_that_part(299, 60, at=110)}
# Width and theme of both pictures of each.
SHOWN = {
    "chat": [(1440, "light"), (420, "dark")],
    "two": [(1440, "dark"), (420, "light")],
    "long": [(1440, "light"), (420, "dark")],
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, browser() as tabs:
        tab, model = tabs(), Path(directory) / "model"
        make_tiny_model(model)
        with serving_weights(model, "--dtype", "float32", "--enforce-eager", *KV) as api:
            for width, theme in SHOWN["chat"]:
                tab.open(f"{api.url}/routed_experts", width, 1000, theme)
                tab.wait_for("#ask")
                tab.type("#max-tokens", "160")
                tab.type("#prompt", "Which experts does this question go to, and why?")
                tab.click("#send")
                tab.wait_for_text("#summary", "finish reason")
                tab.click("#tokens-a [data-i='80']")
                take(tab, folder / f"page-chat-{width}-{theme}.png")
        for what, answers in SAVED.items():
            for width, theme in SHOWN[what]:
                with viewing(*answers()) as url:
                    tab.open(url, width, 1000, theme)
                    tab.wait_for_text("#summary", "finish reason")
                    tab.wait("$$('#tokens-a [data-rare]').length > 100")
                    if what == "two":
                        tab.wait_for("#go")
                        tab.click("#go")
                    take(tab, folder / f"page-{what}-{width}-{theme}.png")


def take(tab: Tab, path: Path) -> None:
    tab.js("document.activeElement.blur(), scrollTo(0, 0), new Promise(done => setTimeout(done, 500))")
    with Image.open(io.BytesIO(tab.screenshot())) as shot:  # 64 colours are a third of the bytes
        shot.convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
