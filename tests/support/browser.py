# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Its pipes are the descriptors 3 and 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root it has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Return the browser's path; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """A tab.

    Args:
        send, receive: ends of the pipes.
        seconds: timeout of every call, so that a failure ends.
    """

    def __init__(self, send: int, receive: int, seconds: float = 30) -> None:
        self._send, self._receive, self._seconds = send, receive, seconds
        self._data, self._number = b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; note the events until it answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while True:
            response = self._read()
            if response.get("id") == self._number:
                assert "error" not in response, response
                return response["result"]
            self.events.append(response)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            assert select.select([self._receive], [], [], self._seconds)[0], "no answer"
            chunk = os.read(self._receive, 1 << 16)
            assert chunk, "the browser has ended"
            self._data += chunk
        message, self._data = self._data.split(b"\0", 1)
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        evaluation = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in evaluation, evaluation
        return evaluation["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + self._seconds
        while not self.run(script):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, *, shift: bool = False, text: str = "") -> None:
        """Press a key."""
        named = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        box = self.run(
            f"(() => {{ const found = document.querySelector({selector!r});"
            "found.scrollIntoView(); const b = found.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2, b.width] })()"
        )
        assert box[2] > 0, f"{selector} is not shown"
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def requests(self) -> list[str]:
        """Return the URLs that the page has requested."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return the browser's complaints: policy violations and script exceptions."""
        entries = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        entries = [
            entry
            for entry in entries
            if entry["level"] != "verbose" and entry["source"] != "network"
        ]
        exceptions = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in entries] + [
            entry["exceptionDetails"]["text"] for entry in exceptions
        ]

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write a PNG of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        capture = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(capture["data"]))


@contextlib.contextmanager
def opened(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser with its own profile; yield a tab, and end the browser on exit."""
    orders, answers = os.pipe(), os.pipe()
    # Above the two that they become.
    child_fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (orders[0], answers[1])]
    words = [sys.executable, "-c", LAUNCH, *map(str, child_fds), program, *FLAGS]
    with open(profile.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=child_fds, stdout=log, stderr=log
        )
    for fd in (*child_fds, orders[0], answers[1]):
        os.close(fd)
    try:
        yield Page(orders[1], answers[0])
    finally:
        process.terminate()
        process.wait()
        os.close(orders[1])
        os.close(answers[0])
