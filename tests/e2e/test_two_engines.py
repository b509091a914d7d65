"""Several engines in one process: one limit, one process counted once, nothing of one in the other's cache."""

from __future__ import annotations

import json

from server import running


def test_two_models_share_a_process_and_no_prefix(model_path, tmp_path):
    """(cases 47, 78) The same prompt to both; what one has cached is nothing to the other. The stop is orderly."""
    engine = {"model": str(model_path), "max_seq_len": 256, "max_num_seqs": 1}
    config = {
        "inference": {"engines": {"first": {**engine, "name": "one"}, "second": {**engine, "name": "two"}}},
        "routes": [{"name": "one", "match": "one", "to": "first"}, {"name": "two", "match": "two", "to": "second"}],
    }
    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()

        def states() -> list[str]:
            return [e["state"] for e in json.loads(laya.get("/ready")[1])["components"]["engines"].values()]

        assert laya.wait_for(lambda: states() == ["ready", "ready"], 60)
        prompt = "Answer in one short sentence, without any comment: what is the capital of France, and on which river is it?"
        seen = {}
        for model in ("one", "one", "two"):
            status, body, _ = laya.chat(model, prompt, temperature=0, max_tokens=8)
            assert status == 200, body
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            seen.setdefault(model, []).append((body["choices"][0]["message"]["content"], cached))
        (first, cold), (again, warm) = seen["one"]
        ((other, theirs),) = seen["two"]
        assert first == again == other and cold == theirs == 0 and warm >= 16
        plans = [line for line in laya.lines if line.get("event") == "plan"]
        assert [plan["host"]["process"] > 0 for plan in plans] == [True, False]
        taken = sum(plans[0]["device"].values()) + sum(plans[0]["host"].values())
        assert plans[1]["limit"] == plans[0]["limit"] - taken
        assert laya.stop() == 0
        assert [line["engine"] for line in laya.lines if line.get("event") == "engine" and line["state"] == "stopped"] != []
