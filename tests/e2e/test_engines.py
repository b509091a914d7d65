"""Several models in one process: each a target of its name, one limit, and one of them there only while it is used."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from server import ROOT, Laya, running

SMALL = {"max_seq_len": 512, "max_num_seqs": 2, "kv_cache": "24MiB"}


def config_of(model_path) -> dict:
    model = str(model_path)
    return {
        "inference": {"engines": {
            "first": {"model": model, "name": "smol-first", **SMALL},
            "second": {"model": model, "name": "smol-second", "load": "on_demand", "idle_unload_s": 1.5, "queue_timeout_s": 90, **SMALL},
        }},
        "routes": [{"name": "alias", "match": "gpt-4o", "to": "second"}, {"name": "rest", "match": "*", "to": "local"}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def served(model_path, tmp_path_factory) -> Iterator[Laya]:
    with running(config_of(model_path), tmp_path_factory.mktemp("engines"), "serve") as laya:
        laya.wait_ready()
        assert laya.wait_for(lambda: state(laya, "first") == "ready", 120)
        yield laya


def state(laya: Laya, engine: str) -> str:
    return json.loads(laya.get("/ready")[1])["components"]["engines"][engine]["state"]


def paris(laya: Laya, model: str) -> None:
    status, answer, _ = laya.chat(model, "What is the capital of France? Answer briefly.", max_tokens=12, temperature=0)
    assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"], answer


def test_models_are_listed_and_an_absent_one_comes_with_its_request(served):
    """(case 47) Two models are asked the same: each has a pool and a prefix cache of its own."""
    listed = [model["id"] for model in json.loads(served.get("/v1/models")[1])["data"]]
    assert {"smol-first", "smol-second"} <= set(listed)
    paris(served, "smol-first")
    paris(served, "smol-second")
    paris(served, "gpt-4o")
    cached = {engine: served.metric("laya_tokens_total", engine=engine, kind="cached") for engine in ("first", "second")}
    assert cached["first"] == 0 < cached["second"], cached  # only the second was asked the same thing twice
    assert served.wait_for(lambda: any(line.get("engine") == "second" and "of 30" in line.get("progress", "") for line in served.lines))


def test_an_idle_model_gives_its_memory_back_and_comes_again(served):
    paris(served, "smol-second")
    process = psutil.Process(served.process.pid)
    with_both = process.memory_info().rss
    assert served.wait_for(lambda: state(served, "second") == "asleep", 60)
    assert state(served, "first") == "ready"
    # Its weights and pool are some 120 MB; what two loadings share (code, the other model) stays.
    assert served.wait_for(lambda: with_both - process.memory_info().rss > 60 << 20, 20), (with_both, process.memory_info().rss)
    total = served.metric("laya_tokens_total", engine="second", kind="generated")
    paris(served, "smol-second")
    assert served.metric("laya_tokens_total", engine="second", kind="generated") > total > 0


def test_requests_all_around_the_moment_of_unloading_are_served(served):
    """Asked again and again across the second in which the model goes; nobody hears anything but an answer."""
    failures = []

    def ask(delay: float) -> None:
        threading.Event().wait(delay)
        status, answer, _ = served.chat("smol-second", "hi", max_tokens=3, temperature=0)
        if status != 200:
            failures.append(answer)

    paris(served, "smol-second")
    asking = [threading.Thread(target=ask, args=(1.2 + 0.12 * i,)) for i in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(120)
    assert failures == []


def test_the_process_is_ready_while_its_only_model_sleeps(model_path, tmp_path):
    config = {"inference": {"model": str(model_path), "name": "smol", "load": "on_demand", **SMALL}}
    with running(config, tmp_path, "serve") as laya:
        status, raw = laya.get("/ready")
        assert status == 200 and json.loads(raw)["components"]["engines"]["local"]["state"] == "asleep"
        status, answer, _ = laya.chat("smol", "hi", max_tokens=3)
        assert status == 200, answer


def plan_of(config: dict, tmp_path) -> dict:
    path = tmp_path / "laya.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "laya", "plan", "--json", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT / "src")}, cwd=tmp_path)
    return json.loads(done.stdout)["engines"]


def test_the_plan_shares_one_limit_in_the_order_written(model_path, tmp_path):
    engines = plan_of(config_of(model_path), tmp_path)
    assert list(engines) == ["first", "second"]
    assert all(engine["fits"] for engine in engines.values()), engines


def test_the_exact_mode_is_planned_as_it_is_loaded(model_path, tmp_path):
    config = {"inference": {"model": str(model_path), "dtype": "float32", "name": "exact", **SMALL}}
    (plan,) = plan_of(config, tmp_path).values()
    assert plan["device"]["params"] > 4 * 134_000_000  # float32 for each parameter
    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()
        (card,) = [model for model in json.loads(laya.get("/v1/models")[1])["data"] if model["id"] == "exact"]
        assert "float32" in json.dumps(card)
        paris(laya, "exact")
