"""What a model will take, from its headers alone: the numbers of the memory plan. No torch here.

In: a path. Out: a dict of plain ints and strings; nothing is loaded. Any thread.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from laya.engine.sizes import ModelSizes
from laya.model.formats import open_checkpoint
from laya.model.formats.stored import Checkpoint
from laya.model.holding import Holds, assumed, held_as, held_bytes, resolve_dtype
from laya.model.tokenizer_source import read_source
from laya.schema.chat_style import style_of


def describe(path: str, *, device: str = "cpu", dtype: str | None = None, holds: Holds | None = None) -> dict[str, Any]:
    """Shapes and sizes. Raises BrokenModel or UnsupportedModel as loading would. `holds` tells whether the device's 4-bit
    product is right, as the loader will find it (`int4.product_holds`); without it that is taken for granted.

    Keys: architecture, quantization, dtype, the fields of `ModelSizes`, sliding_window (tokens or 0), window_layers (how many
    layers see only that much), kv_item_bytes (bytes of one number in the KV cache), tensor_bytes (all weights as they will be
    held), unpacked_bytes (what 4-bit weights whose product does not hold take more than packed; part of tensor_bytes),
    parameters, chat_template (bool), chat_style (how its template writes tool calls and thoughts), folder (bool: not one
    file), rope_scaled (bool).
    """
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    resolved = resolve_dtype(checkpoint, device, dtype)
    source = read_source(checkpoint.tokenizer)
    tensor_bytes = weight_bytes(checkpoint, device, resolved, holds or assumed)
    windows = [spec.window_of(layer) for layer in range(spec.layers)]
    return {
        "architecture": spec.architecture,
        "quantization": checkpoint.quantization,
        "dtype": resolved,
        **{name: getattr(spec, name) for name in ModelSizes.__struct_fields__},
        "sliding_window": spec.sliding_window or 0,
        "window_layers": sum(window is not None for window in windows),
        "kv_item_bytes": 4 if resolved == "float32" else 2,
        "tensor_bytes": tensor_bytes,
        "unpacked_bytes": tensor_bytes - weight_bytes(checkpoint, device, resolved, assumed),
        "parameters": sum(tensor.rows * tensor.columns for tensor in checkpoint.tensors.values()),
        "folder": os.path.isdir(path),
        "rope_scaled": spec.rope.linear_factor != 1.0 or spec.rope.factors is not None,
        "chat_template": source.chat_template is not None,
        "chat_style": msgspec.to_builtins(style_of(source.template_for_tools)),
    }


def weight_bytes(checkpoint: Checkpoint, device: str, dtype: str, holds: Holds) -> int:
    """Every tensor as `load` will hold it; `dtype` a result of `resolve_dtype`."""
    return sum(held_bytes(t, held_as(name, t, device, dtype, holds)) for name, t in checkpoint.tensors.items())


def has_chat_template(checkpoint: Checkpoint) -> bool:
    return read_source(checkpoint.tokenizer).chat_template is not None
