"""The memory plan: from a model's shape and the settings to bytes by part, before anything is loaded.

In: `ModelShape` (a model's headers), `PlanSettings` (laya.yaml and the machine). Out: `Plan`: every part, the limit, whether it
fits, the KV pool's blocks, and the nearest settings that fit. Pure arithmetic; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.engine.machine import Memory

MIB = 1 << 20
# The pool holds two blocks beside the engine's: one of zeros for padding, one for writes that nobody reads.
_SPARE_BLOCKS = 2
# Logits of a step: int32 sums in two planes, float32 logits and their softmax, 4 bytes each.
_LOGIT_BYTES = 16
# Prompt rows whose log-probabilities are computed at once.
_SCORED_ROWS = 64
# Interpreter, server and torch resident before a model: 218 MiB measured on CPU; with CUDA's libraries about 1 GiB.
_PROCESS_BYTES = {"cpu": 256 * MIB, "cuda": 1200 * MIB}
# A token in the tokenizer: its string in Rust and Python maps, its bytes, its merge.
_TOKENIZER_BYTES_PER_TOKEN = 700
# CUDA context with cuBLAS workspaces, and captured graphs unless `enforce_eager`.
_CUDA_CONTEXT_BYTES, _CUDA_GRAPH_BYTES = 600 * MIB, 256 * MIB
# What allocators round up and keep, as a share of the weights (2 %) and at least this.
_SLACK_SHARE, _SLACK_BYTES = 50, 32 * MIB
# 4-bit weights with bf16 scale and zero for groups of 32: 0.5 + 4 / 32 bytes each.
_FOUR_BIT_NUMERATOR, _FOUR_BIT_DENOMINATOR = 5, 8
_SMALLEST_WINDOW = 256  # a shorter one is not worth suggesting


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model by its numbers. `tensor_bytes` are the weights as they will be held."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    tensor_bytes: int
    tied_embeddings: bool = False
    sliding_window: int = 0  # tokens; 0: none
    window_layers: int = 0  # how many layers see only that much
    kv_item_bytes: int = 2  # also of activations
    parameters: int = 0  # 0: unknown

    @property
    def kv_token_bytes(self) -> int:
        """One token's keys and values. Layers with a sliding window hold all positions too: their blocks are the others'."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.kv_item_bytes

    @property
    def four_bit_bytes(self) -> int:
        """About what a 4-bit variant with 8-bit embeddings would take; 0 if unknown."""
        tables = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        linears = max(0, self.parameters - tables)
        return linears * _FOUR_BIT_NUMERATOR // _FOUR_BIT_DENOMINATOR + tables if self.parameters else 0


def shape_of(description: dict[str, Any]) -> ModelShape:
    """From the description that the model room reads from headers; keys that the plan does not use are ignored."""
    return ModelShape(**{name: description[name] for name in ModelShape.__struct_fields__ if name in description})


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`device` is cpu or cuda; `device_memory` the card's, or the host's on a CPU. Sizes in bytes."""

    device: str
    device_memory: Memory
    host_memory: Memory
    utilisation: float = 0.85
    reserve: int = 1 << 30
    max_seq_len: int | None = None  # None: the model's window, or what fits
    max_num_seqs: int = 4
    prefill_chunk_tokens: int = 512
    kv_cache: int | None = None  # None: for max_num_seqs whole windows, or what fits
    swap_space: int = 0
    enforce_eager: bool = False
    block_tokens: int = 16
    host_extra: int = 0  # result cache, session tables, buffered bytes, declared memory of supervised backends


class Suggestion(msgspec.Struct, frozen=True):
    """Other settings that fit; `changes` are fields of PlanSettings, empty where it takes another model or backend."""

    text: str
    changes: dict[str, int] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`device` and `host` are bytes by part; where they are `shared` (a CPU) both lie in host memory under one limit."""

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

    def table(self) -> str:
        """Lines for a person: each part, the sums and limits, the verdict, what would fit."""
        lines = [f"  {name:<16}{size / MIB:>10,.0f} MiB" for name, size in (self.device | self.host).items()]
        sums = [("device total", self.device_total, self.device_limit), ("host total", self.host_total, self.host_limit)]
        if self.shared:
            sums = [("total", self.device_total + self.host_total, self.device_limit)]
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
        found = _largest(lambda n: _plan_window(shape, settings, n).fits, settings.block_tokens, shape.context_length)
        return _plan_window(shape, settings, found or min(_SMALLEST_WINDOW, shape.context_length))
    return _plan_window(shape, settings, min(settings.max_seq_len, shape.context_length))


def _plan_window(shape: ModelShape, settings: PlanSettings, window: int) -> Plan:
    on_cpu = settings.device == "cpu"
    block_bytes = shape.kv_token_bytes * settings.block_tokens
    device = {
        "params": shape.tensor_bytes,
        "kv": 0,
        "activation": activation_bytes(shape, settings, window),
        "runtime": _runtime_bytes(shape, settings),
    }
    host = {
        "process": _PROCESS_BYTES[settings.device],
        "tokenizer": shape.vocab * _TOKENIZER_BYTES_PER_TOKEN,
        "swap": 0 if on_cpu else settings.swap_space,
        "other": settings.host_extra,
    }
    share = int(settings.utilisation * settings.device_memory.total)
    device_limit = max(0, min(share, settings.device_memory.available - settings.reserve))
    taken = sum(device.values()) + (sum(host.values()) if on_cpu else 0)
    one_window = -(-window // settings.block_tokens)
    affordable = (device_limit - taken) // block_bytes - _SPARE_BLOCKS
    if settings.kv_cache is not None:
        blocks = settings.kv_cache // block_bytes - _SPARE_BLOCKS
    else:
        blocks = max(one_window, min(one_window * settings.max_num_seqs, affordable))
    device["kv"] = (blocks + _SPARE_BLOCKS) * block_bytes
    host_limit = device_limit if on_cpu else settings.host_memory.available
    return Plan(
        device=device,
        host=host,
        shared=on_cpu,
        device_limit=device_limit,
        host_limit=host_limit,
        max_seq_len=window,
        num_blocks=blocks,
        fits=one_window <= blocks <= affordable and (on_cpu or sum(host.values()) <= host_limit),
    )


def activation_bytes(shape: ModelShape, settings: PlanSettings, window: int) -> int:
    """The largest prefill chunk beside a full decode batch, at the longest context. One layer's temporaries at a time."""
    item, kv_width = shape.kv_item_bytes, 2 * shape.kv_heads * shape.head_dim
    rows = max(settings.prefill_chunk_tokens, settings.max_num_seqs + settings.block_tokens)  # the step's token budget
    qkv_width = shape.heads * shape.head_dim + kv_width
    residual = 2 * 4 * shape.hidden + 2 * item * shape.hidden  # float32 stream and its norm, a product's input and output
    attention = qkv_width * (item + 8) + shape.heads * shape.head_dim * item  # with the float32 copies that are rotated
    mlp = 3 * shape.intermediate * item
    gathered = (1 + settings.max_num_seqs) * window * kv_width * item  # the chunk's context, and each decode's
    masks = settings.prefill_chunk_tokens * window * (item + 1)
    sampled = max(settings.max_num_seqs, min(_SCORED_ROWS, rows))
    rotary = window * shape.head_dim * 4  # a complex64 for every position and pair
    return rows * (residual + max(attention, mlp)) + gathered + masks + sampled * shape.vocab * _LOGIT_BYTES + rotary


def _runtime_bytes(shape: ModelShape, settings: PlanSettings) -> int:
    slack = max(_SLACK_BYTES, shape.tensor_bytes // _SLACK_SHARE)
    if settings.device == "cpu":
        return slack
    return slack + _CUDA_CONTEXT_BYTES + (0 if settings.enforce_eager else _CUDA_GRAPH_BYTES)


def _suggestions(shape: ModelShape, settings: PlanSettings) -> list[Suggestion]:
    """The nearest settings that fit: one change if one will do, then two, then another model or backend."""
    window = min(settings.max_seq_len or shape.context_length, shape.context_length)

    def fits(**changes: Any) -> bool:
        return _plan(shape, msgspec.structs.replace(settings, **changes)).fits

    found: list[Suggestion] = []
    if settings.kv_cache is not None and fits(kv_cache=None):
        found.append(Suggestion("kv_cache: auto"))
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
