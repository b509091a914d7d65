"""GGUF: one file with weights, tokenizer and template. No torch here.

In: a path. Out: `Checkpoint` whose tensors are views of one memory map. Types and architectures that the engine cannot
hold are refused by name, from the header alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from laya.model.architectures import spec_from_gguf
from laya.model.formats.gguf_header import Header, TensorEntry, read_header
from laya.model.formats.stored import Checkpoint, StoredTensor, collect, refuse_strangers
from laya.model.spec import BrokenModel, UnsupportedModel

# type id in the file: name, numbers in a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
}  # fmt: skip

_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}  # fmt: skip
_TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}


def open_gguf(path: str) -> Checkpoint:
    """Read the header and map the file. Raises BrokenModel or UnsupportedModel."""
    header = read_header(path)
    if "split.count" in header.fields and int(header.fields["split.count"]) > 1:
        raise UnsupportedModel(f"{path}: one part of a split GGUF is not supported; merge the parts first (gguf-split --merge)")
    data = np.memmap(path, mode="r", dtype=np.uint8)
    tensors = {entry.name: _stored(path, entry, data) for entry in header.tensors}
    fields = dict(header.fields)
    if "rope_freqs.weight" in tensors:
        fields["rope_freqs.weight"] = tensors["rope_freqs.weight"].float32().reshape(-1).tolist()
    spec = spec_from_gguf(path, fields, {name: tensor.shape for name, tensor in tensors.items()})
    found = collect(path, spec, lambda name: tensors.get(_file_name(name)), needs_interleaving=not spec.interleaved_rope)
    refuse_strangers(path, spec, {name for name in tensors if name.startswith("blk.")}, found)
    return Checkpoint(path=path, spec=spec, tensors=found, quantization=_mix(header), tokenizer={"gguf": header.fields})


def _file_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}"


def _stored(path: str, entry: TensorEntry, data: np.ndarray) -> StoredTensor:
    if entry.type_id not in TYPES:
        raise UnsupportedModel(
            f"{path}: tensor {entry.name!r} is of type {_type_name(entry.type_id)}, which is not supported; "
            f"known: {', '.join(name for name, _, _ in TYPES.values())}"
        )
    kind, block, block_bytes = TYPES[entry.type_id]
    shape = tuple(reversed(entry.dimensions)) or (1,)
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
    if columns % block:
        raise BrokenModel(f"{path}: tensor {entry.name!r} has rows of {columns}, not a multiple of {block}")
    row_bytes = columns // block * block_bytes
    end = entry.offset + rows * row_bytes
    if end > data.shape[0]:
        raise BrokenModel(f"{path}: cut short: tensor {entry.name!r} ends at byte {end}, the file at {data.shape[0]}")
    raw = data[entry.offset : end].reshape(rows, row_bytes)
    if len(shape) == 1:  # a vector: one number a row, so that rows can be reordered
        if block != 1:
            raise UnsupportedModel(f"{path}: vector {entry.name!r} is quantised ({kind}); known for vectors: F32, F16, BF16")
        raw = raw.reshape(columns, block_bytes)
    return StoredTensor(entry.name, kind, shape, raw)


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(type_id, f"number {type_id}")


def _mix(header: Header) -> str:
    """The types of the matrices, the commonest first: "Q4_1 + Q8_0"."""
    kinds = Counter(TYPES[entry.type_id][0] for entry in header.tensors if len(entry.dimensions) > 1)
    return " + ".join(kind for kind, _ in kinds.most_common())
