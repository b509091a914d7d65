"""What backends that are started on demand may take of this machine's memory.

In: the configuration and the engines' plans. Out: a limit for host and GPU memory. No torch; at start, or at the reload that
brings the first command.
"""

from __future__ import annotations

from collections.abc import Sequence

from laya.config import Config, EngineConfig
from laya.engine.budget import Plan
from laya.engine.cards import Nvml
from laya.engine.machine import host_memory
from laya.net.room import Memory

# Without an engine nobody has set a share and a reserve: the engine's own defaults are as careful.
_DEFAULTS = EngineConfig()


def command_limit(config: Config, plans: Sequence[Plan]) -> Memory:
    """As configured, else what the machine has beside the engines; None where that cannot be told (no NVML)."""
    router = config.router
    host, gpu = router.command_memory, router.command_gpu_memory
    return Memory(_host(plans) if host is None else host, _gpu(plans) if gpu is None else gpu)


def _host(plans: Sequence[Plan]) -> int:
    if not plans:
        free = host_memory().available
        return max(0, min(int(free * _DEFAULTS.gpu_memory_utilization), free - _DEFAULTS.reserve))
    first = plans[0]
    limit = first.device_limit if first.shared else first.host_limit
    # The first plan has set aside what the largest command needs: that is part of what they may take.
    return max(0, limit - sum(plan.process_total for plan in plans) + first.host.get("backends", 0))


def _gpu(plans: Sequence[Plan]) -> int | None:
    on_card = [plan for plan in plans if not plan.shared]
    if on_card:
        taken = sum(plan.device_total for plan in on_card) - on_card[0].device.get("gpu_backends", 0)
        return max(0, on_card[0].device_limit - taken)
    nvml = Nvml.find()
    card = next((card for card in nvml.cards() if card.total), None) if nvml is not None else None
    if card is None:
        return None
    share = int(card.total * _DEFAULTS.gpu_memory_utilization)
    return max(0, min(share, card.total - card.used - _DEFAULTS.reserve))


def set_aside(config: Config) -> tuple[int, int]:
    """Bytes of host and GPU memory that the engines' plan leaves to commands: those of the largest one, or what was set for
    them, and never more than all of them need."""
    commands = [backend for backend in config.backends.values() if backend.command]
    router = config.router
    return (
        _part([backend.memory or 0 for backend in commands], router.command_memory),
        _part([backend.gpu_memory or 0 for backend in commands], router.command_gpu_memory),
    )


def _part(needs: list[int], allowed: int | None) -> int:
    return min(sum(needs), max(needs, default=0) if allowed is None else allowed)
