"""Backends that are commands: started by a request, one at a time where memory says so, never outliving Laya."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from laya.config import Config
from laya.config.structs import BackendConfig
from laya.log import Log
from laya.net.backends import MIN_WAITING, make_backends
from laya.net.clock import Clock
from laya.net.room import Memory
from laya.net.supervisor import Supervisor
from raw import post, read_response
from server import ROOT, Laya, running

SERVER = Path(__file__).with_name("model_server.py")


def command(name: str, directory: Path, options: str = "") -> str:
    return f"{sys.executable} {SERVER} --port {{port}} --name {name} --log {directory}/log {options}"


def coders(directory: Path, names: str = "ab", options: str = "", **more) -> dict:
    """One route and one command a name; one fits at a time."""
    backend = {"memory": "600MiB", "idle_unload_s": None, "start_timeout_s": 20, **more}
    return {
        "router": {"command_memory": "1GiB"},
        "backends": {name: {"command": command(name, directory, options), **backend} for name in names},
        "routes": [{"match": name, "to": name} for name in names],
    }


def process_of(laya: Laya, name: str) -> dict:
    return json.loads(laya.get("/ready")[1])["components"]["backends"][name]["process"]


def state_of(laya: Laya, name: str) -> str:
    return process_of(laya, name)["state"]


def told(laya: Laya, model: str, text: str = "env") -> dict:
    status, body, _ = laya.chat(model, text)
    assert status == 200, body
    return json.loads(body["choices"][0]["message"]["content"])


def log_of(directory: Path) -> list[list[str]]:
    return [line.split()[1:] for line in (directory / "log").read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def in_background(call, *arguments) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call(*arguments)))
    thread.start()
    return thread, found


def test_the_first_request_starts_it_and_others_wait_with_it(tmp_path):
    with running(coders(tmp_path, "a", "--load 0.6"), tmp_path) as laya:
        assert laya.get("/ready")[0] == 200 and state_of(laya, "a") == "stopped"
        asked = [in_background(laya.chat, "a", "hi") for _ in range(6)]
        assert laya.wait_for(lambda: state_of(laya, "a") == "starting")
        assert laya.wait_for(lambda: laya.metric("laya_backend_waiting", backend="a") == 6)
        for thread, _ in asked:
            thread.join(20)
        assert [found[0][0] for _, found in asked] == [200] * 6
        process = process_of(laya, "a")
        assert process["state"] == "ready" and process["starts"] == 1 and "a loads" in process["output"]
        assert told(laya, "a")["cwd"] == str(tmp_path), "it runs in the configuration's folder"
        assert laya.metric("laya_backend_loaded", backend="a") == 1
        assert laya.metric("laya_backend_starts_total", backend="a") == 1
        assert laya.stop() == 0
    assert log_of(tmp_path) == [["a", "started"], ["a", "stopped"]], "a clean stop ends it with SIGTERM"


def test_it_stops_when_it_was_idle_for_so_long_after_its_last_request_ended(tmp_path):
    with running(coders(tmp_path, "a", idle_unload_s=1), tmp_path) as laya:
        told(laya, "a", "sleep 1.5")
        ended = time.monotonic()
        assert state_of(laya, "a") == "ready", "a request that runs is no idleness"
        assert laya.wait_for(lambda: state_of(laya, "a") == "stopped")
        assert time.monotonic() - ended >= 0.9
        told(laya, "a")
        assert process_of(laya, "a")["starts"] == 2


def test_of_several_coders_one_fits_at_a_time_and_an_idle_one_gives_way(tmp_path):
    with running(coders(tmp_path, "abc"), tmp_path) as laya:
        for name in "abca":
            told(laya, name)
        assert [state_of(laya, name) for name in "abc"] == ["ready", "stopped", "stopped"]
    runs = [" ".join(entry) for entry in log_of(tmp_path)]
    assert runs[:6] == ["a started", "a stopped", "b started", "b stopped", "c started", "c stopped"], "never two at once"


def test_a_swap_waits_for_the_running_request(tmp_path):
    """(cases 77, 78)"""
    with running(coders(tmp_path), tmp_path) as laya:
        told(laya, "a")
        running_one, first = in_background(laya.chat, "a", "sleep 1.5")
        assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="a") == 1)
        waiting, second = in_background(laya.chat, "b", "hi")
        assert laya.wait_for(lambda: state_of(laya, "a") == "yielding")
        late, third = in_background(laya.chat, "a", "hi")  # comes while a gives way: it waits for a's next turn
        for thread in (running_one, waiting, late):
            thread.join(20)
        assert first[0][0] == second[0][0] == third[0][0] == 200
    runs = [" ".join(entry) for entry in log_of(tmp_path)]
    assert runs[:5] == ["a started", "a stopped", "b started", "b stopped", "a started"]


def test_two_coders_asked_for_in_turns_by_many_are_both_served(tmp_path):
    with running(coders(tmp_path, max_inflight=1), tmp_path) as laya:
        asked = [in_background(laya.chat, "ab"[n % 2], "sleep 0.05") for n in range(8)]
        asked += [in_background(laya.chat, "ab"[n % 2], "sleep 0.05") for n in range(8) if time.sleep(0.1) is None]
        for thread, _ in asked:
            thread.join(30)
        assert [found[0][0] for _, found in asked] == [200] * 16


def test_what_waits_for_a_busy_one_to_finish_is_bounded_in_time_and_the_busy_one_goes_on(tmp_path):
    """(case 77)"""
    with running(coders(tmp_path, start_timeout_s=1), tmp_path) as laya:
        told(laya, "a")
        thread, found = in_background(laya.chat, "a", "sleep 3")
        assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="a") == 1)
        status, body, _ = laya.chat("b")
        assert status == 503 and "waiting took too long" in body["error"]["message"]
        assert laya.wait_for(lambda: state_of(laya, "a") == "ready"), "nobody waits for its memory any more"
        thread.join(20)
        assert found[0][0] == 200
    assert ["b", "started"] not in log_of(tmp_path)


def test_requests_beyond_the_bound_are_refused_while_it_starts(tmp_path):
    with running(coders(tmp_path, "a", "--load 2"), tmp_path) as laya, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(laya.connect()) for _ in range(MIN_WAITING + 3)]
        for sock in socks:
            sock.sendall(post(b'{"model":"a","messages":[{"role":"user","content":"hi"}]}'))
        answers = [read_response(sock) for sock in socks]
        refused = [body for status, _, body in answers if status == 503]
        assert len(refused) == 3 and sum(status == 200 for status, *_ in answers) == MIN_WAITING
        assert all(b"too many requests wait" in body for body in refused)


def test_a_client_that_leaves_while_it_starts_is_forgotten(tmp_path):
    """(case 37)"""
    with running(coders(tmp_path, "a", "--load 1"), tmp_path) as laya:
        with laya.connect() as sock:
            sock.sendall(post(b'{"model":"a","messages":[{"role":"user","content":"hi"}]}'))
            assert laya.wait_for(lambda: process_of(laya, "a")["waiting"] == 1)
        assert laya.wait_for(lambda: process_of(laya, "a")["waiting"] == 0)
        assert laya.metric("laya_requests_total", outcome="client_closed") == 1
        assert laya.metric("laya_backend_inflight", backend="a") == 0


def test_one_that_dies_is_started_again_and_says_what_it_wrote(tmp_path):
    with running(coders(tmp_path, "a"), tmp_path) as laya:
        first = told(laya, "a")
        status, body, _ = laya.chat("a", "die")
        assert status == 502 and "Backend a" in body["error"]["message"]
        assert laya.wait_for(lambda: process_of(laya, "a")["starts"] >= 2), "without being asked for"
        assert laya.wait_for(lambda: laya.chat("a")[0] == 200, 20)
        assert told(laya, "a")["pid"] != first["pid"]
        died = laya.event("backend_died")
        assert died["code"] == 3 and died["output"] == ["a loads"]


def test_requests_that_come_while_it_restarts_wait_for_it(tmp_path):
    with running(coders(tmp_path, "a"), tmp_path) as laya:
        os.kill(told(laya, "a")["pid"], signal.SIGKILL)
        assert laya.wait_for(lambda: any(line["event"] == "backend_died" for line in laya.lines))
        asked = [in_background(laya.chat, "a", "hi") for _ in range(4)]
        for thread, _ in asked:
            thread.join(20)
        assert [found[0][0] for _, found in asked] == [200] * 4, [*asked, laya.lines]


def test_one_that_cannot_start_says_why_and_is_tried_again_after_a_pause(tmp_path):
    with running(coders(tmp_path, "a", "--fail 'no such model'"), tmp_path) as laya:
        status, body, headers = laya.chat("a")
        assert status == 503 and "Retry-After" in str(headers).title(), headers
        assert "ended with code 9" in body["error"]["message"] and "no such model" in body["error"]["message"]
        began = time.monotonic()
        assert laya.chat("a")[0] == 503 and time.monotonic() - began < 0.5, "not tried again at once"
        assert state_of(laya, "a") == "paused"
        assert laya.wait_for(lambda: state_of(laya, "a") == "stopped")
        assert laya.chat("a")[0] == 503 and process_of(laya, "a")["starts"] == 2
        assert process_of(laya, "a")["next_try_s"] > 1, "the pause grows"
        assert laya.event("backend_start_failed")["output"][-1] == "no such model"


def test_one_that_is_never_ready_is_ended_in_time(tmp_path):
    with running(coders(tmp_path, "a", "--load 100", start_timeout_s=1), tmp_path) as laya:
        status, body, _ = laya.chat("a")
        assert status == 503
        assert laya.wait_for(lambda: ["a", "stopped"] in log_of(tmp_path))
        assert laya.wait_for(lambda: state_of(laya, "a") in ("paused", "stopped"))


def test_a_backend_that_cannot_start_gives_way_to_another(tmp_path):
    config = coders(tmp_path, "a", "--fail x")
    config["backends"]["b"] = {"command": command("b", tmp_path)}
    config["routes"] = [{"match": "m", "to": ["a"], "fallback": ["spare"]}, {"name": "spare", "match": "s", "to": "b"}]
    with running(config, tmp_path) as laya:
        status, _, headers = laya.chat("m")
        assert status == 200 and headers["x-laya-backend"] == "b"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_its_whole_group_dies_with_laya(tmp_path, number):
    config = {"server": {"drain_timeout_s": 1}, **coders(tmp_path, "a", "--child")}
    with running(config, tmp_path) as laya:
        pid = told(laya, "a")["pid"]
        child = next(int(entry[2]) for entry in log_of(tmp_path) if entry[1] == "child")
        leash = process_of(laya, "a")["pid"]
        assert alive(pid) and alive(child) and alive(leash)
        laya.process.send_signal(number)
        laya.process.wait(20)
        assert laya.wait_for(lambda: not (alive(pid) or alive(child) or alive(leash)))
    assert log_of(tmp_path)[-1] == ["a", "stopped"], "even then it is asked first"


def test_one_that_is_stopped_in_the_moment_it_is_started_is_gone_at_once(tmp_path):
    async def run() -> str:
        loop = asyncio.get_running_loop()
        clock = Clock(loop, lambda stall: None)
        config = Config(backends={"a": BackendConfig(command=command("a", tmp_path))})
        [backend] = make_backends(config, "router", {}, clock, loop).values()
        supervisor = Supervisor(Memory(None, None), str(tmp_path), clock, Log("error"), show_output=True)
        supervisor.watch([backend])
        backend.pool.submit(None, b"POST", b"", b"")
        assert backend.process.state == "starting"
        async with asyncio.timeout(5):
            await supervisor.stop()
        return backend.process.state

    assert asyncio.run(run()) == "stopped"


def test_a_reload_ends_what_is_not_configured_any_more_and_keeps_the_rest(tmp_path):
    """(case 65)"""
    config = coders(tmp_path, "ab", memory=None)
    with running(config, tmp_path) as laya:
        kept = told(laya, "a")["pid"]
        told(laya, "b")
        thread, found = in_background(laya.chat, "b", "sleep 1.5")
        assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="b") == 1)
        new = {**coders(tmp_path, "ac", memory=None), "server": {"port": 0, "drain_timeout_s": 5}}
        laya.path.write_text(json.dumps(new))
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == 1)
        assert told(laya, "a")["pid"] == kept and laya.chat("b")[0] == 404
        thread.join(20)
        assert found[0][0] == 200, "what ran there went to its end"
        assert laya.wait_for(lambda: ["b", "stopped"] in log_of(tmp_path))
        told(laya, "c")
        new["backends"]["c"]["command"] = "no-such-program --port {port}"
        laya.path.write_text(json.dumps(new))
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: laya.metric("laya_config_reload_failed") == 1)
        told(laya, "c")


def test_laya_engine_is_such_a_command(model_path, tmp_path):
    """An engine of our own that sleeps as a whole process: nothing of it is left between requests."""
    (tmp_path / "engine.yaml").write_text(json.dumps({
        "inference": {
            "model": str(model_path), "name": "smol", "listen": "http://127.0.0.1:${ENGINE_PORT}", "max_seq_len": 512,
            "kv_cache": "24MiB",
        },
    }))  # fmt: skip
    starts = f"env ENGINE_PORT={{port}} PYTHONPATH={ROOT / 'src'} {sys.executable} -m laya engine --config {tmp_path}/engine.yaml"
    config = {
        "backends": {"small": {"command": starts, "health": "/ready", "memory": "500MiB"}},
        "routes": [{"match": "small", "to": {"backend": "small", "model": "smol"}}],
    }
    with running(config, tmp_path) as laya:
        status, body, _ = laya.chat("small", "hi", max_tokens=2)
        assert status == 200 and body["usage"]["completion_tokens"] == 2 and body["model"] == "small"
        assert laya.stop() == 0


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ({"command": "llama-server -m x"}, "without {port}"),
        ({"command": "sh -c 'x {port}"}, "split into words"),
        ({"command": "sh -c x --port {port} | tee log"}, "the shell's |"),
        ({"command": "no-such-program --port {port}"}, "there is no program no-such-program"),
        ({"command": "./missing/server --port {port}"}, "there is no program ./missing/server"),
    ],
)
def test_a_wrong_command_is_refused_by_name(backend, says, tmp_path, capsys):
    from laya.cli.main import main

    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"backends": {"coder": backend}, "routes": [{"match": "*", "to": "coder"}]}))
    for role in ("check", "router"):
        assert main([role, "--config", str(path)]) == 78
        said = capsys.readouterr().err
        assert says in said and "backends.coder.command" in said and said.count("\n") == 1


def test_one_that_could_never_fit_stops_the_start(tmp_path):
    """(case 48)"""
    config = coders(tmp_path, "a", memory="2GiB")
    laya = Laya(config, tmp_path, wait=False)
    assert laya.process.wait(30) == 78
    laya._reader.join(5)
    assert "backends.a.memory: found 2048 MiB" in " ".join(laya.other) and "at most 1024 MiB" in " ".join(laya.other)
