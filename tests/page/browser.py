"""A headless Chromium, driven over its own protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.e2e.harness import wait_until

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LIMIT_S = 120


# Gives the place to click in the window, or null if the element is not there (yet). Notes whether
# the element, or the one that is in its place by then, has a click; if `is_given`, at that place
# within it.
_LISTENS = """(() => {
  const element = $(%(selector)s);
  if (!element?.getClientRects().length) return null; // not there, or not shown
  element.scrollIntoView({block: 'center'});
  const inside = b => [%(place)s];
  globalThis.isClicked = false;
  const notes = event => {
    const hit = event.target.closest?.(%(selector)s), b = hit?.getBoundingClientRect();
    const off = b ? Math.hypot(event.clientX - b.x - inside(b)[0], event.clientY - b.y - inside(b)[1]) : Infinity;
    globalThis.isClicked ||= hit != null && (off < 2 || !%(is_given)s);
  };
  addEventListener('click', notes, {capture: true, once: true});
  const wider = (one, other) => (other.width > one.width ? other : one); // a token may be on two lines
  const b = %(is_given)s ? element.getBoundingClientRect() : [...element.getClientRects()].reduce(wider);
  return {x: b.x + inside(b)[0], y: b.y + inside(b)[1]};
})()"""


class Tab:
    """One page. What it says on its console is kept in `console`, and what it loads in
    `requested`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.console: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of Chromium's protocol. What it tells before that is noted."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled":
                self.console.append(str([argument.get("value") for argument in params["args"]]))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(
                    details.get("exception", {}).get("description", details["text"])
                )
            case "Log.entryAdded":
                self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    def open(self, url: str, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        """Opens `url` in a window of that size, for somebody whose system has that theme."""
        self.console.clear()
        self.requested.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.prefer(theme)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def prefer(self, theme: str) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited. `$` finds an element, and `$$` all."""
        find = (
            "const $ = s => document.querySelector(s), $$ = s => [...document.querySelectorAll(s)];"
        )
        script = f"(() => {{ {find} return ({expression}) }})()"
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str, limit_s: float = LIMIT_S) -> None:
        """Waits until an expression is true."""
        wait_until(
            lambda: self.js(f"Boolean({condition})"),
            lambda: (
                f"not within {limit_s} s: {condition}\n{self.js('document.body.innerText')}\n{self.console}"
            ),
            limit_s,
        )

    def text(self, selector: str) -> str:
        return str(self.js(f"$({selector!r}).textContent"))

    def texts(self, selector: str) -> list[str]:
        """Of every element that fits."""
        contents: list[str] = self.js(f"$$({selector!r}).map(e => e.textContent)")
        return contents

    def count(self, selector: str) -> int:
        return int(self.js(f"$$({selector!r}).length"))

    def is_hidden(self, selector: str) -> bool:
        return bool(self.js(f"$({selector!r}).hidden"))

    def wait_for(self, selector: str) -> None:
        """Waits until an element is shown."""
        self.wait(f"!$({selector!r}).hidden")

    def wait_for_text(self, selector: str, text: str) -> None:
        """Waits until an element has `text` in it."""
        self.wait(f"$({selector!r}).textContent.includes({json.dumps(text)})")

    def type(self, selector: str, text: str) -> None:
        """Types into a field as a keyboard would, in place of what it holds."""
        self.js(f"(e => {{ e.focus(); e.select?.(); }})($({selector!r}))")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Chooses an option of a list."""
        script = "e.value = %s; e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))"
        self.js(f"(e => {{ {script % json.dumps(value)} }})($({selector!r}))")

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """Clicks the middle of an element, or a place within it.

        Until the element has the click: on a busy machine it may move meanwhile, or the page puts
        another in its place.
        """
        wait_until(
            lambda: self._clicked(selector, x, y), lambda: f"no click reaches {selector}", LIMIT_S
        )

    def _clicked(self, selector: str, x: float | None, y: float | None) -> bool:
        point, is_given = (
            f"{'b.width / 2' if x is None else x}, {'b.height / 2' if y is None else y}",
            x is not None,
        )
        at = self.js(
            _LISTENS
            % {"selector": json.dumps(selector), "place": point, "is_given": json.dumps(is_given)}
        )
        if at is None:
            return False
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        return bool(self.js("globalThis.isClicked"))

    def scroll_to(self, selector: str) -> list[float]:
        """Brings an element into sight; its left and top edge, and its width, in the window."""
        # the page has heard of it
        then = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.js(f"new Promise(done => {{ $({selector!r}).scrollIntoView(); {then} }})")
        box: list[float] = self.js(
            f"(b => [b.x, b.y, b.width])($({selector!r}).getBoundingClientRect())"
        )
        return box

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """An event of the mouse at a place in the window."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def key(self, key: str, times: int = 1) -> None:
        for kind in ("keyDown", "keyUp") * times:
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def give_file(self, selector: str, path: Path) -> None:
        """Gives a file to a field for files."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self) -> bytes:
        """A PNG of the window."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextmanager
def browser() -> Iterator[Callable[[], Tab]]:
    """A running Chromium, which makes tabs."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, ExitStack() as stack:
        flags = [
            "--headless=new",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--mute-audio",
        ]
        flags += [
            "--remote-debugging-port=0",
            f"--user-data-dir={home}",
            "--disable-background-networking",
        ]
        flags += ["--disable-component-update", "--disable-sync", "--no-default-browser-check"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        # one process for all pages, and none for those that were left or may come
        flags += ["--renderer-process-limit=1", "--disable-back-forward-cache"]
        flags += ["--disable-features=SpareRendererForSitePerProcess"]
        # else clicks and keys are lost until a page is first drawn
        flags += ["--allow-pre-commit-input"]
        log, ports = Path(home) / "log", Path(home) / "DevToolsActivePort"
        with log.open("wb") as out:
            process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=out, stderr=out)
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.terminate)

        def has_started() -> bool:
            assert process.poll() is None, f"Chromium did not start:\n{log.read_text()[-3000:]}"
            return ports.exists() and bool(ports.read_text())

        wait_until(has_started, lambda: f"Chromium did not start:\n{log.read_text()[-3000:]}")
        port = ports.read_text().split()[0]

        def tab() -> Tab:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"
            )
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                url = json.load(response)["webSocketDebuggerUrl"]
            return Tab(
                stack.enter_context(
                    connect(url, max_size=None, open_timeout=LIMIT_S, compression=None)
                )
            )

        yield tab
