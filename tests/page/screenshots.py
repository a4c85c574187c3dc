"""Makes the pictures of the page in the documentation: python -m tests.page.screenshots
docs/images"""

import io
import sys
from pathlib import Path

from PIL import Image

from tests.page.browser import Tab, browser
from tests.page.conftest import viewing
from tests.page.seen import ended


def main(folder: Path) -> None:
    """Code in the light theme; code beside prose in the dark one."""
    with browser() as tabs, viewing({}) as url:
        tab = tabs()
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
