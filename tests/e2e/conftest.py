"""One server with the real model for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server import Laya, running


@pytest.fixture(scope="session")
def served(model_path, tmp_path_factory) -> Iterator[Laya]:
    config = {
        "inference": {"model": str(model_path), "name": "smol", "max_seq_len": 1024, "max_num_seqs": 4, "kv_cache": "96MiB"},
        "routes": [{"name": "default", "match": ["smol", "gpt-4o"], "to": "local"}],
    }
    with running(config, tmp_path_factory.mktemp("served"), "serve") as laya:
        laya.wait_ready()
        yield laya


@pytest.fixture
def client(served):
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=60)
