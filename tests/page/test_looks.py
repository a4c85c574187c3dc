"""How the page looks, sounds and moves: themes, widths, contrast, names and roles, speed."""

import base64
import importlib.util
import io
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.page.answers import answer, rows_of, two_that_part
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.seen import GUTTER, compare, show

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_light_dark_and_every_width(tab: Tab, viewed: Viewed, width: int) -> None:
    """page: as the system has it, unless the switch says otherwise; nothing is wider than the
    window, or cut off."""
    two = two_that_part(149, 20, 70, has_weights=True)
    compare(tab, viewed(*two), width=width, theme="dark")
    background, pixel = (
        "getComputedStyle(document.body).backgroundColor",
        "$('#load-scale canvas').toDataURL()",
    )
    dark, dark_pixel = tab.js(background), tab.js(pixel)
    tab.prefer("light")
    tab.wait(f"{background} !== '{dark}'")
    light = tab.js(background)
    tab.wait(f"{pixel} !== '{dark_pixel}'")  # what is drawn follows
    tab.choose("#theme", "dark")
    assert tab.js(background) == dark
    tab.prefer("dark")
    tab.choose("#theme", "light")
    assert tab.js(background) == light
    tab.choose("#theme", "auto")
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.js("$('#map canvas').getBoundingClientRect().right") <= width
    assert tab.js("$('.side').clientWidth <= $('.left').clientWidth")
    assert tab.js("$$('.chip').every(c => c.scrollWidth <= c.clientWidth)")
    tops = "[...saves.children].map(button => button.getBoundingClientRect().top)"
    assert tab.js(f"$$('.saves').every(saves => new Set({tops}).size === 1)")


def test_scrollbars_are_dark_in_the_dark_theme(tab: Tab, viewed: Viewed) -> None:
    compare(tab, viewed(*two_that_part(149, 20, 70)), theme="dark")
    left, top, width = tab.scroll_to("#tokens-a")
    with Image.open(io.BytesIO(tab.screenshot())) as shot:
        strip = shot.convert("L").crop(
            (int(left + width) - 12, int(top) + 3, int(left + width) - 2, int(top) + 150)
        )
        assert strip.getextrema()[1] < 128


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.release), "dark"])
def test_axe_finds_nothing_serious(tab: Tab, viewed: Viewed, theme: str) -> None:
    """And screen readers find what is drawn by its name."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core-python is not installed")
    axe = Path(spec.origin).with_name("axe.min.js").read_text()
    violations = []
    two, none = viewed(*two_that_part(49, 20, 30)), viewed(texts={})
    for url, width in ((two, 1440), (two, 390), (none, 390)):
        tab.open(url, width=width, theme=theme)
        if url == two:
            tab.wait("!$('#views').hidden")
            tab.choose("#pick-b", "1")
            tab.click("#detail tbody tr:nth-child(2) .chip")
            tab.wait("$('#experts tbody tr')")
            nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
            named = {
                (node["role"]["value"], node.get("name", {}).get("value"))
                for node in nodes
                if not node["ignored"]
            }
            assert {
                ("application", "Experts by token and layer"),
                ("application", "Load by layer and expert"),
            } <= named
            assert {
                ("listbox", "Tokens of the response"),
                ("listbox", "Tokens of the compared response"),
            } <= named
        tab.call("Runtime.evaluate", expression=axe)
        result = tab.js(
            "axe.run({resultTypes: ['violations']})"
            ".then(r => r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html + n.failureSummary)]))"
        )
        violations += [one for one in result if one[0] in ("serious", "critical")]
    tab.console.clear()
    assert violations == []


IN_SIGHT = "(b => b.top >= -1 && b.bottom <= innerHeight + 1)($({!r}).getBoundingClientRect())"


@pytest.mark.parametrize("width", [1440, 390])
def test_what_a_click_changes_comes_into_sight(tab: Tab, viewed: Viewed, width: int) -> None:
    """The tokens at the first difference; an expert that was chosen elsewhere on the page; an
    error."""
    compare(tab, viewed(*two_that_part(149, 20, 70)), width=width, height=800)
    tab.wait_for_text("#parting", "149")
    tab.click("#go")
    tab.wait(IN_SIGHT.format("#text-title"), 10)
    tab.wait(
        f"$('#tokens-a .selected').dataset.i === '70' && {IN_SIGHT.format('#tokens-a .selected')}",
        10,
    )
    tab.click("#detail tbody tr:nth-child(3) .chip")
    tab.wait_for_text("#expert-title", "Expert ")
    tab.wait(IN_SIGHT.format("#expert-title"), 10)
    tab.js("scrollTo(0, 1e9)")
    tab.js(
        "document.dispatchEvent(Object.assign(new Event('drop'), {dataTransfer: {files: [], items: []}}))"
    )
    tab.wait(f"!$('#error').hidden && {IN_SIGHT.format('#error')}", 10)
    tab.console.clear()


MIXED = """(() => {
  const canvas = $('#map canvas'), picture = canvas.getContext('2d');
  const [width, tall, mixed] = [canvas.width, %(tall)d, new Set()];
  const pixels = new Uint32Array(picture.getImageData(0, %(top)d, width, 8 * tall).data.buffer);
  for (let x = 60; x < width - 60; x += 7) for (let y = 0; y < 8 * tall; y++) {
    if (pixels[y * width + x] !== pixels[(tall * Math.floor(y / tall) + (tall >> 1)) * width + x]) mixed.add(x);
  }
  return [...mixed];
})()"""


def test_fit_keeps_layers_apart(tab: Tab, viewed: Viewed) -> None:
    """page: tokens that share a pixel are averaged where experts differ, layers are not."""
    rows = rows_of(5000, 8, 2, 16)
    # differs in every other layer
    other = np.where(np.arange(8)[:, None] % 2, rows, (rows + 1) % 16)
    compare(tab, viewed(answer(rows, 1), answer(other, 1)))
    tab.wait_for_text("#parting-text", "5000 positions \u00d7 8 layers")
    assert tab.js("$('#map').scrollWidth > 2 * $('#map').clientWidth")
    tab.click("#fit")
    tab.wait("$('#map').scrollWidth <= $('#map').clientWidth")
    tab.click("#map", GUTTER + (tab.js("$('#map').clientWidth") - 42) * 3000.5 / 5001, 25)
    # as exact as a pixel is
    tab.wait("Math.abs($('#detail-token').textContent.split(' ')[1] - 3000) < 8")
    tab.click("#map", 41, 25)  # the selected token at the left edge
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    tab.wait("Number($('#map-status').textContent.split(' ')[1]) < 8")
    for band in range(3):  # A, B and where they differ
        tab.wait(f"!{MIXED % {'tall': 26, 'top': 20 + band * (8 * 26 + 10)}}.length", 60)
    tab.console.clear()  # where the browser advises against reading pictures


def test_help_is_folded_from_the_second_visit_on(tab: Tab, viewed: Viewed) -> None:
    url = viewed(answer(rows_of(9, 2, 2, 8), 3))
    is_open = "$$('details.how').map(e => e.open)"
    show(tab, url)
    assert set(tab.js(is_open)) == {True}
    show(tab, f"{url}?again")
    assert set(tab.js(is_open)) == {False}
    tab.click("details.how summary")
    assert tab.js("$('details.how p').checkVisibility()")


def fills_in(pdf: bytes) -> set[str]:
    """The colours that a PDF fills with."""
    fills = set()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            operators = zlib.decompress(stream)
        except zlib.error:  # a font's, or not compressed
            continue
        for parts in re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b", operators):
            fills.add("#" + "".join(f"{round(255 * float(part)):02x}" for part in parts))
    return fills


def test_colours_are_printed(tab: Tab, viewed: Viewed) -> None:
    """Those of the light theme, and no dark ground; the screen stays as it was."""
    compare(tab, viewed(*two_that_part(49, 20, 30)), theme="dark")
    tab.choose("#theme", "dark")
    tab.choose("#mode", "expert")
    tab.wait("$('#legend i')")
    ground = tab.js("getComputedStyle(document.body).backgroundColor")
    printed = tab.call("Page.printToPDF", printBackground=False)
    fills = fills_in(base64.b64decode(printed["data"]))
    assert {"#e69f00", "#56b4e9", "#18202c"} <= fills  # swatches, and text
    assert not fills & {"#161c26", "#0d1117"}
    assert tab.js("getComputedStyle(document.body).backgroundColor") == ground
