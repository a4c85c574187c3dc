"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots
docs/images"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.served import serving_weights
from tests.page.browser import Tab, browser
from tests.page.conftest import viewing
from tests.page.seen import ask, ended

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
            tab.open(f"{api.url}/routed_experts", 420, 1160, "dark")
            ask(tab, "Which experts does this question go to, and why?", 160, kind="chat")
            ended(tab)
            tab.click("#tokens-a [data-i='80']")
            take(tab, folder / "page-chat-420-dark.png")
        take_the_example(tab, folder)


def take_the_example(tab: Tab, folder: Path) -> None:
    """Code in the light theme; code beside prose in the dark one."""
    with viewing({}) as url:
        for theme in ("light", "dark"):
            tab.open(url, 1440, 1160, theme)
            tab.wait(
                "$('#empty-how').textContent.startsWith('Open')"
            )  # the button moves until then
            tab.click("#example")
            ended(tab)
            tab.js("$$('details.how').forEach(details => (details.open = false))")
            tab.click("#tokens-a [data-i='80']")
            if theme == "dark":
                tab.choose("#pick-b", "1")
                tab.wait_for("#side-b")
            name = "page-example-1440-light" if theme == "light" else "page-two-1440-dark"
            take(tab, folder / f"{name}.png")


def take(tab: Tab, path: Path) -> None:
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)  # off the tokens
    tab.js(
        "document.activeElement.blur(), scrollTo(0, 0), new Promise(done => setTimeout(done, 500))"
    )
    with Image.open(io.BytesIO(tab.screenshot())) as shot:  # fewer colours would change the scales
        shot.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
