"""`laya bench` against a real router with a scripted backend: what it counts, and that it ends."""

from __future__ import annotations

import json
import time

import pytest

from laya.cli.load import quantiles
from laya.cli.main import main
from scripted_upstream import SSE_HEAD, Hold, answer, chunked, completion, delta, polite

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
    assert found["ok"] == 0 and found["errors"] == {"status 400": 3}


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
