"""A headless Chromium, driven over its own protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_LIMIT_S = 60


class Tab:
    """One page. What it says on its console is kept in `console`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")
        self.requested: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def open(self, url: str, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        """Opens `url` in a window of that size, for somebody whose system has that theme."""
        self.console.clear()
        self.requested = []
        self.resize(width, height)
        self.prefer(theme)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, theme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str, limit_s: float = 120) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + limit_s
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not within {limit_s} s: {condition}\n{self.seen()}"
            time.sleep(0.03)

    def seen(self) -> str:
        """The page's text and its console, for failures."""
        return f"{self.js('document.body.innerText')}\n{self.console}"

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).textContent"))

    def type(self, selector: str, text: str) -> None:
        """Types into a field as a keyboard would, in place of what it holds."""
        self.js(f"(e => {{ e.focus(); e.select?.(); }})(document.querySelector({selector!r}))")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Chooses an option of a list."""
        script = "e.value = %s; e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))"
        self.js(f"(e => {{ {script % json.dumps(value)} }})(document.querySelector({selector!r}))")

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """Clicks the middle of an element, or a place within it."""
        find = f"document.querySelector({selector!r})"
        self.js(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.js(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({find}.getBoundingClientRect())")
        at = {
            "x": box["x"] + (box["width"] / 2 if x is None else x),
            "y": box["y"] + (box["height"] / 2 if y is None else y),
        }
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def key(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = ["--headless=new", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={home}", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", "--no-default-browser-check"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        log = Path(home) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=out, stderr=out)
        sockets: list[ClientConnection] = []
        try:
            port = _port(process, Path(home) / "DevToolsActivePort", log)

            def tab() -> Tab:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
                with urllib.request.urlopen(request, timeout=30) as response:
                    url = json.load(response)["webSocketDebuggerUrl"]
                sockets.append(connect(url, max_size=None, open_timeout=30, compression=None))
                return Tab(sockets[-1])

            yield tab
        finally:
            for socket in sockets:
                socket.close()
            process.terminate()
            process.wait(30)


def _port(process: "subprocess.Popen[bytes]", file: Path, log: Path) -> int:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start:\n{log.read_text()[-3000:]}")
