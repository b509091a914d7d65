"""`laya doctor`: what it finds on a sound machine, and that each ailment comes with the line that mends it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from laya import dependencies
from laya.cli import doctor_machine, doctor_server
from laya.cli.doctor import lines
from laya.cli.doctor_finding import Finding
from laya.cli.main import main
from laya.config import loads
from laya.engine.cards import Nvml
from laya.engine.machine import Memory
from server import ROOT, running


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("LAYA_")]:
        monkeypatch.delenv(name)
    return tmp_path


def examined(capsys, config: dict, place: Path, *argv: str, code: int) -> dict[str, dict]:
    """Findings by name."""
    (place / "laya.yaml").write_text(json.dumps(config))
    assert main(["doctor", "--json", *argv]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (code == 0)
    return {finding["name"]: finding for finding in told["findings"]}


def router_config(**server) -> dict:
    return {
        "server": {"port": 0, **server}, "backends": {"b": {"url": "http://127.0.0.1:9/v1"}}, "routes": [{"match": "*", "to": "b"}]
    }  # fmt: skip


def test_a_sound_machine_ends_with_an_answer_of_the_engine(place, model_path, capsys):
    engine = {"model": str(model_path), "max_seq_len": 512, "kv_cache": "32MiB", "max_num_seqs": 1}
    found = examined(capsys, {"server": {"port": 0}, "inference": engine}, place, code=0)
    assert {finding["state"] for finding in found.values()} <= {"ok", "warn"}
    assert "Paris" in found["answer local"]["text"] and found["start"]["seconds"] > 0
    assert found["stop"]["text"] == "exit code 0" and "checksum right" in found["model local"]["text"]
    assert found["engine packages"]["seconds"] >= 0 and "window 512 tokens" in found["plan local"]["text"]


def test_a_router_is_started_and_its_backends_are_asked_for_nothing(place, upstream, capsys):
    config = router_config()
    config["backends"]["b"]["url"] = upstream.url
    asked = len(upstream.asked)
    found = examined(capsys, config, place, code=0)
    assert "asked for nothing" in found["models"]["text"] and found["stop"]["state"] == "ok"
    assert all(request.method == "GET" for request in upstream.asked[asked:])


def test_a_running_laya_answers_in_place_of_a_second_one(router, place, capsys):
    config = json.loads(router.path.read_text())
    config["server"]["port"] = router.port
    found = examined(capsys, config, place, code=0)
    assert "a running Laya answers" in found["port"]["text"] and "start" not in found and "models" in found


def test_a_port_that_another_has_is_told_with_how_to_find_it(place, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        found = examined(capsys, router_config(port=number), place, "--quick", code=1)
    assert found["port"]["state"] == "fail" and f"ss -ltnp sport = :{number}" in found["port"]["mend"]


def test_a_missing_and_a_damaged_model_are_told_apart(place, capsys):
    found = examined(capsys, {"server": {"port": 0}}, place, code=1)
    assert "is not there" in found["model local"]["text"] and found["model local"]["mend"] == "laya pull default"
    assert found["generation"]["state"] == "skip"
    (place / "models").mkdir()
    (place / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF of something else")
    found = examined(capsys, {"server": {"port": 0}}, place, code=1)
    assert "checksum is wrong" in found["model local"]["text"] and found["model local"]["mend"] == "laya pull default"


def test_a_plan_that_does_not_fit_says_what_would(place, model_path, capsys):
    engine = {"model": str(model_path), "kv_cache": "4TiB"}
    found = examined(capsys, {"server": {"port": 0}, "inference": engine}, place, "--quick", code=1)
    assert "does not fit" in found["plan local"]["text"] and found["plan local"]["mend"]


def test_a_plan_that_does_not_fit_beside_the_running_laya_is_no_failure(router, place, model_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_server, "host_memory", lambda: Memory(1 << 30, 1 << 30))  # what the running one has left
    config = {"server": {"port": router.port}, "inference": {"model": str(model_path)}}
    found = examined(capsys, config, place, "--quick", code=0)
    assert found["plan local"]["state"] == "skip" and "no second one fits" in found["plan local"]["text"]


def test_a_bad_configuration_is_one_finding(place, capsys):
    found = examined(capsys, {"server": {"port": "x"}}, place, code=1)
    assert "server.port" in found["configuration"]["text"] and "model local" not in found and "python" in found


def test_a_server_that_ends_at_start_is_told_with_its_own_line(place, capsys):
    config = router_config(tls={"certificate": "nowhere.pem", "key": "nowhere.key"})
    found = examined(capsys, config, place, code=1)
    assert "ended with code 78" in found["generation"]["text"] and "server.tls" in found["generation"]["text"]


def test_packages_that_are_missing_or_of_other_versions(monkeypatch):
    monkeypatch.setattr(dependencies, "OPTIONAL", {})
    monkeypatch.setattr(dependencies, "ROUTER", {"h11": ("h11", "0.1.0")})
    first, second, _ = doctor_machine.packages(engine=False)
    assert first.state == "warn" and "tested with 0.1.0" in first.text and "h11==0.1.0" in first.mend
    assert second.text.startswith("0 of 1")
    monkeypatch.setattr(dependencies, "ROUTER", {"no_such_package": ("no-such-package", "3.2.1")})
    finding, _ = doctor_machine.packages(engine=False)
    assert finding.state == "fail" and "no-such-package" in finding.text
    assert finding.mend == "pip install 'no-such-package==3.2.1'"


def test_a_package_that_fails_at_import_is_told_with_its_repair(tmp_path, monkeypatch):
    (tmp_path / "breaking_package.py").write_text("raise ImportError('its library is of another version')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dependencies, "ROUTER", {"breaking_package": ("breaking-package", "1.0")})
    finding, _ = doctor_machine.packages(engine=False)
    assert "its library is of another version" in finding.text and "--force-reinstall 'breaking-package==1.0'" in finding.mend


def test_the_unrelated_package_and_its_variables_are_named(place, monkeypatch):
    assert [finding.state for finding in doctor_machine.namesakes()] == ["ok"]
    folder = place / "laya-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: laya\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("LAYA_PORT", "9000")
    package, variable = doctor_machine.namesakes()
    assert package.state == "warn" and "laya 9.9" in package.text and "pip uninstall laya" in package.mend
    assert variable.state == "warn" and "LAYA_PORT" in variable.text and "LAYA_SERVER__PORT" in variable.mend


def test_too_few_descriptors_are_told_with_the_number(monkeypatch):
    config = loads("backends: {b: {url: 'http://h:1', max_inflight: 100}}\nroutes: [{match: '*', to: b}]")
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda _: (1024, 524288))
    (finding,) = doctor_machine.limits(config)
    assert finding.state == "warn" and "ulimit -n 4260" in finding.mend
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda _: (4260, 4260))
    assert next(doctor_machine.limits(config)).state == "ok"


def test_optional_packages_are_compared_where_they_are_installed(monkeypatch):
    monkeypatch.setattr(dependencies, "ROUTER", {})
    monkeypatch.setattr(dependencies, "OPTIONAL", {"h11": ("h11", "0.1.0"), "nothing": ("no-such-package", "1")})
    _, first, second = doctor_machine.packages(engine=False)
    assert (first.name, first.state) == ("optional packages", "warn") and "tested with 0.1.0" in first.text
    assert second.text.startswith("0 of 1")


def test_a_session_table_without_its_folder():
    config = loads("router: {mode: persistent, path: /nowhere/at/all.sqlite}\nbackends: {b: {url: 'http://h:1'}}\nroutes: [{match: '*', to: b}]")
    (finding,) = doctor_machine.storage(config)
    assert finding.state == "fail" and finding.mend == "mkdir -p /nowhere/at"


def test_a_session_table_that_cannot_be_kept_is_told_and_nothing_is_left_behind(tmp_path, monkeypatch):
    path = tmp_path / "t.sqlite"
    assert doctor_machine.table_file(str(path)).state == "ok" and list(tmp_path.iterdir()) == []
    path.mkdir()
    assert doctor_machine.table_file(str(path)).state == "fail"
    path.rmdir()
    path.write_bytes(b"not a table at all")
    damaged = doctor_machine.table_file(str(path))
    assert damaged.state == "warn" and "puts it aside" in damaged.text
    path.unlink()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_machine.tempfile, "TemporaryDirectory", full)
    failed = doctor_machine.table_file(str(path))
    assert failed.state == "fail" and "No space left" in failed.text


def test_a_file_system_without_write_ahead_logs_is_told(tmp_path, monkeypatch):
    class Plain(sqlite3.Connection):
        def execute(self, sql, *arguments):
            return super().execute(sql.replace("=WAL", "=DELETE"), *arguments)

    connect = sqlite3.connect
    monkeypatch.setattr(doctor_machine.sqlite3, "connect", lambda path: connect(path, factory=Plain))
    finding = doctor_machine.table_file(str(tmp_path / "t.sqlite"))
    assert finding.state == "warn" and "without write-ahead logs" in finding.text


def test_the_server_of_the_proof_ends_with_the_command_however_that_ends(place, model_path):
    engine = {"model": str(model_path), "max_seq_len": 512, "kv_cache": "32MiB", "max_num_seqs": 1}
    (place / "laya.yaml").write_text(json.dumps({"server": {"port": 0}, "inference": engine}))
    doctor = subprocess.Popen(
        [sys.executable, "-u", "-m", "laya", "doctor"], stdout=subprocess.PIPE, text=True, cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    try:
        line = next(line for line in doctor.stdout if line.split()[1] == "start")
        port = int(re.search(r"127\.0\.0\.1:(\d+)", line).group(1))
    finally:
        doctor.kill()
        doctor.wait()

    def ended() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return False
        return True

    until = time.monotonic() + 30
    while not ended() and time.monotonic() < until:
        time.sleep(0.05)
    assert ended()


def shared(url: str):
    return loads(f"router: {{mode: shared, redis: '{url}'}}\nbackends: {{b: {{url: 'http://h:1'}}}}\nroutes: [{{match: '*', to: b}}]")


def test_a_common_table_that_does_not_answer_is_told_without_its_password():
    (finding,) = doctor_machine.storage(shared("redis://:hush@127.0.0.1:9/0"))
    assert finding.state == "warn" and "works alone" in finding.text and "hush" not in finding.text + finding.mend


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_common_table_that_answers(tmp_path):
    path = tmp_path / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 20
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.02)
            (finding,) = doctor_machine.storage(shared(f"unix://{path}"))
            assert finding.state == "ok" and "version" in finding.text
        finally:
            process.terminate()


class Driver:
    """Stands for pynvml: two cards, the second lost."""

    class NVMLError(Exception):
        value = 15

    NVML_ERROR_GPU_IS_LOST, NVML_TEMPERATURE_GPU = 15, 0
    nvmlInit = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(int)
    nvmlDeviceGetName = staticmethod(lambda handle: "Card")
    nvmlSystemGetDriverVersion = staticmethod(lambda: b"570.1")
    nvmlDeviceGetTemperature = staticmethod(lambda handle, kind: 55)

    @classmethod
    def nvmlDeviceGetMemoryInfo(cls, handle):
        if handle == 1:
            raise cls.NVMLError
        return types.SimpleNamespace(total=12 << 30, used=1 << 30)


def test_cards_are_named_and_a_lost_one_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor_machine.Nvml, "find", classmethod(lambda cls: Nvml(Driver)))
    good, lost = doctor_machine.gpus()
    assert "Card, 1024 of 12288 MiB used, 55 degrees, driver 570.1" in good.text
    assert lost.state == "fail" and lost.mend


def test_a_driver_without_its_package_is_told(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").write_text("")
    monkeypatch.setattr(doctor_machine, "NVIDIA", str(tmp_path / "nvidiactl"))
    monkeypatch.setattr(doctor_machine.Nvml, "find", classmethod(lambda cls: None))
    (finding,) = doctor_machine.gpus()
    assert finding.state == "warn" and "laya-server[gpu]" in finding.mend


def test_lines_hold_the_time_and_the_repair():
    assert lines(Finding("name", "ok", "text", seconds=1.26)) == ["ok   name                text  (1.3 s)"]
    assert lines(Finding("name", "fail", "text", "do this"))[1].strip() == "mend it: do this"


def test_an_answer_of_the_engine_that_fails_is_a_finding(router):
    from laya.cli.running import Running

    finding = doctor_server._answer(Running("127.0.0.1", router.port, None), "no-such-engine")
    assert finding.state == "fail" and finding.text.startswith("400")


def test_keys_that_are_known_by_their_hash_do_not_keep_the_proof_from_running(place, upstream, capsys):
    config = router_config()
    config["backends"]["b"]["url"] = upstream.url
    config["auth"] = {"keys": [{"name": "k", "sha256": hashlib.sha256(b"unknown here").hexdigest()}]}
    found = examined(capsys, config, place, code=0)
    assert found["models"]["state"] == "ok" and found["stop"]["state"] == "ok"


def test_a_running_laya_whose_keys_are_known_by_their_hash_is_no_failure(place, upstream, capsys):
    config = router_config()
    config["backends"]["b"] = {"url": upstream.url, "health": None}
    config["auth"] = {"keys": [{"name": "k", "sha256": hashlib.sha256(b"unknown here").hexdigest()}]}
    with running(config, place) as laya:
        config["server"]["port"] = laya.port
        found = examined(capsys, config, place, code=0)
    assert found["models"]["state"] == "warn" and "--key KEY" in found["models"]["mend"]


def test_a_unix_socket_without_its_folder_and_a_program_that_is_not_there(place, capsys):
    found = examined(capsys, router_config(unix_socket="/nowhere/laya.sock"), place, "--quick", code=1)
    assert found["unix socket"]["state"] == "fail" and "mkdir -p /nowhere" in found["unix socket"]["mend"]
    config = {"server": {"port": 0}, "backends": {"b": {"command": "no-such-program {port}", "memory": "1GiB"}}}
    found = examined(capsys, config | {"routes": [{"match": "*", "to": "b"}]}, place, "--quick", code=1)
    assert "no-such-program" in found["configuration"]["text"]
