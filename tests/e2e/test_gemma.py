"""A model without a chat template, served: completions work, a chat is told why not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from server import Laya, running


@pytest.fixture(scope="module")
def gemma(gemma_path, tmp_path_factory) -> Iterator[Laya]:
    config = {"inference": {"model": str(gemma_path), "name": "gemma", "max_seq_len": 256, "max_num_seqs": 2, "kv_cache": "32MiB"}}
    with running(config, tmp_path_factory.mktemp("gemma"), "serve") as laya:
        laya.wait_ready()
        yield laya


def test_text_is_completed(gemma):
    body = {"model": "gemma", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    status, raw, _ = gemma.call("POST", "/v1/completions", body)
    answer = json.loads(raw)
    assert status == 200, answer
    assert "capital" in answer["choices"][0]["text"] and answer["usage"]["prompt_tokens"] == 6  # <bos> and five words


def test_a_stream_of_the_same_request_has_the_same_text(gemma):
    body = {"model": "gemma", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = json.loads(gemma.call("POST", "/v1/completions", body)[1])["choices"][0]["text"]
    _, raw, _ = gemma.call("POST", "/v1/completions", {**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole


def test_a_chat_is_refused_with_the_reason(gemma):
    status, answer, _ = gemma.chat("gemma")
    assert status == 400
    assert "no chat template" in answer["error"]["message"] and "/v1/completions" in answer["error"]["message"]
    assert answer["error"]["param"] == "messages"


def test_the_loading_was_told_layer_by_layer(gemma):
    lines = [line for line in gemma.lines if line.get("event") == "engine" and line.get("state") == "loading"]
    assert any("of 18" in line.get("progress", "") for line in lines), lines
