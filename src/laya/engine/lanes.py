"""The order of the waiting line: grouped by prompt length, fair between clients, with ageing between the groups.

Pure bookkeeping without a lock: `admission.Admission` calls it under its own. Three lanes keep short prompts from queueing
behind long ones; a lane that was passed over `PASSES` times goes next, so neither kind starves. Within a lane clients take
turns, one choice a turn: a client with a thousand requests waits as long as one with a single request, and n counts n.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.engine.admission import Offer

# Shorter work that may go before a waiting longer lane: at four the longer one still gets a fifth of the starts.
PASSES = 4
# Lane borders, in prefill chunks: a prompt that is read in one step, one that takes a few, all others.
_BORDERS = (1, 4)


class Lane:
    """Prompts of similar length: a queue for each client, the next client first."""

    __slots__ = ("clients", "passed")

    def __init__(self) -> None:
        self.clients: OrderedDict[str, deque[Offer]] = OrderedDict()
        self.passed = 0

    def head(self) -> Offer:
        return next(iter(self.clients.values()))[0]

    def rotate(self) -> None:
        self.clients.move_to_end(next(iter(self.clients)))


class Lanes:
    def __init__(self, chunk_tokens: int) -> None:
        self._borders = [chunks * chunk_tokens for chunks in _BORDERS]
        self._lanes = [Lane() for _ in range(len(_BORDERS) + 1)]  # shortest first

    def __iter__(self) -> Iterator[Offer]:
        for lane in self._lanes:
            for queue in lane.clients.values():
                yield from queue

    def add(self, offer: Offer) -> None:
        self._lane_of(offer).clients.setdefault(offer.client, deque()).append(offer)

    def remove(self, offer: Offer) -> None:
        lane = self._lane_of(offer)
        queue = lane.clients.get(offer.client)
        if queue is None or offer not in queue:
            return
        queue.remove(offer)
        if not queue:
            del lane.clients[offer.client]
            if not lane.clients:
                lane.passed = 0

    def pick(self, fits: Callable[[Offer], bool], longest: int | None = None) -> Offer | None:
        """The offer whose turn it is, if it fits, and its client moved to the end of the line; it stays in the lane.

        `longest` passes over prompts of more tokens. A lane that has been passed over often enough and does not fit yet
        keeps the room for itself: nothing is picked.
        """
        waiting = [lane for lane in self._lanes if lane.clients]
        aged = [lane for lane in reversed(waiting) if lane.passed >= PASSES]
        for lane in aged + [lane for lane in waiting if lane.passed < PASSES]:
            offer = lane.head()
            if longest is not None and offer.tokens > longest:
                continue
            if fits(offer):
                lane.rotate()
                self._count_passes(lane)
                return offer
            if lane.passed >= PASSES:
                return None
        return None

    def _count_passes(self, picked: Lane) -> None:
        picked.passed = 0
        for lane in reversed(self._lanes):
            if lane is picked:
                return
            if lane.clients:
                lane.passed += 1

    def _lane_of(self, offer: Offer) -> Lane:
        return self._lanes[sum(offer.tokens > border for border in self._borders)]
