"""A headless Firefox in the place of Chromium: `TEST_BROWSER=firefox pytest tests/page`.

Firefox speaks WebDriver BiDi. `FirefoxTab` says in it what the tests say in Chromium's protocol; what
it does not know, it skips.
"""

import itertools
import json
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.e2e.harness import free_port, wait_until
from tests.page.browser import LIMIT_S, Tab

FIREFOX = next(filter(None, map(shutil.which, ("firefox", "firefox-esr"))), None)
PREFERENCES = {
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.enabled": False,
    "browser.download.folderList": 2,
    "browser.download.useDownloadDir": True,
    "browser.download.always_ask_before_handling_new_types": False,
    "network.proxy.type": 0,
}
COLOUR_SCHEME = "layout.css.prefers-color-scheme.content-override"
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Control": "\ue009",
    "Escape": "\ue00c",
    "PageUp": "\ue00e",
    "PageDown": "\ue00f",
    "End": "\ue010",
    "Home": "\ue011",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
}
CONTROL = 2  # as a modifier in Chromium's protocol


class FirefoxTab(Tab):
    """One page, by the commands of WebDriver BiDi."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.console: list[str] = []
        self.requested: list[str] = []
        self.send("session.new", capabilities={})
        self._context = self._first_context()
        self._chrome = self._first_context("chrome")
        self.send("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self._element: Any = None
        self._at: dict[str, Any] | None = None  # the last move of the mouse

    def _first_context(self, scope: str | None = None) -> str:
        only = {"moz:scope": scope} if scope else {}
        context: str = self.send("browsingContext.getTree", **only)["contexts"][0]["context"]
        return context

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "log.entryAdded":
            self.console.append(str(params["text"]))
        elif method == "network.beforeRequestSent" and params["context"] == self._context:
            url = params["request"]["url"]
            self.requested += [url] if not url.startswith("data:") else []  # a font of its own

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of Chromium's protocol would do, and its result."""
        name = method.replace(".", "_")
        does: Callable[..., dict[str, Any] | None] | None = getattr(self, f"_{name}", None)
        if does is None:
            pytest.skip(f"{method} has no counterpart here")
        return does(**params) or {}

    def _Page_navigate(self, url: str) -> None:
        self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def _Emulation_setDeviceMetricsOverride(self, width: int, height: int, **_: Any) -> None:
        size = {"width": width, "height": height}
        self.send("browsingContext.setViewport", context=self._context, viewport=size)

    def _Emulation_setEmulatedMedia(self, features: list[dict[str, str]]) -> None:
        (feature,) = features
        number = ("dark", "light").index(feature["value"])
        self._in_chrome(f"Services.prefs.setIntPref({COLOUR_SCHEME!r}, {number})")

    def _Browser_setDownloadBehavior(self, downloadPath: str, **_: Any) -> None:
        path = json.dumps(downloadPath)
        self._in_chrome(f"Services.prefs.setStringPref('browser.download.dir', {path})")

    def _in_chrome(self, expression: str) -> None:
        target = {"context": self._chrome}
        done = self.send(
            "script.evaluate", expression=expression, target=target, awaitPromise=False
        )
        assert done["type"] == "success", done

    def _Runtime_evaluate(self, expression: str, **options: Any) -> dict[str, Any]:
        if options.get("returnByValue"):
            expression = f"(async () => JSON.stringify(await ({expression})))()"
        target = {"context": self._context}
        done = self.send("script.evaluate", expression=expression, target=target, awaitPromise=True)
        if done["type"] != "success":
            return {"exceptionDetails": done["exceptionDetails"]}
        text = done["result"].get("value")
        is_json = options.get("returnByValue") and isinstance(text, str)
        return {"result": {"value": json.loads(text) if is_json else None}}

    def _Input_dispatchMouseEvent(self, type: str, x: float, y: float, **more: Any) -> None:
        move = {"type": "pointerMove", "x": round(x), "y": round(y)}
        if type == "mouseWheel":
            delta = {"deltaX": round(more["deltaX"]), "deltaY": round(more["deltaY"])}
            wheel = {"type": "scroll", "x": round(x), "y": round(y), **delta}
            self._act("wheel", [wheel], has_control=more.get("modifiers") == CONTROL)
        elif type == "mouseMoved":
            # A move to where the mouse is would be none.
            self._act(
                "pointer", [{**move, "y": move["y"] + 1}, move] if move == self._at else [move]
            )
            self._at = move
        else:
            kind = "pointerDown" if type == "mousePressed" else "pointerUp"
            self._act("pointer", [move, {"type": kind, "button": 0}])

    def _Input_insertText(self, text: str) -> None:
        self._act("key", [act for sign in text for act in _pressed(sign)])

    def _Input_dispatchKeyEvent(self, type: str, key: str, **_: Any) -> None:
        self._act("key", [{"type": type, "value": KEYS.get(key, key)}])

    def _act(self, kind: str, actions: list[dict[str, Any]], has_control: bool = False) -> None:
        source = {"type": kind, "id": kind, "actions": actions}
        sources: list[dict[str, Any]] = [source]
        if has_control:
            down, up = _pressed(KEYS["Control"])
            sources = [
                {"type": "key", "id": "key", "actions": [down, {"type": "pause"}, up]},
                source,
            ]
            source["actions"] = [{"type": "pause"}, *actions]
        self.send("input.performActions", context=self._context, actions=sources)

    def _DOM_getDocument(self) -> dict[str, Any]:
        return {"root": {"nodeId": 0}}

    def _DOM_querySelector(self, selector: str, **_: Any) -> dict[str, Any]:
        target = {"context": self._context}
        expression = f"document.querySelector({selector!r})"
        done = self.send(
            "script.evaluate", expression=expression, target=target, awaitPromise=False
        )
        self._element = {"sharedId": done["result"]["sharedId"]}
        return {"nodeId": 0}

    def _DOM_setFileInputFiles(self, files: list[str], **_: Any) -> None:
        self.send("input.setFiles", context=self._context, element=self._element, files=files)

    def _Page_captureScreenshot(self) -> dict[str, Any]:
        return self.send("browsingContext.captureScreenshot", context=self._context)


def _pressed(sign: str) -> list[dict[str, str]]:
    sign = KEYS["Enter"] if sign == "\n" else sign
    return [{"type": kind, "value": sign} for kind in ("keyDown", "keyUp")]


@contextmanager
def firefox() -> Iterator[Callable[[], Tab]]:
    """A running Firefox, which makes one tab."""
    assert FIREFOX is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, ExitStack() as stack:
        lines = [f"user_pref({json.dumps(n)}, {json.dumps(v)});" for n, v in PREFERENCES.items()]
        Path(home, "user.js").write_text("\n".join(lines))
        flags = ["--headless", "--no-remote", "--profile", home, "--remote-allow-system-access"]
        flags += ["--remote-debugging-port", str(free_port())]
        log = Path(home) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([FIREFOX, *flags, "about:blank"], stdout=out, stderr=out)
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.terminate)

        def address() -> str:
            assert process.poll() is None, f"Firefox did not start:\n{log.read_text()[-3000:]}"
            found = [line for line in log.read_text().splitlines() if "BiDi listening on" in line]
            return found[0].split()[-1] if found else ""

        wait_until(lambda: bool(address()), lambda: log.read_text()[-3000:], LIMIT_S)

        def tab() -> Tab:
            url = urllib.parse.urljoin(f"{address()}/", "session")
            return FirefoxTab(
                stack.enter_context(
                    connect(url, max_size=None, open_timeout=LIMIT_S, compression=None)
                )
            )

        yield tab
