"""Models that come with the first request and go when idle: nobody is lost, least of all at the moment of going."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from laya.engine.backend import EngineBackend
from laya.engine.on_demand import OnDemandEngine
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost
from laya.engine.watchdog import Level
from laya.errors import RateLimited, Unavailable
from laya.schema.generation import Finished, GenerationRequest, ModelCard, SamplingParams

from .fake_runner import FakeRunner, FakeTokenizer, reference
from .test_backend import LONGEST_S, Listener

IDLE_S = 60.0
CARD = ModelCard(id="small", max_model_len=256, chat=True)


class House:
    """An engine that comes and goes, the loop thread it posts to (the test's own), and a clock for what is idle."""

    def __init__(self, *, eager: bool = False, start: bool = True, **settings) -> None:
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.states: list[str] = []
        self.runners: list[FakeRunner] = []
        self.now = 1000.0
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_close = threading.Event()
        self.may_close.set()
        self.fault: Exception | None = None
        self.settings = EngineSettings(**{"thread_nice": 0, **settings})
        self.engine = OnDemandEngine(
            name="small", make=self.make, settings=self.settings, card=CARD, eager=eager, idle_unload_s=IDLE_S,
            on_state=self.states.append, clock=lambda: self.now,
        )  # fmt: skip
        self.count = 0
        if start:
            self.engine.start()

    def make(self, on_state) -> EngineBackend:
        backend = EngineBackend(
            name="small", load=self.load, settings=self.settings, post=self.calls.put, card=CARD,
            on_state=lambda state: on_state(backend, state),
        )  # fmt: skip
        return backend

    def load(self):
        assert self.may_load.wait(LONGEST_S)
        if self.fault is not None:
            raise self.fault
        runner = FakeRunner()
        runner.close = lambda: self.may_close.wait(LONGEST_S) and setattr(runner, "closed", True)
        self.runners.append(runner)
        return runner, FakeTokenizer(), CARD

    def until(self, condition) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            try:
                self.calls.get(timeout=0.05)()
            except queue.Empty:
                assert time.monotonic() < deadline, f"nothing happened for too long: {self.states}"

    def ask(self, length: int = 20, max_tokens: int = 6) -> Listener:
        self.count += 1
        listener = Listener()
        listener.prompt = [1 + (self.count * 7919 + i * 31) % 500 for i in range(length)]
        request = GenerationRequest(
            id=f"r{self.count}", prompt=listener.prompt, sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens)
        )
        listener.handle = self.engine.submit(request, listener)
        return listener

    def served(self, *listeners: Listener) -> None:
        self.until(lambda: all(listener.end is not None for listener in listeners))
        for listener in listeners:
            assert isinstance(listener.end, Finished), listener.end
            assert listener.ids == reference(listener.prompt, 6)

    def idle(self) -> None:
        """Enough time passes for the model to go."""
        self.engine.tick()
        self.now += IDLE_S
        self.engine.tick()

    def end(self) -> None:
        self.engine.stop(0.0)
        self.until(lambda: self.engine.state in ("stopped", "failed"))
        assert self.engine.join(LONGEST_S)


@pytest.fixture
def house():
    made = []

    def build(**how) -> House:
        made.append(House(**how))
        return made[-1]

    yield build
    for one in made:
        one.may_load.set()
        one.may_close.set()
        one.end()


def test_nothing_is_loaded_before_a_request_and_that_request_is_served(house):
    home = house()
    assert home.engine.state == "asleep" and home.runners == [] and home.engine.status()["waiting"] == 0
    home.served(home.ask())
    assert home.states == ["asleep", "waking", "ready"] and len(home.runners) == 1


def test_requests_wait_together_while_the_model_is_loaded(house):
    home = house()
    home.may_load.clear()
    waiting = [home.ask(10 + i) for i in range(5)]
    assert home.engine.state == "waking" and home.engine.status()["waiting"] == 5
    home.may_load.set()
    home.served(*waiting)
    assert len(home.runners) == 1


def test_an_idle_model_goes_and_comes_back(house):
    home = house()
    home.served(home.ask())
    home.idle()
    home.until(lambda: home.engine.state == "asleep")
    assert home.runners[0].closed and home.engine.memory() == {}
    generated = home.engine.figures().generated_tokens
    home.served(home.ask())
    assert len(home.runners) == 2
    assert home.engine.figures().generated_tokens == 2 * generated == 12  # totals go on where they were


def test_a_model_in_use_does_not_go(house):
    """(case 78) Requests in flight guard it."""
    home = house()
    home.served(home.ask())
    held = threading.Event()
    home.runners[0].before_run = lambda batch: held.wait(LONGEST_S)
    busy = home.ask()
    for _ in range(3):
        home.idle()
    assert home.engine.state == "ready"
    held.set()
    home.served(busy)


def test_a_request_at_the_very_moment_of_unloading_is_served(house):
    """(case 78) It comes after the model was told to go, and before it has gone: the model is loaded anew for it."""
    home = house()
    home.served(home.ask())
    home.may_close.clear()
    home.idle()
    assert home.engine.state == "unloading"
    late = [home.ask(), home.ask()]
    assert len(home.runners) == 1
    home.may_close.set()
    home.served(*late)
    assert home.runners[0].closed and len(home.runners) == 2
    assert home.states == ["asleep", "waking", "ready", "unloading", "waking", "ready"]


def test_requests_all_around_the_moment_of_unloading_are_served(house):
    """Threads race here on purpose: the model is told to go right after each answer."""
    home = house()
    for i in range(12):
        listeners = [home.ask(5 + i)]
        home.until(lambda: listeners[0].end is not None)  # noqa: B023
        home.idle()
        listeners += [home.ask(6), home.ask(7)]
        home.served(*listeners)


def test_tokenizing_wakes_the_model_too(house):
    home = house()
    answers = []
    home.engine.tokenize("abc", answers.append)
    home.engine.detokenize([98, 99], answers.append)
    home.until(lambda: len(answers) == 2)
    assert answers == [[98, 99, 100], "ab"]
    home.idle()
    home.until(lambda: home.engine.state == "asleep")


def test_the_wait_for_the_model_is_bounded(house):
    home = house(queue_timeout_s=30.0)
    home.may_load.clear()
    early, late = home.ask(), None
    home.now += 20
    late = home.ask()
    home.now += 11
    home.engine.tick()
    assert isinstance(early.end, Unavailable) and early.end.retry_after and late.end is None
    home.may_load.set()
    home.served(late)


def test_those_who_wait_are_bounded_in_number(house):
    home = house(queue_limit=2)
    home.may_load.clear()
    waiting = [home.ask(), home.ask()]
    with pytest.raises(RateLimited):
        home.ask()
    home.may_load.set()
    home.served(*waiting)


def test_one_that_leaves_while_it_waits_is_never_computed(house):
    home = house()
    home.may_load.clear()
    gone, stays = home.ask(), home.ask()
    gone.handle.cancel()
    gone.handle.cancel()
    assert home.engine.status()["waiting"] == 1
    home.may_load.set()
    home.served(stays)
    assert gone.kinds == []
    home.idle()
    home.until(lambda: home.engine.state == "asleep")


def test_one_that_leaves_while_it_runs_does_not_keep_the_model(house):
    home = house()
    leaving = home.ask(max_tokens=200)
    home.until(lambda: "delta" in leaving.kinds)
    leaving.handle.cancel()
    home.idle()
    home.until(lambda: home.engine.state == "asleep")


def test_a_listener_that_fails_does_not_keep_the_model(house):
    home = house()
    broken = home.ask()
    broken.on_delta = lambda event: 1 / 0
    home.until(lambda: home.engine.state == "ready" and home.engine.figures().generated_tokens > 0)
    home.until(lambda: home.engine.figures().sequences_running == 0 and home.calls.empty())
    home.idle()
    home.until(lambda: home.engine.state == "asleep")


def test_a_model_that_cannot_be_loaded_is_tried_again_later(house):
    home = house()
    home.fault = MemoryError("no room")
    first = home.ask()
    home.until(lambda: first.end is not None)
    assert isinstance(first.end, Unavailable) and first.end.retry_after and home.engine.state == "asleep"
    with pytest.raises(Unavailable):
        home.ask()  # not at once
    home.fault, home.now = None, home.now + 60
    home.served(home.ask())


def test_an_engine_that_dies_in_service_stays_dead(house):
    home = house()
    home.served(home.ask())
    home.runners[0].run = lambda batch: (_ for _ in ()).throw(DeviceLost("gone"))
    doomed = home.ask()
    home.until(lambda: home.engine.state == "failed" and doomed.end is not None)
    assert isinstance(home.engine.failure, DeviceLost)
    with pytest.raises(Unavailable):
        home.ask()


def test_a_machine_in_need_wakes_no_model(house):
    home = house()
    home.engine.protect(Level.SOFT, "host memory is 95% used")
    with pytest.raises(Unavailable, match="95%"):
        home.ask()
    assert home.engine.state == "asleep"
    home.engine.protect(Level.CALM, "")
    home.served(home.ask())


def test_loading_at_startup_and_unloading_when_idle_go_together(house):
    home = house(eager=True)
    home.until(lambda: home.engine.state == "ready")
    assert home.states == ["loading", "warming", "ready"]
    home.idle()
    home.until(lambda: home.engine.state == "asleep")
    home.served(home.ask())


@pytest.mark.parametrize("moment", ["asleep", "waking", "ready", "unloading"])
def test_it_can_be_stopped_at_any_moment(house, moment):
    home = house()
    waiting = None
    if moment == "waking":
        home.may_load.clear()
        waiting = home.ask()
    elif moment != "asleep":
        home.served(home.ask())
    if moment == "unloading":
        home.may_close.clear()
        home.idle()
        waiting = home.ask()
    assert home.engine.state == moment
    home.engine.stop(0.0)
    home.may_load.set()
    home.may_close.set()
    home.until(lambda: home.engine.state == "stopped")
    assert waiting is None or isinstance(waiting.end, Unavailable)
    with pytest.raises(Unavailable):
        home.ask()
