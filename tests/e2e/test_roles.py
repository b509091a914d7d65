"""`laya engine` and `laya router` as two processes: the same APIs, a restart under load, fairness across the split."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter

import pytest

from raw import post, read_response
from scripted_upstream import ScriptedUpstream, answer, completion
from server import Laya, running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inference(model_path, listen: str, **more) -> dict:
    return {
        "model": str(model_path), "name": "smol", "listen": listen, "max_seq_len": 1024, "max_num_seqs": 2, "kv_cache": "48MiB",
        **more,
    }  # fmt: skip


@contextlib.contextmanager
def split(config: dict, directory):
    """(router, engine) of one configuration, both ready."""
    with running(config, directory, "engine", wait="http" in config["inference"]["listen"]) as engine:
        with running(config, directory, "router") as router:
            router.wait_ready()
            yield router, engine


@pytest.fixture(scope="module")
def pair(model_path, tmp_path_factory):
    config = {"inference": inference(model_path, f"http://127.0.0.1:{free_port()}")}
    with split(config, tmp_path_factory.mktemp("split")) as both:
        yield both


def ask(router: Laya, path: str, body: dict, expect: int = 200) -> dict:
    status, raw, _ = router.call("POST", path, body)
    assert status == expect, raw
    return json.loads(raw)


def test_a_router_has_all_apis_of_its_engine_process(pair):
    router, engine = pair
    text = [{"role": "user", "content": "What is the capital of France?"}]
    status, chat, headers = router.chat("smol", "What is the capital of France?", temperature=0, max_tokens=12)
    _, direct, _ = engine.chat("smol", "What is the capital of France?", temperature=0, max_tokens=12)
    assert status == 200 and chat["choices"] == direct["choices"] and headers["x-laya-backend"] == "local"
    assert ask(router, "/v1/completions", {"model": "smol", "prompt": "One two", "max_tokens": 2})["usage"]["completion_tokens"] == 2
    message = ask(router, "/v1/messages", {"model": "smol", "max_tokens": 4, "messages": text})
    assert message["type"] == "message" and message["usage"]["output_tokens"] == 4
    assert ask(router, "/v1/messages/count_tokens", {"model": "smol", "messages": text})["input_tokens"] > 5
    made = ask(router, "/v1/responses", {"model": "smol", "input": "Say hi.", "max_output_tokens": 4})
    again = ask(router, "/v1/responses", {"model": "smol", "input": "More.", "previous_response_id": made["id"], "max_output_tokens": 4})
    assert again["previous_response_id"] == made["id"] and again["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    assert json.loads(router.get(f"/v1/responses/{made['id']}")[1])["id"] == made["id"]
    decided = ask(router, "/v1/systemone", {
        "model": "jev-latest", "state": "It rains.", "questions": {"q": {"type": "noul", "instructions": "Is it raining?"}},
    })  # fmt: skip
    assert 0 <= decided["answers"]["q"]["noul"] <= 1
    ids = ask(router, "/tokenize", {"model": "smol", "prompt": "Paris"})["tokens"]
    assert ask(router, "/detokenize", {"model": "smol", "tokens": ids})["prompt"].endswith("Paris")
    assert router.metric("laya_requests_total", backend="local", api="responses", outcome="ok") == 2
    assert engine.metric("laya_requests_total", backend="local", api="systemone", outcome="ok") == 1


def test_models_of_a_router_are_those_of_its_engine_process(pair):
    router, engine = pair
    entry = json.loads(router.get("/v1/models/smol")[1])
    assert entry["max_model_len"] == 1024 and entry["details"] == json.loads(engine.get("/v1/models/smol")[1])["details"]


def test_a_stream_comes_through_and_a_client_that_leaves_ends_its_sequence(pair):
    """(case 10)"""
    router, engine = pair
    body = {"model": "smol", "stream": True, "ignore_eos": True, "max_tokens": 900, "messages": [{"role": "user", "content": "x"}]}
    with router.connect() as sock:
        sock.sendall(post(json.dumps(body).encode()))
        assert b"200 OK" in sock.recv(4096)
        assert engine.wait_for(lambda: engine.metric("laya_sequences_running", engine="local") == 1)
    assert engine.wait_for(lambda: engine.metric("laya_sequences_running", engine="local") == 0)
    assert router.wait_for(lambda: router.metric("laya_backend_inflight", backend="local") == 0)


def test_the_router_alone_holds_no_torch(pair):
    router, engine = pair
    assert "libtorch" not in open(f"/proc/{router.process.pid}/maps").read()
    assert "libtorch" in open(f"/proc/{engine.process.pid}/maps").read()


def test_an_engine_killed_and_restarted_under_load_loses_only_what_was_in_flight(model_path, tmp_path):
    """Eight clients in a loop; the engine process dies with kill -9 and comes back. Whoever was not at it is served."""
    config = {"inference": inference(model_path, f"http://127.0.0.1:{free_port()}", queue_timeout_s=120)}
    found: list[tuple[float, float, int, str]] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            began = time.monotonic()
            status, body, _ = router.chat("smol", "Count.", max_tokens=8, ignore_eos=True)
            found.append((began, time.monotonic(), status, json.dumps(body)))

    with split(config, tmp_path) as (router, engine):
        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert router.wait_for(lambda: len(found) >= 8, 60)
        engine.process.kill()
        killed = time.monotonic()
        engine.process.wait(10)
        assert router.wait_for(lambda: router.get("/ready")[0] == 503, 5), "a router with no usable backend says so"
        assert router.get("/health")[0] == 200
        with running(config, tmp_path, "engine") as second:
            second.wait_ready()
            before = len(found)
            assert router.wait_for(lambda: len(found) >= before + 16, 60)
            over.set()
            for thread in threads:
                thread.join(60)
    lost = [entry for entry in found if entry[2] != 200]
    assert len(lost) <= 8 and all(began < killed < ended for began, ended, _, _ in lost), lost
    assert all("Backend local" in body and '"upstream' in body for *_, body in lost), lost
    waited = [entry for entry in found if entry[0] <= killed + 1 and entry[1] > killed + 1 and entry[2] == 200]
    assert waited, "requests that came while it was away waited for it"


def test_requests_wait_for_an_engine_that_starts_and_no_longer_than_its_queue_would_let_them(model_path, tmp_path):
    listen = f"http://127.0.0.1:{free_port()}"
    config = {"inference": inference(model_path, listen, queue_timeout_s=2, queue_limit=2)}
    with running(config, tmp_path, "router") as router:
        began = time.monotonic()
        found: list[tuple[int, dict, dict]] = []
        threads = [threading.Thread(target=lambda: found.append(router.chat("smol"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [status for status, _, _ in found] == [503] * 3 and 1.5 <= time.monotonic() - began < 10
        assert all("Retry-After" in headers or "retry-after" in headers for *_, headers in found)
        texts = Counter(body["error"]["message"] for _, body, _ in found)
        assert sum(n for text, n in texts.items() if "too many requests wait" in text) == 1
        with running(config, tmp_path, "engine") as engine:
            engine.wait_ready()
            router.wait_ready()
            assert router.chat("smol", max_tokens=1)[0] == 200


def test_two_clients_share_the_engine_fairly_across_the_split(model_path, tmp_path):
    """One key has twelve requests in the queue; another's single request does not wait for them all."""
    config = {
        "inference": inference(model_path, f"http://127.0.0.1:{free_port()}", max_num_seqs=1),
        "auth": {"keys": [{"name": "greedy", "key": "g"}, {"name": "modest", "key": "m"}]},
    }
    ended: list[str] = []

    def one(key: str) -> None:
        body = {"model": "smol", "max_tokens": 12, "ignore_eos": True, "messages": [{"role": "user", "content": "Count."}]}
        status, raw, _ = router.call("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
        assert status == 200, raw
        ended.append(key)

    with split(config, tmp_path) as (router, engine):
        threads = [threading.Thread(target=one, args=("g",)) for _ in range(12)]
        for thread in threads:
            thread.start()
        assert engine.wait_for(lambda: engine.metric("laya_sequences_waiting", engine="local") >= 9, 30)
        threads.append(threading.Thread(target=one, args=("m",)))
        threads[-1].start()
        for thread in threads:
            thread.join(120)
    assert len(ended) == 13 and ended.index("m") <= 6, ended


def test_the_engine_process_is_told_whose_a_request_is_and_clients_cannot_say_it(tmp_path):
    with ScriptedUpstream(lambda asked: [answer(completion("x") if asked.body else {})]) as engine:
        config = {
            "inference": {"model": "none.gguf", "name": "m", "listen": engine.url.removesuffix("/v1"), "listen_key": "between"},
            "auth": {"keys": [{"name": "ci", "key": "secret", "max_prompt_tokens": 77}]},
            "routes": [{"match": "m", "to": "local", "max_prompt_tokens": 99}],
        }
        with running(config, tmp_path, "router") as router:
            router.wait_ready()
            mine = {"authorization": "Bearer secret", "x-laya-client": "somebody", "x-laya-max-prompt-tokens": "9999"}
            assert router.call("POST", "/v1/chat/completions", {"model": "m", "messages": []}, mine)[0] == 200
            [asked] = [asked for asked in engine.asked if asked.body]
    head = asked.head.lower()
    assert head.count(b"x-laya-client:") == 1 and asked.headers["x-laya-client"] == "ci"
    assert head.count(b"x-laya-max-prompt-tokens:") == 1 and asked.headers["x-laya-max-prompt-tokens"] == "77"
    assert asked.headers["authorization"] == "Bearer between" and b"secret" not in head


def test_an_engine_process_with_a_key_serves_those_who_have_it_and_keeps_caps_on_prompts_token_by_token(model_path, tmp_path):
    listen = f"unix:{tmp_path}/engine.sock"
    config = {
        "inference": inference(model_path, listen, listen_key="between"),
        "routes": [{"name": "short", "match": "smol", "to": "local", "max_prompt_tokens": 40}],
    }
    asked = b'{"model":"anything","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
    with split(config, tmp_path) as (router, engine):
        assert router.chat("smol", "word " * 5, max_tokens=1)[0] == 200
        status, body, _ = router.chat("smol", "word " * 50, max_tokens=1)
        assert status == 400 and body["error"]["code"] == "context_length_exceeded" and "40" in body["error"]["message"]
        with socket.socket(socket.AF_UNIX) as direct:
            direct.connect(listen[5:])
            direct.sendall(post(asked))
            assert read_response(direct)[0] == 401
            direct.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_response(direct)[0] == 200
            direct.sendall(post(asked, extra=b"Authorization: Bearer between\r\n"))
            assert read_response(direct)[0] == 200
        assert engine.stop() == 0


@pytest.mark.parametrize(
    ("config", "names", "says"),
    [
        ({"inference": {}}, [], "no listen address"),
        ({"inference": {"listen": "unix:x"}}, ["other"], "no engine other"),
        ({"inference": {"listen": "https://127.0.0.1:1"}}, [], "server.tls"),
        (
            {"inference": {"engines": {"a": {"listen": "unix:a"}, "b": {"listen": "unix:b"}}}}, [],
            "laya engine a, laya engine b",
        ),
    ],
)
def test_an_engine_that_cannot_listen_says_why(config, names, says, tmp_path, capsys):
    from laya.cli.main import main

    (tmp_path / "c.yaml").write_text(json.dumps(config))
    assert main(["engine", *names, "--config", str(tmp_path / "c.yaml")]) == 78
    assert says in capsys.readouterr().err
