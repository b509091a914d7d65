"""The whole engine with its threads: submit to last event, cancel, load, warm-up, drain, death, stuck steps."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from laya.engine.backend import EngineBackend
from laya.engine.prepare import Job
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost
from laya.errors import ConfigError, EngineFailed, InvalidRequest, LayaError, RateLimited, Unavailable
from laya.schema.generation import ChatPrompt, Finished, GenerationRequest, ModelCard, SamplingParams

from .fake_runner import VOCAB, FakeRunner, FakeTokenizer, reference

LONGEST_S = 20.0  # far beyond any step here: only a hang reaches it


class Listener:
    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.text = ""
        self.ids: list[int] = []
        self.end: Finished | LayaError | None = None

    def on_queued(self, event) -> None:
        self.kinds.append("queued")

    def on_started(self, event) -> None:
        self.kinds.append("started")

    def on_delta(self, event) -> None:
        self.kinds.append("delta")
        self.text += event.text
        self.ids.extend(event.token_ids)

    def on_finished(self, event) -> None:
        self.kinds.append("finished")
        self.end = event

    def on_failed(self, error) -> None:
        self.kinds.append("failed")
        self.end = error


class House:
    """A backend and the loop thread it posts to, which is the test's own."""

    def __init__(self, *, load=None, runner: FakeRunner | None = None, start: bool = True, **settings) -> None:
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.states: list[str] = []
        self.runner = runner or FakeRunner()
        self.backend = EngineBackend(
            name="small",
            load=load or self.load,
            settings=EngineSettings(**{"thread_nice": 0, **settings}),
            post=self.calls.put,
            on_state=self.states.append,
        )
        self.count = 0
        if start:
            self.backend.start()

    def load(self):
        return self.runner, FakeTokenizer(), ModelCard(id="small", max_model_len=self.runner.max_seq_len, chat=True)

    def until(self, condition) -> None:
        """Run posted calls until `condition()`."""
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            try:
                self.calls.get(timeout=0.05)()
            except queue.Empty:
                assert time.monotonic() < deadline, "nothing happened for too long"

    def ready(self) -> House:
        self.until(lambda: self.backend.state == "ready")
        return self

    def submit(self, prompt, listener: Listener | None = None, *, max_tokens: int | None = 8, client: str = "", **sampling):
        self.count += 1
        sampled = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
        request = GenerationRequest(id=f"r{self.count}", prompt=prompt, client=client, sampling=sampled)
        listener = listener or Listener()
        listener.handle = self.backend.submit(request, listener)
        return listener

    def end(self, drain_s: float = LONGEST_S) -> None:
        self.backend.stop(drain_s)
        self.until(lambda: self.backend.state in ("stopped", "failed"))
        assert self.backend.join(LONGEST_S)
        assert self.backend.figures().kv_blocks_used == 0
        assert self.backend.state == "failed" or self.runner.closed


@pytest.fixture
def house():
    made = House(max_num_seqs=4, prefill_chunk_tokens=32).ready()
    yield made
    made.end()


def test_a_request_goes_through_every_event_in_order(house):
    listener = house.submit("hello there", max_tokens=12)
    house.until(lambda: listener.end)
    assert listener.kinds[:2] == ["queued", "started"] and listener.kinds[-1] == "finished"
    assert set(listener.kinds[2:-1]) == {"delta"}
    expected = reference(FakeTokenizer().encode("hello there"), 12)
    assert listener.ids == expected and listener.text == FakeTokenizer().decode(expected)
    assert listener.end.prompt_tokens == 11 and listener.end.completion_tokens == 12
    assert min(listener.end.queue_s, listener.end.prefill_s, listener.end.decode_s) >= 0


def test_states_card_and_figures(house):
    assert house.states[:3] == ["loading", "warming", "ready"]
    assert house.backend.card.max_model_len == 256
    listener = house.submit(ChatPrompt(messages=({"role": "user", "content": "hi"},)))
    house.until(lambda: listener.end)
    figures = house.backend.figures()
    assert figures.kv_blocks_total == 64 and figures.generated_tokens == 8
    assert figures.prompt_tokens == listener.end.prompt_tokens
    assert figures.sequences_running == figures.sequences_waiting == 0 and figures.steps >= 8
    assert house.backend.status() == {"state": "ready", "running": 0, "waiting": 0, "allowed": figures.sequences_allowed, "allowed_at_most": 4}


def test_many_requests_at_once_all_get_their_own_answer(house):
    listeners = [house.submit(f"question {i}", max_tokens=5 + i % 7, client=f"c{i % 3}") for i in range(40)]
    house.until(lambda: all(listener.end for listener in listeners))
    for i, listener in enumerate(listeners):
        assert listener.ids == reference(FakeTokenizer().encode(f"question {i}"), 5 + i % 7)


def test_bad_requests_fail_alone_and_say_why(house):
    too_long, surrogate, good = house.submit("x" * 300), house.submit("\ud800"), house.submit("fine")
    house.until(lambda: too_long.end and surrogate.end and good.end)
    assert too_long.end.code == "context_length_exceeded" and isinstance(surrogate.end, InvalidRequest)
    assert isinstance(good.end, Finished) and too_long.kinds == ["failed"]
    assert house.backend.figures().sequences_waiting == 0


def test_a_cancelled_request_frees_its_blocks_and_hears_nothing_more(house):
    """(case 10)"""
    listener = house.submit("hello", max_tokens=200)
    house.until(lambda: "delta" in listener.kinds)
    listener.handle.cancel()
    listener.handle.cancel()
    heard = len(listener.kinds)
    house.until(lambda: house.backend.figures().kv_blocks_used == 0)
    while not house.calls.empty():
        house.calls.get()()
    assert len(listener.kinds) == heard and house.backend.figures().sequences_running == 0


def test_cancelling_at_every_stage_leaves_no_place_taken(house):
    """(case 51)"""
    for pumped in range(12):
        listener = house.submit("hello", max_tokens=100)
        for _ in range(pumped):
            try:
                house.calls.get(timeout=0.01)()
            except queue.Empty:
                break
        listener.handle.cancel()
    house.until(lambda: house.backend.figures().sequences_running == 0 and house.backend.figures().sequences_waiting == 0)
    assert house.backend.figures().kv_blocks_used == 0


def test_a_listener_that_raises_loses_its_own_request_only(house):
    class Broken(Listener):
        def on_delta(self, event):
            raise RuntimeError("writer is gone")

    broken, good = house.submit("one", Broken(), max_tokens=150), house.submit("two")
    house.until(lambda: good.end and house.backend.figures().sequences_running == 0)
    assert broken.end is None and isinstance(good.end, Finished)


def test_a_stampede_is_refused_beyond_the_bound_and_the_rest_is_served():
    """(case 51)"""
    house = House(max_num_seqs=2, queue_limit=10, prefill_chunk_tokens=32).ready()
    gate = threading.Event()
    house.runner.before_run = lambda batch: gate.wait(LONGEST_S)
    listeners, refused = [], 0
    for i in range(500):
        try:
            listeners.append(house.submit(f"q{i}"))
        except RateLimited as error:
            refused += 1
            assert error.retry_after >= 1
    gate.set()
    house.until(lambda: all(listener.end for listener in listeners))
    assert refused >= 480 and all(isinstance(listener.end, Finished) for listener in listeners)
    house.end()


def test_tokens_are_counted_and_spelled_off_the_loop(house):
    results = []
    house.backend.tokenize("abc", results.append)
    house.backend.detokenize([98, 99, 100], results.append)
    house.backend.detokenize([VOCAB], results.append)
    house.backend.tokenize("x" * 100_000, results.append)
    assert results == []
    house.until(lambda: len(results) == 4)
    assert results[:2] == [[98, 99, 100], "abc"]
    assert all(isinstance(error, InvalidRequest) for error in results[2:])


def test_tokens_are_counted_for_who_asked_before_the_model_was_unloaded(house, monkeypatch):
    gate, results = threading.Event(), []
    house.backend._worker.submit(Job(gate.wait, lambda _: None, lambda: False))  # busy until the model is gone
    house.backend.tokenize("abc", results.append)
    house.backend.detokenize([98, 99, 100], results.append)
    for name in ("_tokenizer", "_limits"):  # as `forget` does
        monkeypatch.setattr(house.backend, name, None)
    gate.set()
    house.until(lambda: len(results) == 2)
    assert results == [[98, 99, 100], "abc"]


def test_requests_before_the_model_is_loaded_are_told_to_come_back_and_during_warm_up_they_wait():
    loading, warming = threading.Event(), threading.Event()
    runner = FakeRunner()
    runner.warm_up = lambda seqs, chunk: warming.wait(LONGEST_S)
    house = House(runner=runner, load=lambda: (loading.wait(LONGEST_S), house.load())[1])
    with pytest.raises(Unavailable, match="being loaded") as refused:
        house.submit("early")
    assert refused.value.retry_after > 0 and house.backend.card.max_model_len == 0
    loading.set()
    house.until(lambda: house.backend.state == "warming")
    listener = house.submit("patient")
    house.until(lambda: listener.kinds == ["queued"])
    warming.set()
    house.until(lambda: listener.end)
    assert isinstance(listener.end, Finished)
    house.end()


def test_a_model_that_cannot_be_loaded_is_a_failed_engine_with_the_reason():
    def load():
        raise ConfigError("no such model")

    house = House(load=load)
    house.until(lambda: house.backend.state == "failed")
    assert isinstance(house.backend.failure, ConfigError)
    with pytest.raises(Unavailable, match="has failed"):
        house.submit("x")
    assert house.backend.join(LONGEST_S)


def test_a_lost_device_ends_everybody_at_once_and_the_state_is_failed():
    """(case 53)"""
    house = House(max_num_seqs=1, prefill_chunk_tokens=32).ready()

    def lose(batch):
        if len(house.runner.batches) > 5:
            raise DeviceLost("fell off the bus")

    house.runner.before_run = lose
    listeners = [house.submit(f"q{i}", max_tokens=50) for i in range(4)]
    house.until(lambda: all(listener.end for listener in listeners) and house.backend.state == "failed")
    assert all(isinstance(listener.end, EngineFailed | Unavailable) for listener in listeners)
    assert isinstance(house.backend.failure, DeviceLost) and house.backend.status()["failure"] == "DeviceLost"
    with pytest.raises(LayaError):
        house.submit("more")
    assert house.backend.join(LONGEST_S) and house.runner.closed
    assert house.backend.figures().kv_blocks_used == 0


def test_a_failing_step_does_not_end_the_engine(house):
    """(case 53)"""

    def fail(batch):
        house.runner.before_run = lambda batch: None
        raise RuntimeError("CUDA out of memory")

    house.runner.before_run = fail
    hit = house.submit("one")
    house.until(lambda: hit.end)
    after = house.submit("two")
    house.until(lambda: after.end)
    assert isinstance(hit.end, EngineFailed) and "CUDA" not in hit.end.message and isinstance(after.end, Finished)
    assert house.backend.state == "ready" and house.backend.figures().failed_steps == 1


def test_draining_finishes_what_runs_and_ends_what_waits():
    """(case 75)"""
    house = House(max_num_seqs=1, prefill_chunk_tokens=32).ready()
    running = house.submit("running", max_tokens=100)
    house.until(lambda: "delta" in running.kinds)
    waiting = house.submit("waiting")
    house.until(lambda: waiting.kinds == ["queued"])
    house.backend.stop(LONGEST_S)
    assert isinstance(waiting.end, Unavailable)
    with pytest.raises(Unavailable, match="shutting down"):
        house.submit("late")
    house.end()
    assert isinstance(running.end, Finished) and running.ids == reference(FakeTokenizer().encode("running"), 100)
    assert house.states[-2:] == ["draining", "stopped"]


def test_a_drain_has_a_limit():
    """(case 76)"""
    house = House(max_num_seqs=2, prefill_chunk_tokens=32).ready()
    house.runner.before_run = lambda batch: time.sleep(0.02)
    endless = house.submit("endless", max_tokens=None)
    house.until(lambda: "delta" in endless.kinds)
    house.end(drain_s=0.1)
    assert isinstance(endless.end, Unavailable)


def test_an_engine_can_be_stopped_while_it_loads_and_before_it_starts():
    gate = threading.Event()
    house = House(load=lambda: (gate.wait(LONGEST_S), house.load())[1])
    house.backend.stop(0.0)
    gate.set()
    house.until(lambda: house.backend.state == "stopped")
    assert house.backend.join(LONGEST_S) and house.runner.closed
    idle = House(start=False)
    idle.backend.stop(0.0)
    assert idle.backend.state == "stopped" and idle.backend.join(1.0)


def test_a_stuck_step_is_reported_once_and_holds_nobody_in_the_queue(capfd):
    house = House(max_num_seqs=1, step_timeout_s=0.5, queue_timeout_s=0.05, prefill_chunk_tokens=32).ready()
    gate = threading.Event()
    house.runner.before_run = lambda batch: gate.wait(LONGEST_S)
    stuck = house.submit("stuck")
    house.until(lambda: "step_s" in house.backend.status())
    waiting = house.submit("waiting")
    house.until(lambda: waiting.kinds == ["queued"])
    house.until(lambda: house.backend.status().get("stuck"))
    with pytest.raises(Unavailable, match="stuck"):
        house.submit("too late")
    house.backend.tick()
    house.backend.tick()
    assert isinstance(waiting.end, Unavailable)
    assert capfd.readouterr().err.count("Current thread") == 1
    gate.set()
    house.until(lambda: stuck.end)
    house.backend.tick()
    assert isinstance(stuck.end, Finished) and "stuck" not in house.backend.status()
    house.end()
