"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots docs/images"""

import io
import json
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

from PIL import Image

from routed_experts.server.cli.tiny_model import make_tiny_model
from routed_experts.server.cli.view import ViewServer
from tests.contract.served import serving_weights
from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab, browser

KV = ("--kv-cache-memory-bytes", "8388608", "--max-model-len", "2048")
ENDED = "document.querySelector('#summary').textContent.includes('finish reason')"
SHOWN = {
    "chat": [("1440", "light"), ("420", "dark")],
    "two": [("1440", "dark"), ("420", "light")],
    "long": [("1440", "light"), ("420", "dark")],
}
SIZES = {"1440": (1440, 1000), "420": (420, 1000)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, browser() as tabs:
        tab, model = tabs(), Path(directory) / "model"
        make_tiny_model(model)
        with serving_weights(model, "--dtype", "float32", "--enforce-eager", *KV) as api:
            for name, theme in SHOWN["chat"]:
                tab.open(f"{api.url}/routed_experts", *SIZES[name], theme=theme)
                ask(tab)
                take(tab, folder / f"page-chat-{name}-{theme}.png")
        saved = {"long": [answer(rows_of(4000, 60, 10, 512), 400)], "two": two_that_part(299, 60, at=110)}
        for what, answers in saved.items():
            for name, theme in SHOWN[what]:
                view(tab, what, answers, SIZES[name], theme)
                take(tab, folder / f"page-{what}-{name}-{theme}.png")


def ask(tab: Tab) -> None:
    tab.wait("!document.querySelector('#ask').hidden")
    tab.type("#max-tokens", "160")
    tab.type("#prompt", "Which experts does this question go to, and why?")
    tab.click("#send")
    tab.wait(ENDED)
    tab.click("#tokens-a [data-i='80']")


def view(tab: Tab, name: str, answers: list[dict[str, Any]], size: tuple[int, int], theme: str) -> None:
    text = "".join(json.dumps(one) + "\n" for one in answers)
    with ViewServer({f"{name}.jsonl": text}, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        tab.open(server.url, *size, theme=theme)
        tab.wait(ENDED, 60)
        tab.wait("document.querySelectorAll('#tokens-a [data-rare]').length > 100", 60)
        if len(answers) > 1:
            tab.wait("!document.querySelector('#go').hidden")
            tab.click("#go")
        server.shutdown()


def take(tab: Tab, path: Path) -> None:
    tab.js("document.activeElement.blur(), scrollTo(0, 0), new Promise(done => setTimeout(done, 500))")
    with Image.open(io.BytesIO(tab.screenshot())) as shot:  # 64 colours are a third of the bytes
        shot.convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
