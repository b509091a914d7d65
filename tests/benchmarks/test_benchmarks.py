"""The benchmarks as programs: they start, their arithmetic is right, and what they time is what they say. No speed is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # after tests/, which has an `engine` too

import gateway  # noqa: E402
import hotpath  # noqa: E402
from gateway_bench import bodies, chunks, figures, frames, hey, inprocess, machine, report, steady, systems, tricks, wrk  # noqa: E402
from gateway_bench.children import Child, NotStarted, free_port  # noqa: E402

REQUIRED = (
    "throughput_c8_vs_nginx", "throughput_c64_vs_nginx", "throughput_c64_16k_vs_nginx", "p99_c512_16k_vs_nginx",
    "throughput_c64_vs_vllm_router", "throughput_c64_vs_litellm", "added_p50_c1_vs_nginx", "p99_c64_vs_nginx",
    "sse_frame_added_us", "ttft_added_ms",
)  # fmt: skip


def load(rps: float, p50: float, p99: float, errors: float = 0) -> figures.Run:
    return {"rps": rps, "p50_us": p50, "p99_us": p99, "errors": errors}


RUNS: figures.Runs = {
    "c1": {"straight": [load(9000, 100, 150)], "nginx": [load(7000, 140, 200)], "laya": [load(7500, 130, 190)]},
    "c8": {"nginx": [load(40_000, 180, 400)], "laya": [load(50_000, 150, 300)]},
    "c64": {
        "nginx": [load(30_000, 1700, 2800), load(34_000, 1700, 3000), load(20_000, 1700, 2900)],
        "laya": [load(45_000, 1500, 5800, 1), load(44_000, 1500, 2000), load(60_000, 1500, 2900, 2)],
        "litellm": [load(90, 500_000, 900_000)],
    },
    "stream": {
        "straight": [{"frame_p50_us": 60.0, "ttft_p50_us": 100.0, "cpu_us": 8.0, "errors": 0}],
        "laya": [{"frame_p50_us": 75.0, "ttft_p50_us": 350.0, "cpu_us": 21.0, "errors": 0}],
    },
}


@pytest.mark.parametrize("name", ["gateway.py", "hotpath.py"])
def test_help_says_what_is_measured(name):
    done = subprocess.run([sys.executable, f"benchmarks/{name}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--json" in done.stdout


def test_ratios_compare_medians_and_errors_add_up():
    found = figures.medians(RUNS)
    assert found["c64"]["nginx"]["rps"] == 30_000
    assert found["c64"]["laya"]["errors"] == 3
    ratios = figures.ratios(found, {"laya": {"start_s": 0.3, "resident_ready_mib": 40.0}})
    assert ratios["throughput_c64_vs_nginx"] == pytest.approx(45_000 / 30_000)
    assert ratios["throughput_c8_vs_nginx"] == pytest.approx(1.25)
    assert ratios["throughput_c64_vs_litellm"] == pytest.approx(500)
    assert ratios["p99_c64_vs_nginx"] == pytest.approx(1.0)
    assert ratios["added_p50_c1_vs_nginx"] == pytest.approx(30 / 40)
    assert ratios["sse_frame_added_us"] == pytest.approx(15)
    assert ratios["ttft_added_ms"] == pytest.approx(0.25)
    assert (ratios["start_s"], ratios["resident_mib"]) == (0.3, 40.0)


def test_every_ratio_is_named_though_its_peer_was_skipped():
    ratios = figures.ratios(figures.medians(RUNS), {})
    assert set(REQUIRED) <= set(ratios) and set(figures.TARGETS) <= set(ratios)
    assert ratios["throughput_c64_vs_vllm_router"] is None
    assert all(value is None for value in figures.ratios({}, {}).values())


def test_a_difference_lost_in_the_noise_gives_no_ratio():
    runs = {"c1": {"straight": [load(1, 100, 1)], "nginx": [load(1, 99, 1)], "laya": [load(1, 120, 1)]}}
    assert figures.ratios(figures.medians(runs), {})["added_p50_c1_vs_nginx"] is None


def test_targets_are_met_on_their_side():
    assert figures.met("throughput_c64_vs_nginx", 1.0) == "yes"
    assert figures.met("throughput_c64_vs_nginx", 0.99) == "no"
    assert figures.met("p99_c64_vs_nginx", 1.3) == "yes"
    assert figures.met("p99_c64_vs_nginx", 1.31) == "no"
    assert figures.met("p99_c64_vs_nginx", None) == figures.met("sse_frame_cpu_us", 1.0) == ""


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)],
)  # fmt: skip
def test_percentile_is_the_nearest_rank(percent, expected):
    assert figures.percentile(range(1, 11), percent) == expected


def test_table_and_numbers_read_well():
    assert figures.table([["a", "bb"], ["ccc", "d"]]).splitlines() == ["| a   | bb |", "|-----|----|", "| ccc | d  |"]
    assert [figures.number(value) for value in (40_123.4, 12.34, 1.234, 0.0123, 0, None)] == [
        "40,123", "12.3", "1.23", "0.012", "0.00", "-",
    ]  # fmt: skip


def test_report_shows_systems_points_ratios_and_what_was_skipped():
    found = figures.medians(RUNS)
    told = {name: {"version": "1"} for name in ("straight", "nginx", "laya")}
    text = report.render({
        "machine": machine.describe(), "wrk": "4", "method": "one run", "systems": told, "skipped": {"smg": "not installed"},
        "figures": found, "ratios": figures.ratios(found, told),
    })  # fmt: skip
    assert "Skipped: smg: not installed" in text
    assert "64 connections, 200-byte prompts" in text and "45,000" in text
    assert "| throughput_c64_vs_nginx " in text and "| >= 1.00 | yes |" in text
    assert report.title("c1") == "1 connection, 200-byte prompts"
    assert report.title("c512_16k") == "512 connections, 16 KB prompts"


def test_results_of_the_load_generators_are_read():
    assert wrk.parse('Running\nRESULT {"requests":1000,"duration_us":500000,"p50_us":1.5,"p99_us":9.0,"refused":2,"broken":1}\n') == {
        "rps": 2000.0, "requests": 1000, "p50_us": 1.5, "p99_us": 9.0, "errors": 3,
    }  # fmt: skip
    summary = "  Requests/sec:\t1234.5\n  50%% in 0.0010 secs\n  99%% in 0.0200 secs\n  [200]\t90 responses\n  [503]\t10 responses\n"
    assert hey.parse(summary) == {"rps": 1234.5, "requests": 100, "p50_us": 1000.0, "p99_us": 20_000.0, "errors": 10}
    for parse in (wrk.parse, hey.parse):
        with pytest.raises(RuntimeError):
            parse("unable to connect")


@pytest.mark.parametrize("size", [bodies.SMALL_BYTES, bodies.LARGE_BYTES])
def test_no_two_requests_are_alike_and_lengths_spread_around_the_size(size):
    found = bodies.bodies(size)
    lengths = [len(body) for body in found]
    assert len(set(found)) == len(found)
    assert min(lengths) < 0.85 * size and max(lengths) > 1.15 * size
    assert 0.9 * size < sum(lengths) / len(lengths) < 1.15 * size
    assert len(set(lengths)) > 50
    assert all(json.loads(body)["model"] == bodies.MODEL for body in found[:50])


def test_chunks_are_taken_off_however_the_bytes_are_cut():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-request-id: 10\r\n\r\n"
    data = head + b"5\r\nhello\r\n1;x=y\r\n \r\n6\r\nworld\n\r\n0\r\n\r\n"
    for size in (1, 2, 3, 7, len(data)):
        response, payload = chunks.Dechunker(), b""
        for start in range(0, len(data), size):
            assert not response.done
            payload += response.feed(data[start : start + size])
        assert payload == b"hello world\n" and response.done and response.status_ok


def test_an_answer_that_is_no_stream_ends_the_wait():
    response = chunks.Dechunker()
    assert response.feed(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\n{}") == b""
    assert response.done and response.status_ok is False


@pytest.fixture
def stub_port(tmp_path):
    port = free_port()
    child = Child([sys.executable, str(ROOT / "benchmarks/gateway_bench/stub.py"), "--port", str(port), "--interval-ms", "1"], cwd=tmp_path)
    try:
        child.wait_until_answers(port, bodies.http(bodies.bodies(200)[0], port), 30)
        yield port
    finally:
        child.stop()


def test_streams_and_constant_rate_measure_the_stub(stub_port):
    for dense in (False, True):
        told = frames.run(stub_port, 3, 20, dense=dense)
        assert told["frames"] == 60 and told["errors"] == 0
        assert 0 < told["frame_p50_us"] <= told["frame_p99_us"]
    told = steady.run(stub_port, rate=100, seconds=0.3)
    assert told["answers"] == 30 and told["errors"] == 0 and told["connections"] >= 1
    assert 0 < told["p50_us"] <= told["p99_us"]


def test_a_system_that_does_not_start_is_named_with_its_command(tmp_path):
    child = Child([sys.executable, "-c", "raise SystemExit(3)"], cwd=tmp_path)
    try:
        with pytest.raises(NotStarted, match=r"code 3; run: .*SystemExit"):
            child.wait_until_answers(free_port(), b"", 30)
    finally:
        child.stop()


def test_what_a_system_starts_ends_with_it(tmp_path):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    child = Child([sys.executable, "-c", code], cwd=tmp_path)
    until = time.monotonic() + 20
    while len(child.pids()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    pids = child.pids()
    assert len(pids) == 2 and child.resident_mib() > 0 and child.cpu_seconds() > 0
    child.stop()
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_peer_is_found_in_its_folder_or_not_at_all(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "smg"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert systems.find("smg", tmp_path) == systems.find("smg", tmp_path / "bin") == str(program)
    assert systems.find("smg", None) is None
    assert systems.vllm_router(1, 2, tmp_path, tmp_path, 3) is None
    assert systems.version_of(str(program), "pytest") == pytest.__version__


def test_nginx_configuration_has_every_place_filled(tmp_path, monkeypatch):
    program = tmp_path / "nginx"
    program.write_text("#!/bin/sh\necho nginx version: nginx/9.9 >&2\n")
    program.chmod(0o755)
    launch = systems.nginx(8001, 8002, tmp_path, "off", tmp_path)
    text = Path(launch.command[-1]).read_text()
    assert launch.version == "9.9" and "${" not in text
    assert "listen 127.0.0.1:8001;" in text and "server 127.0.0.1:8002;" in text and "access_log off;" in text


def test_unknown_systems_are_refused():
    with pytest.raises(SystemExit):
        gateway.arguments(["--only", "laya,apache"])
    assert gateway.arguments(["--only", "laya,nginx"]).only == {"laya", "nginx"}


def test_every_trick_can_be_switched_off_and_the_path_answers_the_same():
    switches = [switch for pair in (tricks.TRICKS | tricks.FEATURES).values() for switch in pair if switch is not None]

    def work(path: inprocess.Path) -> int:
        for switch in switches:
            with switch(path):
                path.check()
                path.check()
            path.check()
        return len(switches)

    assert inprocess.measured(work) >= 8


def test_hot_path_figures_have_all_their_parts(monkeypatch, capsys):
    monkeypatch.setattr(inprocess, "KINDS", 16)
    result = {"machine": machine.describe(), **inprocess.measured(lambda path: hotpath.measure(path, 1))}
    assert set(result["tricks"]) == set(tricks.TRICKS) and set(result["features"]) == set(tricks.FEATURES)
    assert all(us > 0 for us in (*result["request_us"].values(), *result["parts_us"].values(), result["frame_us"]))
    assert set(result["ratios"]) == {"metrics_share", "access_log_share"}
    text = hotpath.render(json.loads(json.dumps(result)))
    assert "| heads remembered " in text and "| whole request " in text


def test_measuring_leaves_the_application_as_it_was():
    from laya import app
    from laya.net.server import Server

    before = len(os.listdir("/proc/self/task"))
    inprocess.measured(lambda path: path.check())
    assert app.Server is Server
    assert len(os.listdir("/proc/self/task")) <= before + 1
