"""Which engine runs a model, and why; what it leaves unused of the settings. No torch; before anything listens.

In: an engine's settings, the model's description, the device. Out: `Choice`. Raises StartError where the engine that was asked
for cannot run, saying what `auto` would do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.config import EngineConfig
from laya.errors import StartError
from laya.model import nano_fit

NANO, TORCH = "nano-vllm", "torch"
_TORCH_BLOCK_TOKENS = 16  # small enough that a sequence wastes little of its last block, large enough to copy and hash quickly

# (engine, device or any) -> setting -> why it does nothing there. docs/engine.md has the same as a table.
_UNUSED = {
    (NANO, None): {
        "prefill_chunk_tokens": "nano-vllm reads a prompt in one step",
        "swap_space": "nano-vllm computes preempted sequences anew",
        "threads": "nano-vllm computes on the GPU",
    },
    (TORCH, "cpu"): {"swap_space": "KV is in host memory already on the CPU"},
}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    why: str

    def line(self) -> str:
        return f"{self.engine}: {self.why}"

    @property
    def nano(self) -> bool:
        return self.engine == NANO

    @property
    def block_tokens(self) -> int:
        return nano_fit.BLOCK_TOKENS if self.nano else _TORCH_BLOCK_TOKENS


def choose(settings: EngineConfig, description: dict[str, Any], device: str, *, taken: bool = False) -> Choice:
    """`taken`: an engine before this one is nano-vllm's, which a process has once."""
    if settings.engine == TORCH:
        return Choice(engine=TORCH, why="asked for")
    missing = ["a CUDA device"] if device == "cpu" else []
    missing += nano_fit.unfit(description, settings.dtype) + nano_fit.missing_packages()
    missing += ["a process without another engine of its kind"] if taken else []
    if not missing:
        return Choice(engine=NANO, why="asked for" if settings.engine == NANO else "it, CUDA and a fitting model are here")
    needs = f"nano-vllm needs {', '.join(missing)}"
    if settings.engine == NANO:
        raise StartError(f"inference.engine: {needs}; `engine: auto` would take the torch engine on {device}")
    return Choice(engine=TORCH, why=needs)


def unused(settings: EngineConfig, choice: Choice, device: str) -> dict[str, str]:
    """Settings that differ from their defaults and that the chosen engine does not look at -> why."""
    default = EngineConfig()
    found = {**_UNUSED.get((choice.engine, None), {}), **_UNUSED.get((choice.engine, device), {})}
    return {name: why for name, why in found.items() if getattr(settings, name) != getattr(default, name)}
