"""What the scripts that run real command-line clients share: a Laya in front of a backend, a client under a time limit.

In: a configuration and a command. Out: what the client printed. Everything runs on loopback, in a temporary folder, and is
ended before the script ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripted_upstream import SSE_HEAD, Asked, answer, chunked

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def laya(config: dict, folder: Path, command: str) -> Iterator[str]:
    """The URL of a running server."""
    path = folder / "laya.yaml"
    path.write_text(json.dumps({"server": {"port": 0, "drain_timeout_s": 2}, **config}))  # JSON is YAML
    process = subprocess.Popen(
        [sys.executable, "-m", "laya", command, "--config", str(path)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    try:
        url = _listening(process)
        threading.Thread(target=_drain, args=(process.stderr,), daemon=True).start()
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _listening(process: subprocess.Popen) -> str:
    for line in process.stderr:
        try:
            event = json.loads(line)
        except ValueError:
            sys.exit(f"the server did not start: {line.decode(errors='replace')}")
        if event.get("event") == "listening":
            return event["addresses"][0]
    sys.exit("the server did not start")


def _drain(pipe) -> None:
    for line in pipe:
        if b'"error"' in line:
            print("laya:", line.decode().rstrip(), file=sys.stderr)


def wait_ready(url: str, seconds: float = 120.0) -> None:
    import urllib.request

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    sys.exit("the model did not become ready")


def run_client(command: list[str], folder: Path, env: dict[str, str], seconds: float) -> subprocess.CompletedProcess:
    """The client under a time limit, with a home of its own and nothing of ours in its environment."""
    given = {**{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}, "HOME": str(folder), **env}
    return subprocess.run(
        command, cwd=folder, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )


@dataclass
class Call:
    """A tool call of the scripted model; its arguments go out in two pieces."""

    id: str
    name: str
    arguments: dict


@dataclass
class Step:
    """One answer of the scripted model."""

    text: str = ""
    calls: tuple[Call, ...] = ()


TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens (8900 of messages)",
        "type": "BadRequestError", "code": 400,
    },
}  # fmt: skip


class ChatModel:
    """Plays a chat completions server whose model follows a script, step by step. `asked` holds the decoded requests.

    Without steps every prompt is too long for it.
    """

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.asked: list[dict] = []

    def __call__(self, asked: Asked) -> list:
        if not asked.target.startswith("/v1/chat/completions"):
            return [answer(b'{"detail":"Not Found"}', "404 Not Found")]
        request = asked.json()
        self.asked.append(request)
        if not self.steps:
            return [answer(TOO_LONG, "400 Bad Request")]
        step = self.steps[min(len(self.asked), len(self.steps)) - 1]
        return list(_chunks(step)) if request.get("stream") else [answer(_whole(step))]

    def results(self) -> list[str]:
        """The tool results that the last request brought."""
        return [m["content"] for m in self.asked[-1]["messages"] if m["role"] == "tool"]


_USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "prompt_tokens_details": {"cached_tokens": 64}}


def _chunks(step: Step) -> Iterator[bytes]:
    yield SSE_HEAD
    yield _chunk({"role": "assistant", "content": ""})
    for word in step.text.split(" ") if step.text else ():
        yield _chunk({"content": word + " "})
    for i, call in enumerate(step.calls):
        text = json.dumps(call.arguments)
        head = {"index": i, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": text[:5]}}
        yield _chunk({"tool_calls": [head]})
        yield _chunk({"tool_calls": [{"index": i, "function": {"arguments": text[5:]}}]})
    yield _chunk({}, "tool_calls" if step.calls else "stop")
    yield _frame({"choices": [], "usage": _USAGE})
    yield chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _chunk(delta: dict, reason: str | None = None) -> bytes:
    return _frame({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _frame(members: dict) -> bytes:
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "scripted", **members}
    return chunked(b"data: " + json.dumps(data).encode() + b"\n\n")


def _whole(step: Step) -> dict:
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}} for c in step.calls
    ]  # fmt: skip
    message = {"role": "assistant", "content": step.text or None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "scripted", "choices": [choice], "usage": _USAGE}


def check(name: str, good: bool, detail: object = "") -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {name}{f': {detail}' if detail and not good else ''}", flush=True)
    return good
