"""Which requests a package that schedules by itself may have in hand: admission, room, preemption. The steps are its own.

In: choices from admission, outcomes from a `PackageRunner`. Out: the sequences that the package holds, as a batch of
candidates, and sequences that have advanced. Engine thread only; takes the place of `scheduler.Scheduler` in the loop.

The package never gets what it cannot run: more sequences than it has slots, a prompt for which no blocks are free (it would
block its own queue), a decode without a block to grow into (it would preempt by itself). It reads prompts whole and before any
decode, so while answers run, prompts are handed over only every other step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from laya.engine.admission import Admission, Offer
from laya.engine.group import Group
from laya.engine.pace import Opening
from laya.engine.sequence import Sequence, Status
from laya.engine.settings import EngineSettings
from laya.engine.step import PackageRunner, Sampled, Scheduled


def _age(sequence: Sequence) -> int:
    return sequence.seq_id


class DrivenScheduler:
    def __init__(
        self, runner: PackageRunner, admission: Admission, opening: Opening, settings: EngineSettings,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.groups: set[Group] = set()  # requests of which a choice was taken and that are not over
        self.running: list[Sequence] = []  # in the package's hands; oldest first
        self.paused: list[Sequence] = []  # taken, and without room; oldest first
        self.preemptions = 0
        self._runner = runner
        self._admission = admission
        self._opening = opening
        self._clock = clock
        self._max_prefills = settings.max_concurrent_prefills
        self._read_prompts = False  # in the step before
        self._next_id = 0

    @property
    def blocks(self):
        return self._runner.blocks

    @property
    def size(self) -> int:
        return len(self.running) + len(self.paused)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.paused

    def reset(self) -> None:
        """Forget every sequence, and the package's queues, blocks and prefix cache."""
        self.groups, self.running, self.paused = set(), [], []
        self._runner.reset()

    # -- one step ------------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Scheduled]:
        """Everything the package holds; it picks from these and the runner cuts the list down to what it ran."""
        while len(self.running) > 1 and self._runner.blocks_to_grow() > self.blocks.available:
            self._preempt(self.running[-1])
        decoding = any(sequence.status is Status.DECODE for sequence in self.running)
        if not (decoding and self._read_prompts):
            self._resume()
            self._admit()
        self._read_prompts = any(sequence.status is Status.PREFILL for sequence in self.running)
        return [Scheduled(sequence, sequence.num_computed, 1) for sequence in self.running]

    def commit(self, work: Scheduled, outcome: Sampled) -> bool:
        """Book what a step has computed; True when a token was sampled, which is then the newest of the sequence."""
        sequence, group = work.sequence, work.sequence.request
        if not group.announced and sequence.num_computed == 0:
            sequence.num_cached = work.start
            if sequence.index == 0:
                group.cached_tokens = work.start
        sequence.num_computed = work.start + work.count
        if outcome.token_id is None:
            return False
        sequence.token_ids.append(outcome.token_id)
        sequence.status = Status.DECODE
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out at any point of its life and free what it holds."""
        for place in (self.running, self.paused):
            if sequence in place:
                place.remove(sequence)
        self._runner.drop(sequence)
        sequence.status = Status.FINISHED

    # -- what starts or goes on ----------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Its blocks go to the others; later it starts over with all its tokens as the prompt."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._runner.drop(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.num_computed = 0
        insort(self.paused, sequence, key=_age)

    def _resume(self) -> None:
        while self.paused and self._has_room(len(self.paused[0])):
            self._start(self.paused.pop(0))

    def _start(self, sequence: Sequence) -> None:
        self._runner.add(sequence)
        sequence.status = Status.PREFILL
        insort(self.running, sequence, key=_age)

    def _admit(self) -> None:
        """Start new work within the caps on running sequences and on requests that are read in one step."""
        reading = {sequence.request for sequence in self.running if sequence.status is Status.PREFILL}
        places = self._max_prefills - len(reading)
        while self._admission.queued and not self.paused and self.size < self._opening.allowed:
            taken = self._admission.take(self._fits if places > 0 else self._goes_on)
            if taken is None:
                return
            offer, index = taken
            if index == 0:
                offer.group = Group(offer, self._clock())
                self.groups.add(offer.group)
            if offer.group not in reading:
                reading.add(offer.group)
                places -= 1
            sequence = offer.group.choice(self._next_id, index)
            self._next_id += 1
            if self._has_room(len(sequence)):
                self._start(sequence)
            else:
                self._wait(sequence)

    # -- room ----------------------------------------------------------------------------------------------------------------

    def _goes_on(self, offer: Offer) -> bool:
        """A further choice of a request that is being read already; no new prompt may start in this step."""
        return offer.taken > 0 and self._fits(offer)

    def _fits(self, offer: Offer) -> bool:
        return self._has_room(len(offer.prepared.prompt_ids) + offer.prepared.tail)

    def _has_room(self, tokens: int) -> bool:
        """Blocks for so many tokens beside the prompts handed over and not read yet, and one for each that runs."""
        size = self._runner.block_size
        promised = sum(-(-len(sequence) // size) for sequence in self.running if sequence.status is Status.PREFILL)
        left = self.blocks.available - promised - -(-tokens // size)
        return left >= (len(self.running) if self.running else 0)
