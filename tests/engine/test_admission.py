"""The bounded queue: bounds, fairness between clients, lanes by length, time-outs, the crossing between threads."""

from __future__ import annotations

import threading
import time

import pytest

from laya.engine.admission import Admission, Offer
from laya.engine.lanes import PASSES
from laya.engine.pace import ServiceRate
from laya.engine.prepare import Prepared
from laya.engine.settings import EngineSettings
from laya.errors import RateLimited, Unavailable
from laya.schema.generation import GenerationRequest, SamplingParams

from .harness import Clock


class Queue:
    def __init__(self, **settings) -> None:
        self.clock = Clock()
        settings = {"prefill_chunk_tokens": 10, **settings}
        self.admission = Admission(EngineSettings(**settings), self.clock)

    def made(self, tokens: int = 5, *, n: int = 1, client: str = "") -> Offer:
        request = GenerationRequest(id="r", prompt="", client=client, sampling=SamplingParams(n=n))
        prepared = Prepared(request=request, prompt_ids=[1] * tokens, max_new_tokens=1, prompt_text=None)
        return Offer(prepared, None, self.clock())

    def offer(self, tokens: int = 5, *, n: int = 1, client: str = "") -> Offer:
        self.admission.reserve(n)
        offer = self.made(tokens, n=n, client=client)
        self.admission.offer(offer)
        return offer

    def take(self, **how) -> Offer | None:
        taken = self.admission.take(lambda offer: True, **how)
        return taken and taken[0]


def test_requests_over_the_bound_are_refused_with_a_retry_hint():
    """(case 51)"""
    queue = Queue(queue_limit=3)
    for _ in range(3):
        queue.offer()
    with pytest.raises(RateLimited, match="3 requests wait and the limit is 3") as refused:
        queue.offer()
    assert refused.value.status == 429 and refused.value.retry_after >= 1
    assert queue.admission.waiting == 3
    queue.take()
    queue.offer()


def test_choices_count_and_an_empty_queue_admits_any_request():
    queue = Queue(queue_limit=3)
    queue.offer(n=50)
    with pytest.raises(RateLimited):
        queue.offer()
    for _ in range(50):
        assert queue.take()
    assert queue.admission.waiting == 0 and queue.take() is None


def test_prompt_tokens_are_bounded_and_places_are_given_back_on_refusal():
    queue = Queue(queue_tokens=100)
    queue.offer(1000)  # an empty queue takes it
    with pytest.raises(RateLimited, match="1000 prompt tokens wait and the limit is 100"):
        queue.offer(5)
    assert queue.admission.waiting == 1
    queue.take()
    assert queue.admission.waiting_tokens == 0
    queue.offer(60)
    with pytest.raises(RateLimited):
        queue.offer(60)


def test_requests_in_preparation_hold_their_places():
    queue = Queue(queue_limit=2)
    queue.admission.reserve(1)
    queue.admission.reserve(1)
    with pytest.raises(RateLimited):
        queue.admission.reserve(1)
    queue.admission.release(1)
    queue.admission.reserve(1)


def test_retry_after_follows_the_measured_rate():
    rate = ServiceRate()
    assert rate.seconds_for(50) == 1
    for _ in range(100):
        rate.add(1, 0.5)
    assert rate.seconds_for(10) == pytest.approx(5)
    assert rate.seconds_for(1) == 1 and rate.seconds_for(10_000) == 60


def test_clients_take_turns():
    queue = Queue(queue_limit=100)
    for _ in range(5):
        queue.offer(client="greedy")
    queue.offer(client="a")
    queue.offer(client="b")
    assert [queue.take().client for _ in range(7)] == ["greedy", "a", "b", "greedy", "greedy", "greedy", "greedy"]


def test_a_client_that_comes_back_at_once_does_not_overtake_the_others():
    queue = Queue(queue_limit=100)
    for _ in range(5):
        queue.offer(client="patient")
    queue.offer(client="eager")
    served = []
    for _ in range(6):
        client = queue.take().client
        served.append(client)
        if client == "eager":
            queue.offer(client="eager")
    assert served.count("patient") == 3


def test_many_choices_of_one_client_take_as_many_turns():
    queue = Queue(queue_limit=100)
    many = queue.offer(n=3, client="many")
    queue.offer(client="one")
    queue.offer(client="one")
    order = [queue.admission.take(lambda offer: True) for _ in range(5)]
    assert [(o.client, i) for o, i in order] == [("many", 0), ("one", 0), ("many", 1), ("one", 0), ("many", 2)]
    assert many.taken == 3


def test_short_prompts_go_first_and_a_passed_lane_ages():
    queue = Queue(queue_limit=100)
    long = queue.offer(500)
    middle = queue.offer(30)
    for _ in range(20):
        queue.offer(5)
    order = [queue.take() for _ in range(2 * PASSES + 2)]
    assert order.index(long) <= PASSES + 1 and order.index(middle) <= PASSES + 1
    assert [len(o.prepared.prompt_ids) for o in order[:PASSES]] == [5] * PASSES


def test_an_aged_prompt_that_does_not_fit_keeps_the_room_for_itself():
    queue = Queue(queue_limit=100)
    long = queue.offer(500)
    for _ in range(20):
        queue.offer(5)
    served = 0
    while queue.admission.take(lambda offer: offer is not long):
        served += 1
    assert served == PASSES
    assert queue.take() is long


def test_long_prompts_can_be_passed_over_by_length():
    queue = Queue()
    queue.offer(500)
    assert queue.take(longest=10) is None
    short = queue.offer(5)
    assert queue.take(longest=10) is short


def test_a_queued_request_that_is_aborted_is_gone_at_once():
    """(case 51)"""
    queue = Queue()
    first, second = queue.offer(7), queue.offer(9)
    queue.admission.abort(first)
    assert (queue.admission.waiting, queue.admission.waiting_tokens) == (1, 9)
    assert queue.admission.take_aborts() == [] and queue.take() is second


def test_the_rest_of_a_started_request_is_dropped_and_the_engine_hears_of_it():
    queue = Queue()
    offer = queue.offer(n=3)
    queue.take()
    queue.admission.abort(offer)
    assert queue.admission.waiting == 0 and queue.take() is None
    assert queue.admission.take_aborts() == [offer] and queue.admission.take_aborts() == []


def test_late_requests_expire_and_started_ones_do_not():
    queue = Queue(queue_timeout_s=10)
    started, late = queue.offer(n=2), queue.offer()
    queue.take()
    queue.clock.now += 6
    fresh = queue.offer()
    assert queue.admission.expire() == []
    queue.clock.now += 5
    assert queue.admission.expire() == [late] and queue.admission.expire() == []
    assert {queue.take(), queue.take()} == {started, fresh}


def test_a_closed_queue_refuses_with_its_reason_and_returns_what_was_not_started():
    queue = Queue()
    started, waiting = queue.offer(n=2), queue.offer()
    queue.take()
    queue.admission.reserve(1)
    assert queue.admission.close(lambda: Unavailable("closing")) == [waiting]
    with pytest.raises(Unavailable, match="closing"):
        queue.admission.reserve(1)
    with pytest.raises(Unavailable, match="closing"):
        queue.admission.offer(queue.made())
    assert queue.admission.waiting == 1 and queue.take() is started


def test_an_offer_wakes_the_sleeping_engine():
    queue = Queue()
    woken = threading.Event()

    def sleep():
        queue.admission.wait(20)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.02)
    assert not woken.is_set()
    queue.offer()
    assert woken.wait(5)
    thread.join()
    began = time.monotonic()
    queue.admission.wait(0.01)  # the wake-up was consumed, so this sleeps its time and not for ever
    assert time.monotonic() - began < 5


def test_a_wake_up_before_the_sleep_is_not_lost():
    queue = Queue()
    queue.offer()
    began = time.monotonic()
    queue.admission.wait(20)
    assert time.monotonic() - began < 5
