"""A small model server for tests of commands: takes its time to load, says who it is, dies when told to.

`python model_server.py --port N [--load SECONDS] [--fail TEXT] [--log FILE] [--child]`; a request whose last message is `die`
ends it without an answer, `sleep N` is answered after so long, `env` with the process's ids. The log gets a line at each start
and stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ready_at = 0.0

    def do_GET(self) -> None:
        ready = time.monotonic() >= self.ready_at
        self._answer(200 if ready else 503, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = request["messages"][-1]["content"]
        if text == "die":
            os._exit(3)
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        content = json.dumps({"pid": os.getpid(), "group": os.getpgid(0), "cwd": os.getcwd()})
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer(200, {"id": "x", "object": "chat.completion", "model": request["model"], "choices": [choice]})

    def _answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """No access log."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--name", default="server")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()

    def note(text: str) -> None:
        with open(given.log, "a") as file:
            file.write(f"{time.monotonic():.3f} {given.name} {text}\n")

    def stop(*_) -> None:
        note("stopped")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    note("started")
    print(f"{given.name} loads", flush=True)
    if given.fail:
        print(given.fail, file=sys.stderr, flush=True)
        sys.exit(9)
    if given.child:  # in a session of its own, as workers of some servers are
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        note(f"child {child.pid}")
    Handler.ready_at = time.monotonic() + given.load
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
