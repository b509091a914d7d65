"""A real Chromium without a screen, driven over its DevTools protocol: clicks and keys go the way a user's do."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Quiet: without these it looks for its maker's servers at every start.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
START_S = 60
WAIT_S = 30


class Browser:
    """One page. `errors` collects what the console and the content policy complain about."""

    def __init__(self) -> None:
        from websockets.sync.client import connect

        self._folder = tempfile.TemporaryDirectory(prefix="laya-chromium-")
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "--remote-debugging-port=0", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.errors: list[str] = []
        self._number = 0
        self._password = ""
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=START_S) as answer:
            target = next(item for item in json.load(answer) if item["type"] == "page")
        self._held = contextlib.ExitStack()
        session = connect(target["webSocketDebuggerUrl"], max_size=64 << 20, open_timeout=START_S)
        self._socket = self._held.enter_context(session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _port(self) -> int:
        place = Path(self._folder.name) / "DevToolsActivePort"
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, "chromium has ended"
            if place.exists() and (text := place.read_text().split()):
                return int(text[0])
            time.sleep(0.05)
        raise AssertionError("chromium did not open its port")

    def call(self, method: str, **parameters):
        self._send(method, **parameters)
        number = self._number
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def log_in(self, password: str) -> None:
        """Answer the browser's question for a name and a password, as a person does in its dialog."""
        self._password = password
        self.call("Fetch.enable", handleAuthRequests=True)

    def _send(self, method: str, **parameters) -> None:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))

    def _note(self, message: dict) -> None:
        if message.get("method") == "Fetch.requestPaused":
            self._send("Fetch.continueRequest", requestId=message["params"]["requestId"])
        elif message.get("method") == "Fetch.authRequired":
            answer = {"response": "ProvideCredentials", "username": "anyone", "password": self._password}
            self._send("Fetch.continueWithAuth", requestId=message["params"]["requestId"], authChallengeResponse=answer)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"]["exception"].get("description", "an exception"))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)  # answers when the new document has taken the old one's place
        self.wait("document.readyState === 'complete'")

    def run(self, script: str):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT_S):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {script}; the page says: {self.run('document.body.innerText')[:2000]}")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the element, wherever the page has it; what covers it gets the click."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, name: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def look(self, width: int, height: int, *, dark: bool) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """The whole page, below the fold too."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._held.close()
        self.process.terminate()
        self.process.wait(20)
        self._folder.cleanup()
