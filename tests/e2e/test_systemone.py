"""Typed decisions with the real model: conformant answers, in time, without touching other requests."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest
import zstandard

STATE = "I was charged twice for March. Please refund me today or I will dispute the charge."
TEAMS = {"Billing": "Payments, invoices, refunds", "Technical": "Bugs and outages", "Sales": None}
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Does the customer want a refund?", "criteria": {"true": "They ask for money back"}},
    "team": {"type": "choice", "instructions": "Which team should handle this ticket?", "criteria": TEAMS},
    "anger": {"type": "score", "instructions": "How frustrated is the customer?", "criteria": ["Calm", "Frustrated", "Very angry"]},
}  # fmt: skip


def decide(served, questions=QUESTIONS, state=STATE, model: str = "jev-latest", **members):
    """(status, body) of one request."""
    body = {"model": model, "state": state, "questions": questions, **members}
    status, raw, _ = served.call("POST", "/v1/systemone", body, {"authorization": "Bearer anything"})
    return status, json.loads(raw)


def check_distribution(answer: dict, keys) -> None:
    assert list(answer["probabilities"]) == list(keys)
    assert all(0 <= p <= 1 for p in answer["probabilities"].values()) and 0 <= answer["confidence"] <= 1
    assert math.isclose(sum(answer["probabilities"].values()), 1, abs_tol=1e-6)


def test_each_type_is_answered_and_the_model_understands(served):
    """(cases 81, 83, 84) The alias is accepted and so is an Authorization header without auth."""
    status, body = decide(served, unknown_member=1)
    assert status == 200 and set(body) == {"model", "answers", "usage"} and set(body["answers"]) == set(QUESTIONS)
    team, anger = body["answers"]["team"], body["answers"]["anger"]
    assert team["choice"] == "Billing" and 0 <= body["answers"]["refund"]["noul"] <= 1
    check_distribution(team, TEAMS)
    check_distribution(anger, "012")
    assert anger["legend"] == {"0": "Calm", "1": "Frustrated", "2": "Very angry"}
    assert anger["score"] == pytest.approx(sum(int(k) * p for k, p in anger["probabilities"].items()))
    assert body["usage"]["input_tokens"] > 100 and body["usage"]["output_tokens"] == 0


def test_names_order_and_company_of_questions_move_no_answer(served):
    _, alone = decide(served, {"x": QUESTIONS["team"]})
    renamed = {f"질문 {name} 🎯": question for name, question in reversed(QUESTIONS.items())}
    _, together = decide(served, renamed)
    one, other = alone["answers"]["x"]["probabilities"], together["answers"]["질문 team 🎯"]["probabilities"]
    assert all(abs(one[name] - other[name]) < 0.05 for name in one)


@pytest.mark.parametrize("count", [2, 26, 255])
def test_many_options_are_answered_in_time(served, count):
    """(case 79)"""
    options = {"Billing": "Payments, invoices, refunds", **{f"Queue {i:03d}": f"Tickets for queue {i}" for i in range(1, count)}}
    began = time.monotonic()
    status, body = decide(served, {"q": {"type": "choice", "instructions": "Which queue?", "criteria": options}})
    assert status == 200, body
    check_distribution(body["answers"]["q"], options)
    assert time.monotonic() - began < 60


def test_options_of_any_spelling_come_back_byte_for_byte(served):
    options = {"환불 요청": "돈", "": None, " a": "b", "a": {"k": [1]}, "🙂 é": ["x"], "e\u0301": None}
    status, body = decide(served, {"q": {"type": "choice", "instructions": ["유형은?"], "criteria": options}}, state=["x", {"y": 1}])
    assert status == 200 and body["answers"]["q"]["choice"] in options
    check_distribution(body["answers"]["q"], options)


def test_a_packed_body_is_read(served):
    """The SDK packs bodies from 1,024 bytes on."""
    body = json.dumps({"model": "smol", "state": "x" * 1500, "questions": {"q": {"type": "noul"}}}).encode()
    status, raw, _ = served.call("POST", "/v1/systemone", zstandard.compress(body), {"content-encoding": "zstd"})
    assert status == 200 and 0 <= json.loads(raw)["answers"]["q"]["noul"] <= 1


def test_errors_have_the_apis_own_form(served):
    """(case 84)"""
    status, body = decide(served, {})
    assert status == 422 and body["detail"][0]["loc"] == ["body", "questions"]
    status, body = decide(served, model="no-such-model")
    assert status == 404 and set(body["detail"]) == {"error_type", "message"}
    status, body = decide(served, {"q": {"type": "noul"}}, state="word " * 3000)
    assert status == 413 and "1024" in body["detail"]["message"]
    assert json.loads(served.call("GET", "/v1/systemone")[1])["detail"]["error_type"]
    status, raw, _ = served.call("POST", "/v1/systemone", b'{"model": "smol", "state": ')
    assert status == 422 and json.loads(raw)["detail"][0]["loc"] == ["body"]


def test_decisions_and_chats_share_the_engine(served, client):
    kw = {"model": "smol", "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 16}
    alone = client.chat.completions.create(**kw).choices[0].message.content
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(decide(served)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert client.chat.completions.create(**kw).choices[0].message.content == alone
    for thread in threads:
        thread.join()
    assert results == [200, 200, 200]
    assert served.wait_for(lambda: served.metric("laya_kv_blocks_used", engine="local") == 0)


def test_a_client_that_leaves_ends_its_decision(served):
    options = {f"word{i} number {i * 7919}": None for i in range(200)}
    body = json.dumps({"state": STATE, "model": "smol", "questions": {
        f"q{i}": {"type": "choice", "instructions": f"{i}?", "criteria": options} for i in range(20)
    }}).encode()  # fmt: skip
    with served.connect() as sock:
        sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") > 0)
    assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") == 0, 5)
    assert served.wait_for(lambda: served.metric("laya_kv_blocks_used", engine="local") == 0, 5)


def test_the_sdk_reads_every_type(served):
    import typesafe_sdk as sdk

    questions = {
        "refund": sdk.Noul(instructions="Refund?"), "team": sdk.Choice(instructions="Team?", criteria=TEAMS),
        "anger": sdk.Score(instructions="Angry?", criteria=["Calm", "Angry"]),
    }  # fmt: skip
    with sdk.TypeSafeClient(api_key="any", base_url=served.url, timeout=60) as client:
        answers = client.system_one(state=STATE, questions=questions)
    assert answers.choices["team"].choice in TEAMS and answers.nouls["refund"] and answers.scores["anger"]


def test_a_picture_is_refused_in_words(served):
    import typesafe_sdk as sdk

    with sdk.TypeSafeClient(api_key="any", base_url=served.url, timeout=60) as client:
        with pytest.raises(sdk.TypeSafeUnprocessableEntityError, match="reads text only"):
            client.system_one(state=[sdk.Image(b"\x89PNG\r\n\x1a\n"), "what?"], questions={"q": sdk.Noul(instructions="Red?")})


def test_tokenize_and_detokenize_agree(served):
    status, raw, _ = served.call("POST", "/tokenize", {"model": "smol", "prompt": "Hello, wörld 🚀"})
    tokens = json.loads(raw)
    assert status == 200 and tokens["count"] == len(tokens["tokens"]) > 3 and tokens["max_model_len"] == 1024
    status, raw, _ = served.call("POST", "/detokenize", {"model": "smol", "tokens": tokens["tokens"]})
    assert status == 200 and json.loads(raw)["prompt"] == "Hello, wörld 🚀"
    chat = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}]}
    counted = json.loads(served.call("POST", "/tokenize", chat)[1])["count"]
    assert counted == served.chat(text="Hello", max_tokens=1)[1]["usage"]["prompt_tokens"]
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {"tokens": ["x"]}), ("/detokenize", {"tokens": [-1]}),
                       ("/detokenize", {}), ("/tokenize", {"messages": []})):  # fmt: skip
        status, raw, _ = served.call("POST", path, {"model": "smol", **body})
        assert status == 400 and json.loads(raw)["error"]["type"] == "invalid_request_error"
    status, raw, _ = served.call("POST", "/detokenize", {"model": "smol", "tokens": [10**9]})
    assert status == 400 and json.loads(raw)["error"]["param"] == "tokens[0]"
