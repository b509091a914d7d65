"""The watchdog: reads what the machine has left twice a second, and says when an engine must hold back. The machine wins.

In: `Reading`s from a `MachineReader` (a test gives its own). Out: each ward's `protect(level, why)` and `device_lost(why)`,
posted to the loop thread. The thread reads and judges; it changes nothing of the engine itself.

CALM: serve. SOFT: nothing new is admitted, free heap pages are given back. HARD: besides, the newest sequences end.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import msgspec

from laya.engine import heap, machine
from laya.engine.cards import Card, Nvml
from laya.engine.machine import Memory

log = logging.getLogger("laya.engine")

# A process can take a gigabyte a second; between the marks of a 24 GiB machine lie 1.2 GiB. A reading costs about 0.3 ms.
INTERVAL_S = 0.5
# How far below the soft mark all figures must be, and for how many readings, before new work is admitted again: without
# a gap the engine would open and close with every request.
_GAP, _CALM_READINGS = 0.02, 4
_TEMPERATURE_GAP_C = 3.0
# Paging faster than this means that the machine's working set no longer fits: a disk's worth of traffic, not a stray page.
_PAGING_BYTES_S = 8 << 20
# Rounds between two trims while memory stays short: others may hold it, and each trim makes the next steps clear pages again.
_RELIEVE_EVERY = 20
# A card that the plan fills to its limit must not stand above its own mark.
_CARD_MARGIN, _CARD_MOST = 0.02, 0.995


class Level(enum.IntEnum):
    CALM, SOFT, HARD = 0, 1, 2


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The machine at one moment. `levels` is the machine's memory, then each control group's; bytes, bytes a second."""

    levels: tuple[Memory, ...]
    resident: int = 0
    swap_total: int = 0
    swap_free: int = 0
    paging: float = 0.0
    cards: tuple[Card, ...] = ()


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine: shares of each memory, and what this process may hold in all (bytes; None: not watched)."""

    soft: float = 0.92
    hard: float = 0.97
    gpu_temperature_c: float = 90.0
    process_limit: int | None = None
    card: int | None = None  # index of the engine's card; None on a CPU
    card_share: float = 0.0  # what the plan takes of the card


class Protectable(Protocol):
    """Called on the loop thread."""

    name: str

    def protect(self, level: Level, why: str) -> None: ...

    def device_lost(self, why: str) -> None: ...


class MachineReader:
    """Reads this machine. Keeps the last swap figures for a rate: one thread only."""

    def __init__(self, nvml: Nvml | None = None, root: str = "/", clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._root = root
        self._clock = clock
        self._moved: tuple[float, int] | None = None

    def read(self) -> Reading:
        swap, now = machine.swap(self._root), self._clock()
        before, self._moved = self._moved, (now, swap.moved)
        paging = 0.0
        if before is not None and now > before[0]:
            paging = max(0, swap.moved - before[1]) / (now - before[0])
        return Reading(
            levels=tuple(machine.memory_levels(self._root)),
            resident=machine.resident(self._root),
            swap_total=swap.total,
            swap_free=swap.free,
            paging=paging,
            cards=self._nvml.cards() if self._nvml is not None else (),
        )


class Guard:
    """Judges readings by one engine's marks; goes up at once and comes down only when it has been calm for a while."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.level = Level.CALM
        self.why = ""
        self._calm = 0

    def judge(self, reading: Reading) -> Level:
        level, why = self._assess(reading, 0.0)
        if level is not Level.CALM:
            self.level, self.why, self._calm = level, why, 0
        elif self.level is not Level.CALM:
            self.level = Level.SOFT
            self._calm = self._calm + 1 if self._assess(reading, _GAP)[0] is Level.CALM else 0
            if self._calm >= _CALM_READINGS:
                self.level, self.why = Level.CALM, ""
        return self.level

    def lost_card(self, reading: Reading) -> bool:
        return any(card.lost and card.index == self.marks.card for card in reading.cards)

    def _assess(self, reading: Reading, gap: float) -> tuple[Level, str]:
        worst, why = Level.CALM, ""
        for what, share, soft, hard in self._shares(reading):
            level = Level.HARD if share >= hard - gap else Level.SOFT if share >= soft - gap else Level.CALM
            if level > worst:
                worst, why = level, f"{what} is {share:.0%} used"
        if worst is Level.CALM:
            why = self._other(reading, gap > 0)
            worst = Level.SOFT if why else Level.CALM
        return worst, why

    def _shares(self, reading: Reading) -> Iterator[tuple[str, float, float, float]]:
        marks = self.marks
        for number, memory in enumerate(reading.levels):
            yield "the control group's memory" if number else "host memory", memory.used_share, marks.soft, marks.hard
        if marks.process_limit:
            yield "the memory allowed to this process", reading.resident / marks.process_limit, marks.soft, marks.hard
        soft = min(max(marks.soft, marks.card_share + _CARD_MARGIN), _CARD_MOST)
        for card in reading.cards:
            if card.index == marks.card:
                yield "GPU memory", card.used_share, soft, min(max(marks.hard, soft + _CARD_MARGIN), _CARD_MOST)

    def _other(self, reading: Reading, returning: bool) -> str:
        marks = self.marks
        limit = marks.gpu_temperature_c - (_TEMPERATURE_GAP_C if returning else 0.0)
        for card in reading.cards:
            if card.index == marks.card and card.temperature_c is not None and card.temperature_c >= limit:
                return f"the GPU is at {card.temperature_c:.0f} degrees"
        return "the machine is swapping" if reading.paging >= _PAGING_BYTES_S else ""


class Watchdog:
    """One for a process. `add` every engine before `start`; `look` is one round and is what a test calls."""

    def __init__(
        self, read: Callable[[], Reading], post: Callable[[Callable[[], None]], object], *,
        interval_s: float = INTERVAL_S, relieve: Callable[[], None] = heap.trim,
    ) -> None:  # fmt: skip
        self.last: Reading | None = None  # for display
        self.readings = 0
        self._read = read
        self._post = post
        self._interval_s = interval_s
        self._relieve = relieve
        self._wards: list[tuple[Guard, Protectable]] = []
        self._lost: set[str] = set()
        self._blind = False
        self._short = 0  # rounds in a row that were not calm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laya-watchdog", daemon=True)

    def add(self, engine: Protectable, marks: Marks) -> None:
        self._wards.append((Guard(marks), engine))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended, or after two rounds when a driver's call hangs."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * self._interval_s)

    @property
    def level(self) -> Level:
        """The worst of all engines'. Any thread; for display."""
        return max((guard.level for guard, _ in self._wards), default=Level.CALM)

    def status(self) -> dict:
        """For /ready: the worst level with its reason. Any thread; for display."""
        level = self.level
        status: dict = {"level": level.name.lower(), "readings": self.readings}
        if level is not Level.CALM:
            status["why"] = next((guard.why for guard, _ in self._wards if guard.level is level), "")
        if self._blind:
            status["blind"] = True
        return status

    def look(self) -> None:
        """Read once, judge for each engine, and post what has changed; a hard level is posted at every round."""
        try:
            reading = self._read()
        except Exception:
            if not self._blind:
                log.exception("the watchdog cannot read the machine")
            self._blind = True
            return
        self._blind = False
        self.last = reading
        self.readings += 1
        for guard, engine in self._wards:
            if guard.lost_card(reading) and engine.name not in self._lost:
                self._lost.add(engine.name)
                self._post(partial(engine.device_lost, "the driver says that the GPU is lost"))
            before = guard.level
            level = guard.judge(reading)
            if level is not before or level is Level.HARD:
                log.log(logging.INFO if level is Level.CALM else logging.WARNING, "watchdog: engine %s: %s%s",
                        engine.name, level.name.lower(), f": {guard.why}" if guard.why else "")  # fmt: skip
                self._post(partial(engine.protect, level, guard.why))
        if self.level is Level.CALM:
            self._short = 0
            return
        if self._short % _RELIEVE_EVERY == 0:
            self._relieve()
        self._short += 1

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.look()
            except RuntimeError:  # the loop has closed: the process is going down
                return
