"""The memory plan: from a model's shape and the settings to bytes by part, before anything is loaded.

In: `ModelShape` (a model's headers), `PlanSettings` (laya.yaml and the machine). Out: `Plan`: every part, the limit, whether it
fits, the KV pool's blocks, and the nearest settings that fit. Pure arithmetic; any thread. `footprint.py` has the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.engine.footprint import (
    MIB,
    SPARE_BLOCKS,
    ModelShape,
    PlanSettings,
    Shared,
    activation_bytes,
    block_bytes,
    block_records,
    card_loading_bytes,
    host_parts,
    loading_bytes,
    runtime_bytes,
    shape_of,
)
from laya.engine.machine import Memory

__all__ = ["ModelShape", "Plan", "PlanSettings", "Shared", "Suggestion", "plan", "shape_of"]

_SMALLEST_WINDOW = 256  # a shorter one is not worth suggesting
# Enough for two of the largest bodies that are accepted by default.
_SMALL_BUFFERS = 64 * MIB
# What is said to be missing is a multiple of this, and 256 GiB at most: beyond that it is the wrong model.
_STEP = 64 * MIB
_MOST_STEPS = 4096
# On a CPU the memory is everybody's: without a size of their own, windows and pool take this part of what is available.
_AUTO_POOL_PART = 4


class Suggestion(msgspec.Struct, frozen=True):
    """Other settings that fit; `changes` are fields of PlanSettings, empty where it takes another model or backend."""

    text: str
    changes: dict[str, int | None] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`device` and `host` are bytes by part; where they are `shared` (a CPU) both lie in host memory under one limit.

    The limits are what is left to this engine after those before it.
    """

    device: dict[str, int]
    host: dict[str, int]
    shared: bool
    device_limit: int
    host_limit: int
    max_seq_len: int  # the window that is planned for
    num_blocks: int  # KV blocks that the engine can give out
    fits: bool
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def process_total(self) -> int:
        """What lies in host memory: on a CPU everything."""
        return self.host_total + (self.device_total if self.shared else 0)

    def table(self) -> str:
        """Lines for a person: each part, the sums and limits, the verdict, what would fit."""
        lines = [f"  {name:<16}{size / MIB:>10,.0f} MiB" for name, size in (self.device | self.host).items()]
        sums = [("device total", self.device_total, self.device_limit), ("host total", self.host_total, self.host_limit)]
        if self.shared:
            sums = [("total", self.process_total, self.device_limit)]
        lines += [f"  {name:<16}{size / MIB:>10,.0f} MiB of {limit / MIB:,.0f} MiB" for name, size, limit in sums]
        verdict = "fits" if self.fits else "does not fit"
        lines.append(f"  window {self.max_seq_len} tokens, {self.num_blocks} KV blocks: {verdict}")
        return "\n".join(lines + [f"  would fit: {suggestion.text}" for suggestion in self.suggestions])


def plan(shape: ModelShape, settings: PlanSettings) -> Plan:
    """The plan for these settings; if it does not fit, with the nearest ones that do."""
    made = _plan(shape, settings)
    return made if made.fits else msgspec.structs.replace(made, suggestions=tuple(_suggestions(shape, settings)))


def _plan(shape: ModelShape, settings: PlanSettings) -> Plan:
    if settings.max_seq_len is None:
        found = _largest(lambda n: _roomy(shape, settings, n), settings.block_tokens, shape.context_length)
        return _plan_window(shape, settings, found or min(_SMALLEST_WINDOW, shape.context_length))
    return _plan_window(shape, settings, min(settings.max_seq_len, shape.context_length))


def _roomy(shape: ModelShape, settings: PlanSettings, window: int) -> bool:
    """Whether a window that nobody asked for may be this long: it fits, and on a CPU leaves most of the memory to others."""
    made = _plan_window(shape, settings, window)
    return made.fits and (settings.kv_cache is not None or made.device["kv"] <= _auto_pool(settings))


def _auto_pool(settings: PlanSettings) -> int:
    """The largest pool that is made without being asked for, in bytes."""
    memory = settings.device_memory
    return memory.available // _AUTO_POOL_PART if settings.device == "cpu" else memory.total


def _limits(settings: PlanSettings) -> tuple[int, int]:
    """What this engine may plan on the device and the host. On a CPU the share is of what is available."""
    on_cpu, memory = settings.device == "cpu", settings.device_memory
    share = int(settings.utilisation * (memory.available if on_cpu else memory.total))
    limit = min(share, memory.available - settings.reserve)
    if on_cpu:
        limit -= settings.taken_device + settings.taken_host
        return max(0, limit), max(0, limit)
    return max(0, limit - settings.taken_device), max(0, settings.host_memory.available - settings.taken_host)


def _plan_window(shape: ModelShape, settings: PlanSettings, window: int) -> Plan:
    on_cpu = settings.device == "cpu"
    each = block_bytes(shape, settings)
    device = {
        "params": shape.tensor_bytes,
        "kv": 0,
        "activation": activation_bytes(shape, settings, window),
        "runtime": runtime_bytes(shape, settings),
    }
    if settings.shared is not None and settings.shared.gpu_backends and not on_cpu:
        device["gpu_backends"] = settings.shared.gpu_backends
    host = host_parts(shape, settings)
    device_limit, host_limit = _limits(settings)
    taken = sum(device.values()) + (sum(host.values()) if on_cpu else 0)
    one_window = -(-window // settings.block_tokens)
    affordable = (device_limit - taken) // (each + (block_records(1) if on_cpu else 0)) - SPARE_BLOCKS
    if settings.kv_cache is not None:
        blocks = settings.kv_cache // each - SPARE_BLOCKS
    else:
        wanted = min(one_window * settings.max_num_seqs, affordable, _auto_pool(settings) // each - SPARE_BLOCKS)
        blocks = max(one_window, wanted)
    device["kv"] = (blocks + SPARE_BLOCKS) * each
    host["blocks"] = block_records(max(0, blocks))
    later = device["kv"] + device["activation"]  # not there yet while the weights come in
    beside = loading_bytes(shape) - (later if on_cpu else 0)
    if beside > 0:
        host["loading"] = beside
    if not on_cpu and card_loading_bytes(shape) > later:
        device["packing"] = card_loading_bytes(shape) - later
    fits = one_window <= blocks <= affordable and sum(host.values()) <= host_limit
    return Plan(
        device=device,
        host=host,
        shared=on_cpu,
        device_limit=device_limit,
        host_limit=host_limit,
        max_seq_len=window,
        num_blocks=blocks,
        fits=fits and sum(device.values()) + (sum(host.values()) if on_cpu else 0) <= device_limit,
    )


def _suggestions(shape: ModelShape, settings: PlanSettings) -> list[Suggestion]:
    """The nearest settings that fit: one change if one will do, then two, then another model or backend."""
    window = min(settings.max_seq_len or shape.context_length, shape.context_length)

    def fits(**changes: Any) -> bool:
        return _plan(shape, msgspec.structs.replace(settings, **changes)).fits

    found: list[Suggestion] = []
    shared = settings.shared
    if shared is not None and shared.buffers > _SMALL_BUFFERS and fits(
        shared=msgspec.structs.replace(shared, buffers=_SMALL_BUFFERS)
    ):
        found.append(Suggestion(f"server.max_buffered_bytes: {_SMALL_BUFFERS // MIB}MiB"))
    if settings.kv_cache is not None and fits(kv_cache=None):
        found.append(Suggestion("kv_cache: auto", {"kv_cache": None}))
    shorter = _largest(lambda n: fits(max_seq_len=n), _SMALLEST_WINDOW, window - 1)
    if shorter:
        found.append(Suggestion(f"max_seq_len: {shorter}", {"max_seq_len": shorter}))
    fewer = _largest(lambda n: fits(max_num_seqs=n), 1, settings.max_num_seqs - 1)
    if fewer:
        found.append(Suggestion(f"max_num_seqs: {fewer}", {"max_num_seqs": fewer}))
    if not found:
        both = _largest(lambda n: fits(max_seq_len=n, max_num_seqs=1), _SMALLEST_WINDOW, window - 1)
        if both:
            changes = {"max_seq_len": both, "max_num_seqs": 1}
            found.append(Suggestion(f"max_seq_len: {both} with max_num_seqs: 1", changes))
    if not found and 0 < shape.four_bit_bytes < shape.tensor_bytes:
        if _plan(msgspec.structs.replace(shape, tensor_bytes=shape.four_bit_bytes), settings).fits:
            found.append(Suggestion("a 4-bit variant of this model"))
    if not found and settings.device == "cpu":
        memory = settings.device_memory
        short = _largest(  # steps that are not enough
            lambda n: not fits(device_memory=Memory(memory.total + n * _STEP, memory.available + n * _STEP)), 0, _MOST_STEPS
        )
        if short is not None and short < _MOST_STEPS:
            found.append(Suggestion(f"{(short + 1) * _STEP // MIB:,} MiB more memory, or a higher limit of the control group"))
    if not found:
        found.append(Suggestion("a smaller model, or llama.cpp as a backend with part of this one's layers on the device"))
    return found


def _largest(good: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest n in [low, high] that is good, if every smaller one is good too; None if even `low` is not."""
    if low > high or not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
