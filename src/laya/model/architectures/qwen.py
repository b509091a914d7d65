"""Qwen 2/2.5 (biases on q, k, v) and Qwen 3 (norms on each query and key head): variations of Llama.

In: header fields. Out: `ModelSpec`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laya.model.architectures.llama import shared_from_gguf, shared_from_hf
from laya.model.spec import ModelSpec


def qwen2_from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    return ModelSpec(qkv_bias=True, **shared_from_gguf("qwen2", fields, shapes))


def qwen3_from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    return ModelSpec(qk_norm=True, **shared_from_gguf("qwen3", fields, shapes))


def qwen2_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(qkv_bias=True, **_window(config), **shared_from_hf(config))


def qwen3_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(qk_norm=True, **_window(config), **shared_from_hf(config))


def _window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers from max_window_layers on are windowed, and only if the config switches it on."""
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return {}
    first = int(config.get("max_window_layers", 0))
    layers = int(config["num_hidden_layers"])
    return {"sliding_window": int(config["sliding_window"]), "window_layers": tuple(i >= first for i in range(layers))}
