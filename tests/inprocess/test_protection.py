"""Which marks hold for an engine, and what /metrics shows of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from laya.config import Config, InferenceConfig
from laya.config.structs import WatchdogConfig
from laya.engine.budget import Plan
from laya.engine.cards import Card
from laya.engine.machine import Memory
from laya.engine.step import DeviceLost
from laya.engine.watchdog import Level, Reading, Watchdog
from laya.errors import ConfigError, DeviceGone, EngineDied
from laya.inprocess import protection
from laya.inprocess.engines import _reason

MIB = 1 << 20


def made(shared: bool, device: int = 300 * MIB, host: int = 100 * MIB, limit: int = 1000 * MIB) -> Plan:
    return Plan(
        device={"params": device}, host={"process": host}, shared=shared, device_limit=limit, host_limit=limit, max_seq_len=64,
        num_blocks=4, fits=True,
    )  # fmt: skip


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, level: str, name: str, **fields) -> None:
        self.events.append(name)


def engine(plan: Plan, allowed: int = 2, peak: int = 0):
    return SimpleNamespace(
        name="local", plan=plan, figures=lambda: SimpleNamespace(sequences_allowed=allowed), memory=lambda: {"device_peak": peak}
    )


@pytest.fixture
def build(monkeypatch):
    """`build(plan, cards)` -> (watchdog, its only marks, log), without touching this process's oom score."""

    def make(plan: Plan, cards: tuple[Card, ...] | None = None, **marks):
        monkeypatch.setattr(protection, "offer_to_oom_killer", lambda score: True)
        nvml = None if cards is None else SimpleNamespace(cards=lambda: cards)
        monkeypatch.setattr(protection.Nvml, "find", staticmethod(lambda: nvml))
        log = Log()
        config = Config(inference=InferenceConfig(watchdog=WatchdogConfig(**marks)))
        watchdog = protection.build_watchdog(config, {"local": engine(plan)}, lambda call: call(), log)
        ((guard, _),) = watchdog._wards
        return watchdog, guard.marks, log

    return make


def test_the_process_may_hold_its_limit_and_never_less_than_its_plan(build):
    assert build(made(True))[1].process_limit == 1000 * MIB
    tight = build(made(True, limit=410 * MIB), soft=0.8)[1]
    assert 400 * MIB / tight.process_limit < 0.8  # the plan alone is not past the mark
    assert build(made(False))[1].process_limit == 1000 * MIB


def test_on_a_card_its_share_is_known_and_missing_nvml_is_said(build):
    _, marks, log = build(made(False), (Card(index=0, total=600 * MIB, used=0),))
    assert marks.card == 0 and marks.card_share == 0.5 and log.events == []
    _, marks, log = build(made(False))
    assert marks.card_share == 0.0 and log.events == ["no_nvml"]
    assert build(made(True))[1].card is None and build(made(True))[2].events == []


def test_metrics_show_plan_machine_groups_and_cards():
    reading = Reading(
        levels=(Memory(1000, 400), Memory(500, 300), Memory(200, 10)), swap_total=50, swap_free=20,
        cards=(Card(index=0, total=90, used=30, temperature_c=55.0),),
    )  # fmt: skip
    watchdog = Watchdog(lambda: reading, lambda call: call(), relieve=lambda: None)
    watchdog.look()
    samples = protection.memory_gauges(watchdog, {"local": engine(made(False), peak=7)})
    shown = {(name, *labels.values()): value for name, labels, value in samples}
    assert shown["laya_plan_bytes", "local", "params"] == 300 * MIB and shown["laya_sequences_allowed", "local"] == 2
    assert shown["laya_host_memory_bytes", "available"] == 400 and shown["laya_host_memory_bytes", "swap_used"] == 30
    assert shown["laya_host_memory_bytes", "group_total"] == 200 and shown["laya_host_memory_bytes", "group_available"] == 10
    assert shown["laya_gpu_memory_bytes", "0", "used"] == 30 and shown["laya_gpu_memory_bytes", "0", "peak"] == 7
    assert shown["laya_gpu_temperature_celsius", "0"] == 55.0 and shown["laya_memory_protection",] == Level.CALM


@pytest.mark.parametrize(
    ("failure", "served", "kind", "code"),
    [
        (DeviceLost("off the bus"), True, DeviceGone, 75),
        (RuntimeError("secret"), True, EngineDied, 70),
        (RuntimeError("secret"), False, ConfigError, 78),
        (ConfigError("no such file"), False, ConfigError, 78),
        (None, True, EngineDied, 70),
    ],
)
def test_the_end_of_an_engine_has_a_reason_and_an_exit_code(failure, served, kind, code):
    """(case 53)"""
    reason = _reason("local", failure, served)
    assert type(reason) is kind and reason.exit_code == code and "secret" not in str(reason)
