"""System One requests read and answers made, without a model."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.errors import ContextLengthExceeded, InvalidRequest, LayaError, RateLimited, Unauthorized, Unprocessable
from laya.gateway.api.shortlist import SHOWN_ON_CPU, most_shown, shortlist
from laya.gateway.api.systemone import (
    answer_of,
    choice_confidence,
    decode,
    generations_of,
    score_confidence,
    softmax,
)
from laya.gateway.api.systemone_errors import error_body, error_status
from laya.schema.generation import ModelCard
from laya.schema.systemone import Choice, Noul, Score

CARD = ModelCard(id="m", max_model_len=1000, chat=True, details={"device": "cuda"})
NOUL = {"type": "noul", "instructions": "Refund?"}


def read(questions, **members):
    return decode(json.dumps({"state": "x", "questions": questions, **members}).encode())


@pytest.mark.parametrize(
    "question",
    [
        {"type": "noul"}, NOUL, {**NOUL, "criteria": None}, {**NOUL, "criteria": {"true": "yes"}}, {**NOUL, "criteria": {"false": ["n"]}},
        {"type": "noul", "instructions": {"task": ["a"]}}, {"type": "noul", "instructions": ["a", {"b": 1}], "criteria": {}},
        {"type": "choice", "criteria": {"a": None, "": {"x": 1}}}, {"type": "choice", "criteria": {str(i): None for i in range(255)}},
        {"type": "score", "criteria": ["low", {"label": "high"}]}, {"type": "score", "instructions": "How?", "criteria": ["l"] * 10},
    ],
)  # fmt: skip
def test_valid_questions_are_read(question):
    """(cases 79, 80, 81)"""
    request = read({"q 1.🙂": question}, model="jev-latest", unknown=5)
    (generation,) = generations_of(request, "r", "c", CARD)
    assert len(generation.options) == len(set(generation.options)) >= 2


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        (b"{", ()), (b"[]", ()), (b"null", ()), (b'{"state": "x"}', ()), (b'{"state": null, "questions": {}}', ("state",)),
        (b'{"state": "x", "questions": {}}', ("questions",)), (b'{"state": 5, "questions": {"a": 1}}', ("state",)),
        (b'{"state": "x", "questions": {"": {"type": "noul"}}}', ("questions", "")),
        (b'{"state": "x", "questions": {"a": {"instructions": "?"}}}', ("questions", "a")),
        (b'{"state": "x", "questions": {"a.b": {"type": "boolean"}}}', ("questions", "a.b", "type")),
        (b'{"state": "x", "questions": {"a": {"type": "choice", "criteria": {"x": null}}}}', ("questions", "a", "criteria")),
        (b'{"state": "x", "questions": {"a": {"type": "choice"}}}', ("questions", "a")),
        (b'{"state": "x", "questions": {"a": {"type": "score", "criteria": {"0": "x", "1": "y"}}}}', ("questions", "a", "criteria")),
        (b'{"state": "x", "questions": {"a": {"type": "score", "criteria": ["x", null]}}}', ("questions", "a", "criteria", "1")),
        (b'{"state": "x", "questions": {"a": {"type": "score", "criteria": ["x"]}}}', ("questions", "a", "criteria")),
        (b'{"state": "x", "questions": {"a": {"type": "noul", "criteria": {"true": 5}}}}', ("questions", "a", "criteria", "true")),
        (b'{"state": "\\ud83d", "questions": {"a": {"type": "noul"}}}', ()), (b'{"state": "\xff", "questions": {"a": {}}}', ()),
        (b'{"state": ' + b"[" * 100_000, ()),
        (json.dumps({"state": "x", "questions": {"a": {"type": "choice", "criteria": {str(i): None for i in range(256)}}}}).encode(),
         ("questions", "a", "criteria")),
        (json.dumps({"state": "x", "questions": {"a": {"type": "score", "criteria": ["x"] * 11}}}).encode(),
         ("questions", "a", "criteria")),
    ],
)  # fmt: skip
def test_a_fault_is_422_with_its_place(body, loc):
    """(cases 23, 79, 82, 84)"""
    with pytest.raises(Unprocessable) as caught:
        decode(body)
    assert caught.value.loc == loc and error_status(caught.value) == 422
    (detail,) = error_body(caught.value)["detail"]
    assert detail["loc"] == ["body", *loc] and detail["msg"] and detail["type"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unauthorized("no key"), 401), (RateLimited("later", retry_after=1), 429), (ContextLengthExceeded("too long"), 413),
        (LayaError("ours"), 500),
    ],
)  # fmt: skip
def test_other_errors_have_one_detail(error, status):
    body = error_body(error)
    assert error_status(error) == status and set(body["detail"]) == {"error_type", "message"}
    assert error_body(InvalidRequest("bad", param="model"))["detail"][0]["loc"] == ["body", "model"]


@given(st.lists(st.floats(-1e6, 0) | st.just(-math.inf), min_size=2, max_size=255))
def test_probabilities_are_a_distribution_whatever_the_figures(values):
    """(case 84)"""
    shares = softmax(values)
    assert all(0 <= share <= 1 for share in shares) and math.isclose(sum(shares), 1, abs_tol=1e-9)
    for confidence in (choice_confidence(shares), score_confidence(shares)):
        assert 0 <= confidence <= 1


def test_each_type_is_answered_by_its_formulas():
    """(cases 82, 84)"""
    even = {"a": -1.0, "b": -1.0}
    assert answer_of(Noul(), {"yes": math.log(0.3), "no": math.log(0.1)}) == {"type": "noul", "noul": pytest.approx(0.75)}
    choice = answer_of(Choice({"b": None, "a": None}), {**even, "a": -0.5})
    assert choice["choice"] == "a" and list(choice["probabilities"]) == ["b", "a"]
    assert choice["confidence"] == pytest.approx((choice["probabilities"]["a"] - 0.5) / 0.5)
    assert answer_of(Choice({"a": None, "b": None}), even)["confidence"] == 0
    hot, cold = (answer_of(Choice({"b": None, "a": None}), {**even, "a": -0.5}, heat)["confidence"] for heat in (5, 0.1))
    assert hot < choice["confidence"] < cold
    levels = ["low", {"label": "mid"}, "high"]
    score = answer_of(Score(levels), {"0": math.log(0.2), "1": math.log(0.5), "2": math.log(0.3)})
    assert score["legend"] == {"0": "low", "1": {"label": "mid"}, "2": "high"} and score["score"] == pytest.approx(1.1)
    assert score["confidence"] == pytest.approx(1 - (0.2 + 0.3) / (2 / 3))


def test_ids_are_not_shown_and_the_state_comes_first():
    request = read({"secret-id": {"type": "choice", "instructions": ["a", "b"], "criteria": {"x": {"k": 1}, "y": None}}}, state={"s": 1})
    (generation,) = generations_of(request, "r", "c", CARD)
    text = generation.prompt.messages[1]["content"]
    assert text.startswith('State:\n{"s":1}\n') and '["a","b"]' in text and '- x: {"k":1}\n- y' in text and "secret-id" not in text
    assert generation.options == ("x", "y") and generation.sampling.max_tokens == 0


def test_a_model_without_a_chat_template_gets_plain_text():
    (generation,) = generations_of(read({"q": NOUL}), "r", "c", ModelCard(id="m", max_model_len=9, chat=False))
    assert generation.prompt.endswith("Answer:") and generation.options == (" yes", " no")


def test_a_processor_is_shown_the_options_with_most_in_common():
    """(case 79)"""
    names = {**{f"Queue {i:03d}": f"Tickets for queue {i}" for i in range(200)}, "Billing": "Payments, invoices, refunds"}
    question = {"q": {"type": "choice", "instructions": "Which one?", "criteria": names}}
    request = read(question, state="I want a refund of my payment.")
    card = ModelCard(id="m", max_model_len=9, chat=True, details={"device": "cpu"})
    (few,) = generations_of(request, "r", "c", card)
    (all_of_them,) = generations_of(request, "r", "c", CARD)
    assert len(few.options) == SHOWN_ON_CPU and "Billing" in few.options and all_of_them.options == tuple(names)
    answer = answer_of(request.questions["q"], dict.fromkeys(few.options, -1.0))
    assert len(answer["probabilities"]) == 201 and math.isclose(sum(answer["probabilities"].values()), 1)
    assert most_shown({"device": "cuda:0"}) is None and most_shown({"device": "cuda", "decision_options": 9}) == 9
    assert shortlist(["a", "b"], "", 5) == [0, 1]
