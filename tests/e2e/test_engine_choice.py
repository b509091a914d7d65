"""`engine: auto` in a running server: the choice and its reason in the log and in `/v1/models`, and what it does not look at."""

from __future__ import annotations

import json
import subprocess
import sys

from server import ROOT, running


def test_the_choice_its_reason_and_settings_without_effect_are_told(model_path, tmp_path):
    inference = {"model": str(model_path), "max_seq_len": 256, "max_num_seqs": 1, "swap_space": "1GiB"}
    with running({"inference": inference}, tmp_path, "serve") as laya:
        laya.wait_ready()
        chosen, unused = laya.event("engine_chosen"), laya.event("no_effect")
        assert (chosen["chosen"], chosen["asked"], chosen["engine"]) == ("torch", "auto", "local") and "nano-vllm needs" in chosen["why"]
        assert unused["level"] == "warning" and unused["setting"] == "inference.swap_space" and "CPU" in unused["text"]
        details = json.loads(laya.get("/v1/models")[1])["data"][0]["details"]
        assert details["engine"] == "torch" and details["engine_why"] == chosen["why"]
        assert laya.stop() == 0


def test_the_plan_names_the_engine_and_why(model_path, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"inference": {"model": str(model_path), "max_seq_len": 256}}))
    command = [sys.executable, "-m", "laya", "plan", "--config", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert "run by torch: nano-vllm needs" in done.stdout, done.stderr
    done = subprocess.run([*command, "--json"], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=60)
    engine = json.loads(done.stdout)["engines"]["local"]
    assert engine["engine"] == "torch" and "this one is llama" in engine["why"]
