"""From a path to a running model: open, refuse what cannot be run, hold each tensor in its form, allocate the KV pool.

In: a path and sizes that the memory plan has worked out. Out: (Runner, Tokenizer, ModelCard). Called on the engine thread,
whose torch thread count it sets.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from laya.errors import ConfigError, DependencyError
from laya.model.describe import has_chat_template
from laya.model.formats import open_checkpoint
from laya.model.formats.stored import Checkpoint
from laya.model.holding import held_as, resolve_dtype
from laya.model.int4 import product_holds
from laya.model.kv_cache import KVCache
from laya.model.layers import Decoder, Layer, norm_weight
from laya.model.quant import Linear, build_linear
from laya.model.runner import TorchRunner
from laya.model.tokenizer import ModelTokenizer, build_tokenizer
from laya.schema.generation import ModelCard

log = logging.getLogger("laya.model")


def load(
    path: str, *, device: str = "auto", dtype: str | None = None, max_seq_len: int | None = None, num_blocks: int,
    block_size: int = 16, threads: int | None = None, swap_bytes: int = 0, max_num_seqs: int = 1,
    prefill_chunk_tokens: int = 512, model_id: str | None = None, progress: Callable[[int, int], None] | None = None,
    tokenizer: ModelTokenizer | None = None, eager: bool = False,
) -> tuple[TorchRunner, ModelTokenizer, ModelCard]:  # fmt: skip
    """`dtype`: auto (None) keeps quantised weights quantised; float32 is the exact mode; bfloat16 dequantises.

    `num_blocks` KV blocks of `block_size` tokens are allocated; `max_seq_len` is clamped to the model's window and to the
    pool. `progress` hears (layers read, layers in all) after each. A `tokenizer` that was read before is taken as it is.
    `eager` keeps to torch's own operations. Raises StartError (UnsupportedModel, BrokenModel, ConfigError, DependencyError)
    before any weight is read.
    """
    began = time.monotonic()
    checkpoint = open_checkpoint(path)
    place = pick_device(device)
    resolved = resolve_dtype(checkpoint, place.type, dtype)
    tokenizer = tokenizer or build_tokenizer(checkpoint.tokenizer)
    window = usable_window(checkpoint, max_seq_len, num_blocks * block_size)
    if threads is not None:
        torch.set_num_threads(threads)
    activations = torch.float32 if resolved == "float32" else torch.bfloat16
    with torch.inference_mode():
        decoder = _decoder(checkpoint, place, resolved, activations, window, progress)
        for tensor in checkpoint.tensors.values():
            tensor.forget_pages()
        if place.type == "cuda":  # what packing has left in torch's hands: the pool is one large piece
            torch.cuda.empty_cache()
        spec = checkpoint.spec
        cache = KVCache(
            layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, num_blocks=num_blocks,
            block_size=block_size, dtype=activations, device=place, swap_bytes=swap_bytes,
        )  # fmt: skip
    runner = TorchRunner(decoder, cache, max_seq_len=window, eos_token_ids=tokenizer.eos_token_ids, eager=eager)
    log.info("loaded %s (%s, %s) in %.1f s", path, spec.architecture, checkpoint.quantization, time.monotonic() - began)
    details = {
        "architecture": spec.architecture, "quantization": checkpoint.quantization, "dtype": resolved, "device": str(place),
        "parameters": sum(t.rows * t.columns for t in checkpoint.tensors.values()), "engine": "torch",
        "max_num_seqs": max_num_seqs, "prefill_chunk_tokens": prefill_chunk_tokens,
        "chat_style": msgspec.to_builtins(tokenizer.chat_style), "step": runner.forward.kind,
    }  # fmt: skip
    card = ModelCard(
        id=model_id or default_id(path), max_model_len=window, chat=has_chat_template(checkpoint),
        created=int(os.stat(path).st_mtime), details=details,
    )  # fmt: skip
    return runner, tokenizer, card


def read_tokenizer(path: str) -> ModelTokenizer:
    """A model's tokenizer alone. A large vocabulary holds the interpreter for half a second, and every answer with it."""
    return build_tokenizer(open_checkpoint(path).tokenizer)


def pick_device(device: str) -> torch.device:
    """auto | cpu | cuda | cuda:N. Raises ConfigError for another name, DependencyError where CUDA is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"device {device!r} is not known; allowed: auto, cpu, cuda, cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DependencyError(f"device {device!r}: torch {torch.__version__} sees no CUDA device; `auto` would take cpu")
    return torch.device(device)


def usable_window(checkpoint: Checkpoint, wanted: int | None, pool_tokens: int) -> int:
    """Tokens of prompt and answer together: what was asked for, within the model's window and the pool."""
    limit = checkpoint.spec.context_length
    if wanted is not None and wanted > limit:
        log.warning("max_seq_len %d exceeds the model's window; clamped to %d", wanted, limit)
    window = min(wanted or limit, limit)
    if window > pool_tokens:
        log.warning("the KV cache holds %d tokens; the window is clamped from %d to that", pool_tokens, window)
    return min(window, pool_tokens)


def default_id(path: str) -> str:
    """The file's name without its suffix, or the directory's."""
    name = os.path.basename(os.path.normpath(path))
    return name[: -len(".gguf")] if name.endswith(".gguf") else name


def _decoder(
    checkpoint: Checkpoint, device: torch.device, dtype: str, activations: torch.dtype, window: int,
    progress: Callable[[int, int], None] | None,
) -> Decoder:  # fmt: skip
    """Weights tensor by tensor: each is read from the file's pages into its final form, and nothing is kept beside it."""
    spec, tensors = checkpoint.spec, checkpoint.tensors

    def linear(*names: str) -> Linear:
        parts = [tensors[name] for name in names]
        held = [held_as(n, t, device.type, dtype, product_holds) for n, t in zip(names, parts, strict=True)]
        return build_linear(parts, held, device)

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(tensors[name].float32())).to(device)

    def norm(name: str) -> torch.Tensor:
        return norm_weight(vector(name))

    def layer(number: int) -> Layer:
        at = f"layers.{number}."
        qk_norm = qkv_bias = None
        if spec.qk_norm:
            q, k = vector(at + "q_norm"), vector(at + "k_norm")
            qk_norm = torch.cat([q.repeat(spec.heads), k.repeat(spec.kv_heads)])
        if spec.qkv_bias:
            qkv_bias = torch.cat([vector(at + name) for name in ("q_bias", "k_bias", "v_bias")]).to(activations)
        return Layer(
            attn_norm=norm(at + "attn_norm"), qkv=linear(at + "q", at + "k", at + "v"), o=linear(at + "o"),
            mlp_norm=norm(at + "mlp_norm"), gate_up=linear(at + "gate", at + "up"), down=linear(at + "down"),
            kind=(spec.rope_of(number), spec.window_of(number)), qkv_bias=qkv_bias, qk_norm=qk_norm,
            post_attn_norm=vector(at + "post_attn_norm") if spec.post_norms else None,
            post_mlp_norm=vector(at + "post_mlp_norm") if spec.post_norms else None,
        )  # fmt: skip

    layers = []
    for number in range(spec.layers):
        layers.append(layer(number))
        tensors[f"layers.{number}.attn_norm"].forget_pages()
        if progress is not None:
            progress(number + 1, spec.layers)
    embed = linear("embed")
    return Decoder(
        spec, embed=embed, layers=layers, final_norm=norm("final_norm"),
        head=embed if spec.tied_embeddings else linear("head"), dtype=activations, max_seq_len=window, device=device,
    )  # fmt: skip
