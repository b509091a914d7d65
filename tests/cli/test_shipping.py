"""What is shipped agrees with the code: image, unit, manifest, executables, and the page that tells how to operate."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from laya.cli import exits
from laya.cli.main import COMMANDS, main, parse
from laya.cli.memory_max import STEP, memory_max
from laya.config import loads
from laya.config.server import ServerConfig
from laya.engine.machine import Memory
from laya.gateway.pages import Pages
from laya.inprocess.plans import Machine, plan_engines

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
DRAIN_S = ServerConfig().drain_timeout_s
GIB = 1 << 30


def manifest(kind: str) -> dict:
    documents = yaml.safe_load_all((PACKAGING / "kubernetes.yaml").read_text())
    return next(document for document in documents if document["kind"] == kind)


def container() -> dict:
    return manifest("Deployment")["spec"]["template"]["spec"]["containers"][0]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read(PACKAGING / "laya.service")
    return parser["Service"]


def pages() -> Pages:
    return Pages(None, ready=lambda: True, healthy=lambda: True, components=dict, metrics_open=False)


def test_the_manifests_configuration_is_one_that_laya_takes():
    text = manifest("ConfigMap")["data"]["laya.yaml"]
    config = loads(text, {"LAYA_KEY": "a-key-of-some-length"})
    port = container()["ports"][0]["containerPort"]
    assert config.server.host == "0.0.0.0" and config.server.port == port == manifest("Service")["spec"]["ports"][0]["port"]
    assert config.auth.keys[0].key == "a-key-of-some-length"
    assert [variable["name"] for variable in container()["env"]] == re.findall(r"\$\{(\w+)\}", text)


def test_the_manifests_probes_ask_for_pages_that_are_open_everywhere():
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container()[probe]["httpGet"]["path"].encode()
        assert pages().has(path) and path in pages().open
    assert container()["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container()["livenessProbe"]["httpGet"]["path"] == "/health"


def test_the_pod_is_given_longer_than_the_drain():
    spec = manifest("Deployment")["spec"]["template"]["spec"]
    config = loads(manifest("ConfigMap")["data"]["laya.yaml"], {"LAYA_KEY": "a-key-of-some-length"})
    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= pause + config.server.drain_timeout_s + 10
    assert spec["securityContext"]["runAsNonRoot"] and container()["securityContext"]["readOnlyRootFilesystem"]


def test_commands_in_the_packages_are_ones_that_laya_has():
    words = shlex.split(unit()["ExecStart"])
    assert words[0].endswith("/laya") and parse(words[1:]).command == "serve"
    assert parse(container()["args"]).command == "serve"
    text = (PACKAGING / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["laya"]' in text and parse(yaml.safe_load(re.search(r"^CMD (\[.*\])", text, re.M).group(1))).command == "serve"


def test_the_unit_waits_for_the_drain_and_does_not_restart_in_vain():
    service = unit()
    assert int(service["TimeoutStopSec"]) >= DRAIN_S + 10
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == {exits.USAGE, exits.CONFIG}
    assert int(service["LimitNOFILE"]) >= ServerConfig().max_connections * 2
    assert service["MemoryMax"] == container()["resources"]["limits"]["memory"].removesuffix("i")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    text = re.sub(r"/opt/laya/bin/laya", "/bin/true", (PACKAGING / "laya.service").read_text())
    copy = tmp_path / "laya.service"
    copy.write_text(re.sub(r"^(User|Group)=.*$", "", text, flags=re.M))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "laya.service" not in done.stderr, done.stderr


def test_the_image_copies_what_exists_and_is_let_through():
    text = (PACKAGING / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M) for word in line.split()[:-1]]
    allowed = [line[1:] for line in (PACKAGING / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sources and set(sources) == set(allowed)
    assert all((ROOT / source).exists() for source in sources)
    assert re.search(r"^USER 10001$", text, re.M) and "/health" in text and text.count("FROM ") == 2


def test_the_executable_carries_the_page_and_every_command():
    text = (PACKAGING / "laya.spec").read_text()
    assert 'collect_submodules("laya")' in text and '"laya/ui/page"' in text
    assert (ROOT / "src/laya/ui/page/index.html").exists()
    makefile = (ROOT / "Makefile").read_text()
    assert "binary:" in makefile and "binary-router:" in makefile


def test_the_embedded_model_is_found_in_the_executable_unless_there_is_one_beside(tmp_path, monkeypatch):
    import sys

    monkeypatch.chdir(tmp_path)
    config = loads("inference: {}", source=None)
    engine = config.engines_by_name()["local"]
    carried = tmp_path / "unpacked" / engine.model
    carried.parent.mkdir(parents=True)
    carried.write_bytes(b"x")
    assert config.model_path(engine) == str(tmp_path / engine.model)
    monkeypatch.setattr(sys, "_MEIPASS", str(tmp_path / "unpacked"), raising=False)
    assert config.model_path(engine) == str(carried)
    beside = tmp_path / engine.model
    beside.parent.mkdir(parents=True)
    beside.write_bytes(b"x")
    assert config.model_path(engine) == str(beside)


CHILD = """
import sys, time
sys._MEIPASS = sys.argv[1]
from laya.cli.onefile import settle
settle()
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("settled", flush=True)
if sys.argv[2] == "end": sys.exit(0)
time.sleep(60)
"""


def unpacked(folder: Path, how: str) -> subprocess.Popen:
    """What PyInstaller's loader is: a process that waits for the one that runs."""
    (folder / "carried").write_text("x")
    loader = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, {str(folder)!r}, {how!r}])"
    return subprocess.Popen(
        [sys.executable, "-c", loader], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def test_the_executables_two_processes_end_as_one_and_leave_nothing_unpacked(tmp_path):
    loader = unpacked(tmp_path, "stay")
    assert loader.stdout.readline() == "settled\n"
    loader.kill()
    assert loader.stdout.read() == ""  # the child has ended too
    until = time.monotonic() + 20
    while tmp_path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not tmp_path.exists()
    loader.wait()


def test_the_executable_leaves_what_its_loader_removes(tmp_path):
    loader = unpacked(tmp_path, "end")
    loader.communicate(timeout=20)
    assert (tmp_path / "carried").exists()


def test_a_terminals_interrupt_reaches_the_executable_through_its_loader_only(tmp_path):
    loader = unpacked(tmp_path, "stay")
    assert loader.stdout.readline() == "settled\n"
    os.killpg(loader.pid, signal.SIGINT)  # the stand-in passes nothing on
    assert "interrupted" not in loader.communicate(timeout=20)[0]


def test_memory_max_is_the_least_in_which_the_plan_stays_as_it_is(model_path):
    config = loads(f"inference: {{model: {str(model_path)!r}, max_seq_len: 2048}}")
    machine = Machine(Memory(64 * GIB, 60 * GIB))
    made = plan_engines(config, machine)
    limit = memory_max(config, machine, made)
    held = made[0].plan.host["process"]
    (within,) = plan_engines(config, Machine(Memory(limit, limit - held)))
    assert within.plan.fits and within.plan.num_blocks == made[0].plan.num_blocks
    assert limit % STEP == 0 and made[0].plan.process_total < limit * made[0].settings.watchdog.soft
    (tighter,) = plan_engines(config, Machine(Memory(int(limit * 0.85), int(limit * 0.85) - held)))
    assert not tighter.plan.fits or tighter.plan.num_blocks < made[0].plan.num_blocks


def test_plan_prints_lines_that_a_unit_takes(model_path, tmp_path, capsys):
    path = tmp_path / "laya.yaml"
    path.write_text(f"inference: {{model: {str(model_path)!r}}}")
    assert main(["plan", "--systemd", "--host-memory", "32GiB", "--gpu-memory", "0", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^MemoryMax=\d+M$", out, re.M) and all(line.startswith("#") or "=" in line for line in out.splitlines())


def table(text: str, heading: str) -> list[list[str]]:
    part = text.split(f"## {heading}")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_the_table_of_exit_codes_is_what_the_code_has():
    rows = table((ROOT / "docs/operating.md").read_text(), "Exit codes")
    assert [int(row[0]) for row in rows] == sorted(exits.MEANINGS)
    refused = {int(row[0]) for row in rows if row[2].startswith("no")}
    assert refused == {int(code) for code in unit()["RestartPreventExitStatus"].split()}


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["check"], 0), (["route", "nobody"], 1), (["frob"], 2), (["bench", "--url", "http://127.0.0.1:9"], 69), (["plan"], 78)],
)
def test_exit_codes_are_those_of_the_table(argv, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laya.yaml").write_text(
        "backends: {b: {url: 'http://127.0.0.1:9'}}\nroutes: [{match: only, to: b}]\ninference: {model: nowhere.gguf}"
    )
    try:
        found = main(argv)
    except SystemExit as ended:
        found = ended.code
    assert found == code


def test_an_interrupted_command_is_130(tmp_path, monkeypatch):
    from laya.cli import check

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "run", interrupted)
    assert main(["check"]) == 130


def test_the_operating_page_tells_of_every_command_and_every_member_of_a_frame():
    from laya.ui.desk import Desk

    text = (ROOT / "docs/operating.md").read_text()
    for name in COMMANDS:
        if name not in ("serve", "route", "pull", "plan"):
            assert re.search(rf"laya {name}\b", text), name
    source = Path(Desk.snapshot.__code__.co_filename).read_text().split("def snapshot")[1].split("def ")[0]
    for member in re.findall(r'^ {12}"(\w+)":', source, re.M):
        assert f"`{member}`" in text, member


def test_links_of_the_new_pages_lead_somewhere():
    for page in ("operating.md", "coming-from.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "docs" / page).read_text()):
            assert os.path.exists(ROOT / "docs" / target), (page, target)
