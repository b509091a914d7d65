"""System One requests read and answers made, without a model."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.errors import ContextLengthExceeded, InvalidRequest, LayaError, RateLimited, Unauthorized, Unprocessable
from laya.gateway.api.inquiry import LISTED_ON_CPU, Inquiry, softmax
from laya.gateway.api.systemone import answer_of, choice_confidence, decode, generations_of, score_confidence
from laya.gateway.api.systemone_errors import error_body, error_status
from laya.schema.generation import ModelCard
from laya.schema.systemone import Choice, Noul, Score

CARD = ModelCard(id="m", max_model_len=1000, chat=True, details={"device": "cuda"})
NOUL = {"type": "noul", "instructions": "Refund?"}


def read(questions, **members):
    return decode(json.dumps({"state": "x", "questions": questions, **members}).encode())


def first_of(request, card: ModelCard = CARD):
    (inquiry,) = generations_of(request, "r", "c", card)
    return inquiry.first()


def asked_of(question: dict, card: ModelCard = CARD, state: str = "x") -> Inquiry:
    """The way of one question that is on its way already."""
    return generations_of(read({"q": question}, state=state), "r", "c", card)[0]


def shares_of(question: dict, logprobs: list[float], heat: float = 1.0) -> list[float]:
    details = {"device": "cuda", "decision_temperatures": {question["type"]: heat}}
    inquiry = asked_of(question, ModelCard(id="m", max_model_len=1000, chat=True, details=details))
    assert inquiry.first().id == "r-0" and inquiry.heard(tuple(logprobs)) is None
    return inquiry.shares


def text_of(generation) -> str:
    return generation.prompt.messages[1]["content"]


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
    generation = first_of(request)
    assert len(generation.options) == len(set(generation.options)) >= 2


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        (b"{", ()), (b"[]", ()), (b"null", ()), (b'{"state": "x"}', ("questions",)), (b'{"state": null, "questions": {}}', ("state",)),
        (b'{"state": "x", "questions": {}}', ("questions",)), (b'{"state": 5, "questions": {"a": 1}}', ("state",)),
        (b'{"state": "x", "questions": {"": {"type": "noul"}}}', ("questions", "")),
        (b'{"state": "x", "questions": {"a": {"instructions": "?"}}}', ("questions", "a", "type")),
        (b'{"state": "x", "questions": {"a.b": {"type": "boolean"}}}', ("questions", "a.b", "type")),
        (b'{"state": "x", "questions": {"a": {"type": "choice", "criteria": {"x": null}}}}', ("questions", "a", "criteria")),
        (b'{"state": "x", "questions": {"a": {"type": "choice"}}}', ("questions", "a", "criteria")),
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
    assert shares_of(NOUL, [math.log(0.3), math.log(0.1)]) == [pytest.approx(0.75), pytest.approx(0.25)]
    assert answer_of(Noul(), [0.75, 0.25]) == {"type": "noul", "noul": 0.75}
    choice = answer_of(Choice({"b": None, "a": None}), [0.4, 0.6])
    assert choice["choice"] == "a" and list(choice["probabilities"]) == ["b", "a"]
    assert choice["confidence"] == pytest.approx((0.6 - 0.5) / 0.5)
    assert answer_of(Choice({"a": None, "b": None}), [0.5, 0.5])["confidence"] == 0
    two = {"type": "choice", "criteria": {"b": None, "a": None}}
    hot, mild, cold = (max(shares_of(two, [-1.0, -0.5], heat)) for heat in (5, 1, 0.1))
    assert hot < mild < cold
    levels = ["low", {"label": "mid"}, "high"]
    score = answer_of(Score(levels), [0.2, 0.5, 0.3])
    assert score["legend"] == {"0": "low", "1": {"label": "mid"}, "2": "high"} and score["score"] == pytest.approx(1.1)
    assert score["confidence"] == pytest.approx(1 - (0.2 + 0.3) / (2 / 3))


def test_ids_are_not_shown_and_the_state_comes_first():
    request = read({"secret-id": {"type": "choice", "instructions": ["a", "b"], "criteria": {"x": {"k": 1}, "y": None}}}, state={"s": 1})
    generation = first_of(request)
    text = text_of(generation)
    assert text.startswith('State:\n{"s":1}\n') and '["a","b"]' in text and '- x: {"k":1}\n- y' in text and "secret-id" not in text
    assert generation.options == ("x", "y") and generation.sampling.max_tokens == 0


def test_a_model_without_a_chat_template_gets_plain_text():
    generation = first_of(read({"q": NOUL}), ModelCard(id="m", max_model_len=9, chat=False))
    assert generation.prompt.endswith("Answer:") and generation.options == (" yes", " no")


def long_choice(count: int, described: str = "") -> dict:
    return {"type": "choice", "instructions": "Which one?", "criteria": {f"Queue {i:03d}": described or None for i in range(count)}}


def card(device: str = "cpu", window: int = 1000, chat: bool = True, **details) -> ModelCard:
    return ModelCard(id="m", max_model_len=window, chat=chat, details={"device": device, **details})


def test_a_long_choice_is_compared_by_name_and_then_the_likeliest_are_read():
    """(case 79) Every option has a share; names count by what the state adds to them, not by how common they are."""
    inquiry = asked_of(long_choice(255, "Tickets"), card(), "Refund me.")
    given = inquiry.first()
    assert len(given.options) == 255 and "Options:" not in text_of(given) and text_of(given).startswith("State:\nRefund me.\n")
    without = inquiry.heard(tuple(-1.0 - i % 7 for i in range(255)))
    assert without is not None and without.options == given.options and "Refund" not in text_of(without)
    figures = [-1.0 - i % 7 for i in range(255)]
    for likely in range(100, 120):
        figures[likely] -= 3.0 if likely % 2 else 2.0  # rarer without the state than with it
    listed = inquiry.heard(tuple(figures))
    assert listed is not None
    odd = [f"Queue {i:03d}" for i in range(101, 120, 2)]
    assert set(odd) <= set(listed.options) and len(listed.options) == LISTED_ON_CPU
    assert all(f"- {name}: Tickets" in text_of(listed) for name in listed.options) and text_of(listed).count("\n- ") == LISTED_ON_CPU
    assert text_of(listed).startswith(text_of(given)), "the state and the question are read once"
    before = list(inquiry.shares)
    assert inquiry.heard(tuple(0.0 if name == odd[3] else -9.0 for name in listed.options)) is None
    assert math.isclose(sum(inquiry.shares), 1) and min(inquiry.shares) > 0 and inquiry.shares[0] == before[0]
    assert max(range(255), key=inquiry.shares.__getitem__) == 107


def test_what_is_listed_follows_the_device_the_setting_and_the_window():
    def names(question: dict, of: ModelCard) -> int | None:
        """How many the first request lists; None: it lists nothing."""
        generation = asked_of(question, of).first()
        return len(generation.options) if "Options:" in text_of(generation) else None

    assert names(long_choice(16), card()) == 16 and names(long_choice(17), card()) is None
    assert names(long_choice(255), card("cuda:0", 8000)) == 255 and names(long_choice(9), card("cuda", decision_options=8)) is None
    assert names(long_choice(255), card(window=8000, decision_options=255)) == 255
    long = long_choice(10, "word " * 60)  # 3,100 bytes: too much for the half of a window of 1,000 tokens
    assert names(long, card(window=2000)) == 10 and names(long, card("cuda")) is None
    inquiry = asked_of(long, card("cuda"))
    inquiry.first()
    inquiry.heard((-1.0,) * 10)
    listed = inquiry.heard((-1.0,) * 9 + (-3.0,))
    assert listed is not None and 2 <= len(listed.options) < 7 and listed.options[-1] == "Queue 009"
    huge = asked_of(long_choice(3, "word " * 3000), card())
    assert huge.heard((-1.0,) * 3) is not None
    assert len(huge.heard((-1.0,) * 3).options) == 2, "a question has two answers at least: the engine says that it does not fit"


def test_a_long_choice_for_a_model_without_a_template_is_plain_text():
    inquiry = asked_of(long_choice(40), card(chat=False))
    asked = [inquiry.first(), inquiry.heard((-1.0,) * 40), inquiry.heard((-2.0,) * 40)]
    assert all(generation.options[0] == " Queue 000" and generation.prompt.endswith("Answer:") for generation in asked)


@given(st.integers(17, 60), st.data())
def test_a_long_choice_is_a_distribution_whatever_the_figures(count, data):
    """(case 84)"""
    inquiry = asked_of(long_choice(count), card())
    generation, figure = inquiry.first(), st.floats(-1e4, 0) | st.just(-math.inf)
    while generation is not None:
        size = len(generation.options)
        generation = inquiry.heard(tuple(data.draw(st.lists(figure, min_size=size, max_size=size))))
    assert len(inquiry.shares) == count and all(0 <= share <= 1 for share in inquiry.shares)
    assert math.isclose(sum(inquiry.shares), 1, abs_tol=1e-9)
