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
        seconds: that anything may take; only there so that a failure ends.
    """

    def __init__(self, send: int, receive: int, seconds: float = 30) -> None:
        self._send, self._receive, self._seconds = send, receive, seconds
        self._data, self._number = b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
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
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            assert select.select([self._receive], [], [], self._seconds)[0], "no answer"
            part = os.read(self._receive, 1 << 16)
            assert part, "the browser has ended"
            self._data += part
        found, self._data = self._data.split(b"\0", 1)
        return json.loads(found)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

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
        """Return the addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return what the browser says against the page: its policy, faults of scripts."""
        said = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        said = [one for one in said if one["level"] != "verbose" and one["source"] != "network"]
        faults = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        return [one["text"] for one in said] + [one["exceptionDetails"]["text"] for one in faults]

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write a PNG of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def opened(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own; yield a tab, and end the browser."""
    orders, answers = os.pipe(), os.pipe()
    # Above the two that they become.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (orders[0], answers[1])]
    words = [sys.executable, "-c", LAUNCH, *map(str, theirs), program, *FLAGS]
    with open(profile.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=theirs, stdout=log, stderr=log
        )
    for fd in (*theirs, orders[0], answers[1]):
        os.close(fd)
    try:
        yield Page(orders[1], answers[0])
    finally:
        process.terminate()
        process.wait()
        os.close(orders[1])
        os.close(answers[0])
