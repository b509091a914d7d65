"""Tiny random models in GGUF, written as llama.cpp's converter writes them, with transformers as the referee."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from . import tiny

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")  # blocks of 256: their models are as wide
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.15}  # as spread as narrow ones

_TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
}  # fmt: skip
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def save_gguf(
    path: Path, kind: GGMLQuantizationType, *, architecture: str = "llama", embed: GGMLQuantizationType | None = None
) -> PreTrainedModel:
    """Write a GGUF file whose matrices are of `kind`; returns a referee that holds the very numbers in the file."""
    sizes = WIDE if kind.name in K_TYPES else {"head_dim": 16}
    # GGUF has no field for the scale of queries: it is head_dim's.
    model = tiny.make(architecture, **sizes, **({"query_pre_attn_scalar": sizes["head_dim"]} if architecture == "gemma3" else {}))
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_sizes(writer, config, architecture)
    write_vocabulary(writer)
    state = model.state_dict()
    for name, tensor in state.items():
        held = embed if embed is not None and name in ("model.embed_tokens.weight", "lm_head.weight") else kind
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        state[name] = torch.from_numpy(_write(writer, _file_name(name, architecture), tensor.numpy(), held, config))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_sizes(writer: gguf.GGUFWriter, config, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", tiny.GLOBAL_EVERY)


def write_vocabulary(writer: gguf.GGUFWriter, *, pre: str = "gpt-2", model: str = "gpt2", template: str | None = None) -> None:
    unused = tiny.VOCAB - 258
    words = [*sorted(ByteLevel.alphabet()), "<s>", "</s>", *(f"<unused{i}>" for i in range(unused))]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([1] * 256 + [3] * 2 + [5] * unused)
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if template is not None:
        writer.add_chat_template(template)


def _file_name(name: str, architecture: str) -> str:
    if name in _TOP:
        return _TOP[name] + ".weight"
    parts = _PARTS | _GEMMA_PARTS if architecture == "gemma3" else _PARTS
    pieces = name.split(".")
    return f"blk.{pieces[2]}.{parts[pieces[-2]]}.{pieces[-1]}"


def _write(writer, name: str, values: np.ndarray, kind: GGMLQuantizationType, config) -> np.ndarray:
    """Add one tensor in the converter's form; returns what a reader gets, in the model's own form."""
    part, architecture = name.split(".")[-2], writer.arch
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    permuted = heads if architecture == "llama" else None  # the others' q and k rows stay as they are
    plus_one = architecture == "gemma3" and part.endswith("norm")
    if permuted:
        values = _permute(values, permuted)
    if values.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, values + 1 if plus_one else values)
        read = values
    else:
        packed = pack(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        read = gguf.quants.dequantize(packed, kind)
    return np.ascontiguousarray(_unpermute(read, permuted) if permuted else read, dtype=np.float32)


def pack(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks. The gguf package reads K types and does not write them: those are random blocks of the same spread."""
    if kind.name not in K_TYPES:
        return gguf.quants.quantize(values, kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(abs(values).sum() * 1000) % 2**32)
    raw = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    spread = values.std() * rng.uniform(0.5, 1.5, len(raw))
    if kind.name == "Q6_K":  # d * scale * (q - 32): scales of +-127, q of a deviation of 18
        raw[:, -2:] = (spread / (73 * 18)).astype(np.float16)[:, None].view(np.uint8)
    else:  # d * scale * q - dmin * minimum: dmin brings the mean near zero
        top = 15 if kind.name == "Q4_K" else 31
        d = spread / (36 * top / 2)
        raw[:, 0:2] = d.astype(np.float16)[:, None].view(np.uint8)
        raw[:, 2:4] = (d * top / 2).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(values.shape[0], -1)


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
