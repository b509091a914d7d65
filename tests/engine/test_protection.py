"""An engine under the watchdog's word: nothing new past the soft mark, the newest ended past the hard one, a lost device."""

from __future__ import annotations

import threading
import time

import pytest

from laya.engine import heap
from laya.engine.step import DeviceLost
from laya.engine.watchdog import Level
from laya.errors import EngineFailed, LayaError, Unavailable
from laya.schema.generation import Finished

from .harness import Engine, prompt
from .test_backend import LONGEST_S, House


def test_past_the_soft_mark_new_requests_are_refused_and_running_ones_go_on():
    house = House(max_num_seqs=2, prefill_chunk_tokens=32).ready()
    running = house.submit("running", max_tokens=60)
    house.until(lambda: "delta" in running.kinds)
    house.backend.protect(Level.SOFT, "host memory is 93% used")
    with pytest.raises(Unavailable, match="93%") as refused:
        house.submit("new")
    assert refused.value.retry_after >= 1 and house.backend.status()["protected"] == "host memory is 93% used"
    house.until(lambda: running.end)
    assert isinstance(running.end, Finished) and len(running.ids) == 60
    house.backend.protect(Level.CALM, "")
    after = house.submit("after")
    house.until(lambda: after.end)
    assert isinstance(after.end, Finished) and "protected" not in house.backend.status()
    house.end()


def test_what_waits_is_not_started_until_it_is_calm_again():
    engine = Engine(max_num_seqs=4)
    waiting = engine.offer(prompt(9), 5)
    engine.admission.pause(lambda: Unavailable("short"))
    for _ in range(5):
        assert not engine.turn()
    assert waiting.started is None and engine.admission.waiting == 1
    engine.admission.pause(None)
    engine.settle()
    assert waiting.ok


def test_past_the_hard_mark_the_newest_end_and_the_oldest_stay():
    engine = Engine(max_num_seqs=4)
    clients = [engine.offer(prompt(9, i), 40) for i in range(4)]
    while not all(client.started for client in clients):
        engine.turn()
    engine.admission.shed(2, lambda: Unavailable("The machine must be protected."))
    engine.turn()
    assert [isinstance(client.end, Unavailable) for client in clients] == [False, False, True, True]
    engine.settle()
    assert clients[0].ok and clients[1].ok


def test_the_hard_mark_ends_the_newer_half_at_each_word_until_nothing_runs():
    house = House(max_num_seqs=4, prefill_chunk_tokens=32).ready()
    house.backend._loop.opening.allowed = 4
    house.runner.before_run = lambda batch: time.sleep(0.05)  # ten seconds for 200 tokens: none ends by itself before the word
    listeners = [house.submit(f"question {i}", max_tokens=200) for i in range(4)]
    house.until(lambda: all("delta" in listener.kinds for listener in listeners))
    for left in (2, 1, 0):
        house.backend.protect(Level.HARD, "host memory is 98% used")
        house.until(lambda left=left: sum(listener.end is None for listener in listeners) <= left)
    assert all(isinstance(listener.end, Unavailable) and "98%" in listener.end.message for listener in listeners)
    assert house.backend.state == "ready"
    house.end()


def test_concurrency_does_not_open_while_the_watchdog_is_not_calm():
    engine = Engine(max_num_seqs=8, open_all=False)
    engine.loop.opening.held = True
    for i in range(4):
        engine.offer(prompt(9, i), 20)
    engine.settle()
    assert engine.loop.opening.allowed == 1
    engine.loop.opening.held = False
    for i in range(8):
        engine.offer(prompt(9, i), 20)
    engine.settle()
    assert engine.loop.opening.allowed > 1


def test_a_lost_device_ends_everybody_at_once_although_the_step_hangs():
    """(case 53)"""
    house = House(max_num_seqs=1, prefill_chunk_tokens=32).ready()
    gate = threading.Event()
    house.runner.before_run = lambda batch: gate.wait(LONGEST_S)
    running, waiting = house.submit("running"), house.submit("waiting")
    house.until(lambda: house.backend.status().get("step_s") is not None and waiting.kinds == ["queued"])
    house.backend.device_lost("the driver says so")
    house.backend.device_lost("again")
    assert isinstance(running.end, EngineFailed) and isinstance(waiting.end, LayaError)
    assert house.backend.state == "failed" and isinstance(house.backend.failure, DeviceLost)
    with pytest.raises(Unavailable, match="has failed"):
        house.submit("new")
    gate.set()
    assert house.backend.join(LONGEST_S)
    assert running.kinds.count("failed") == 1


def test_while_a_step_is_stuck_new_requests_are_told_so():
    house = House(max_num_seqs=1, step_timeout_s=0.05, prefill_chunk_tokens=32).ready()
    gate = threading.Event()
    house.runner.before_run = lambda batch: gate.wait(LONGEST_S)
    stuck = house.submit("stuck")
    house.until(lambda: house.backend.status().get("stuck"))
    house.backend.tick()
    with pytest.raises(Unavailable, match="stuck"):
        house.submit("new")
    gate.set()
    house.until(lambda: stuck.end)
    house.backend.tick()
    after = house.submit("after")
    house.until(lambda: after.end)
    assert isinstance(after.end, Finished)
    house.end()


def test_loading_tightly_gives_memory_back_and_keeps_the_result():
    before = heap.loaded_tightly(lambda: (bytes(8 << 20), 2))
    assert before()[1] == 2
    with pytest.raises(ValueError, match="broken"):
        heap.loaded_tightly(lambda: int("broken"))()
