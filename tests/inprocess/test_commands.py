"""What commands may take beside the engines, and what the engines' plan sets aside for them."""

from __future__ import annotations

import json

from laya.config.load import loads
from laya.engine.budget import plan
from laya.engine.footprint import ModelShape, PlanSettings, Shared
from laya.engine.machine import Memory
from laya.inprocess.commands import command_limit, set_aside

GIB = 1 << 30
SHAPE = ModelShape(
    layers=4, hidden=256, intermediate=512, heads=4, kv_heads=4, head_dim=64, vocab=1000, context_length=1024, tensor_bytes=GIB
)


def config(**router):
    backends = {
        "a": {"command": "x {port}", "memory": "3GiB", "gpu_memory": "5GiB"}, "b": {"command": "x {port}", "memory": "2GiB"},
        "c": {"command": "x {port}"}, "far": {"url": "http://x/v1"},
    }  # fmt: skip
    return loads(json.dumps({"backends": backends, "router": router, "routes": [{"match": "*", "to": "a"}]}))


def made(device: str, host: int, gpu: int):
    memory = Memory(40 * GIB, 40 * GIB)
    return plan(SHAPE, PlanSettings(
        device=device, device_memory=memory, host_memory=memory, kv_cache=GIB, shared=Shared(backends=host, gpu_backends=gpu)
    ))  # fmt: skip


def test_the_plan_leaves_room_for_the_largest_command_or_what_was_set():
    assert set_aside(config()) == (3 * GIB, 5 * GIB)
    assert set_aside(config(command_memory="4GiB", command_gpu_memory="1GiB")) == (4 * GIB, GIB)
    assert set_aside(config(command_memory="90GiB")) == (5 * GIB, 5 * GIB), "never more than all of them need"


def test_commands_may_take_what_the_engines_leave():
    host, gpu = set_aside(config())
    on_cpu, on_card = made("cpu", host, gpu), made("cuda", host, gpu)
    assert "gpu_backends" not in on_cpu.device and on_cpu.host["backends"] == host and on_card.device["gpu_backends"] == gpu
    limit = command_limit(config(), [on_cpu])
    assert limit.host == on_cpu.device_limit - on_cpu.process_total + host
    limit = command_limit(config(), [on_card])
    assert limit.gpu == on_card.device_limit - on_card.device_total + gpu
    assert limit.host == on_card.host_limit - on_card.host_total + host
    for found in (on_cpu, on_card):
        assert command_limit(config(), [found]).host >= host, "the largest always fits"


def test_a_limit_that_was_set_holds_whatever_the_machine_has():
    limit = command_limit(config(command_memory="4GiB", command_gpu_memory="7GiB"), [made("cpu", 0, 0)])
    assert limit == (4 * GIB, 7 * GIB)
