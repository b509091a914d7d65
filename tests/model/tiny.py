"""Tiny random models of real architectures, written to disk as people have them, with transformers as the referee."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320  # 256 bytes, some specials, and a tail that no token uses, as padded heads have
WINDOW = 24  # sliding window of the models that have one: shorter than the prompts, and no multiple of a block
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 257, "initializer_range": 0.3,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def _gemma_layers() -> list[str]:
    return ["sliding_attention", "sliding_attention", "full_attention"]


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_SIZES, sliding_window=WINDOW, layer_types=_gemma_layers(), query_pre_attn_scalar=20)
    ),
}


def make(kind: str) -> PreTrainedModel:
    """A model with the same random weights every time, biases and norms included."""
    torch.manual_seed(7)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write a Hugging Face directory with safetensors and a byte-level tokenizer; returns the referee in float32."""
    make(kind).to(dtype).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    referee = make(kind)  # rounded, but its rotary frequencies are not
    for parameter in referee.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return referee


def byte_tokenizer() -> Tokenizer:
    words = {word: i for i, word in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] natural-log probabilities by the referee."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def save_gguf(path: Path, kind: gguf.GGMLQuantizationType, *, embed: gguf.GGMLQuantizationType | None = None) -> PreTrainedModel:
    """Write a llama GGUF whose matrices are of `kind`; returns a referee that holds the very numbers in the file."""
    model = make("llama")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    write_vocabulary(writer)
    state = model.state_dict()
    for name, tensor in state.items():
        file_name = _gguf_name(name)
        held = embed if embed is not None and name in ("model.embed_tokens.weight", "lm_head.weight") else kind
        state[name] = torch.from_numpy(_write(writer, file_name, tensor.numpy(), held, config))
    model.load_state_dict(state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_vocabulary(writer: gguf.GGUFWriter, *, pre: str = "gpt-2", model: str = "gpt2", template: str | None = None) -> None:
    words = [*sorted(ByteLevel.alphabet()), "<s>", "</s>", *(f"<unused{i}>" for i in range(VOCAB - 258))]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([1] * 256 + [3] * 2 + [5] * (VOCAB - 258))
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if template is not None:
        writer.add_chat_template(template)


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return top[name] + ".weight"
    part = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
        "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    pieces = name.split(".")
    return f"blk.{pieces[2]}.{part[pieces[-2]]}.weight"


def _write(writer, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType, config) -> np.ndarray:
    """Add one tensor, q and k permuted as llama.cpp's converter does; returns what a reader gets, in the model's own order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads:
        values = _permute(values, heads)
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
        read = values
    else:
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        read = gguf.quants.dequantize(packed, kind)
    return np.ascontiguousarray(_unpermute(read, heads) if heads else read, dtype=np.float32)


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
