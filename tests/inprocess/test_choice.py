"""Which engine is chosen and why, what it leaves unused, and that the memory plan follows the choice."""

from __future__ import annotations

import pytest

from laya.config import EngineConfig
from laya.engine.budget import PlanSettings, plan, shape_of
from laya.engine.machine import Memory
from laya.errors import StartError
from laya.inprocess.choice import Choice, choose, unused
from laya.model import nano_fit

GIB = 1 << 30
QWEN3 = {
    "architecture": "qwen3", "quantization": "BF16", "folder": True, "sliding_window": 0, "rope_scaled": False, "layers": 28,
    "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936,
    "context_length": 40960, "tensor_bytes": 1_192_000_000, "parameters": 596_000_000, "kv_item_bytes": 2,
    "tied_embeddings": True,
}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(nano_fit, "missing_packages", lambda: [])


def test_auto_takes_nano_vllm_where_everything_is_there(installed):
    choice = choose(EngineConfig(), QWEN3, "cuda")
    assert choice.nano and choice.block_tokens == 256 and "CUDA" in choice.why


@pytest.mark.parametrize(("changes", "device", "settings", "word"), [
    ({}, "cpu", {}, "a CUDA device"),
    ({"architecture": "llama"}, "cuda", {}, "this one is llama"),
    ({"folder": False, "quantization": "Q4_1 + F32"}, "cuda", {}, "safetensors in BF16 or F16"),
    ({"quantization": "AWQ + F16"}, "cuda", {}, "safetensors in BF16 or F16"),
    ({"quantization": "F32"}, "cuda", {}, "safetensors in BF16 or F16"),
    ({"sliding_window": 4096}, "cuda", {}, "without sliding windows"),
    ({"rope_scaled": True}, "cuda", {}, "rotary scaling"),
    ({}, "cuda", {"dtype": "float32"}, "dtype auto or bfloat16"),
])  # fmt: skip
def test_auto_takes_torch_else_and_says_what_is_missing(installed, changes, device, settings, word):
    choice = choose(EngineConfig(**settings), QWEN3 | changes, device)
    assert choice.engine == "torch" and word in choice.why and choice.block_tokens == 16
    with pytest.raises(StartError, match="`engine: auto` would take the torch engine") as refused:
        choose(EngineConfig(engine="nano-vllm", **settings), QWEN3 | changes, device)
    assert word in str(refused.value)


def test_packages_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(nano_fit.importlib.util, "find_spec", lambda name: None if name == "flash_attn" else object())
    assert "flash-attn" in choose(EngineConfig(), QWEN3, "cuda").why


def test_a_process_has_it_once_and_torch_is_taken_when_asked_for(installed):
    assert "another engine of its kind" in choose(EngineConfig(), QWEN3, "cuda", taken=True).why
    assert choose(EngineConfig(engine="torch"), QWEN3, "cuda") == Choice(engine="torch", why="asked for")
    assert choose(EngineConfig(engine="nano-vllm"), QWEN3, "cuda").why == "asked for"


def test_settings_that_an_engine_does_not_look_at_are_found():
    nano, torch = Choice(engine="nano-vllm", why=""), Choice(engine="torch", why="")
    changed = EngineConfig(swap_space=GIB, prefill_chunk_tokens=256, threads=2)
    assert set(unused(changed, nano, "cuda")) == {"swap_space", "prefill_chunk_tokens", "threads"}
    assert set(unused(changed, torch, "cpu")) == {"swap_space"} and unused(changed, torch, "cuda") == {}
    assert unused(EngineConfig(), nano, "cuda") == {} == unused(EngineConfig(), torch, "cpu")


def test_the_plan_counts_prompts_that_are_read_whole():
    memory = Memory(80 * GIB, 79 * GIB)
    settings = PlanSettings(device="cuda", device_memory=memory, host_memory=memory, max_seq_len=8192, block_tokens=256)
    pieces = plan(shape_of(QWEN3), settings)
    whole = plan(shape_of(QWEN3), PlanSettings(**{n: getattr(settings, n) for n in settings.__struct_fields__} | {"whole_prompts": True}))
    rows = 8192 * 3 * 3072 * 2  # gate, up and their product for every token of the longest prompt
    assert whole.device["activation"] > rows > pieces.device["activation"] / 4
    assert whole.fits and whole.device["kv"] == (whole.num_blocks + 2) * 256 * 28 * 8 * 128 * 2 * 2
