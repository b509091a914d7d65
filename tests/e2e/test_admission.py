"""Admission of the real server: bounded, fair, capped, with hints when to come back; a stampede leaves the machine alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from raw import post, read_all, read_until
from server import Laya, running

# What a second process sees of the scheduler: how late it wakes from a sleep of 5 ms, worst and median, in milliseconds.
_SLEEPER = """
import sys, time
late = []
while not sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
    began = time.perf_counter()
    time.sleep(0.005)
    late.append((time.perf_counter() - began - 0.005) * 1000)
late.sort()
print(late[len(late) // 2], late[-1], len(late))
"""


@pytest.fixture(scope="module")
def narrow(model_path, tmp_path_factory) -> Iterator[Laya]:
    """One sequence at a time, a queue of six, two keys."""
    config = {
        "inference": {
            "model": str(model_path), "name": "smol", "max_seq_len": 512, "max_num_seqs": 1, "queue_limit": 6,
            "queue_timeout_s": 1.5, "max_prompt_tokens": 300,
        },
        "auth": {"keys": [
            {"name": "ann", "key": "key-of-ann"}, {"name": "bob", "key": "key-of-bob", "max_prompt_tokens": 40},
        ]},
        "routes": [
            {"name": "default", "match": ["smol"], "to": "local"},
            {"name": "tight", "match": ["tight"], "to": "local", "max_prompt_tokens": 60},
        ],
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("narrow"), "serve") as laya:
        laya.wait_ready()
        yield laya


ANN, BOB = {"authorization": "Bearer key-of-ann"}, {"authorization": "Bearer key-of-bob"}


def ask(laya: Laya, headers: dict, prompt: list[int] | str = "Hi", model: str = "smol", **members):
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **members}
    status, raw, found = laya.call("POST", "/v1/completions", body, headers)
    return status, json.loads(raw), {name.lower(): value for name, value in found.items()}


def occupied(laya: Laya) -> socket.socket:
    """A connection whose request keeps the only sequence busy until it is closed."""
    sock = laya.connect()
    body = {"model": "smol", "prompt": "Count:", "max_tokens": 500, "ignore_eos": True, "stream": True}
    sock.sendall(post(json.dumps(body).encode(), b"/v1/completions", b"Authorization: Bearer key-of-ann\r\n"))
    read_until(sock, b'"text":')
    return sock


def idle(laya: Laya) -> bool:
    running_now = laya.metric("laya_sequences_running", engine="local")
    return running_now + laya.metric("laya_sequences_waiting", engine="local") + laya.metric("laya_kv_blocks_used", engine="local") == 0


@pytest.mark.parametrize(("headers", "model", "cap"), [(ANN, "smol", 300), (ANN, "tight", 60), (BOB, "smol", 40), (BOB, "tight", 40)])
def test_the_prompt_is_capped_by_engine_route_and_key_whichever_is_shortest(narrow, headers, model, cap):
    """(case 52) Right at the edge, and both numbers are said."""
    assert ask(narrow, headers, [5] * cap, model)[0] == 200
    status, body, _ = ask(narrow, headers, [5] * (cap + 1), model)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert str(cap) in body["error"]["message"] and str(cap + 1) in body["error"]["message"]


def test_a_request_that_waits_longer_than_the_time_out_is_503_with_a_hint(narrow):
    with occupied(narrow):
        began = time.monotonic()
        status, body, headers = ask(narrow, BOB)
        assert status == 503 and 1.0 < time.monotonic() - began < 30
        assert int(headers["retry-after"]) >= 1 and body["error"]["type"] == "server_error"
    assert narrow.wait_for(lambda: idle(narrow))


def test_beyond_the_queue_it_is_429_with_a_hint_and_counted(narrow):
    """(case 51)"""
    with occupied(narrow):
        waiting = [narrow.connect() for _ in range(6)]
        body = json.dumps({"model": "smol", "prompt": "Hi", "max_tokens": 1}).encode()
        for sock in waiting:
            sock.sendall(post(body, b"/v1/completions", b"Authorization: Bearer key-of-ann\r\n"))
        assert narrow.wait_for(lambda: narrow.metric("laya_sequences_waiting", engine="local") == 6, 1.4)
        status, answer, headers = ask(narrow, BOB)
        for sock in waiting:
            sock.close()
    assert status == 429 and answer["error"]["type"] == "rate_limit_error" and 1 <= int(headers["retry-after"]) <= 60
    assert narrow.metric("laya_requests_total", outcome="refused") >= 1
    assert narrow.wait_for(lambda: idle(narrow))


def test_a_client_that_leaves_the_queue_is_dropped_and_never_prefilled(narrow):
    """(case 51)"""
    before = narrow.metric("laya_tokens_total", engine="local", kind="prompt")
    with occupied(narrow):
        started = narrow.metric("laya_tokens_total", engine="local", kind="prompt")
        with narrow.connect() as leaver:
            body = {"model": "smol", "prompt": [7] * 250, "max_tokens": 50}
            leaver.sendall(post(json.dumps(body).encode(), b"/v1/completions", b"Authorization: Bearer key-of-ann\r\n"))
            assert narrow.wait_for(lambda: narrow.metric("laya_sequences_waiting", engine="local") == 1, 1.4)
        assert narrow.wait_for(lambda: narrow.metric("laya_sequences_waiting", engine="local") == 0, 1.4)
    assert narrow.wait_for(lambda: idle(narrow))
    assert narrow.metric("laya_tokens_total", engine="local", kind="prompt") == started > before


def test_a_stampede_of_two_thousand_is_answered_within_bounds_and_others_keep_their_processor(narrow):
    """(case 51) Every one is served or told when to come back, memory stays flat, and a second process is not starved.

    Each client has a socket of its own; they all send at once. The delay is printed (-s shows it), not judged by a figure of
    a busy machine: only that the second process ran throughout.
    """
    sleeper = subprocess.Popen([sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    body = post(
        json.dumps({"model": "smol", "prompt": "Hi", "max_tokens": 2}).encode(), b"/v1/completions",
        b"Authorization: Bearer key-of-ann\r\nConnection: close\r\n",
    )  # fmt: skip
    resident = _resident(narrow)
    sockets = []
    for _ in range(2000):
        sock = narrow.connect()
        sock.sendall(body)
        sockets.append(sock)
    answers: Counter[int] = Counter()
    lock = threading.Lock()

    def collect(part: list) -> None:
        for sock in part:
            head = read_all(sock, 60).partition(b"\r\n\r\n")[0]
            sock.close()
            with lock:
                answers[int(head.split(b" ")[1]) if head else 0] += 1
                if head.split(b" ")[1:2] in ([b"429"], [b"503"]) and b"retry-after" not in head.lower():
                    answers[-1] += 1

    threads = [threading.Thread(target=collect, args=(sockets[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grown = _resident(narrow) - resident
    median, worst, count = sleeper.communicate("done\n", timeout=30)[0].split()
    print(f"{dict(answers)}; a second process woke {float(median):.2f} ms late in the median and {float(worst):.1f} ms at worst")
    assert set(answers) <= {200, 429, 503} and sum(answers.values()) == 2000 and answers[200] >= 1 and answers[429] >= 1000
    assert grown < 64 << 20, f"{grown >> 20} MiB more"
    assert int(count) > 20
    assert narrow.get("/health")[0] == 200 and narrow.wait_for(lambda: idle(narrow), 30)
    assert ask(narrow, ANN)[0] == 200


def _resident(laya: Laya) -> int:
    return int(Path(f"/proc/{laya.process.pid}/statm").read_text().split()[1]) * 4096
