"""Two different models in one process: one limit, one process counted once, nothing of one in the other's cache."""

from __future__ import annotations

import json

import gguf
import pytest

from model import gguf_files
from server import running

PROMPT = "Answer in one short sentence, without any comment: what is the capital of France, and on which river is it?"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> str:
    """A random Qwen 2 with a vocabulary of its own: nothing about it is the first model's."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    gguf_files.save_gguf(path, gguf.GGMLQuantizationType.Q8_0, architecture="qwen2")
    return str(path)


def test_two_models_share_a_process_and_no_prefix(model_path, other_model, tmp_path):
    """(cases 47, 78) The same prompt to both; what one has cached is nothing to the other. The stop is orderly."""
    bounds = {"max_seq_len": 256, "max_num_seqs": 1}
    config = {
        "inference": {"engines": {
            "first": {"model": str(model_path), "name": "one", **bounds}, "second": {"model": other_model, "name": "two", **bounds},
        }},
        "routes": [{"name": "one", "match": "one", "to": "first"}, {"name": "two", "match": "two", "to": "second"}],
    }  # fmt: skip
    with running(config, tmp_path, "serve") as laya:
        laya.wait_ready()

        def states() -> list[str]:
            return [e["state"] for e in json.loads(laya.get("/ready")[1])["components"]["engines"].values()]

        assert laya.wait_for(lambda: states() == ["ready", "ready"], 60)
        details = {m["id"]: m["details"]["architecture"] for m in json.loads(laya.get("/v1/models")[1])["data"]}
        assert (details["one"], details["two"]) == ("llama", "qwen2")
        seen: dict[str, list] = {}
        for model in ("one", "one", "two", "two"):
            body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
            status, raw, _ = laya.call("POST", "/v1/completions", body)
            answer = json.loads(raw)
            assert status == 200, answer
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            seen.setdefault(model, []).append((answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], cached))
        for (text, tokens, cold), (again, _, warm) in seen.values():
            assert text == again and cold == 0 and 16 <= warm < tokens
        assert seen["one"][0][:2] != seen["two"][0][:2]  # another tokenizer, other weights
        plans = [line for line in laya.lines if line.get("event") == "plan"]
        assert [plan["host"]["process"] > 0 for plan in plans] == [True, False]
        taken = sum(plans[0]["device"].values()) + sum(plans[0]["host"].values())
        assert plans[1]["limit"] == plans[0]["limit"] - taken
        assert laya.stop() == 0
        assert [line["engine"] for line in laya.lines if line.get("event") == "engine" and line["state"] == "stopped"] != []
