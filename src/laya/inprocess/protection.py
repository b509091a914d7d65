"""The watchdog over this process's engines: which marks hold for each.

In: the configuration and the engines with their plans. Out: a `Watchdog`, not started; the composition root starts it beside
the engines. Main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from laya.config import Config
from laya.engine.backend import EngineBackend
from laya.engine.budget import Plan
from laya.engine.cards import Nvml
from laya.engine.machine import offer_to_oom_killer, peak_resident
from laya.engine.watchdog import MachineReader, Marks, Watchdog
from laya.log import Log

# Of 1000. A database keeps 0 (or less), so that the kernel takes an engine before it; a shell's runaway is still taken first
# where it alone holds half of the memory more.
OOM_SCORE = 500
# A plan that fills its limit must not stand above the soft mark by itself.
_ROOM = 1.02


def build_watchdog(
    config: Config, engines: dict[str, EngineBackend], post: Callable[[Callable[[], None]], Any], log: Log
) -> Watchdog:
    """Also offers this process to the kernel's out-of-memory killer before others: its children inherit that."""
    if not offer_to_oom_killer(OOM_SCORE):
        log.event("warning", "oom_score", text="oom_score_adj could not be raised: the kernel may kill another process first")
    nvml = Nvml.find()
    plans = [engine.plan for engine in engines.values() if engine.plan is not None]
    on_card = sum(plan.device_total for plan in plans if not plan.shared)
    if on_card and nvml is None:
        log.event("warning", "no_nvml", text="GPU memory and temperature are not watched: pip install 'laya-server[gpu]'")
    watchdog = Watchdog(MachineReader(nvml).read, post)
    cards = nvml.cards() if nvml is not None else ()
    for name, settings in config.engines_by_name().items():
        engine = engines.get(name)
        if engine is None or engine.plan is None:
            continue
        own, plan = settings.watchdog, engine.plan
        share = on_card / cards[0].total if cards and cards[0].total and not plan.shared else 0.0
        watchdog.add(engine, Marks(
            soft=own.soft, hard=own.hard, gpu_temperature_c=own.gpu_temperature_c,
            process_limit=_process_limit(plans, own.soft), card=None if plan.shared else 0, card_share=share,
        ))  # fmt: skip
    return watchdog


def _process_limit(plans: list[Plan], soft: float) -> int:
    """What the process may hold: the limit that it was planned under, and never so little that the plan itself is too much."""
    allowed = max(plan.host_limit for plan in plans)  # the first engine's: those after it see what is left
    return max(allowed, int(sum(plan.process_total for plan in plans) / soft * _ROOM))


def memory_gauges(watchdog: Watchdog, engines: dict[str, EngineBackend]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Samples for /metrics: the plan by part, the machine as the watchdog saw it last, and how far protection has gone."""
    for name, engine in engines.items():
        if engine.plan is not None:
            for part, size in (engine.plan.device | engine.plan.host).items():
                yield "laya_plan_bytes", {"engine": name, "part": part}, size
            peak = 0 if engine.plan.shared else engine.memory().get("device_peak", 0)
            if peak:
                yield "laya_gpu_memory_bytes", {"gpu": "0", "kind": "peak"}, peak
        yield "laya_sequences_allowed", {"engine": name}, engine.figures().sequences_allowed
    yield "laya_memory_protection", {}, int(watchdog.level)
    yield "laya_host_memory_bytes", {"kind": "peak"}, peak_resident()
    reading = watchdog.last
    if reading is None:
        return
    machine, *groups = reading.levels
    yield "laya_host_memory_bytes", {"kind": "total"}, machine.total
    yield "laya_host_memory_bytes", {"kind": "available"}, machine.available
    yield "laya_host_memory_bytes", {"kind": "swap_used"}, reading.swap_total - reading.swap_free
    if groups:
        tightest = max(groups, key=lambda group: group.used_share)
        yield "laya_host_memory_bytes", {"kind": "group_total"}, tightest.total
        yield "laya_host_memory_bytes", {"kind": "group_available"}, tightest.available
    for card in reading.cards:
        number = str(card.index)
        yield "laya_gpu_memory_bytes", {"gpu": number, "kind": "used"}, card.used
        yield "laya_gpu_memory_bytes", {"gpu": number, "kind": "total"}, card.total
        if card.temperature_c is not None:
            yield "laya_gpu_temperature_celsius", {"gpu": number}, card.temperature_c
