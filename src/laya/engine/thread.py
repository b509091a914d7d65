"""The engine's loop: take aborts and expiries -> schedule -> run -> advance answers -> post one batch of events.

In: offers and aborts through admission. Out: `post(events)` once a step, each event an (owner, event) pair with event a
Started, Delta, Finished or LayaError. `turn` and `run` belong to the engine thread; `drain` may be called from any.

Faults are contained: one that concerns a sequence ends its request, one of the whole step ends the requests in it, one
in the bookkeeping ends all that run and starts over with an empty pool. Only a lost device ends the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from laya.engine.admission import Admission
from laya.engine.answer import Answer, token_logprob
from laya.engine.driven import DrivenScheduler
from laya.engine.group import Group
from laya.engine.pace import Opening
from laya.engine.scheduler import Scheduler
from laya.engine.sequence import Sequence
from laya.engine.settings import EngineSettings
from laya.engine.step import DeviceLost, Runner, Sampled, Scheduled, Tokenizer
from laya.errors import EngineFailed, LayaError, Unavailable
from laya.schema.generation import Delta

log = logging.getLogger("laya.engine")

# Sleep when idle; offers and aborts wake the loop, so this only bounds the wait for a drain's deadline.
_LONGEST_SLEEP_S = 1.0


class Tally:
    """Totals since the start. Written by the engine thread, read by any for display only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.step_seconds = 0.0
        self.longest_step_s = 0.0
        self.failed_steps = 0
        self.step_began: float | None = None  # by the loop's clock, while a step is computed


class EngineLoop:
    def __init__(
        self, *, runner: Runner, tokenizer: Tokenizer, settings: EngineSettings, admission: Admission,
        post: Callable[[list[tuple[Any, Any]]], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.opening = Opening(settings.max_num_seqs, settings.step_timeout_s)
        driven = getattr(runner, "schedules", False)  # its package decides about steps
        self.scheduler = (DrivenScheduler if driven else Scheduler)(runner, admission, self.opening, settings, clock)
        self.tally = Tally()
        self._runner = runner
        self._tokenizer = tokenizer
        self._admission = admission
        self._post = post
        self._clock = clock
        self._events: list[tuple[Any, Any]] = []
        self._deadline: float | None = None

    def run(self) -> None:
        """Serve until drained. An exception that leaves it means that the engine is dead: call `end_all` then."""
        while self._deadline is None or (self.scheduler.groups and self._clock() < self._deadline):
            if not self.turn():
                self._admission.wait(_LONGEST_SLEEP_S)
        self.end_all(lambda: Unavailable("The engine is shutting down."))

    def drain(self, deadline: float) -> None:
        """Finish what runs until `deadline` (by the loop's clock), then end the rest. Close admission before."""
        self._deadline = deadline
        self._admission.wake()

    def turn(self) -> bool:
        """One turn of the loop; False when there was nothing to compute."""
        for offer in self._admission.take_aborts():
            if offer.group is not None:
                self._leave(offer.group)
        for offer in self._admission.expire():
            self._events.append((offer.owner, expired(self._admission)))
        shed = self._admission.take_shed()
        if shed is not None:
            self._end_newest(*shed)
        batch = self._schedule()
        if batch:
            self._step(batch)
        elif not self.scheduler.groups and self.scheduler.blocks.used:
            log.error("%d KV blocks were still held with nothing running; the pool starts over", self.scheduler.blocks.used)
            self.scheduler.reset()
        self._flush()
        return bool(batch)

    def end_all(self, error: Callable[[], LayaError]) -> None:
        """End everything that runs or waits with `error()`, and refuse what comes."""
        for offer in self._admission.close(error):
            self._events.append((offer.owner, error()))
        for group in list(self.scheduler.groups):
            self._end(group, error())
        self._flush()

    # -- one step ------------------------------------------------------------------------------------------------------------

    def _schedule(self) -> list[Scheduled]:
        try:
            return self.scheduler.schedule()
        except Exception:
            log.exception("the schedule failed; every running request is ended")
            for group in list(self.scheduler.groups):
                self._admission.withdraw(group.offer)
                group.over = True
                self._events.append((group.owner, _failed()))
            self.scheduler.reset()
            return []

    def _step(self, batch: list[Scheduled]) -> None:
        tally, began = self.tally, self._clock()
        tally.step_began = began
        try:
            outcomes = self._runner.run(batch)
            if len(outcomes) != len(batch):
                raise RuntimeError(f"the runner returned {len(outcomes)} outcomes for {len(batch)} sequences")
        except DeviceLost:
            raise
        except Exception:
            log.exception("a step failed; the %d sequences in it are ended", len(batch))
            tally.failed_steps += 1
            for group in {work.sequence.request for work in batch}:
                self._end(group, _failed())
            return
        finally:
            tally.step_began = None
        now = self._clock()
        running, ended = len(self.scheduler.running), 0
        for work, outcome in zip(batch, outcomes, strict=True):
            ended += self._advance(work, outcome, now)
        seconds = now - began
        tally.steps += 1
        tally.step_seconds += seconds
        tally.longest_step_s = max(tally.longest_step_s, seconds)
        self._admission.rate.add(ended, seconds)
        self.opening.step(running, seconds)

    def _advance(self, work: Scheduled, outcome: Sampled, now: float) -> bool:
        """Book one sequence's outcome; True when its choice has ended well."""
        group: Group = work.sequence.request
        if group.over:  # another of its choices failed in this step
            return False
        try:
            if outcome.error is not None:
                raise outcome.error
            sampled = self.scheduler.commit(work, outcome)
            if outcome.told:
                group.told |= outcome.told
            if outcome.prompt_logprobs and group.prompt_logprobs is not None:
                self._keep_prompt_logprobs(group, work, outcome)
            if sampled and not group.prompt_ready:
                group.finish_prompt(work.sequence, now)
            if not group.announced and (group.prompt_ready or group.prompt_logprobs is None):
                self._announce(group)
            return sampled and self._extend(group, work.sequence, outcome, now)
        except LayaError as error:
            self._end(group, error)
        except Exception:
            log.exception("a request failed; the others go on")
            self._end(group, _failed())
        return False

    def _extend(self, group: Group, sequence: Sequence, outcome: Sampled, now: float) -> bool:
        """The newest token becomes text; True when the choice ends with it."""
        prepared = group.offer.prepared
        if prepared.max_new_tokens == 0:  # scoring: the prompt was all
            delta = Delta(sequence.index, "", (), (), "length")
        else:
            if sequence.answer is None:
                sequence.answer = Answer(sequence, self._tokenizer, self._runner.eos_token_ids, prepared.max_new_tokens)
            group.completion_tokens += 1
            self.tally.generated_tokens += 1
            if sequence.grammar is not None:
                sequence.grammar.accept(sequence.token_ids[-1])
            delta = sequence.answer.accept(sequence, outcome)
        if delta is None:
            return False
        self._events.append((group.owner, delta))
        if delta.finish_reason is None:
            return False
        self.scheduler.remove(sequence)
        group.sequences.remove(sequence)
        group.ended += 1
        if group.ended == group.offer.choices:
            self._end(group, group.finished(now))
        return True

    def _keep_prompt_logprobs(self, group: Group, work: Scheduled, outcome: Sampled) -> None:
        token_ids = work.sequence.token_ids
        for position, (logprob, top) in enumerate(outcome.prompt_logprobs, max(work.start, 1)):
            group.prompt_logprobs[position] = token_logprob(self._tokenizer, token_ids[position], logprob, top)

    def _announce(self, group: Group) -> None:
        event = group.started()
        group.announced = True
        self.tally.prompt_tokens += event.prompt_tokens
        self.tally.cached_tokens += event.cached_tokens
        self._events.append((group.owner, event))

    # -- ends ----------------------------------------------------------------------------------------------------------------

    def _end(self, group: Group, event: Any) -> None:
        """The last event of a request, whatever it is."""
        if not group.over:
            self._leave(group)
            self._events.append((group.owner, event))

    def _end_newest(self, requests: int, error: Callable[[], LayaError]) -> None:
        for group in sorted(self.scheduler.groups, key=lambda group: group.started_at)[-requests:]:
            self._end(group, error())

    def _leave(self, group: Group) -> None:
        """Free everything a request holds. Idempotent."""
        group.over = True
        self.scheduler.groups.discard(group)
        self._admission.withdraw(group.offer)
        for sequence in group.sequences:
            self.scheduler.remove(sequence)
        group.sequences = []

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._post(events)


def expired(admission: Admission) -> Unavailable:
    """What a request hears that waited longer than the queue's time-out."""
    retry_after = admission.rate.seconds_for(admission.waiting)
    return Unavailable("The request waited too long in the engine's queue.", retry_after=retry_after)


def _failed() -> EngineFailed:
    return EngineFailed("The engine failed while it worked on this request.")
