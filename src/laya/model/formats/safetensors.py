"""Safetensors directories as Hugging Face lays them out: config.json, one or many .safetensors files. No torch here.

In: a directory. Out: `Checkpoint` whose tensors are views of memory maps. Of quantised ones only AWQ is known; others are
refused by name.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from typing import Annotated, Any

import msgspec
import numpy as np

from laya.model.architectures import spec_from_hf
from laya.model.formats import awq
from laya.model.formats.stored import PLAIN, Checkpoint, StoredTensor, collect, refuse_strangers
from laya.model.spec import BrokenModel, UnsupportedModel

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}  # I32: the words of AWQ
_Mapped = tuple[str, tuple[int, ...], np.ndarray]  # type, shape, raw uint8 rows

MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in a file's header. Offsets are counted from the header's end."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight", "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight", "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
# Where a norm follows each part too, the name llama uses for the norm before the MLP means the one after attention.
_FOUR_NORMS = {
    "post_attn_norm": "post_attention_layernorm.weight", "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}  # fmt: skip
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


def open_safetensors(directory: str) -> Checkpoint:
    """Read config.json and the headers. Raises BrokenModel or UnsupportedModel."""
    config = _read_json(os.path.join(directory, "config.json"))
    group = _awq_group(directory, config.get("quantization_config"))
    spec = spec_from_hf(directory, config)
    stored = _map_tensors(directory)
    names = _LAYER_NAMES | _FOUR_NORMS if spec.post_norms else _LAYER_NAMES
    less_one = spec.post_norms  # gemma: norms are stored as w - 1

    def lookup(name: str) -> StoredTensor | None:
        top = name in _TOP_NAMES
        part = name if top else name.rsplit(".", 1)[-1]
        file_name = _TOP_NAMES[name] if top else f"model.layers.{name.split('.')[1]}.{names[part]}"
        if file_name not in stored:
            return _awq_tensor(stored, file_name.removesuffix(".weight"), group)
        kind, shape, raw = stored[file_name]
        if kind not in PLAIN:
            raise UnsupportedModel(f"{directory}: tensor {file_name!r} is of type {kind}; known: {', '.join(sorted(PLAIN))}")
        return StoredTensor(file_name, kind, shape, raw, add=1.0 if less_one and part.endswith("norm") else 0.0)

    found = collect(directory, spec, lookup, needs_interleaving=True)
    of_layers = {name for name in stored if name.startswith("model.layers.") and not name.endswith("rotary_emb.inv_freq")}
    refuse_strangers(directory, spec, of_layers, found)
    kinds = Counter(tensor.kind for tensor in found.values())
    return Checkpoint(
        path=directory, spec=spec, tensors=found,
        quantization=" + ".join(kind for kind, _ in kinds.most_common()), tokenizer={"directory": directory},
    )  # fmt: skip


def _awq_group(directory: str, config: dict[str, Any] | None) -> int | None:
    """How many numbers share a scale, or None for plain weights. Raises UnsupportedModel for any other quantisation."""
    if not config:
        return None
    if not isinstance(config, dict):
        raise BrokenModel(f"{directory}: the quantisation in config.json cannot be read")
    method = config.get("quant_method", "unnamed")
    if method != "awq":
        raise UnsupportedModel(
            f"{directory}: quantisation {method!r} is not supported; known: awq (4 bits), none (BF16, F16, F32), or a GGUF file"
        )
    return awq.group_size(directory, config)


def _awq_tensor(stored: dict[str, _Mapped], base: str, group: int | None) -> StoredTensor | None:
    parts = [stored.get(f"{base}.{part}") for part in awq.PARTS]
    if group is None or None in parts:
        return None
    (weights, _, q), (zeros, _, z), (scales, _, s) = parts
    if (weights, zeros, scales) != ("I32", "I32", "F16"):
        raise UnsupportedModel(f"{base}: AWQ as {weights}, {zeros} and {scales}; known: I32, I32 and F16")
    return awq.AwqTensor(base, q.view(np.uint32), z.view(np.uint32), s.view(np.float16), group)


def _map_tensors(directory: str) -> dict[str, _Mapped]:
    """Tensor name -> (type, shape, raw uint8 rows) over every .safetensors file of the directory."""
    files = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    if not files:
        raise BrokenModel(f"{directory}: no .safetensors file")
    found = {}
    for file in files:
        path = os.path.join(directory, file)
        header, start = _read_header(path)
        data = np.memmap(path, mode="r", dtype=np.uint8)
        for name, entry in header.items():
            found[name] = _tensor(path, name, entry, data, start)
    return found


def _read_header(path: str) -> tuple[dict[str, _Entry], int]:
    """The tensors and where their bytes begin."""
    with open(path, "rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if size > MAX_HEADER_BYTES:
            raise BrokenModel(f"{path}: not a safetensors file")
        try:
            raw = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
            entries = {n: msgspec.json.decode(entry, type=_Entry) for n, entry in raw.items() if n != "__metadata__"}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BrokenModel(f"{path}: the safetensors header is cut short or damaged: {error}") from error
        return entries, 8 + size


def _tensor(path: str, name: str, entry: _Entry, data: np.ndarray, start: int) -> _Mapped:
    kind, shape = entry.dtype, entry.shape or (1,)
    if kind not in ITEM_BYTES:
        raise UnsupportedModel(f"{path}: tensor {name!r} is of type {kind}; known: {', '.join(ITEM_BYTES)}")
    first, last = (start + offset for offset in entry.data_offsets)
    row_bytes = ITEM_BYTES[kind] * math.prod(shape[1:])
    if last > data.shape[0] or last - first != row_bytes * shape[0]:
        raise BrokenModel(f"{path}: tensor {name!r} does not lie within the file")
    return kind, shape, data[first:last].reshape(shape[0], row_bytes)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: cannot be read as JSON") from error
    if not isinstance(config, dict):
        raise BrokenModel(f"{path}: holds no JSON object")
    return config
