"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots
docs/images"""

import io
import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.served import serving_weights
from tests.page.answers import two_that_part
from tests.page.browser import Tab, browser
from tests.page.conftest import viewing
from tests.page.seen import ask, compare

KV = ("--kv-cache-memory-bytes", "8388608", "--max-model-len", "2048")
FLAGS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--enable-return-routed-expert-weights",
    *KV,
)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, browser() as tabs:
        tab, model = tabs(), Path(directory) / "model"
        make_tiny_model(model)
        with serving_weights(model, *FLAGS) as api:
            for width, theme in ((1440, "light"), (420, "dark")):
                tab.open(f"{api.url}/routed_experts", width, 1160, theme)
                ask(tab, "Which experts does this question go to, and why?", 160, kind="chat")
                tab.wait_for_text("#summary", "finish reason")
                tab.click("#tokens-a [data-i='80']")
                take(tab, folder / f"page-chat-{width}-{theme}.png")
        with viewing(
            {"two.jsonl": "\n".join(map(json.dumps, two_that_part(299, 60, 110, has_weights=True)))}
        ) as url:
            compare(tab, url, height=1160, theme="dark")
            tab.wait_for_text("#parting", "299")
            tab.click("#go")
            take(tab, folder / "page-two-1440-dark.png")


def take(tab: Tab, path: Path) -> None:
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)  # off the tokens
    tab.js(
        "document.activeElement.blur(), scrollTo(0, 0), new Promise(done => setTimeout(done, 500))"
    )
    with Image.open(io.BytesIO(tab.screenshot())) as shot:  # fewer colours would change the scales
        shot.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
