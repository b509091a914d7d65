"""Faults planted in the real server: each ends what it concerns, with an error at once, and the rest goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raw import post, read_all, read_until
from server import ROOT, Laya, running

# Read by the interpreter at its start: patches the runner, once it is imported, to do what the file beside it says.
_PLANTED = """
import importlib.abc, importlib.machinery, os, sys, time

FAULT = {fault!r}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "laya.model.runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader
        execute = loader.exec_module
        def exec_module(module):
            execute(module)
            plant(module.TorchRunner)
        loader.exec_module = exec_module
        return spec

def plant(runner):
    run = runner.run
    def faulty(self, batch):
        if os.path.exists(FAULT) and batch[0].sequence.seq_id >= 0:
            kind = open(FAULT).read()
            if kind != "dead" and kind != "lost" and kind != "hang":
                os.unlink(FAULT)
            import torch
            from laya.engine.step import DeviceLost, Sampled
            if kind == "step":
                raise RuntimeError("the step is broken")
            if kind == "memory":
                torch.empty(1 << 50)
            if kind == "sequence":
                outcomes = run(self, batch)
                outcomes[0] = Sampled(error=ValueError("nan"))
                return outcomes
            if kind == "dead":
                raise SystemExit("the thread is gone")
            if kind == "lost":
                raise torch.AcceleratorError("CUDA error: GPU is lost")
            if kind == "hang":
                while os.path.exists(FAULT):
                    time.sleep(0.02)
        return run(self, batch)
    from laya.model.device_faults import contained
    runner.run = contained(faulty)

sys.meta_path.insert(0, Finder())
"""




def planted(folder: Path) -> tuple[Path, dict]:
    fault = folder / "fault"
    (folder / "plant").mkdir()
    (folder / "plant" / "sitecustomize.py").write_text(_PLANTED.format(fault=str(fault)))
    return fault, {"PYTHONPATH": f"{folder / 'plant'}:{ROOT / 'src'}"}


def configuration(model_path, **more) -> dict:
    inference = {"model": str(model_path), "name": "smol", "max_seq_len": 512, "max_num_seqs": 2, **more}
    return {"inference": inference, "routes": [{"name": "default", "match": ["smol"], "to": "local"}]}


@pytest.fixture(scope="module")
def faulty(model_path, tmp_path_factory) -> Iterator[tuple[Laya, Path]]:
    folder = tmp_path_factory.mktemp("faulty")
    fault, env = planted(folder)
    with running(configuration(model_path, step_timeout_s=5), folder, "serve", env=env) as laya:
        laya.wait_ready()
        yield laya, fault


def paris(laya: Laya) -> str:
    status, body, _ = laya.chat("smol", "What is the capital of France? Answer briefly.", temperature=0, max_tokens=12)
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("kind", ["step", "memory", "sequence"])
def test_a_fault_of_a_step_ends_its_requests_and_the_next_is_served(faulty, kind):
    """(cases 32, 53) An exception of the step, torch out of memory, an error of one sequence."""
    laya, fault = faulty
    fault.write_text(kind)
    status, body, _ = laya.chat("smol", "Hello", temperature=0, max_tokens=12)
    assert status == 500 and body["error"]["code"] == "engine_error"
    assert "nan" not in body["error"]["message"] and "broken" not in body["error"]["message"]
    assert not fault.exists() and "Paris" in paris(laya)
    assert laya.get("/ready")[0] == laya.get("/health")[0] == 200
    assert laya.wait_for(lambda: laya.metric("laya_kv_blocks_used", engine="local") == 0)


def test_a_stuck_step_is_told_and_its_end_too(faulty):
    laya, fault = faulty
    answers: list = []
    fault.write_text("hang")
    asker = threading.Thread(target=lambda: answers.append(paris(laya)))
    asker.start()
    assert laya.wait_for(lambda: laya.get("/ready")[0] == 503, 40)
    assert json.loads(laya.get("/ready")[1])["components"]["engines"]["local"]["stuck"] and laya.get("/health")[0] == 200
    assert laya.wait_for(lambda: any("laya-engine" in line or "most recent call first" in line for line in laya.other))
    status, body, headers = laya.chat("smol", "Hello")
    assert status == 503 and "stuck" in body["error"]["message"] and "retry-after" in {name.lower() for name in headers}
    fault.unlink()
    asker.join(60)
    assert answers and "Paris" in answers[0]
    assert laya.wait_for(lambda: laya.get("/ready")[0] == 200)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x \ud83d"}]}, {"prompt": "\ud83d"}, {"prompt": "\x00\ufffe\uffff"},
        {"prompt": "\u0301" * 300}, {"prompt": "<|im_start|>" * 50}, {"prompt": [999_999_999]}, {"prompt": "a" * 100_000},
    ],
    ids=["surrogate-chat", "surrogate", "controls", "marks", "specials", "id-outside", "one-long-word"],
)  # fmt: skip
def test_broken_tokenizer_input_is_the_clients_own(faulty, body):
    """(cases 12, 23)"""
    laya, _ = faulty
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    raw = json.dumps({"model": "smol", "max_tokens": 2, **body}).encode()
    status, answer, _ = laya.call("POST", path, raw)
    assert status in (200, 400), answer
    assert status == 200 or json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert "Paris" in paris(laya)


@pytest.mark.parametrize(("kind", "code"), [("dead", 70), ("lost", 75)])
def test_when_the_engine_dies_clients_hear_at_once_and_the_process_ends(model_path, tmp_path, kind, code):
    """(case 53) One that streams, one that waits, one that comes later; the exit code says which death it was."""
    fault, env = planted(tmp_path)
    with running(configuration(model_path, max_num_seqs=1), tmp_path, "serve", env=env) as laya:
        laya.wait_ready()
        body = {"model": "smol", "prompt": "Count:", "max_tokens": 400, "ignore_eos": True}
        with laya.connect() as streaming, laya.connect() as waiting:
            streaming.sendall(post(json.dumps({**body, "stream": True}).encode(), b"/v1/completions"))
            read_until(streaming, b'"text":')
            waiting.sendall(post(json.dumps(body).encode(), b"/v1/completions"))
            assert laya.wait_for(lambda: laya.metric("laya_sequences_waiting", engine="local") == 1)
            fault.write_text(kind)
            began = time.monotonic()
            rest, answer = read_all(streaming, 20), read_all(waiting, 20)
            assert time.monotonic() - began < 15
            assert b'"error"' in rest and b"[DONE]" not in rest
            assert answer.split(b" ")[1] in (b"500", b"503") and b'"error"' in answer
        assert laya.process.wait(30) == code
        assert ("GPU is lost" in laya.other[-1]) == (kind == "lost")


def test_with_another_backend_a_dead_engine_leaves_the_router_serving(model_path, tmp_path, upstream):
    """(case 53) /health stays, /ready tells, requests for the backend go on, those for the engine are refused."""
    fault, env = planted(tmp_path)
    config = configuration(model_path)
    config["backends"] = {"up": {"url": upstream.url, "health": None}}
    config["routes"].append({"name": "other", "match": ["other"], "to": "up"})
    with running(config, tmp_path, "serve", env=env) as laya:
        assert laya.wait_for(lambda: json.loads(laya.get("/ready")[1])["components"]["engines"]["local"]["state"] == "ready", 60)
        fault.write_text("dead")
        assert laya.chat("smol", "Hello")[0] in (500, 503)
        assert laya.wait_for(lambda: json.loads(laya.get("/ready")[1])["components"]["engines"]["local"]["state"] == "failed")
        assert laya.get("/health")[0] == 200 and laya.get("/ready")[0] == 200
        assert laya.chat("other", "Hello")[0] == 200
        assert laya.chat("smol", "Hello")[0] == 503
        assert laya.stop() == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_under_the_log_stops_nobody(tmp_path, upstream):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "server": {"port": port}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"name": "all", "match": "*", "to": "up"}],
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "laya", "router", "--config", str(tmp_path / "c.yaml")],
            env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}, stderr=full, stdout=subprocess.DEVNULL, cwd=tmp_path,
        )  # fmt: skip
    try:
        laya = Laya.__new__(Laya)
        laya.process, laya.url, laya.port = process, f"http://127.0.0.1:{port}", port
        assert laya.wait_for(lambda: process.poll() is None and _answers(laya), 30)
        for _ in range(20):
            assert laya.chat("any", "hi")[0] == 200
        assert laya.wait_for(lambda: laya.metric("laya_log_lines_dropped") >= 20)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _answers(laya: Laya) -> bool:
    try:
        return laya.get("/health")[0] == 200
    except OSError:
        return False


def test_past_the_soft_mark_the_server_refuses_and_says_why(model_path, tmp_path):
    """The mark stands below what any machine uses, so that the real reader passes it at its first look."""
    config = configuration(model_path, watchdog={"soft": 0.0001, "hard": 0.99})
    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()
        assert laya.wait_for(lambda: laya.metric("laya_memory_protection") == 1)
        status, body, headers = laya.chat("smol", "Hello")
        assert status == 503 and "host memory is" in body["error"]["message"]
        assert int({name.lower(): value for name, value in headers.items()}["retry-after"]) >= 1
        shown = json.loads(laya.get("/ready")[1])["components"]
        assert shown["watchdog"]["level"] == "soft" and "host memory" in shown["watchdog"]["why"]
        assert "host memory" in shown["engines"]["local"]["protected"]
        assert laya.get("/health")[0] == 200 and laya.stop() == 0
