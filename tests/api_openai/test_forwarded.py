"""APIs that are passed on: to a backend that has them, by path; refused in words elsewhere."""

from __future__ import annotations

import json

import pytest

from scripted_upstream import answer
from server import running

VECTOR = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "model": "m", "usage": {}}


@pytest.mark.parametrize(
    ("path", "upstream_path"),
    [
        ("/v1/embeddings", "/v1/embeddings"), ("/v1/rerank", "/v1/rerank"), ("/v1/score", "/v1/score"),
        ("/v1/moderations", "/v1/moderations"), ("/v1/audio/speech", "/v1/audio/speech"), ("/tokenize", "/tokenize"),
        ("/detokenize", "/detokenize"), ("/v1/images/generations", "/v1/images/generations"), ("/v1/systemone", "/v1/systemone"),
    ],
)  # fmt: skip
def test_a_backend_gets_the_body_untouched_at_its_own_path(router, upstream, path, upstream_path):
    upstream.script = lambda asked: [answer(VECTOR)]
    body = b'{"model": "m",  "input": ["a"], "unknown": {"x": 1}}'
    status, got, headers = router.call("POST", path, body)
    assert (status, json.loads(got)) == (200, VECTOR) and headers["x-laya-backend"] == "up"
    assert upstream.asked[-1].target == upstream_path and upstream.asked[-1].body == body


def test_the_embeddings_of_the_openai_sdk(router, upstream):
    import openai

    upstream.script = lambda asked: [answer({**VECTOR, "data": [{"object": "embedding", "index": 0, "embedding": "AAAAPw=="}]})]
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0)
    assert client.embeddings.create(model="m", input="a").data[0].embedding == [0.5]


def test_a_recording_is_transcribed_by_a_backend_under_its_own_name(upstream, tmp_path):
    import openai

    upstream.script = lambda asked: [answer({"text": "hello"})]
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "whisper", "to": {"backend": "up", "model": "whisper-large"}}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        client = openai.OpenAI(base_url=f"{laya.url}/v1", api_key="x", max_retries=0)
        assert client.audio.transcriptions.create(model="whisper", file=("a.wav", b"RIFF\r\n\0\xff")).text == "hello"
        asked = upstream.asked[-1]
        assert asked.target == "/v1/audio/transcriptions" and b"whisper-large" in asked.body and b"RIFF\r\n\0\xff" in asked.body
        assert int(asked.headers["content-length"]) == len(asked.body)
        status, body, _ = laya.call("POST", "/v1/audio/transcriptions", b"--x", {"content-type": "multipart/form-data; boundary=x"})
        assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_route_without_the_api_is_a_400_that_names_those_with_it(upstream, tmp_path):
    config = {
        "backends": {"chat": {"url": upstream.url, "health": None, "apis": ["chat"]},
                     "vectors": {"url": upstream.url, "health": None, "apis": ["embeddings"]}},
        "routes": [{"match": "talker", "to": "chat"}, {"match": "embedder", "to": "vectors"},
                   {"name": "both", "match": "b*", "to": ["chat", "vectors"]}],
    }  # fmt: skip
    upstream.script = lambda asked: [answer(VECTOR)]
    with running(config, tmp_path) as laya:
        status, body, _ = laya.call("POST", "/v1/embeddings", {"model": "talker", "input": "a"})
        error = json.loads(body)["error"]
        assert status == 400 and error["param"] == "model" and "embedder" in error["message"] and "both" in error["message"]
        for _ in range(3):
            assert laya.call("POST", "/v1/embeddings", {"model": "b1", "input": "a"})[2]["x-laya-backend"] == "vectors"
        status, body, _ = laya.call("POST", "/v1/systemone", {"model": "talker", "state": "x", "questions": {}})
        assert status == 422 and json.loads(body)["detail"][0]["loc"] == ["body", "model"]
