"""`laya plan --systemd`: the memory limit of a unit under which the engines get the plan that they get without one.

In: the configuration and the machine. Out: lines for a unit's [Service] section. No torch; reads the models' headers.
"""

from __future__ import annotations

import msgspec

from laya.config import Config
from laya.engine.machine import Memory
from laya.inprocess.plans import EnginePlan, Machine, plan_engines

STEP = 64 << 20  # the limit is a multiple of this: a number that people can read
ROOM = 1.02  # what is planned must stay below the watchdog's soft mark by so much
GROWTH = 1.05  # from one try to the next
TRIES = 60  # 1.05 ** 60 is 18 times the plan


def unit_lines(config: Config, machine: Machine, made: list[EnginePlan]) -> list[str]:
    """`made` is the plan on this machine, which fits."""
    limit = memory_max(config, machine, made)
    planned = sum(engine.plan.process_total for engine in made)
    return [
        f"# laya plan: {planned >> 20} MiB for the process; within the limit the same plan fits, shares and reserve kept free",
        f"MemoryMax={limit >> 20}M",
        "MemorySwapMax=0",
        "OOMPolicy=stop",
    ]


def memory_max(config: Config, machine: Machine, made: list[EnginePlan]) -> int:
    """Bytes, a multiple of STEP: the least of the tries in which every engine keeps its KV blocks and its window; what the
    machine has where even that is too little."""
    wanted = [(engine.plan.num_blocks, engine.plan.max_seq_len) for engine in made]
    soft = min(engine.settings.watchdog.soft for engine in made)
    held = made[0].plan.host.get("process", 0)  # when the plan is made inside, the process is there already
    size = sum(engine.plan.process_total for engine in made) / soft * ROOM
    for _ in range(TRIES):
        limit = -(-int(size) // STEP) * STEP
        if limit >= machine.host.total:
            break
        tried = plan_engines(config, msgspec.structs.replace(machine, host=Memory(limit, max(0, limit - held))))
        if all(engine.plan.fits for engine in tried) and wanted == [(e.plan.num_blocks, e.plan.max_seq_len) for e in tried]:
            return limit
        size *= GROWTH
    return machine.host.total
