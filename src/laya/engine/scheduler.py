"""What runs in the next step: schedule -> (runner.run) -> commit.

In: choices from admission, outcomes from the runner. Out: a batch of `Scheduled`, and sequences that have advanced. Engine
thread only. A step's token budget goes to decodes first and to prompt chunks then, so running answers never wait for a
long prompt. `running` is ordered by age; when blocks run out the youngest gives up its own, into the swap space or to be
recomputed, and goes on before anything new starts.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterator

from laya.engine.admission import Admission, Offer
from laya.engine.blocks import BlockPool
from laya.engine.group import Group
from laya.engine.pace import Opening
from laya.engine.sequence import Sequence, Status
from laya.engine.settings import EngineSettings
from laya.engine.step import Runner, Sampled, Scheduled
from laya.engine.tiles import Tiles, tile_tokens

log = logging.getLogger("laya.engine")


def _age(sequence: Sequence) -> int:
    return sequence.seq_id


def _left(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed


def _pieces(sequence: Sequence, tokens: int) -> Iterator[tuple[int, int]]:
    """Runs [start, end) of at most so many tokens in all; a seeded sequence's own tokens are computed anew singly."""
    start, last, tiles = sequence.num_computed, len(sequence.token_ids), sequence.tiles
    if tiles is None:
        yield start, min(last, start + tokens)
        return
    limit, end = start + tokens, start
    while end < tiles.prompt and tiles.after(end) <= limit:
        end = tiles.after(end)
    if end > start:
        yield start, end
    if end >= tiles.prompt:
        for position in range(end, min(last, limit)):
            yield position, position + 1


class Scheduler:
    def __init__(
        self, runner: Runner, admission: Admission, opening: Opening, settings: EngineSettings, clock: Callable[[], float]
    ) -> None:
        self.groups: set[Group] = set()  # requests of which a choice was taken and that are not over
        self.running: list[Sequence] = []  # hold blocks; oldest first
        self.paused: list[Sequence] = []  # preempted; oldest first
        self.parked: list[Sequence] = []  # further choices that wait for the first one's prompt, to share its blocks
        self.preemptions = 0
        self._runner = runner
        self._admission = admission
        self._opening = opening
        self._clock = clock
        self._max_prefills = settings.max_concurrent_prefills
        # A full decode batch still leaves one block's worth for a prompt.
        self._step_tokens = max(settings.prefill_chunk_tokens, settings.max_num_seqs + runner.block_size)
        self._tile = tile_tokens(self._step_tokens, settings.max_num_seqs, runner.block_size)
        self._short_turn = False
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """Forget every sequence and the prefix cache."""
        for sequence in self.paused:
            self._drop_swapped(sequence)
        self.groups, self.running, self.paused, self.parked = set(), [], [], []
        self.blocks = BlockPool(self._runner.num_blocks, self._runner.block_size)

    @property
    def size(self) -> int:
        return len(self.running) + len(self.paused) + len(self.parked)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.paused
        yield from self.parked

    # -- one step ------------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Scheduled]:
        """The next step's work; empty when nothing can run."""
        batch: list[Scheduled] = []
        self._decode(batch)
        tokens = self._step_tokens - len(batch)
        self._resume()
        self._unpark()
        self._admit(tokens)
        self._prefill(batch, tokens)
        return batch

    def commit(self, work: Scheduled, outcome: Sampled) -> bool:
        """Book what a step has computed; True when a token was sampled, which is then the newest of the sequence."""
        sequence, samples = work.sequence, work.samples
        sequence.num_computed = work.start + work.count
        self.blocks.register(sequence)
        if samples:
            if outcome.token_id is None:
                raise RuntimeError("the runner sampled no token where one was due")
            sequence.token_ids.append(outcome.token_id)
            sequence.status = Status.DECODE
        return samples

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out at any point of its life and free what it holds."""
        for place in (self.running, self.paused, self.parked):
            if sequence in place:
                place.remove(sequence)
        self._drop_swapped(sequence)
        self.blocks.release(sequence)
        sequence.status = Status.FINISHED

    # -- decode --------------------------------------------------------------------------------------------------------------

    def _decode(self, batch: list[Scheduled]) -> None:
        """Every running sequence gets its next token; the oldest take blocks from the youngest."""
        for sequence in list(self.running):
            if sequence.status is not Status.DECODE:
                continue
            while sequence.status is Status.DECODE and not self.blocks.grow(sequence, len(sequence.token_ids)):
                self._preempt(self.running[-1])
            if sequence.status is Status.DECODE:
                batch.append(Scheduled(sequence, sequence.num_computed, 1))

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        insort(self.paused, sequence, key=_age)
        computed = sequence.block_table[: self.blocks.blocks_for(sequence.num_computed)]
        try:
            sequence.swap_ticket = self._runner.swap_out(computed) if computed else None
        except Exception:
            log.exception("swapping a sequence out failed; it will be recomputed")
        sequence.status = Status.WAITING if sequence.swap_ticket is None else Status.SWAPPED
        self.blocks.release(sequence)

    # -- what starts or goes on ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        while self.paused and self._has_room(self.blocks.blocks_for(len(self.paused[0]))):
            sequence = self.paused[0]
            if not (self._swap_in(sequence) if sequence.status is Status.SWAPPED else self._start(sequence)):
                break
            del self.paused[0]
            insort(self.running, sequence, key=_age)

    def _swap_in(self, sequence: Sequence) -> bool:
        if not self.blocks.grow(sequence, len(sequence)):
            return False
        computed = self.blocks.blocks_for(sequence.num_computed)
        try:
            self._runner.swap_in(sequence.swap_ticket, sequence.block_table[:computed])
        except Exception:
            log.exception("swapping a sequence in failed; it will be recomputed")
            self._drop_swapped(sequence)
            self.blocks.release(sequence)
            return self._start(sequence)
        sequence.swap_ticket = None
        decodes = sequence.num_generated > 0 and _left(sequence) == 1
        sequence.status = Status.DECODE if decodes else Status.PREFILL
        return True

    def _unpark(self) -> None:
        ready = [sequence for sequence in self.parked if sequence.request.prompt_ready or sequence.index == 0]
        for sequence in ready:
            if self.paused or not self._has_room(self._cost_of_choice(sequence.request.offer)) or not self._start(sequence):
                break
            self.parked.remove(sequence)
            insort(self.running, sequence, key=_age)

    def _admit(self, tokens: int) -> None:
        """Start new work within the caps on running sequences and on requests that prefill.

        While long prompts take all prefill places, every other step belongs to short work: one prompt that can be read
        in that single step may start, and the long ones wait for it once.
        """
        if not self._admission.queued:
            return
        prefilling = {sequence.request: _left(sequence) for sequence in self.running if sequence.status is Status.PREFILL}
        places, longest = self._max_prefills - len(prefilling), None
        if places <= 0 and self._short_turn and min(prefilling.values()) > tokens:
            places, longest = 1, tokens
        while places > 0 and not self.paused and self.size < self._opening.allowed:
            taken = self._admission.take(self._fits, longest)
            if taken is None:
                return
            offer, index = taken
            if index == 0:
                offer.group = Group(offer, self._clock())
                self.groups.add(offer.group)
                places -= 1
            sequence = offer.group.choice(self._next_id, index)
            sequence.tiles = self._tiles(offer)
            self._next_id += 1
            self.parked.append(sequence)
            if (index == 0 or offer.group.prompt_ready) and self._start(sequence):
                self.parked.remove(sequence)
                self.running.append(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens, the cached prefix shared. Its own log-probabilities need every position computed."""
        request, prepared = sequence.request.request, sequence.request.offer.prepared
        limit = None if prepared.options is None else len(prepared.prompt_ids)  # figures are wanted from its last token on
        if not self.blocks.start(sequence, request.salt, reuse=sequence.sampling.prompt_logprobs is None, limit=limit):
            return False
        if not sequence.request.announced:  # later starts find their own blocks again: that is no saving
            sequence.num_cached = sequence.request.cached_tokens = sequence.num_computed
        sequence.status = Status.PREFILL
        return True

    def _prefill(self, batch: list[Scheduled], tokens: int) -> None:
        """Give the rest of the step's tokens to prompts: by age, and every other time to the shortest first."""
        waiting = [sequence for sequence in self.running if sequence.status is Status.PREFILL]
        if not waiting:
            return
        if self._short_turn:
            waiting.sort(key=_left)
        self._short_turn = not self._short_turn
        requests: set[Group] = set()
        for sequence in waiting:
            if sequence.request not in requests and len(requests) == self._max_prefills:
                continue
            requests.add(sequence.request)
            if tokens == 0:
                break
            for start, end in _pieces(sequence, tokens):
                batch.append(Scheduled(sequence, start, end - start))
                tokens -= end - start

    # -- room ----------------------------------------------------------------------------------------------------------------

    def _has_room(self, blocks: int) -> bool:
        """`blocks` more, and still one to grow into for each sequence that runs."""
        return blocks + len(self.running) <= self.blocks.available or (not self.running and blocks <= self.blocks.available)

    def _fits(self, offer: Offer) -> bool:
        if offer.taken:  # before its prompt is ready it is only parked
            return not offer.group.prompt_ready or self._has_room(self._cost_of_choice(offer))
        whole = self.blocks.blocks_for(len(offer.prepared.prompt_ids) + offer.prepared.tail)
        return self._has_room(whole) or self._has_room(self._cost_of_choice(offer))

    def _cost_of_choice(self, offer: Offer) -> int:
        prepared = offer.prepared
        return self.blocks.cost(prepared.prompt_ids, prepared.request.salt, prepared.tail, self._tiles(offer))

    def _tiles(self, offer: Offer) -> Tiles | None:
        """A request with a seed is promised its text whatever else runs; options are scored, not sampled."""
        prepared = offer.prepared
        if self._runner.rows_are_exact or prepared.request.sampling.seed is None or prepared.options is not None:
            return None
        return Tiles(self._tile, len(prepared.prompt_ids))

    def _drop_swapped(self, sequence: Sequence) -> None:
        ticket, sequence.swap_ticket = sequence.swap_ticket, None
        if ticket is not None:
            try:
                self._runner.drop_swapped(ticket)
            except Exception:
                log.exception("swap space of an ended sequence could not be freed")
