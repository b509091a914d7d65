"""`laya bench` against a real router with a scripted backend: what it counts, and that it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from laya.cli.load import quantiles
from laya.cli.main import main
from scripted_upstream import SSE_HEAD, Close, Hold, ScriptedUpstream, answer, chunked, completion, delta, polite
from server import ROOT

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
LAST = b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [], "usage": USAGE}).encode() + b"\n\n"


def streaming(asked):
    pieces = [chunked(delta(text)) for text in ("one ", "two ", "three")]
    return [SSE_HEAD, *pieces, chunked(delta(None, "stop")), chunked(LAST), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


def bench(router, *argv: str, code: int = 0, capsys=None) -> dict:
    assert main(["bench", "--url", router.url, "--model", "m", "--json", *argv]) == code
    return json.loads(capsys.readouterr().out)


def test_streams_are_timed_and_tokens_counted(router, upstream, capsys):
    upstream.script = streaming
    found = bench(router, "-n", "20", "-c", "3", "--prompt-words", "5", capsys=capsys)
    assert found["ok"] == 20 and found["errors"] == {} and found["unmeasured"] == 0
    assert (found["prompt_tokens"], found["generated_tokens"]) == (140, 60)
    assert set(found["latency_ms"]) == {"whole answer", "first token", "between tokens"}
    assert found["requests_s"] == pytest.approx(20 / found["seconds"])
    prompts = {asked.json()["messages"][0]["content"] for asked in upstream.asked[-20:]}
    assert len(prompts) == 20 and all(len(prompt.split()) == 5 for prompt in prompts)


def test_plain_answers_have_no_token_times(router, upstream, capsys):
    upstream.script = polite
    found = bench(router, "-n", "4", "-c", "2", "--no-stream", capsys=capsys)
    assert found["ok"] == 4 and set(found["latency_ms"]) == {"whole answer"}
    assert "stream" not in upstream.asked[-1].json()


def test_answers_without_usage_are_told_apart(router, upstream, capsys):
    body = completion("x")
    del body["usage"]
    upstream.script = lambda asked: [answer(body)]
    assert main(["bench", "--url", router.url, "--model", "m", "-n", "2", "--no-stream"]) == 0
    assert "2 answers told no usage" in capsys.readouterr().out


def test_failures_are_counted_by_kind_and_the_code_says_that_nothing_succeeded(router, upstream, capsys):
    upstream.script = lambda asked: [answer({"error": {"message": "no"}}, "400 Bad Request")]
    found = bench(router, "-n", "3", "-c", "1", code=1, capsys=capsys)
    assert found["ok"] == 0 and found["errors"] == {"status 400": 3} and found["reasons"] == {"status 400": "no"}
    assert main(["bench", "--url", router.url, "--model", "m", "-n", "2"]) == 1
    assert "2 x status 400: no\n" in capsys.readouterr().out


def test_a_stream_that_breaks_off_is_no_success(router, upstream, capsys):
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("half")), b"0\r\n\r\n"]
    found = bench(router, "-n", "2", "-c", "1", code=1, capsys=capsys)
    assert found["ok"] == 0 and sum(found["errors"].values()) == 2


def test_it_ends_in_time_whatever_the_server_does(router, upstream, capsys):
    upstream.script = lambda asked: [Hold()]
    began = time.monotonic()
    found = bench(router, "-d", "1", "-c", "2", code=1, capsys=capsys)
    assert time.monotonic() - began < 20 and found["ok"] == 0 and found["errors"] == {}


def test_the_table_names_the_load_and_the_quantiles(router, upstream, capsys):
    upstream.script = streaming
    assert main(["bench", "--url", router.url, "--model", "m", "-n", "3"]) == 0
    out = capsys.readouterr().out
    assert "4 connections, streamed" in out and "first token" in out and "p99" in out


SSE_WHOLE = "content-type: text/event-stream\r\n"
NULLS = b'{"choices":[{"delta":null}],"usage":{"prompt_tokens":null,"completion_tokens":2}}'


def odd(body: bytes | dict, headers: str = SSE_WHOLE, status: str = "200 OK"):
    """A server that is not ours: it is sound until it is asked for a completion."""
    return lambda asked: [answer(body, status, headers) if asked.method == "POST" else answer({})]


def cut_after_an_error(asked):
    """As Laya ends a stream whose backend has gone."""
    error = b'data: {"error":{"message":"gone","code":"upstream_error"}}\n\n'
    return [SSE_HEAD, chunked(delta("a")), chunked(error), Close()] if asked.method == "POST" else [answer({})]


@pytest.mark.parametrize(
    ("script", "argv", "ok", "errors"),
    [
        (odd(completion("x"), "content-type: application/json\r\n"), [], 0, {"answer without a stream": 3}),
        (odd(b"data: [1, 2]\n\ndata: [DONE]\n\n"), [], 0, {"answer that is no chat completion": 3}),
        (odd(b"data: \xff\n\ndata: [DONE]\n\n"), [], 0, {"answer that is no chat completion": 3}),
        (odd(b"data: " + NULLS + b"\n\ndata: [DONE]\n\n"), [], 3, {}),
        (odd(b'data:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\ndata:[DONE]\r\n\r\n'), [], 3, {}),
        (odd(b"data: half"), [], 0, {"answer that is no chat completion": 3}),
        (odd(b""), [], 0, {"stream without an end": 3}),
        (cut_after_an_error, [], 0, {"error in the stream": 3}),
        (odd(b"[1]"), ["--no-stream"], 0, {"answer that is no chat completion": 3}),
        (odd(b"{}"), ["--no-stream"], 0, {"answer that is no chat completion": 3}),
        (odd(b"{}", "retry-after: \xb2\r\n", "429 Slow"), [], 0, {"status 429": 3}),
    ],
)
def test_whatever_a_server_answers_is_counted_once_for_each_request(script, argv, ok, errors, capsys):
    with ScriptedUpstream(script) as server:
        url = server.url.removesuffix("/v1")
        assert main(["bench", "--url", url, "--json", "-n", "3", "-c", "1", *argv]) == (0 if ok else 1)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["ok"], found["errors"]) == (ok, errors) and err == ""


def test_answers_that_are_cut_off_at_the_end_are_told(router, upstream, capsys):
    upstream.script = lambda asked: [Hold()]
    assert main(["bench", "--url", router.url, "--model", "m", "-d", "1", "-c", "2"]) == 1
    assert "2 were under way at the end" in capsys.readouterr().out


def test_ctrl_c_shows_what_was_measured_until_then(router, upstream):
    upstream.script = streaming
    process = subprocess.Popen(
        [sys.executable, "-m", "laya", "bench", "--url", router.url, "--model", "m", "-c", "2", "-d", "60", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    asked = len(upstream.asked)
    assert upstream.wait_for(lambda: len(upstream.asked) > asked + 20, 30)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    found = json.loads(out)
    assert process.returncode == 130 and err == b"" and found["interrupted"] and found["ok"] > 10 and found["seconds"] < 40


def test_too_few_descriptors_are_told_by_their_name(router, upstream):
    upstream.script = streaming
    done = subprocess.run(
        [sys.executable, "-m", "laya", "bench", "--url", router.url, "--model", "m", "-c", "60", "-d", "2"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )  # fmt: skip
    assert done.returncode == 0 and "x Too many open files" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("argv", [["-c", "0"], ["-d", "601"], ["-n", "x"], ["--prompt-words", "100001"]])
def test_bounds_of_the_load_are_kept(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *argv])
    assert caught.value.code == 2 and "usage: laya bench" in capsys.readouterr().err


def test_no_server_is_one_line_and_code_69(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_SERVER__PORT", "9")
    assert main(["bench"]) == 69
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nothing answers at http://127.0.0.1:9" in error


def test_quantiles_are_measured_values():
    assert quantiles([0.003]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert quantiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
