"""An engine whose model is loaded by the first request and freed when idle; between, requests wait here.

In: the calls that an `EngineBackend` takes, from gateway and composition root. Out: the same, passed to the engine of the
moment: each loading makes a new one (`make`), because its threads end with its model. Loop thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from laya.engine.backend import EngineBackend
from laya.engine.budget import Plan
from laya.engine.figures import EngineFigures
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost
from laya.engine.visit import Question, Visit
from laya.engine.watchdog import Level
from laya.errors import LayaError, RateLimited, Unavailable
from laya.schema.generation import ChatPrompt, GenerationListener, GenerationRequest, Handle, ModelCard

log = logging.getLogger("laya.engine")

# After a loading that failed: reading a model again at every request would leave the machine no time for others.
_RETRY_S = 10.0
_LOADING_RETRY_S = 2.0
_PROTECTED_RETRY_S = 5.0
_OVER = ("draining", "stopped", "failed")

OnState = Callable[[EngineBackend, str], None]


class OnDemandEngine:
    """States: asleep -> waking -> ready -> unloading -> asleep; loading -> warming -> ready the first time where `eager`; and
    draining, stopped, failed as an EngineBackend's.

    `make(on_state)` gives an engine that was not started. `on_state` hears each change of state; `failure` says why it failed.
    """

    def __init__(
        self, *, name: str, make: Callable[[OnState], EngineBackend], settings: EngineSettings, card: ModelCard,
        eager: bool = False, idle_unload_s: float | None = None, plan: Plan | None = None,
        on_state: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name
        self.plan = plan
        self.state = "idle"
        self.card = card
        self.settings = settings
        self.failure: BaseException | None = None
        self._make = make
        self._eager = eager
        self._idle_unload_s = idle_unload_s
        self._on_state = on_state
        self._clock = clock
        self._engine: EngineBackend | None = None
        self._waiting: list[Visit | Question] = []  # bounded by queue_limit, in order of arrival
        self._visits = 0  # requests and questions that have not ended
        self._used = clock()
        self._past = EngineFigures()
        self._protection: tuple[Level, str] = (Level.CALM, "")
        self._try_again_at = 0.0

    # -- the gateway's calls -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, listener: GenerationListener) -> Handle:
        """As `EngineBackend.submit`; where the model is not there, the request waits, `queue_timeout_s` at most."""
        visit = Visit(request, listener, self._clock(), self._left)
        self._admit(visit, request.sampling.n)
        return visit

    def tokenize(self, prompt: ChatPrompt | str, done: Callable[[Any], None], *, add_special: bool = True) -> None:
        self._ask(lambda engine, tell: engine.tokenize(prompt, tell, add_special=add_special), done)

    def detokenize(self, ids: list[int], done: Callable[[Any], None]) -> None:
        self._ask(lambda engine, tell: engine.detokenize(ids, tell), done)

    def status(self) -> dict[str, Any]:
        """As the engine's; `waiting` counts those that wait for the model too."""
        figures = self.figures()
        status: dict[str, Any] = self._engine.status() if self._engine is not None else {"running": 0}
        return status | {"state": self.state, "waiting": figures.sequences_waiting}

    def figures(self) -> EngineFigures:
        now = self._engine.figures() if self._engine is not None else EngineFigures()
        waiting = now.sequences_waiting + len(self._waiting)
        return msgspec.structs.replace(now, sequences_waiting=waiting).after(self._past)

    def memory(self) -> dict[str, int]:
        return self._engine.memory() if self._engine is not None else {}

    # -- the composition root's calls ----------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._eager:
            self._load("loading")
        else:
            self._enter("asleep")

    def tick(self) -> None:
        """Call about once a second: time-outs of those that wait, and whether the model has been idle long enough."""
        now = self._clock()
        if self._engine is not None:
            self._engine.tick()
        while self._waiting and self._waiting[0].since + self.settings.queue_timeout_s <= now:
            late = self._waiting.pop(0)
            late.fail(Unavailable("The request waited too long for the model to be loaded.", retry_after=_LOADING_RETRY_S))
        if self._visits:
            self._used = now
        elif self.state == "ready" and self._idle_unload_s is not None and now - self._used >= self._idle_unload_s:
            self._enter("unloading")
            self._engine.stop(0.0)

    def protect(self, level: Level, why: str) -> None:
        self._protection = level, why
        if self._engine is not None:
            self._engine.protect(level, why)

    def device_lost(self, why: str) -> None:
        if self.state in _OVER:
            return
        if self._engine is not None:
            self._engine.device_lost(why)
        else:
            self._fail(DeviceLost(why))

    def stop(self, drain_s: float) -> None:
        if self.state in _OVER:
            return
        absent = self._engine is None
        self._enter("stopped" if absent else "draining")
        self._refuse_waiting(self._refusal)
        if not absent:
            self._engine.stop(drain_s)

    def join(self, timeout_s: float) -> bool:
        return self._engine.join(timeout_s) if self._engine is not None else True

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _ask(self, put: Callable[[EngineBackend, Callable[[Any], None]], None], done: Callable[[Any], None]) -> None:
        question = Question(put, done, self._clock(), self._left)
        try:
            self._admit(question, 1)
        except LayaError as error:
            done(error)

    def _admit(self, visit: Visit | Question, choices: int) -> None:
        """Pass on to an engine that takes requests, else keep, and load where nothing is loading. Raises what refuses it."""
        if self.state in _OVER:
            raise self._refusal()
        self._used = self._clock()
        self._visits += 1
        try:
            if self._takes():
                visit.hand_over(self._engine)
            else:
                self._keep(visit, choices)
        except LayaError:
            self._visits -= 1
            raise

    def _takes(self) -> bool:
        """The engine of the moment takes requests, or refuses them itself (at the first start, which `/ready` tells)."""
        return self.state in ("loading", "warming", "ready") or (self.state == "waking" and self._engine.state == "warming")

    def _keep(self, visit: Visit | Question, choices: int) -> None:
        level, why = self._protection
        if level is not Level.CALM:
            raise Unavailable(f"The machine must be protected: {why}. Try again later.", retry_after=_PROTECTED_RETRY_S)
        if self._waiting and len(self._waiting) + choices > self.settings.queue_limit:
            text = f"The engine's queue is full: {len(self._waiting)} requests wait for the model to be loaded."
            raise RateLimited(text, retry_after=_LOADING_RETRY_S)
        if self.state == "asleep":
            left = self._try_again_at - self._clock()
            if left > 0:
                raise Unavailable("The model could not be loaded.", retry_after=left)
            self._load("waking")
        self._waiting.append(visit)

    def _load(self, state: str) -> None:
        self._enter(state)
        self._engine = self._make(self._changed)
        self._engine.start()
        self._engine.protect(*self._protection)

    def _changed(self, engine: EngineBackend, state: str) -> None:
        """The engine of the moment has a new state."""
        if state == "warming":
            self.card = engine.card
            if self.state == "loading":
                self._enter("warming")
            waiting, self._waiting = self._waiting, []
            for visit in waiting:
                _hand_over(visit, engine)
        elif state == "ready":
            self._used = self._clock()
            self._enter("ready")
        elif state == "failed":
            self._engine_failed(engine)
        elif state == "stopped":
            self._unloaded(engine)

    def _unloaded(self, engine: EngineBackend) -> None:
        if self.state != "unloading":
            self._enter("stopped")
            return
        self._leave(engine)
        if self._waiting:  # they came while it was unloading
            self._load("waking")
        else:
            self._enter("asleep")

    def _engine_failed(self, engine: EngineBackend) -> None:
        """A model that cannot be loaded now may be later (memory was short); an engine that dies in service is not replaced."""
        if self.state != "waking" or isinstance(engine.failure, DeviceLost):
            self._fail(engine.failure)
            return
        log.error("engine %s: its model could not be loaded", self.name)
        self._try_again_at = self._clock() + _RETRY_S
        self._leave(engine)
        self._enter("asleep")
        self._refuse_waiting(lambda: Unavailable("The model could not be loaded.", retry_after=_RETRY_S))

    def _leave(self, engine: EngineBackend) -> None:
        self._past = engine.figures().after(self._past)
        self._engine = None
        engine.forget()

    def _fail(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._enter("failed")
        self._refuse_waiting(self._refusal)

    def _refuse_waiting(self, refusal: Callable[[], LayaError]) -> None:
        waiting, self._waiting = self._waiting, []
        for visit in waiting:
            visit.fail(refusal())

    def _left(self, visit: Visit | Question) -> None:
        """A request or question has ended; one that never got a place is not among the waiting."""
        self._visits -= 1
        self._used = self._clock()
        if visit in self._waiting:
            self._waiting.remove(visit)

    def _refusal(self) -> Unavailable:
        why = "The engine has failed." if self.state == "failed" else "The engine is shutting down."
        return Unavailable(why, retry_after=_LOADING_RETRY_S)

    def _enter(self, state: str) -> None:
        self.state = state
        log.debug("engine %s: %s", self.name, state)  # `on_state` tells it where there is one
        if self._on_state is not None:
            self._on_state(state)


def _hand_over(visit: Visit | Question, engine: EngineBackend) -> None:
    try:
        visit.hand_over(engine)
    except LayaError as error:
        visit.fail(error)
