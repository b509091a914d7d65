"""Starting and stopping the process, with the model and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from raw import post, read_until, unchunk
from server import ROOT, running

ENV = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}


def serve(config: dict | None, directory, *, path: str = "", timeout: float = 60) -> subprocess.CompletedProcess:
    """`laya serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "laya"]
    if config is not None:
        (directory / "c.yaml").write_text(json.dumps(config))
        command += ["serve", "--config", str(directory / "c.yaml")]
    env = {**ENV, "PYTHONPATH": f"{path}:{ENV['PYTHONPATH']}" if path else ENV["PYTHONPATH"]}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout)


def last_line(done: subprocess.CompletedProcess) -> str:
    return [line for line in done.stderr.splitlines() if not line.startswith("{")][-1]


def test_sigterm_lets_a_running_generation_finish_and_exits_0(model_path, tmp_path):
    """(case 75)"""
    config = {"inference": {"model": str(model_path), "name": "smol", "max_seq_len": 512, "max_num_seqs": 1}}
    body = json.dumps({
        "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "messages": [{"role": "user", "content": "Count."}],
    }).encode()  # fmt: skip
    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()
        with laya.connect() as sock:
            sock.sendall(post(body))
            data = read_until(sock, b'"content":"')
            laya.process.terminate()
            data += read_until(sock, b"[DONE]\n\n\r\n0\r\n\r\n", 30)
        frames = unchunk(data.partition(b"\r\n\r\n")[2])[0]
        assert b'"finish_reason":"length"' in frames
        assert laya.process.wait(20) == 0


def test_a_missing_model_says_how_to_get_it(tmp_path):
    done = serve(None, tmp_path)
    assert done.returncode == 78 and "laya pull default" in last_line(done)


def test_nano_vllm_without_cuda_says_what_is_missing(model_path, tmp_path):
    config = {
        "inference": {
            "engine": "nano-vllm", "model": str(model_path), "max_seq_len": 2048, "max_num_seqs": 2,
            "gpu_memory_utilization": 0.75, "enforce_eager": True, "swap_space": 1,
        }
    }  # fmt: skip
    done = serve(config, tmp_path)
    assert done.returncode == 78
    assert "CUDA" in last_line(done) and "auto" in last_line(done) and "torch" in last_line(done)


def test_a_plan_that_does_not_fit_stops_the_start_with_numbers(model_path, tmp_path):
    """(case 48)"""
    config = {"inference": {"model": str(model_path), "kv_cache": "900GiB"}}
    done = serve(config, tmp_path)
    assert done.returncode == 78 and "does not fit" in done.stderr and "kv_cache: auto" in done.stderr


@pytest.mark.parametrize("package", ["tokenizers", "msgspec", "uvloop", "gguf"])
def test_a_package_that_breaks_at_import_is_named_in_one_line(model_path, tmp_path, package):
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / f"{package}.py").write_text("raise AttributeError('module has no attribute fast_path')\n")
    done = serve({"inference": {"model": str(model_path)}}, tmp_path, path=str(planted))
    line = last_line(done)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert package in line and "tested" in line and "pip install" in line and "AttributeError" in line


def test_a_package_that_breaks_when_the_engine_starts_is_named(model_path, tmp_path):
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "tokenizers.py").write_text(textwrap.dedent("""
        import sys, types

        class Broken:
            def __getattr__(self, name):
                return Broken()

            def __call__(self, *args, **kw):
                raise AttributeError("'Tokenizer' object has no attribute 'encode_fast'")

        def __getattr__(name):
            if name.startswith("__") and name != "__path__":
                raise AttributeError(name)
            return Broken()

        __path__ = []
        for name in ("models", "pre_tokenizers", "decoders", "normalizers", "processors"):
            part = sys.modules["tokenizers." + name] = types.ModuleType("tokenizers." + name)
            part.__getattr__ = __getattr__
    """))
    done = serve({"inference": {"model": str(model_path)}}, tmp_path, path=str(planted))
    assert done.returncode == 78, done.stderr
    assert "tokenizers" in last_line(done) and "tested" in last_line(done)


def test_the_router_holds_no_torch_and_no_engine_thread(tmp_path):
    code = textwrap.dedent("""
        import sys, threading
        import laya.app, laya.cli.main, laya.gateway.front, laya.net.server
        assert "torch" not in sys.modules and "transformers" not in sys.modules, "torch came along"
        assert not any("engine" in thread.name for thread in threading.enumerate())
    """)
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, timeout=30)
    config = {"backends": {"up": {"url": "http://127.0.0.1:9/v1", "health": None}}, "routes": [{"match": "*", "to": "up"}]}
    with running(config, tmp_path, "router") as laya:
        maps = open(f"/proc/{laya.process.pid}/maps").read()
        assert "libtorch" not in maps
        tasks = f"/proc/{laya.process.pid}/task"
        threads = [open(f"{tasks}/{t}/comm").read() for t in os.listdir(tasks)]
        assert not any("engine" in name for name in threads)
        assert laya.stop() == 0
