"""What `laya doctor` asks of the configuration, and the proof: one generation through a real server.

In: the configuration. Out: findings. The server is a process of its own on a free port, or the one that runs already. Main
thread.
"""

from __future__ import annotations

import ctypes
import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from laya.cli import check, wheel
from laya.cli import running as server
from laya.cli.doctor_finding import FAIL, OK, SKIP, WARN, Finding
from laya.cli.exits import CommandFailed
from laya.config import Config
from laya.config.notices import notices
from laya.engine.cards import Nvml
from laya.engine.machine import Memory, host_memory
from laya.errors import DependencyError, StartError

START_S = 60.0  # until it listens: the router needs 0.3 s, a cold disk some more
LOAD_S = 600.0  # until the engine is ready: 14 GB from a slow disk
STOP_S = 30.0
ANSWER_S = 300.0
PROBE_S = 2.0  # a Laya on this machine answers within a millisecond
QUESTION = "What is the capital of France? Answer briefly."
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
USABLE = frozenset({"ready", "asleep"})
ENDED = frozenset({"failed", "stopped"})


def configuration(path: str | None) -> tuple[Config | None, Finding]:
    try:
        config, table = check.read(path)
    except StartError as error:
        return None, Finding("configuration", FAIL, str(error), "docs/configuration.md; laya check reads it again")
    text = f"{config.source or 'built-in defaults'}, {len(table.routes)} routes"
    said = notices(config)
    return config, Finding("configuration", WARN if said else OK, "; ".join([text, *said]))


def models(config: Config) -> Iterator[Finding]:
    known = {model.file: (name, model) for name, model in wheel.MODELS.items()}
    for name, engine in config.engines_by_name().items():
        path = config.model_path(engine)
        which, packaged = known.get(os.path.basename(path), (None, None))
        if not os.path.exists(path):
            mend = f"laya pull {which}" if which else "laya pull ORG/NAME, or set inference.model"
            yield Finding(f"model {name}", FAIL, f"{path} is not there", mend)
        elif not os.access(path, os.R_OK):
            yield Finding(f"model {name}", FAIL, f"{path} cannot be read", f"chmod a+r {path}")
        elif packaged is not None and not wheel.is_right(path, packaged):
            yield Finding(f"model {name}", FAIL, f"{path} is damaged: its checksum is wrong", f"laya pull {which}")
        else:
            yield Finding(f"model {name}", OK, path + (", checksum right" if packaged is not None else ""))


def plan(config: Config) -> Iterator[Finding]:
    """Whether the engines fit, as `laya plan` says it."""
    if not config.engines_by_name():
        return
    from laya.inprocess.plans import Machine, plan_engines

    nvml = Nvml.find()
    card = next((card for card in nvml.cards() if card.total), None) if nvml is not None else None
    try:
        made = plan_engines(config, Machine(host_memory(), Memory(card.total, card.total - card.used) if card else None))
    except StartError as error:
        mend = "the engine packages, see above" if isinstance(error, DependencyError) else "see inference.model"
        yield Finding("memory plan", FAIL, str(error).partition("; install it")[0], mend)
        return
    for engine in made:
        planned = engine.plan
        taken = planned.process_total if planned.shared else planned.device_total
        text = f"{taken >> 20} MiB of {planned.device_limit >> 20} MiB, window {planned.max_seq_len} tokens"
        if planned.fits:
            yield Finding(f"plan {engine.name}", OK, text)
        elif config.server.port and _is_ours(config):  # it was planned before this one had its memory
            yield Finding(f"plan {engine.name}", SKIP, f"{text}: no second one fits beside the Laya that runs already")
        else:
            would = "; ".join(suggestion.text for suggestion in planned.suggestions[:2])
            yield Finding(f"plan {engine.name}", FAIL, f"{text}: does not fit", would or "laya plan shows every part")


def port(config: Config) -> Iterator[Finding]:
    host, number = config.server.host, config.server.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        yield Finding("port", OK, f"{host}:{number} is free")
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE and _is_ours(config):
            yield Finding("port", OK, f"{host}:{number}: a running Laya answers")
        else:
            reason = exc.strerror or str(exc)
            mend = {
                errno.EADDRINUSE: f"another server.port, or end what listens: ss -ltnp sport = :{number}",
                errno.EACCES: "a server.port from 1024 on, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit",
            }.get(exc.errno, "set server.host to an address of this machine")
            yield Finding("port", FAIL, f"{host}:{number} cannot be used: {reason}", mend)
    folder = os.path.dirname(config.server.unix_socket or "") or "."
    if config.server.unix_socket and not os.access(folder, os.W_OK | os.X_OK):
        text = f"{config.server.unix_socket}: {folder} is not there, or nothing may be made in it"
        yield Finding("unix socket", FAIL, text, f"mkdir -p {folder}; chown $(id -un) {folder}")


def _is_ours(config: Config) -> bool:
    try:
        return json.loads(server.of_config(config).get("/", PROBE_S).read(65536)).get("name") == "laya"
    except (CommandFailed, ValueError, OSError, AttributeError):
        return False


def generation(config: Config) -> Iterator[Finding]:
    """Start, load, answer, stop, each a finding; or an answer of the Laya that runs already."""
    if config.server.port and _is_ours(config):
        try:
            yield _targets(_ready(server.of_config(config)))
            yield from _answers(server.of_config(config), config)
        except CommandFailed as failed:
            yield Finding("generation", FAIL, str(failed), "see its log")
        return
    role = "serve" if config.engines_by_name() else "router"
    with tempfile.TemporaryFile() as log:
        process = _start(config, role, log)
        try:
            running = _listening(process, config, log)
            yield Finding("start", OK, f"laya {role} listens on {running.url}")
            yield _loaded(process, running, log)
            yield from _answers(running, config)
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_S)
            yield Finding("stop", OK if code == 0 else FAIL, f"exit code {code}", "" if code == 0 else "see its log")
        except CommandFailed as failed:
            yield Finding("generation", FAIL, str(failed), f"laya {role} shows the whole log")
        except subprocess.TimeoutExpired:
            yield Finding("stop", FAIL, f"it does not stop within {STOP_S:.0f} s", "see its log")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(config: Config, role: str, log) -> subprocess.Popen:
    """The user's own configuration on a free port of loopback, with nothing on disk that another process may hold."""
    overrides = {
        "LAYA_SERVER__HOST": "127.0.0.1", "LAYA_SERVER__PORT": "0", "LAYA_SERVER__UNIX_SOCKET": "null",
        "LAYA_SERVER__LOG_LEVEL": "info", "LAYA_ROUTER__MODE": "memory",
        "LAYA_AUTH__KEYS": "[]", "LAYA_AUTH__KEYS_FILE": "null",
    }  # fmt: skip
    command = [sys.executable] if hasattr(sys, "_MEIPASS") else [sys.executable, "-m", "laya"]
    command += [role, *(["--config", config.source] if config.source else [])]
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **overrides},
        preexec_fn=lambda: prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0),  # however this command ends
    )  # fmt: skip


def _log_lines(log) -> list[str]:
    """Read beside the process, which goes on writing where it was."""
    return os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace").splitlines()


def _listening(process: subprocess.Popen, config: Config, log) -> server.Running:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        for line in _log_lines(log):
            if '"event":"listening"' in line:
                address = next(a for a in json.loads(line)["addresses"] if not a.startswith("unix:"))
                return msgspec.structs.replace(server.of_config(config), host="127.0.0.1", port=int(address.rsplit(":", 1)[1]))
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise _ended(process, log, "it did not listen")


def _loaded(process: subprocess.Popen, running: server.Running, log) -> Finding:
    """When every engine takes requests; backends are named with what is known of them."""
    until = time.monotonic() + LOAD_S
    while time.monotonic() < until and process.poll() is None:
        parts = _ready(running)
        states = {name: engine["state"] for name, engine in parts["engines"].items()}
        if ENDED & set(states.values()):
            break
        if USABLE.issuperset(states.values()):
            return _targets(parts)
        time.sleep(0.1)
    raise _ended(process, log, "the engine did not become ready")


def _targets(parts: dict[str, Any]) -> Finding:
    """Engines and backends as /ready shows them."""
    told = [f"{name} {engine['state']}" for name, engine in parts["engines"].items()]
    backends = parts.get("backends", {})
    down = [name for name, backend in backends.items() if backend["healthy"] is False]
    if down:
        return Finding("targets", WARN, "; ".join([*told, f"not there: {', '.join(down)}"]), "start these backends")
    return Finding("targets", OK, "; ".join([*told, f"{len(backends)} backends"]))


def _ready(running: server.Running) -> dict[str, Any]:
    try:
        return _asked(running, "GET", "/ready")[1]["components"]
    except (KeyError, TypeError) as exc:
        raise running.unreachable(exc) from None


def _answers(running: server.Running, config: Config) -> Iterator[Finding]:
    """One short generation by each engine; a router without one is asked for nothing that a backend might bill."""
    engines = list(config.engines_by_name())
    if not engines:
        yield _listed(running)
    for name in engines:
        yield _answer(running, name)


def _listed(running: server.Running) -> Finding:
    status, told = _asked(running, "GET", "/v1/models")
    if status == 401 and running.key is None:
        return _unasked("models")
    if status != 200:
        return Finding("models", FAIL, f"{status}: {_why(told)}", "see its log")
    return Finding("models", OK, f"{len(told['data'])} names are listed; backends were asked for nothing")


def _unasked(name: str) -> Finding:
    text = "it runs and wants a key; the configuration has none in clear to ask it with"
    return Finding(name, WARN, text, "laya bench -n 1 --key KEY asks it with yours")


def _why(told: Any) -> str:
    return told.get("error", {}).get("message", "") if isinstance(told, dict) else ""


def _asked(running: server.Running, method: str, path: str, body: Any = None, headers: dict | None = None) -> tuple[int, Any]:
    """Status and decoded body. Raises CommandFailed when nothing or no JSON comes."""
    connection = running.connection(ANSWER_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), {**running.headers(), **(headers or {})})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise running.unreachable(exc) from None
    finally:
        connection.close()


def _answer(running: server.Running, engine: str) -> Finding:
    body = {"model": engine, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
    headers = {"content-type": "application/json", "x-laya-target": engine}
    status, told = _asked(running, "POST", "/v1/chat/completions", body, headers)
    if status == 401 and running.key is None:
        return _unasked(f"answer {engine}")
    if status != 200:
        return Finding(f"answer {engine}", FAIL, f"{status}: {_why(told)}", "see its log")
    tokens = told["usage"]["completion_tokens"]
    text = " ".join((told["choices"][0]["message"]["content"] or "").split())[:80]
    return Finding(f"answer {engine}", OK if tokens else FAIL, f"{tokens} tokens: {text}", "" if tokens else "see its log")


def _ended(process: subprocess.Popen, log, what: str) -> CommandFailed:
    lines = [line for line in _log_lines(log) if line.startswith("laya: ") or '"level":"error"' in line]
    code = process.poll()
    how = f"ended with code {code}" if code is not None else what
    return CommandFailed(f"{how}: {lines[-1].removeprefix('laya: ')[:300] if lines else 'its log says nothing'}")
