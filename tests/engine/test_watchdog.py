"""The watchdog: marks and their way back, each kind of trouble through the reader's interface, what is posted to whom."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import msgspec
import pytest

from laya.engine.cards import Card, Nvml
from laya.engine.machine import Memory
from laya.engine.watchdog import Guard, Level, MachineReader, Marks, Reading, Watchdog

GIB, MIB = 1 << 30, 1 << 20
ROOMY = Reading(levels=(Memory(100 * GIB, 60 * GIB),))
CALM, SOFT, HARD = Level.CALM, Level.SOFT, Level.HARD


def host(used: float, **more) -> Reading:
    return msgspec.structs.replace(ROOMY, levels=(Memory(100 * GIB, int((1 - used) * 100 * GIB)),), **more)


def card(**figures) -> tuple[Card, ...]:
    return (Card(**{"index": 0, "total": 12 * GIB, "used": 6 * GIB, "temperature_c": 60.0, **figures}),)


class Engine:
    """What the watchdog may call."""

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.heard: list = []

    def protect(self, level: Level, why: str) -> None:
        self.heard.append((level, why))

    def device_lost(self, why: str) -> None:
        self.heard.append(("lost", why))


def watched(readings: list, **marks) -> tuple[Watchdog, Engine, list]:
    """A watchdog that sees `readings` one after the other; the third is how often memory was given back."""
    left, engine, relieved = iter(readings), Engine(), []

    def read() -> Reading:
        reading = next(left)
        if isinstance(reading, Exception):
            raise reading
        return reading

    watchdog = Watchdog(read, lambda call: call(), relieve=lambda: relieved.append(1))
    watchdog.add(engine, Marks(**marks))
    for _ in readings:
        watchdog.look()
    return watchdog, engine, relieved


@pytest.mark.parametrize(
    ("reading", "level", "word"),
    [
        (host(0.5), CALM, ""),
        (host(0.93), SOFT, "host memory"),
        (host(0.98), HARD, "host memory"),
        (msgspec.structs.replace(ROOMY, levels=(ROOMY.levels[0], Memory(2 * GIB, 100 * MIB))), SOFT, "control group"),
        (msgspec.structs.replace(ROOMY, levels=(ROOMY.levels[0], Memory(2 * GIB, 10 * MIB))), HARD, "control group"),
        (host(0.5, resident=93 * MIB), SOFT, "this process"),
        (host(0.5, resident=99 * MIB), HARD, "this process"),
        (host(0.5, paging=100e6), SOFT, "swapping"),
        (host(0.5, paging=1e6, swap_total=GIB, swap_free=0), CALM, ""),  # full swap that nobody touches is no trouble
        (host(0.5, cards=card()), CALM, ""),
        (host(0.5, cards=card(used=int(11.2 * GIB))), SOFT, "GPU memory"),
        (host(0.5, cards=card(used=int(11.9 * GIB))), HARD, "GPU memory"),
        (host(0.5, cards=card(temperature_c=91.0)), SOFT, "91 degrees"),
        (host(0.5, cards=card(index=1, used=12 * GIB)), CALM, ""),  # another engine's card
    ],
)
def test_each_kind_of_trouble_has_its_level_and_its_reason(reading, level, word):
    guard = Guard(Marks(card=0, process_limit=100 * MIB))
    assert guard.judge(reading) is level and word in guard.why


def test_the_way_back_is_slower_than_the_way_up():
    guard = Guard(Marks())
    seen = [guard.judge(host(used)) for used in (0.93, 0.919, 0.919, 0.919, 0.919, 0.5, 0.5, 0.5, 0.93, 0.5, 0.5, 0.5, 0.5)]
    assert seen == [SOFT] * 12 + [CALM]


def test_past_the_hard_mark_nothing_more_ends_once_memory_is_there_again():
    guard = Guard(Marks())
    assert [guard.judge(host(used)) for used in (0.98, 0.95, 0.98, 0.5)] == [HARD, SOFT, HARD, SOFT]


def test_a_plan_that_fills_the_card_does_not_stop_itself():
    guard = Guard(Marks(card=0, card_share=0.95))
    assert guard.judge(host(0.5, cards=card(used=int(0.955 * 12 * GIB)))) is CALM
    assert guard.judge(host(0.5, cards=card(used=int(0.98 * 12 * GIB)))) is SOFT
    assert guard.judge(host(0.5, cards=card(used=12 * GIB))) is HARD


def test_changes_are_posted_once_and_a_hard_level_at_every_round():
    _, engine, relieved = watched([host(0.5), host(0.5), host(0.93), host(0.93), host(0.98), host(0.98), *[host(0.5)] * 5])
    assert [level for level, _ in engine.heard] == [SOFT, HARD, HARD, SOFT, CALM]
    assert "93%" in engine.heard[0][1] and engine.heard[-1][1] == ""
    assert len(relieved) == 1


def test_memory_is_given_back_again_while_it_stays_short():
    assert len(watched([host(0.93)] * 41)[2]) == 3
    assert len(watched([*[host(0.93)] * 3, *[host(0.5)] * 5, host(0.93)])[2]) == 2


def test_a_lost_card_is_told_once():
    watchdog, engine, _ = watched([host(0.5, cards=card()), host(0.5, cards=card(lost=True)), host(0.5, cards=card(lost=True))], card=0)
    assert [kind for kind, _ in engine.heard] == ["lost"] and watchdog.level is CALM


def test_a_reader_that_fails_changes_nothing_and_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "laya.engine"):
        watchdog, engine, _ = watched([host(0.93), OSError("gone"), OSError("gone"), host(0.5)])
    assert sum("cannot read" in record.message for record in caplog.records) == 1
    assert [level for level, _ in engine.heard] == [SOFT] and watchdog.readings == 2


def test_its_state_is_shown():
    watchdog, _, _ = watched([host(0.93)])
    assert watchdog.status() == {"level": "soft", "readings": 1, "why": "host memory is 93% used"}
    watchdog, _, _ = watched([OSError("gone")])
    assert watchdog.status() == {"level": "calm", "readings": 0, "blind": True}


def test_the_thread_looks_until_it_is_stopped_and_ends_with_the_loop():
    seen = threading.Event()

    def read() -> Reading:
        seen.set()
        return ROOMY

    watchdog = Watchdog(read, lambda call: call(), interval_s=0.01)
    watchdog.start()
    assert seen.wait(10)
    watchdog.stop()
    assert not any(thread.name == "laya-watchdog" for thread in threading.enumerate())

    def closed(call):
        raise RuntimeError("Event loop is closed")

    watchdog = Watchdog(lambda: host(0.99), closed, interval_s=0.01, relieve=lambda: None)
    watchdog.add(Engine(), Marks())
    watchdog.start()
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()


def test_the_machine_is_read_with_its_paging_rate(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 64 kB\nSwapFree: 32 kB\n")
    vmstat, now = tmp_path / "proc/vmstat", [10.0]
    vmstat.write_text("pswpin 0\npswpout 0\n")
    reader = MachineReader(root=str(tmp_path), clock=lambda: now[0])
    first = reader.read()
    assert first.levels == (Memory(MIB, MIB // 2),) and first.paging == 0.0 and first.swap_total == 64 << 10
    vmstat.write_text("pswpin 100\npswpout 100\n")
    now[0] += 2.0
    assert reader.read().paging == pytest.approx(100 * 4096, rel=16)


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def nvml_module(**calls) -> SimpleNamespace:
    """What pynvml offers, as far as it is used."""
    module = SimpleNamespace(
        NVMLError=NvmlError, NVML_ERROR_GPU_IS_LOST=15, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda handle: b"RTX",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=12 * GIB, used=GIB),
        nvmlDeviceGetTemperature=lambda handle, kind: 55,
    )  # fmt: skip
    for name, call in calls.items():
        setattr(module, name, call)
    return module


def failing(code: int):
    def call(*_):
        raise NvmlError(code)

    return call


def test_a_card_is_read_and_a_lost_one_is_told_from_one_that_does_not_answer():
    (found,) = Nvml(nvml_module()).cards()
    assert found == Card(index=0, name="RTX", total=12 * GIB, used=GIB, temperature_c=55.0)
    assert Nvml(nvml_module(nvmlDeviceGetTemperature=failing(3))).cards()[0].temperature_c is None
    assert Nvml(nvml_module(nvmlDeviceGetMemoryInfo=failing(15))).cards()[0].lost
    unsure = Nvml(nvml_module(nvmlDeviceGetMemoryInfo=failing(999))).cards()[0]
    assert not unsure.lost and unsure.used_share == 0.0


def test_without_a_driver_there_are_no_cards():
    assert Nvml.find() is None or Nvml.find().cards()
