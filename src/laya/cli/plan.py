"""`laya plan`: what memory the engines would take, from the models' headers, before anything is loaded. No torch.

In: the configuration, and this machine's memory or a named size. Out: a table for each engine or one JSON object; exit code 0
when everything fits and 1 when something does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from laya.cli import exits
from laya.config import load
from laya.config.units import format_size, parse_size
from laya.engine.cards import Nvml
from laya.engine.machine import Memory, host_memory
from laya.inprocess.plans import EnginePlan, Machine, plan_engines

_NVIDIA = "/dev/nvidiactl"  # there wherever the driver is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print every part in bytes")
    parser.add_argument("--systemd", action="store_true", help="print the memory lines of a systemd unit for this plan")
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", type=_size, help="plan for an empty GPU of this size, as 12GiB; 0 plans for the CPU"
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", type=_size, help="plan for a host with this much free, as 32GiB; default: this one's"
    )


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config)
    if not config.engines_by_name():
        raise exits.CommandFailed("no engine is configured: nothing would be loaded", exits.FAILED)
    machine = _machine(arguments.gpu_memory, arguments.host_memory)
    made = plan_engines(config, machine)
    fits = all(engine.plan.fits for engine in made)
    if arguments.systemd and fits:
        from laya.cli.memory_max import unit_lines

        print("\n".join(unit_lines(config, machine, made)))
        return exits.OK
    print(json.dumps(_report(machine, made, fits), indent=2) if arguments.json else _text(machine, made, fits))
    return exits.OK if fits else exits.FAILED


def _size(text: str) -> int:
    size = parse_size(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 12GiB")
    return size


def _machine(gpu: int | None, host: int | None) -> Machine:
    """What is not named is this machine's; an NVIDIA card is seen through NVML."""
    memory = host_memory() if host is None else Memory(host, host)
    if gpu is not None:
        return Machine(memory, Memory(gpu, gpu) if gpu else None)
    nvml = Nvml.find()
    if nvml is None and os.path.exists(_NVIDIA):
        print("an NVIDIA GPU is here but cannot be read: pip install 'laya-server[gpu]', or give --gpu-memory", file=sys.stderr)
    card = next((card for card in nvml.cards() if card.total), None) if nvml is not None else None
    return Machine(memory, Memory(card.total, card.total - card.used) if card is not None else None)


def _text(machine: Machine, made: list[EnginePlan], fits: bool) -> str:
    lines = [f"host: {_of(machine.host)}", f"GPU: {_of(machine.card)}" if machine.card is not None else "GPU: none"]
    for engine in made:
        lines.append(engine.table())
        if engine.shrunk:
            changes = [f"{key}: {'auto' if value is None else value}" for key, value in engine.shrunk.items()]
            lines.append(f"  fit: shrink has set {', '.join(changes)}")
    return "\n".join([*lines, "everything fits" if fits else "this does not fit: serve would refuse to start"])


def _of(memory: Memory) -> str:
    return f"{memory.available / (1 << 20):,.0f} MiB free of {memory.total / (1 << 20):,.0f} MiB"


def _report(machine: Machine, made: list[EnginePlan], fits: bool) -> dict:
    return {
        "fits": fits,
        "host": {"total": machine.host.total, "available": machine.host.available},
        "gpu": None if machine.card is None else {"total": machine.card.total, "available": machine.card.available},
        "engines": {engine.name: _engine(engine) for engine in made},
    }


def _engine(engine: EnginePlan) -> dict:
    plan = engine.plan
    return {
        "model": engine.settings.model,
        "engine": engine.choice.engine,
        "why": engine.choice.why,
        "fits": plan.fits,
        "device": plan.device,
        "host": plan.host,
        "device_total": plan.device_total,
        "host_total": plan.host_total,
        "one_memory": plan.shared,
        "device_limit": plan.device_limit,
        "host_limit": plan.host_limit,
        "max_seq_len": plan.max_seq_len,
        "max_num_seqs": engine.max_num_seqs,
        "kv_blocks": plan.num_blocks,
        "shrunk": engine.shrunk,
        "would_fit": [suggestion.text for suggestion in plan.suggestions],
        "sizes": {part: format_size(size) for part, size in (plan.device | plan.host).items()},
    }
