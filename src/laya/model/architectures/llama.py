"""Llama and those built like it (SmolLM, Mistral, TinyLlama); also the reader of fields that all architectures share.

In: header fields. Out: `ModelSpec`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laya.model.architectures.rope import rope_from_gguf, rope_from_hf
from laya.model.spec import BrokenModel, ModelSpec, UnsupportedModel

MOST_LAYERS = 4096  # thirty times the deepest there is


def from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    # Files of this architecture hold q and k rows paired (0,1),(2,3)..: the converter permuted them.
    biased = "blk.0.attn_q.bias" in shapes
    return ModelSpec(interleaved_rope=True, qkv_bias=biased, **shared_from_gguf("llama", fields, shapes))


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    window = config.get("sliding_window")
    return ModelSpec(sliding_window=None if window is None else int(window), **shared_from_hf(config))


def shared_from_gguf(arch: str, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The ModelSpec arguments that every GGUF architecture has under the same keys."""
    hidden = int(_need(fields, f"{arch}.embedding_length"))
    heads = int(_need(fields, f"{arch}.attention.head_count"))
    head_dim = int(fields.get(f"{arch}.attention.key_length", hidden // heads))
    rotary = int(fields.get(f"{arch}.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise UnsupportedModel(f"partial rotary embedding ({rotary} of {head_dim}) is not supported")
    if int(fields.get(f"{arch}.expert_count", 0)):
        raise UnsupportedModel("mixture-of-experts models are not supported; known: dense decoders")
    factors = fields.get("rope_freqs.weight")  # put among the fields by the format's reader when the tensor is there
    return {
        "architecture": arch,
        "layers": _layers(_need(fields, f"{arch}.block_count")),
        "hidden": hidden,
        "intermediate": int(_need(fields, f"{arch}.feed_forward_length")),
        "heads": heads,
        "kv_heads": int(fields.get(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "vocab": int(_need(shapes, "token_embd.weight")[0]),
        "context_length": int(_need(fields, f"{arch}.context_length")),
        "rms_eps": float(fields.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        "rope": rope_from_gguf(arch, fields, factors=tuple(factors) if factors is not None else None),
        "tied_embeddings": "output.weight" not in shapes,
    }


def shared_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelSpec arguments that every Hugging Face config has under the same keys."""
    hidden, heads = int(_need(config, "hidden_size")), int(_need(config, "num_attention_heads"))
    head_dim = int(config.get("head_dim") or hidden // heads)
    return {
        "architecture": str(config.get("model_type", "llama")),
        "layers": _layers(_need(config, "num_hidden_layers")),
        "hidden": hidden,
        "intermediate": int(_need(config, "intermediate_size")),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "vocab": int(_need(config, "vocab_size")),
        "context_length": int(_need(config, "max_position_embeddings")),
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_from_hf(config, head_dim=head_dim),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _layers(number: Any) -> int:
    """Read first: loops over layers follow."""
    if not 1 <= int(number) <= MOST_LAYERS:
        raise BrokenModel(f"the model's header says {number} layers")
    return int(number)


def _need(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise BrokenModel(f"the model's header lacks {key!r}")
    return fields[key]
