"""Tiny random models of real architectures, written to disk as people have them, with transformers as the referee."""

from __future__ import annotations

from pathlib import Path

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

GLOBAL_EVERY = 3  # gemma3: the third layer of each three sees everything
_GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]

MODELS = {
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    "llama3": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True)),
    "mistral": lambda sizes: MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)),
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**sizes)),
    "gemma3": lambda sizes: Gemma3ForCausalLM(
        Gemma3TextConfig(**({"query_pre_attn_scalar": 20} | sizes), sliding_window=WINDOW, layer_types=_GEMMA_LAYERS)
    ),
}


def make(kind: str, **sizes) -> PreTrainedModel:
    """A model with the same random weights every time, biases and norms included."""
    torch.manual_seed(7)
    model = MODELS[kind](_SIZES | sizes).eval()
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
