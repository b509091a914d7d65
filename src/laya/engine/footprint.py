"""What each part of a served model takes, in bytes: arithmetic from shapes and settings, with measured constants.

In: `ModelShape` (a model's headers) and `PlanSettings` (laya.yaml and the machine). Out: numbers that `budget.py` adds up.
Pure; any thread. The constants were measured with benchmarks/memory.py, which compares their sum with a real server's peak.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.engine.machine import Memory
from laya.engine.sizes import ModelSizes

MIB = 1 << 20
# The pool holds two blocks beside the engine's: one of zeros for padding, one for writes that nobody reads.
SPARE_BLOCKS = 2
# A logit of a scored prompt: int32 sums in two planes, float32 logits and their softmax, and what a copy holds meanwhile: 21
# measured. A sampled one: log-probabilities, probabilities, the whole row sorted with its ids and what that takes: 49 measured.
_SCORED_LOGIT_BYTES, _SAMPLED_LOGIT_BYTES = 22, 50
# Prompt rows whose log-probabilities are computed at once.
_SCORED_ROWS = 64
# Interpreter, server and torch resident before a model: measured on CPU; with CUDA's libraries about 1 GiB.
_PROCESS_BYTES = {"cpu": 248 * MIB, "cuda": 1200 * MIB}
# A token in the tokenizer: its string in Rust and Python maps, its bytes, its merge.
_TOKENIZER_BYTES_PER_TOKEN = 560
# The same token in the trie that structured output is matched with; made at the first such request.
_GRAMMAR_BYTES_PER_TOKEN = 500
# A waiting prompt's token in a Python list (8 bytes, and an int of 28), and a connection with its buffers and one request.
_QUEUED_TOKEN_BYTES, _CONNECTION_BYTES = 36, 24 << 10
# A KV block's keys in the prefix cache: two tuples, its token ids, dictionary entries.
_BLOCK_RECORD_BYTES = 1000
# An entry of the session table: the key, the backend's name, its place in the order.
_SESSION_BYTES = 400
# CUDA context with cuBLAS workspaces, and captured graphs unless `enforce_eager`.
_CUDA_CONTEXT_BYTES, _CUDA_GRAPH_BYTES = 600 * MIB, 256 * MIB
# What allocators round up and keep, as a share of the weights (2 %) and at least this.
_SLACK_SHARE, _SLACK_BYTES = 50, 8 * MIB
# 4-bit weights with bf16 scale and zero for groups of 32: 0.5 + 4 / 32 bytes each.
_FOUR_BIT_NUMERATOR, _FOUR_BIT_DENOMINATOR = 5, 8
# 4-bit weights of a CPU unpacked at once for products with a prefill chunk, one block of rows at the least: float32, and bytes
# and scales on their way to it.
_PANEL_WEIGHTS, _PANEL_ROWS, _PANEL_BYTES_PER_WEIGHT = 1 << 19, 64, 6
# Rows that an 8-bit product of a CPU computes at once; a result's integer sums in two planes and its float32.
_INT8_ROWS, _INT8_BYTES_PER_RESULT = 128, 12
# A weight on its way into its packed form: its number as a byte and as an int32. A card gets two in a byte.
_LOADING_BYTES_PER_WEIGHT, _LOADING_WEIGHTS_PER_CARD_BYTE = 5, 2


class ModelShape(ModelSizes, frozen=True, kw_only=True):
    """A model by its numbers. `tensor_bytes` are the weights as they will be held."""

    tensor_bytes: int
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


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole process holds besides its engines; planned with the first of them. Bytes, but for the counts."""

    connections: int = 0
    buffers: int = 0  # server.max_buffered_bytes
    cache: int = 0  # the result cache
    sessions: int = 0  # entries of the hot table
    store: int = 0  # stored conversations
    backends: int = 0  # set aside for backends that are started on demand
    gpu_backends: int = 0  # the same on the card


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`device` is cpu or cuda; `device_memory` the card's, or the host's on a CPU. Sizes in bytes.

    `taken_device` and `taken_host` are what engines before this one have planned of the same limits.
    """

    device: str
    device_memory: Memory
    host_memory: Memory
    utilisation: float = 0.85
    reserve: int = 1 << 30
    max_seq_len: int | None = None  # None: the model's window, or what fits
    max_num_seqs: int = 4
    prefill_chunk_tokens: int = 512
    whole_prompts: bool = False  # prompts are read in one step, with an attention that neither gathers nor masks
    kv_cache: int | None = None  # None: for max_num_seqs whole windows, or what fits
    swap_space: int = 0
    enforce_eager: bool = False
    block_tokens: int = 16
    queue_tokens: int = 65536
    shared: Shared | None = Shared()  # None: an engine before has it
    taken_device: int = 0
    taken_host: int = 0


def host_parts(shape: ModelShape, settings: PlanSettings) -> dict[str, int]:
    """Host memory by part; those that are 0 are left out, but for process and tokenizer."""
    shared = settings.shared
    parts = {
        "process": _PROCESS_BYTES[settings.device] if shared is not None else 0,
        "tokenizer": shape.vocab * _TOKENIZER_BYTES_PER_TOKEN,
        "grammar": shape.vocab * _GRAMMAR_BYTES_PER_TOKEN,
        "queue": settings.queue_tokens * _QUEUED_TOKEN_BYTES,
        "swap": 0 if settings.device == "cpu" else settings.swap_space,
    }
    if shared is not None:
        parts |= {
            "connections": shared.connections * _CONNECTION_BYTES,
            "buffers": shared.buffers,
            "cache": shared.cache,
            "sessions": shared.sessions * _SESSION_BYTES,
            "store": shared.store,
            "backends": shared.backends,
        }
    return {name: size for name, size in parts.items() if size or name in ("process", "tokenizer")}


def block_bytes(shape: ModelShape, settings: PlanSettings) -> int:
    """One block of the pool on the device."""
    return shape.kv_token_bytes * settings.block_tokens


def block_records(blocks: int) -> int:
    """The prefix cache's bookkeeping of so many blocks, in host memory."""
    return blocks * _BLOCK_RECORD_BYTES


def activation_bytes(shape: ModelShape, settings: PlanSettings, window: int) -> int:
    """The largest prefill chunk beside a full decode batch, at the longest context. One layer's temporaries at a time."""
    item, kv_width = shape.kv_item_bytes, 2 * shape.kv_heads * shape.head_dim
    chunk = window if settings.whole_prompts else settings.prefill_chunk_tokens
    rows = max(chunk, settings.max_num_seqs + settings.block_tokens)  # the step's token budget
    qkv_width = shape.heads * shape.head_dim + kv_width
    residual = 2 * 4 * shape.hidden + 2 * item * shape.hidden  # float32 stream and its norm, a product's input and output
    # With float32 copies: of what is rotated, and of a first chunk's queries, keys, values and result on a CPU.
    attention = (qkv_width + shape.heads * shape.head_dim) * (item + 8)
    mlp = 3 * shape.intermediate * item
    gathered = (1 + settings.max_num_seqs) * window * kv_width * item  # the chunk's context, and each decode's
    masks = chunk * window * (item + 1)
    logits = shape.vocab * max(settings.max_num_seqs * _SAMPLED_LOGIT_BYTES, min(_SCORED_ROWS, rows) * _SCORED_LOGIT_BYTES)
    rotary = window * shape.head_dim * 4  # a complex64 for every position and pair
    paged = 0 if settings.whole_prompts else gathered + masks
    apart = _dense_bytes(shape, settings) + _panel_bytes(shape, settings, rows)
    return rows * (residual + max(attention, mlp)) + paged + logits + rotary + apart


def _panel_bytes(shape: ModelShape, settings: PlanSettings, rows: int) -> int:
    """What a product of quantised weights holds: a panel of unpacked 4-bit weights and its product with the chunk (panels of
    narrow matrices have the most rows), or the sums of an 8-bit gate and up.
    """
    if settings.device != "cpu":
        return 0
    weights = max(_PANEL_WEIGHTS, _PANEL_ROWS * max(shape.intermediate, shape.hidden))
    panels = weights * _PANEL_BYTES_PER_WEIGHT + rows * max(_PANEL_ROWS, _PANEL_WEIGHTS // shape.hidden) * 4
    return max(panels, _INT8_ROWS * _INT8_BYTES_PER_RESULT * 2 * shape.intermediate)


def _dense_bytes(shape: ModelShape, settings: PlanSettings) -> int:
    """What dense products of a CPU hold beside the rest: at most two thirds of the head's size, measured with one of 47 MiB."""
    dense = shape.parameters and shape.tensor_bytes >= shape.parameters * 3 // 2
    return shape.vocab * shape.hidden * shape.kv_item_bytes * 2 // 3 if dense and settings.device == "cpu" else 0


def loading_bytes(shape: ModelShape) -> int:
    """What the largest matrix that is packed, gate and up, needs beside its final form; free before the pool is made."""
    return _LOADING_BYTES_PER_WEIGHT * 2 * shape.intermediate * shape.hidden


def card_loading_bytes(shape: ModelShape) -> int:
    """The same on a card."""
    return 2 * shape.intermediate * shape.hidden // _LOADING_WEIGHTS_PER_CARD_BYTE


def runtime_bytes(shape: ModelShape, settings: PlanSettings) -> int:
    slack = max(_SLACK_BYTES, shape.tensor_bytes // _SLACK_SHARE)
    if settings.device == "cpu":
        return slack
    return slack + _CUDA_CONTEXT_BYTES + (0 if settings.enforce_eager else _CUDA_GRAPH_BYTES)
