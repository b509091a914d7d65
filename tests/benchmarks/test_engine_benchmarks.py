"""The engine's benchmarks: their arithmetic, their client against a scripted server, what is said of a peer that is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # after tests/, which has an `engine` too

from engine_bench import client, peers, ratios  # noqa: E402
from engine_bench.client import Stream  # noqa: E402

FOUND = {
    "laya_decode_1": 120.0, "llama_bench_decode": 100.0, "llama_server_decode_1": 80.0, "laya_decode_8": 300.0,
    "llama_server_decode_8": 200.0, "laya_prefill": 600.0, "llama_bench_prefill": 300.0, "transformers_decode": 15.0,
    "laya_ttft_s": 0.1, "llama_server_ttft_s": 0.2,
}  # fmt: skip


class Scripted(BaseHTTPRequestHandler):
    """Answers with as many frames as asked for, or with 503 where `max_tokens` is 503."""

    asked: list[dict] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        self.send_response(503 if body["max_tokens"] == 503 else 200)
        self.end_headers()
        for number in range(body["max_tokens"] if body["max_tokens"] != 503 else 0):
            self.wfile.write(b'data: {"choices":[{"text":"%d"}]}\n\n' % number)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_) -> None: ...


@pytest.fixture
def scripted():
    Scripted.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["engine.py", "mixed.py"])
def test_help_says_what_is_measured(name):
    done = subprocess.run([sys.executable, f"benchmarks/{name}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--json" in done.stdout


@pytest.mark.parametrize("name", ["engine.py", "mixed.py"])
def test_a_model_that_is_not_there_is_said(name):
    command = [sys.executable, f"benchmarks/{name}", "--model", "/nowhere/m.gguf"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "" and "skipped: /nowhere/m.gguf" in done.stderr


def test_engine_ratios_are_ours_over_theirs():
    found = ratios.engine_ratios(FOUND)
    assert found == pytest.approx({
        "decode_1_vs_llamacpp": 1.2, "decode_1_vs_llama_server": 1.5, "decode_8_vs_llamacpp": 1.5, "prefill_vs_llamacpp": 2.0,
        "decode_vs_transformers": 8.0, "ttft_vs_llama_server": 0.5,
    })  # fmt: skip
    assert {name: ratios.met(name, value) for name, value in found.items()} == {
        "decode_1_vs_llamacpp": "yes", "decode_1_vs_llama_server": "", "decode_8_vs_llamacpp": "yes",
        "prefill_vs_llamacpp": "yes", "decode_vs_transformers": "yes", "ttft_vs_llama_server": "",
    }  # fmt: skip


def test_a_missing_peer_leaves_its_ratio_empty_and_no_verdict():
    found = ratios.engine_ratios({"laya_decode_1": 1.0})
    assert set(found.values()) == {None}
    assert {row[3] for row in ratios.verdicts(found)[1:]} == {""}


def test_mixed_ratios_tell_loss_and_tail():
    samples = {
        "gateway_p99_us": [1500.0, 1900.0, 9000.0], "straight_p99_us": [400.0, 500.0, 600.0],
        "engine_alone": [200.0, 210.0, 190.0], "engine_loaded": [170.0, 180.0, 100.0],
    }  # fmt: skip
    found = ratios.mixed_ratios(ratios.medians(samples))
    assert found == pytest.approx({"gateway_p99_ms": 1.9, "gateway_p99_vs_straight": 3.8, "engine_loss": 0.15})
    assert [ratios.met(name, value) for name, value in found.items()] == ["yes", "yes", "no"]


def test_only_time_in_which_all_streams_decode_counts():
    streams = [Stream(0.0, 1.0, 5.0, 41), Stream(0.0, 2.0, 7.0, 101)]
    assert client.shared_rate(streams) == pytest.approx(10 + 20)
    with pytest.raises(RuntimeError, match="side by side"):
        client.shared_rate([Stream(0.0, 1.0, 2.0, 5), Stream(0.0, 3.0, 4.0, 5)])


def test_the_client_asks_for_ids_of_its_own_and_times_the_text(scripted):
    stream = client.complete(scripted, "m", 12, 5)
    assert stream.asked < stream.first <= stream.last and stream.tokens == 5
    client.complete(scripted, "m", 12, 5)
    one, other = (body["prompt"] for body in Scripted.asked)
    assert len(one) == len(other) == 12 and one != other
    assert Scripted.asked[0]["ignore_eos"] is True and Scripted.asked[0]["temperature"] == 0.0


def test_a_refusal_ends_the_measurement(scripted):
    with pytest.raises(RuntimeError, match="status 503"):
        client.decode_rate(scripted, "m", 3, 503)


def test_programs_are_looked_for_in_a_build_and_named_when_missing(tmp_path, monkeypatch):
    program = tmp_path / "build" / "bin" / "llama-bench"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert peers.find("llama-bench", tmp_path) == str(program)
    assert peers.find("llama-server", tmp_path) is None
    assert peers.version(str(program)) == "7 (abc)"


def test_llama_bench_rows_are_told_apart(tmp_path):
    program = tmp_path / "llama-bench"
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 250.5}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 80.0}]
    program.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    program.chmod(0o755)
    assert peers.llama_bench(str(program), tmp_path, 1, 512, 64) == {"prefill": 250.5, "decode": 80.0}
