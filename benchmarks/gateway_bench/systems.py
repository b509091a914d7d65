"""The systems compared: how each is started in front of the stub, as its manual has it for one backend.

Each function returns a `Launch`, or None where its program is not installed. Log levels: Laya and nginx write their access log
to /dev/null (a row each with it off); the others log as they do by default, to /dev/null too.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gateway_bench.bodies import MODEL

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
IN_PYTHON = "laya-python"
# Started so, Laya finds none of its parts in C.
WITHOUT_C = """
import runpy, sys
sys.modules.update(dict.fromkeys(["laya.net.native_lane", "laya.wire.native_whole", "laya.schema.native_routing"]))
runpy.run_module("laya", run_name="__main__", alter_sys=True)
"""
RULES = 100  # routing rules in Laya's table beside the one that matches: a table of some size is the normal case


@dataclass
class Launch:
    command: list[str]
    version: str
    env: dict[str, str] = field(default_factory=dict)
    start_limit_s: float = 30.0
    most_connections: int = 512  # a system that answers 100 requests a second is not asked with 512 connections


def find(program: str, peers: Path | None) -> str | None:
    """The program in `peers` (a virtual environment or a folder of programs), else in PATH."""
    for folder in ([peers / "bin", peers] if peers else []):
        if os.access(folder / program, os.X_OK):
            return str(folder / program)
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def laya(port: int, stub_port: int, directory: Path, log_level: str, program: tuple[str, ...] = ("-m", "laya")) -> Launch:
    path = directory / f"laya-{port}.yaml"
    path.write_text(json.dumps(laya_config(port, stub_port, log_level)))  # JSON is YAML
    command = [sys.executable, *program, "router", "--config", str(path)]
    return Launch(command, _laya_version(), {"PYTHONPATH": str(ROOT / "src")})


def laya_in_python(port: int, stub_port: int, directory: Path) -> Launch:
    """As `laya`, where there was no C compiler at installation."""
    return laya(port, stub_port, directory, "info", ("-c", WITHOUT_C))


def laya_config(port: int, stub_port: int, log_level: str, health: str | None = "/health") -> dict:
    """Everything at its default but for the addresses and a table of rules."""
    backend = {"url": f"http://127.0.0.1:{stub_port}/v1", "health": health}
    rules = [{"name": f"r{i}", "match": [f"team-{i}/*", f"model-{i}"], "to": "other"} for i in range(RULES)]
    return {
        "server": {"port": port, "log_level": log_level},
        "backends": {"stub": backend, "other": backend},
        "routes": [{"name": "chat", "match": "gpt-4o*", "to": "stub"}, *rules],
    }


def nginx(port: int, stub_port: int, directory: Path, access_log: str, peers: Path | None) -> Launch | None:
    program = find("nginx", peers)
    if program is None:
        return None
    folder = directory / f"nginx-{port}"
    folder.mkdir()
    template = string.Template((HERE / "nginx.conf").read_text())
    path = folder / "nginx.conf"
    path.write_text(template.substitute(port=port, stub_port=stub_port, directory=folder, access_log=access_log))
    shown = subprocess.run([program, "-v"], capture_output=True, text=True).stderr
    return Launch([program, "-p", str(folder), "-c", str(path)], shown.strip().rpartition("/")[2])


def vllm_router(port: int, stub_port: int, directory: Path, peers: Path | None, metrics_port: int) -> Launch | None:
    program = find("vllm-router", peers)
    if program is None:
        return None
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{stub_port}"]
    command += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    return Launch(command, version_of(program, "vllm-router"), start_limit_s=60)


def smg(port: int, stub_port: int, directory: Path, peers: Path | None, metrics_port: int) -> Launch | None:
    program = find("smg", peers)
    if program is None:
        return None
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{stub_port}"]
    command += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    return Launch(command, version_of(program, "sglang-router"), start_limit_s=60)


def litellm(port: int, stub_port: int, directory: Path, peers: Path | None) -> Launch | None:
    program = find("litellm", peers)
    if program is None:
        return None
    backend = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{stub_port}/v1", "api_key": "unused"}
    path = directory / "litellm.yaml"
    path.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": backend}]}))
    env = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it starts without a key of its own
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched from the network
    }
    command = [program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    return Launch(command, version_of(program, "litellm"), env, start_limit_s=180, most_connections=64)


def version_of(program: str, distribution: str) -> str:
    """The version of the Python distribution that installed `program`, by the interpreter in its first line."""
    with open(program, "rb") as file:
        first = file.readline()
    if not first.startswith(b"#!"):
        return "unknown"
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    result = subprocess.run([*first[2:].decode().split(), "-c", code], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def _laya_version() -> str:
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from laya import __version__
    finally:
        sys.path.pop(0)
    return __version__
