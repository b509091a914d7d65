"""`laya top` from a running server and from frames."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from laya.cli.main import main
from laya.cli.top_screen import duration, milliseconds, screen, size, spark
from scripted_upstream import ScriptedUpstream, answer
from server import ROOT


def test_once_prints_one_frame(router, capsys):
    router.chat("a-model", "words of a prompt")
    time.sleep(1)  # frames are made once a second
    assert main(["top", "--once", "--url", router.url]) == 0
    out = capsys.readouterr().out
    assert "laya 0" in out and "router" in out and "ready" in out and "host" in out
    assert "a-model" in out and "200 ok" in out and "closed" in out and "words of a prompt" not in out


def test_the_address_and_the_key_come_from_the_configuration(upstream, tmp_path, capsys):
    from server import running

    config = {
        "auth": {"keys": [{"name": "me", "key": "k-1"}]}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up"}], "server": {"host": "0.0.0.0"},
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        config["server"]["port"] = laya.port
        path = tmp_path / "same.yaml"
        path.write_text(json.dumps(config))
        assert main(["top", "--once", "--config", str(path)]) == 0
        assert "router" in capsys.readouterr().out
        assert main(["top", "--once", "--config", str(path), "--key", "other"]) == 1
        assert "answers 401" in capsys.readouterr().err


def test_it_goes_on_when_the_server_comes_back(upstream, tmp_path):
    from server import running

    config = {"backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}]}
    with running(config, tmp_path) as laya:
        top = subprocess.Popen(
            [sys.executable, "-u", "-m", "laya", "top", "--url", laya.url], stdout=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "COLUMNS": "100"},
        )  # fmt: skip
        seen = ""
        try:
            until = time.monotonic() + 30
            while "router" not in seen and time.monotonic() < until:
                seen += top.stdout.readline()
            port = laya.port
            laya.stop()
            while "nothing answers" not in seen and time.monotonic() < until:
                seen += top.stdout.readline()
            with running({**config, "server": {"port": port}}, tmp_path):
                back = ""
                while "up 0 s" not in back and "up 1 s" not in back and "up 2 s" not in back and time.monotonic() < until:
                    back += top.stdout.readline()
            top.send_signal(signal.SIGINT)
            assert top.wait(20) == 0  # Ctrl-C is how one ends it
        finally:
            top.kill()
            top.wait(10)
    assert "nothing answers" in seen and "ready" in back


def test_a_terminal_without_the_characters_gets_others(router):
    done = subprocess.run(
        [sys.executable, "-m", "laya", "top", "--once", "--url", router.url], capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and b"router" in done.stdout and done.stderr == b""


def test_where_stdout_is_no_terminal_frames_follow_each_other(router):
    environ = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_INTERACTIVE")}
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "laya", "top", "--url", router.url], stdout=subprocess.PIPE, text=True,
        env={**environ, "PYTHONPATH": str(ROOT / "src")},
    ) as top:  # fmt: skip
        heads = 0
        for line in top.stdout:
            heads += line.startswith("laya ")
            if heads == 3:
                break
        assert heads == 3 and "\x1b" not in line
        top.send_signal(signal.SIGINT)
        assert top.wait(20) == 0


@pytest.mark.parametrize(
    ("body", "kind", "code", "said"),
    [
        (b"<html>hello</html>", "text/html", 1, "is not Laya"),
        (b"data: {oops\n\n", "text/event-stream", 1, "is not Laya"),
        (b"retry: 2000\n\n", "text/event-stream", 69, "has ended the stream"),  # it drains
        (b'data: {"at": 1}\n\n', "text/event-stream", 1, "cannot be read"),  # another version
        (b"data: [1]\n\n", "text/event-stream", 1, "cannot be read"),
    ],
)
def test_a_server_without_the_figures_is_one_line(body, kind, code, said, capsys):
    with ScriptedUpstream(lambda asked: [answer(body, headers=f"content-type: {kind}\r\n")]) as server:
        assert main(["top", "--once", "--url", server.url.removesuffix("/v1")]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_servers_message_does_not_command_the_terminal(capsys):
    told = {"error": {"message": "\x1b[31mred\x07\nnext"}}
    with ScriptedUpstream(lambda asked: [answer(told, "500 Oops")]) as server:
        assert main(["top", "--once", "--url", server.url.removesuffix("/v1")]) == 1
    assert capsys.readouterr().err.endswith("/ui/events answers 500: ·[31mred· next\n")


FRAME = {
    "version": "0", "role": "serve", "ready": False, "uptime_s": 7200, "at": 0, "outcomes": {},
    "machine": {
        "gpus": [
            {"index": 0, "name": "Card", "used": 95 << 28, "total": 24 << 30, "temperature_c": 71.0, "lost": False},
            {"index": 1, "name": "", "used": 0, "total": 0, "temperature_c": None, "lost": True},
        ],
        "host": {"total": 32 << 30, "available": 8 << 30}, "group": {"total": 1 << 30, "available": 1 << 28},
        "swap": {"total": 1 << 30, "used": 0}, "process": {"resident": 1 << 30, "peak": 1 << 30},
    },
    "components": {
        "server": {"connections": 3, "draining": False}, "engines": {"e": {"state": "ready", "stuck": True}},
        "watchdog": {"level": "soft", "why": "host memory at 93 %"}, "backends": {},
    },
    "figures": {"e": {"model": "m", "running": 1, "allowed": 4, "waiting": 2, "kv_used": 3, "kv_total": 9, "generated_tokens": 5,
                      "preemptions": 0}},
    "minute": {"requests_s": 1.5, "generated_s": 20.0, "prompt_s": 0.0, "latency": []},
    "history": {"requests": [0, 1, 2], "generated": [0, 0, 0]},
    "recent": [{"at": 0, "model": "\x1b[31m[red]evil[/red]\x07", "route": "r", "backend": "b", "api": "chat", "status": 502,
                "outcome": "upstream_error", "ms": 1234.5, "tokens": None, "client": "c", "id": "i"}],
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 140])
def test_a_frame_becomes_text_and_names_stay_text(width):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen(FRAME, width))
    text = out.getvalue()
    assert "not ready" in text and "up 2 h" in text and "71 °C" in text and "lost" in text
    assert "stuck" in text and "memory protection soft: host memory at 93 %" in " ".join(text.split())
    assert "\x1b" not in text and "\x07" not in text and "[red]evil" in text
    assert ("502 upstream error" if width > 90 else "502 ") in text and "1.2 s" in text


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_heading_is_cut_where_names_are_long_and_figures_large(width):
    from rich.console import Console

    name = "SmolLM2-135M Instruct.Q4_1-and-more-of-it"
    large = {**FRAME["figures"]["e"], "model": name, "running": 16, "allowed": 16, "kv_used": 20480, "kv_total": 20480,
             "generated_tokens": 123456789}  # fmt: skip
    backend = {"healthy": True, "breaker": "half-open", "inflight": 4096, "process": {"state": "starting"}}
    request = {**FRAME["recent"][0], "model": name, "route": name, "backend": name, "outcome": "client_closed", "tokens": [9999, 999]}
    frame = {**FRAME, "figures": {"e": large}, "recent": [request]}
    frame["components"] = {**FRAME["components"], "engines": {"e": {"state": "unloading"}}, "backends": {name: backend}}
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen(frame, width))
    engine, backends, recent = (
        next(line for line in out.getvalue().splitlines() if line.startswith(first)) for first in ("engine", "backend", "time")
    )
    assert engine.split() == ["engine", "state", "running", "waiting", "KV", "blocks", *(["generated"] if width >= 76 else []),
                              *(["preempted"] if width >= 90 else [])]  # fmt: skip
    assert backends.split() == ["backend", "state", "breaker", "in", "flight"]
    assert recent.split()[:2] == ["time", "model"] and "…" not in recent and "20480 of 20480" in out.getvalue()


def test_figures_are_short():
    assert [size(n) for n in (0, 1023, 1 << 20, 3 << 40)] == ["0 B", "1023 B", "1.0 MiB", "3.0 TiB"]
    assert [milliseconds(n) for n in (0.05, 5, 1500)] == ["50 µs", "5.0 ms", "1.5 s"]
    assert [duration(n) for n in (5, 600, 7200, 864000)] == ["5 s", "10 min", "2 h", "10 d"]
    assert spark([0, 1, 8]).endswith(" ▁█") and len(spark([1] * 99)) == 24 and spark([]).strip() == ""
