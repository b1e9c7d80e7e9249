"""A headless Chromium, steered over its DevTools protocol: what a page shows, says and asks for.

with Browser() as browser:
    browser.open(Path("report.html"))
    browser.evaluate("document.title")
    browser.errors, browser.requests  # of the console; to the network
"""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
    "--remote-allow-origins=*", "--hide-scrollbars",
)  # fmt: skip


def chromium() -> str:
    """Where it is; skips the test where there is none."""
    pytest.importorskip("websockets")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip("there is no Chromium here")


class Browser:
    """One browser with one page; `errors` and `requests` are of the page opened last."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        program = chromium()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={self.folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._connect()
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        from websockets.sync.client import connect

        port = Path(self.folder.name) / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (port.exists() and "\n" in port.read_text()):
            if time.monotonic() > until or self.process.poll() is not None:
                pytest.skip("Chromium does not start here")
            time.sleep(0.1)
        place, pages = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list", []
        while not pages:
            if time.monotonic() > until:
                pytest.skip("Chromium has no page here")
            with urllib.request.urlopen(place, timeout=30) as answer:
                pages = [found for found in json.loads(answer.read()) if found["type"] == "page"]
        page = pages[0]
        self.socket = connect(page["webSocketDebuggerUrl"], max_size=None).__enter__()
        self.numbers, self.loaded = itertools.count(1), False
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        if hasattr(self, "socket"):
            self.socket.close()
        self.process.terminate()
        self.process.wait(30)
        self.folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._heard(answer)

    def _heard(self, event: dict[str, Any]) -> None:
        what, told = event.get("method"), event.get("params", {})
        if what == "Page.loadEventFired":
            self.loaded = True
        elif what == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif what == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(a.get("value", a)) for a in told["args"]))
        elif what == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:")):
                self.requests.append(url)

    def open(self, page: Path | str, wait: float = 30.0) -> None:
        """Open a file or an address, and wait until it has loaded."""
        self.loaded, self.errors, self.requests = False, [], []
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        until = time.monotonic() + wait
        while not self.loaded:
            self._heard(json.loads(self.socket.recv(timeout=max(0.1, until - time.monotonic()))))
        self.wait_for("document.readyState === 'complete'", wait)

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, code: str, seconds: float = 10.0) -> Any:
        """The value of an expression once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(code)):
            assert time.monotonic() < until, f"never true: {code}"
            time.sleep(0.05)
        return value

    def move(self, selector: str, value: Any) -> None:
        """Set a slider, a choice or a tick as a person would: input and change events included."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"if (e.type === 'checkbox') e.checked = {json.dumps(value)};"
            f"else e.value = {json.dumps(value)};"
            "for (const k of ['input', 'change']) e.dispatchEvent(new Event(k, {bubbles: true})); })()"
        )

    def resize(self, width: int, height: int, phone: bool = False, dark: bool = False) -> None:
        """The size of the window, and whether its user likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=phone,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        """A picture of the page, all of its length."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
