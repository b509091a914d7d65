"""The nano-vllm package on a CPU: what of it needs a GPU is replaced, its engine, scheduler, sequences and model are its own.

Replaced: flash-attn's two functions (SDPA over the paged cache), triton and the kernel that stores KV, and torch.cuda with pinned
memory, as the package's own modules see them and nobody else.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


class OnHost(torch.Tensor):
    """A pinned tensor that was sent to the device."""

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.clone().as_subclass(torch.Tensor)


class HostCuda:
    """torch.cuda of a machine whose device is the host."""

    def mem_get_info(self) -> tuple[int, int]:
        return 8 << 30, 8 << 30

    def memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 0}

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None  # set_device, synchronize, empty_cache, reset_peak_memory_stats


class HostTorch:
    """torch as the package's model runner sees it."""

    cuda = HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def set_default_device(self, device: str) -> None:
        pass

    def zeros(self, *shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return torch.zeros(*shape, **how).as_subclass(OnHost if pin_memory else torch.Tensor)

    def tensor(self, data: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return torch.tensor(data, **how).as_subclass(OnHost if pin_memory else torch.Tensor)


def _paged(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[length, heads, dim] of one sequence."""
    blocks = -(-length // cache.shape[1])
    assert (table[:blocks] >= 0).all(), "a block of the table is missing"
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal from the end: the last query sees every key."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1)


def flash_attn_varlen_func(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, block_table
):  # fmt: skip
    out = []
    for i, (first, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        length = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        at = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        keys = k[at] if block_table is None else _paged(k, block_table[i], length)
        values = v[at] if block_table is None else _paged(v, block_table[i], length)
        out.append(_attend(q[first:end], keys, values, softmax_scale))
    return torch.cat(out)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):
    rows = [
        _attend(q[i], _paged(k_cache, block_table[i], n), _paged(v_cache, block_table[i], n), softmax_scale)
        for i, n in enumerate(cache_seqlens.tolist())
    ]
    return torch.stack(rows)


def store_kvcache(key, value, k_cache, v_cache, slot_mapping) -> None:
    at = slot_mapping.long()
    assert (at >= 0).all() and len(set(at.tolist())) == len(at), "two tokens in one slot"
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.view(-1, *new.shape[1:])[at] = new


@contextlib.contextmanager
def _stand_ins():
    """Modules that `import nanovllm` wants, and no compiling; all gone again afterwards, or torch would take triton for real."""
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function
    triton.language = types.ModuleType("triton.language")
    triton.language.constexpr = int
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    planted = {"triton": triton, "triton.language": triton.language, "flash_attn": flash}
    planted = {name: module for name, module in planted.items() if name not in sys.modules}
    sys.modules.update(planted)
    compiled, torch.compile = torch.compile, lambda function: function  # half a minute when cold
    try:
        yield
    finally:
        torch.compile = compiled
        for name in planted:
            del sys.modules[name]


def bring_to_host() -> None:
    """Import the package and give its modules the host for a device. Idempotent."""
    with _stand_ins():
        attention = importlib.import_module("nanovllm.layers.attention")
        runner = importlib.import_module("nanovllm.engine.model_runner")
    attention.store_kvcache = store_kvcache
    attention.flash_attn_varlen_func = flash_attn_varlen_func
    attention.flash_attn_with_kvcache = flash_attn_with_kvcache
    runner.torch = HostTorch()


def write_config_dtype(folder: Path, dtype: str) -> None:
    """The type that the package computes in."""
    import json

    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config))
