"""The memory plans of a configuration's engines, from model headers alone: what `laya plan` prints and `serve` starts with.

In: the configuration and the machine's memory. Out: an `EnginePlan` for each engine, in the order written; each gets what
those before it leave of the one limit. No torch; before anything listens, on the main thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from laya import dependencies
from laya.config import DEFAULT_MODEL, Config, EngineConfig
from laya.engine.budget import Plan, PlanSettings, Shared, plan, shape_of
from laya.engine.footprint import MIB
from laya.engine.machine import Memory
from laya.errors import StartError
from laya.inprocess.choice import Choice, choose
from laya.inprocess.commands import set_aside

Holds = Callable[[str, int, int], bool]  # (device, columns, group), as model/holding.py has it


class Machine(msgspec.Struct, frozen=True):
    """Where the engines run: `card` None means on the CPU, in the host's memory."""

    host: Memory
    card: Memory | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.card is None else "cuda"


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's plan and what it was made from. `shrunk` are the settings that `fit: shrink` has changed."""

    name: str
    settings: EngineConfig
    path: str
    description: dict
    choice: Choice
    plan: Plan
    max_num_seqs: int
    shrunk: dict[str, int | None] = {}

    def table(self) -> str:
        kind = f"{self.description['architecture']}, {self.description['quantization']}, {self.description['dtype']}"
        lines = [f"engine {self.name}: {self.settings.model} ({kind})", f"  run by {self.choice.line()}"]
        if more := self.description["unpacked_bytes"]:
            lines.append(f"  4-bit products are wrong or missing on this device: {more / MIB:,.0f} MiB more for dense weights")
        return "\n".join([*lines, self.plan.table()])


def plan_engines(config: Config, machine: Machine, holds: Holds | None = None) -> list[EnginePlan]:
    """Raises StartError for a model that is not there or cannot be read; a plan that does not fit is returned as such.

    `holds` tells whether the device's 4-bit product is right: weights are dense, and planned so, where it is not. None: taken
    for granted, by who plans without the device or without torch.
    """
    made: list[EnginePlan] = []
    for name, settings in config.engines_by_name().items():
        if settings.decision_calibration is not None:
            settings = msgspec.structs.replace(settings, decision_calibration=config.path_of(settings.decision_calibration))
        made.append(_plan_one(name, settings, config, machine, made, holds))
    return made


def model_path(config: Config, settings: EngineConfig) -> str:
    path = config.model_path(settings)
    if not os.path.exists(path):
        mend = "bring it with: laya pull default" if settings.model == DEFAULT_MODEL else "see inference.model"
        raise StartError(f"the model {path} is not there; {mend}")
    return path


def _plan_one(
    name: str, settings: EngineConfig, config: Config, machine: Machine, before: list[EnginePlan], holds: Holds | None
) -> EnginePlan:  # fmt: skip
    try:
        from laya.model.describe import describe
    except ImportError as exc:  # a package of a version that lacks a name we need
        raise dependencies.unfit(exc) from None

    path = model_path(config, settings)
    description = describe(path, device=machine.device, dtype=settings.dtype, holds=holds)
    choice = choose(settings, description, machine.device, taken=any(engine.choice.nano for engine in before))
    wanted = _wanted(settings, choice, config, machine, before)
    shape = shape_of(description)
    result = plan(shape, wanted)
    shrunk: dict[str, int | None] = {}
    if not result.fits and settings.fit == "shrink":
        shrunk = next((s.changes for s in result.suggestions if s.changes), {})
        wanted = msgspec.structs.replace(wanted, **shrunk)
        result = plan(shape, wanted)
    return EnginePlan(
        name=name, settings=settings, path=path, description=description, choice=choice, plan=result, shrunk=shrunk,
        max_num_seqs=wanted.max_num_seqs,
    )  # fmt: skip


def _wanted(
    settings: EngineConfig, choice: Choice, config: Config, machine: Machine, before: list[EnginePlan]
) -> PlanSettings:  # fmt: skip
    return PlanSettings(
        device=machine.device,
        device_memory=machine.card or machine.host,
        host_memory=machine.host,
        utilisation=settings.gpu_memory_utilization,
        reserve=settings.reserve,
        max_seq_len=settings.max_seq_len,
        max_num_seqs=settings.max_num_seqs,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        kv_cache=None if settings.kv_cache == "auto" else settings.kv_cache,
        swap_space=0 if choice.nano else settings.swap_space,
        enforce_eager=settings.enforce_eager or not choice.nano,  # the torch engine captures no graphs
        whole_prompts=choice.nano,
        block_tokens=choice.block_tokens,
        queue_tokens=settings.queue_tokens,
        shared=None if before else _shared(config),
        taken_device=sum(engine.plan.device_total for engine in before),
        taken_host=sum(engine.plan.host_total for engine in before),
    )


def _shared(config: Config) -> Shared:
    cache = config.stages.cache
    host, gpu = set_aside(config)
    cached = cache.enabled or any(getattr(route, "cache", None) for route in config.routes)
    return Shared(
        connections=config.server.max_connections,
        buffers=config.server.max_buffered_bytes,
        cache=cache.max_bytes if cached else 0,
        sessions=config.router.cache_size,
        store=config.router.responses.max_bytes,
        backends=host,
        gpu_backends=gpu,
    )
