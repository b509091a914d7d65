"""An in-process engine as the gateway sees it: `EngineBackend` puts admission, preparation, thread and model together.

In: requests from the gateway, on the loop thread. Out: the listener's calls, on the loop thread, through `post`. The model is
loaded, warmed up, run and closed on one thread of its own; its state changes are posted here, so the loop thread owns the
state.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laya.engine import heap
from laya.engine.admission import Admission
from laya.engine.budget import Plan
from laya.engine.figures import EngineFigures
from laya.engine.grammar import GrammarCompiler
from laya.engine.prepare import Job, PreparationWorker, PromptLimits, encode, longest_token_bytes, prepare
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost, Runner, Tokenizer
from laya.engine.submission import Submission
from laya.engine.thread import EngineLoop, expired
from laya.engine.watchdog import Level
from laya.errors import EngineFailed, LayaError, Unavailable
from laya.schema.generation import ChatPrompt, GenerationListener, GenerationRequest, Handle, ModelCard

log = logging.getLogger("laya.engine")

# Loading takes seconds to a minute: a client that comes back after this long loses little.
_LOADING_RETRY_S = 2.0
# Memory is short, or a step is stuck: neither mends itself at once.
_PROTECTED_RETRY_S = 5.0
_NOT_SERVING = {
    "idle": "The engine has not been started.",
    "loading": "The model is being loaded.",
    "draining": "The engine is shutting down.",
    "stopped": "The engine has stopped.",
    "failed": "The engine has failed.",
}

Load = Callable[[], tuple[Runner, Tokenizer, ModelCard]]


class EngineBackend:
    """States: idle -> loading -> warming -> ready -> draining -> stopped, and failed from any. Requests wait from warming on.

    `post(call)` runs `call` on the loop thread soon, in order, from any thread. `on_state(state)` is called on the loop
    thread at each change; `failure` then says what ended the engine. `card` may be given from the model's header; loading
    replaces it.
    """

    def __init__(
        self, *, name: str, load: Load, settings: EngineSettings, post: Callable[[Callable[[], None]], None],
        card: ModelCard | None = None, on_state: Callable[[str], None] | None = None, plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name
        self.plan = plan  # for display
        self.state = "idle"
        self.card = card or ModelCard(id=name, max_model_len=0, chat=False, details={"state": "loading"})
        self.failure: BaseException | None = None
        self.settings = settings
        self.progress: tuple[int, int] | None = None  # layers read and layers in all; written by the engine thread
        self._load = load
        self._post = post
        self._on_state = on_state
        self._clock = clock
        self._admission = Admission(settings, clock)
        # Every reserved place may be in preparation at once, and as many counting requests beside them.
        self._worker = PreparationWorker(name, 2 * settings.queue_limit + 1, post)
        self._thread = threading.Thread(target=self._main, name=f"laya-engine-{name}", daemon=True)
        self._stop_at: float | None = None
        self._stuck_since: float | None = None
        self._protection = ""  # why nothing new is admitted
        # Set on the loop thread by `_warming`, before any request needs them.
        self._loop: EngineLoop | None = None
        self._runner: Runner | None = None
        self._tokenizer: Tokenizer | None = None
        self._limits: PromptLimits | None = None
        self._grammars: GrammarCompiler | None = None  # used by the preparation worker

    # -- the gateway's calls -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, listener: GenerationListener) -> Handle:
        """Queue the work. Raises Unavailable before warming and after draining began, RateLimited over the queue's bound."""
        self._refuse_unless_serving()
        submission = Submission(request, listener, self._admission, self._clock())
        work = partial(prepare, request, self._tokenizer, self._limits, self._grammars)
        try:
            self._worker.submit(Job(work, submission.prepared, lambda: submission.cancelled))
        except LayaError:
            submission.cancel()
            raise
        return submission

    def tokenize(self, prompt: ChatPrompt | str, done: Callable[[Any], None], *, add_special: bool = True) -> None:
        self._prepare(partial(encode, prompt, self._tokenizer, self._limits, add_special), done)

    def detokenize(self, ids: list[int], done: Callable[[Any], None]) -> None:
        tokenizer, limits = self._tokenizer, self._limits  # now: the model may be unloaded before the worker comes to it
        # `encode` takes ids as a prompt too, and refuses those outside the vocabulary.
        self._prepare(lambda: tokenizer.decode(encode(ids, tokenizer, limits)), done)

    def status(self) -> dict[str, Any]:
        """`state`, and what an operator asks next; `step_s` only while a step is computed, `stuck` when it takes too long."""
        figures = self.figures()
        status: dict[str, Any] = {
            "state": self.state,
            "running": figures.sequences_running,
            "waiting": figures.sequences_waiting,
            "allowed": figures.sequences_allowed,
            "allowed_at_most": self.settings.max_num_seqs,
        }
        if self.progress is not None and self.state == "loading":
            status["layers"] = "{} of {}".format(*self.progress)
        if self._protection:
            status["protected"] = self._protection
        step_s = self._step_age()
        if step_s is not None:
            status["step_s"] = round(step_s, 3)
            status["stuck"] = self._stuck()
        if self.failure is not None:
            status["failure"] = type(self.failure).__name__
        return status

    def figures(self) -> EngineFigures:
        waiting = self._admission.waiting
        if self._loop is None:
            return EngineFigures(sequences_waiting=waiting)
        scheduler, tally = self._loop.scheduler, self._loop.tally
        return EngineFigures(
            sequences_running=scheduler.size,
            sequences_waiting=waiting,
            sequences_allowed=self._loop.opening.allowed,
            kv_blocks_used=scheduler.blocks.used,
            kv_blocks_total=scheduler.blocks.num_blocks,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            generated_tokens=tally.generated_tokens,
            preemptions=scheduler.preemptions,
            steps=tally.steps,
            failed_steps=tally.failed_steps,
            step_seconds=tally.step_seconds,
            longest_step_s=tally.longest_step_s,
        )

    def memory(self) -> dict[str, int]:
        """Bytes by part, from the runner: params, kv, and what the device reports. Empty before it is loaded."""
        return self._runner.memory() if self._runner is not None else {}

    # -- the composition root's calls ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load. Returns at once; `on_state` tells when requests are taken."""
        self._enter("loading")
        self._worker.start()
        self._thread.start()

    def tick(self) -> None:
        """Call about once a second: what must happen although a step is stuck."""
        for offer in self._admission.expire():
            offer.owner.deliver(expired(self._admission))
        if not self._stuck():
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = self._clock()
            log.error("engine %s: a step takes longer than %.0f s; all stacks follow", self.name, self.settings.step_timeout_s)
            faulthandler.dump_traceback(all_threads=True)

    def protect(self, level: Level, why: str) -> None:
        """The watchdog's word. SOFT: refuse what is new, start nothing. HARD: besides, end the newer half of what runs."""
        self._protection = why if level is not Level.CALM else ""
        self._admission.pause(None if level is Level.CALM else partial(_short_of_memory, why))
        if self._loop is not None:
            self._loop.opening.held = level is not Level.CALM
            if level is Level.HARD:
                self._admission.shed((len(self._loop.scheduler.groups) + 1) // 2, partial(_short_of_memory, why))

    def device_lost(self, why: str) -> None:
        """The driver says that the device is gone; the engine thread may hang in a call to it and is not waited for."""
        if self.state in ("stopped", "failed"):
            return
        log.critical("engine %s: %s", self.name, why)
        self._failed(DeviceLost(why))
        for offer in self._admission.close(_dead):
            offer.owner.deliver(_dead())
        if self._loop is not None:
            for group in list(self._loop.scheduler.groups):
                group.owner.deliver(_dead())
            self._loop.drain(self._clock())  # should the step ever come back

    def stop(self, drain_s: float) -> None:
        """Refuse new work, end what waits, finish what runs within `drain_s` seconds. Returns at once; `join` waits."""
        if self.state in ("stopped", "failed"):
            return
        never_started = self.state == "idle"
        self._stop_at = self._clock() + drain_s
        self._enter("stopped" if never_started else "draining")
        for offer in self._admission.close(self._refusal):
            offer.owner.deliver(self._refusal())
        self._worker.close()
        if self._loop is not None:
            self._loop.drain(self._stop_at)

    def join(self, timeout_s: float) -> bool:
        """Wait for the engine's threads, after `stop`; False if they still run. The only call that blocks."""
        deadline = time.monotonic() + timeout_s
        threads = [thread for thread in (self._thread, self._worker.thread) if thread.ident is not None]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def forget(self) -> None:
        """After it has stopped: let go of the model's last parts, without waiting for the collector."""
        self._loop = self._runner = self._tokenizer = self._limits = self._grammars = None

    # -- loop thread, inside -------------------------------------------------------------------------------------------------

    def _prepare(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            self._refuse_unless_serving()
            self._worker.submit(Job(work, done, lambda: False))
        except LayaError as error:
            self._post(partial(done, error))

    def _refusal(self) -> Unavailable:
        return Unavailable(_NOT_SERVING[self.state], retry_after=_LOADING_RETRY_S)

    def _refuse_unless_serving(self) -> None:
        if self.state in _NOT_SERVING:
            raise self._refusal()
        if self._stuck():
            raise Unavailable("The engine does not answer: a step is stuck.", retry_after=_PROTECTED_RETRY_S)

    def _stuck(self) -> bool:
        """As it is now, not at the last tick: who asks after the step has come back is served."""
        step_s = self._step_age()
        return step_s is not None and step_s > self.settings.step_timeout_s

    def _step_age(self) -> float | None:
        began = self._loop.tally.step_began if self._loop is not None else None
        return None if began is None else self._clock() - began

    def _enter(self, state: str) -> None:
        if self.state in ("failed", "stopped") or (self.state == "draining" and state in ("warming", "ready")):
            return
        self.state = state
        log.debug("engine %s: %s", self.name, state)  # `on_state` tells it where there is one
        if self._on_state is not None:
            self._on_state(state)

    def _warming(self, loop: EngineLoop, runner: Runner, tokenizer: Tokenizer, limits: PromptLimits, card: ModelCard) -> None:
        self._loop, self._runner, self._tokenizer, self._limits = loop, runner, tokenizer, limits
        self._grammars = GrammarCompiler(tokenizer, runner.eos_token_ids)
        self.card = msgspec.structs.replace(card, max_model_len=limits.window)
        if self._stop_at is not None:  # stopped while it was loading, when there was no loop to drain
            loop.drain(self._stop_at)
        self._enter("warming")

    def _failed(self, error: BaseException) -> None:
        if self.state not in ("stopped", "failed"):
            self.failure = error
            self._enter("failed")
            self._worker.close()

    # -- engine thread -------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        loop: EngineLoop | None = None
        runner: Runner | None = None
        failure: BaseException | None = None
        try:
            _lower_priority(self.settings.thread_nice)
            runner, tokenizer, card = self._load()
            window = min(runner.max_seq_len, card.max_model_len, runner.num_blocks * runner.block_size)
            limits = PromptLimits(
                window=window,
                max_prompt_tokens=self.settings.max_prompt_tokens,
                longest_token_bytes=longest_token_bytes(tokenizer),
                vocab_size=runner.vocab_size,
            )
            loop = EngineLoop(
                runner=runner, tokenizer=tokenizer, settings=self.settings, admission=self._admission,
                post=self._post_events, clock=self._clock,
            )  # fmt: skip
            self._post(partial(self._warming, loop, runner, tokenizer, limits, card))
            runner.warm_up(self.settings.max_num_seqs, self.settings.prefill_chunk_tokens)
            self._post(partial(self._enter, "ready"))
            loop.run()
        except BaseException as error:  # whatever it is, nobody else can tell the clients
            failure = error
            log.critical("engine %s: its thread has ended", self.name, exc_info=error)
        self._wind_up(loop, runner, failure)

    def _wind_up(self, loop: EngineLoop | None, runner: Runner | None, failure: BaseException | None) -> None:
        """Tell everybody and free the model, whatever else goes wrong."""
        if failure is not None:
            _attempt(partial(self._post, partial(self._failed, failure)))
            _attempt(partial(self._admission.close if loop is None else loop.end_all, _dead))
        if runner is not None:
            _attempt(runner.close)
            heap.trim()
        if failure is None:
            _attempt(partial(self._post, partial(self._enter, "stopped")))

    def _post_events(self, events: list[tuple[Submission, Any]]) -> None:
        self._post(partial(_deliver, events))


def _deliver(events: list[tuple[Submission, Any]]) -> None:
    for submission, event in events:
        submission.deliver(event)


def _dead() -> EngineFailed:
    return EngineFailed("The engine has failed.", retry_after=_LOADING_RETRY_S)


def _short_of_memory(why: str) -> Unavailable:
    return Unavailable(f"The machine must be protected: {why}. Try again later.", retry_after=_PROTECTED_RETRY_S)


def _attempt(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        log.exception("the engine could not be wound up cleanly")


def _lower_priority(nice: int) -> None:
    """Linux counts nice values by thread, and threads that the model starts inherit this one's."""
    if nice and hasattr(os, "setpriority"):
        try:
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
        except OSError as error:
            log.warning("the engine thread keeps its priority: %s", error)
