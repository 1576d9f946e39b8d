"""A real Chromium, driven over its debugging pipe: no driver and no browser library in between."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--lang=en",
)
_HIGH = 10
"""Descriptors from here on cannot collide with 3 and 4, which Chromium reads and writes."""


class Browser:
    """The running program and its messages."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "chromium", PROGRAM, *_FLAGS,
             f"--user-data-dir={profile}"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._in = os.fdopen(ours_in, "rb", buffering=0)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come in between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._out.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, method: str, session: str) -> dict[str, Any]:
        """The next event of that name, one that has been kept among them."""
        while True:
            for event in self.events:
                if event["method"] == method and event.get("sessionId") == session:
                    self.events.remove(event)
                    return event
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._in.read(1 << 16)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """End the program."""
        with contextlib.suppress(RuntimeError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._in.close()


class Page:
    """One tab, at one width, in one colour scheme."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._target = target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the debugging protocol."""
        return self._browser.call(method, self._session, **params)

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """How the page is looked at from now on."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def open(self, url: str) -> None:
        """Go there and wait until all is loaded."""
        self.call("Page.navigate", url=url)
        self._browser.wait("Page.loadEventFired", self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; of a promise what it resolves to."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, console messages and refusals of the page's policy so far."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] in names and event.get("sessionId") == self._session
        ]

    def press(self, key: str) -> None:
        """One key of the keyboard, pressed and let go."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key]
            )

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """The page as a PNG, from its top; in full without a height."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


_KEYS = {"Tab": 9, "Enter": 13}


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended at the end."""
    running = Browser(profile)
    try:
        yield running
    finally:
        running.close()
