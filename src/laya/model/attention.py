"""Attention over the paged pool: each layer does the few operations that the step's plan prescribes.

In: a layer's queries, keys and values of all rows, and an `AttentionPlan`. Out: what each row saw. Engine thread only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from laya.model.attention_plan import AttentionPlan, DecodeGroup, PrefillChunk
from laya.model.kv_cache import KVCache


class Heads:
    """Shapes of one layer's attention. `scale` multiplies the scores."""

    __slots__ = ("kv", "group", "dim", "q_width", "scale")

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float) -> None:
        self.kv, self.group, self.dim, self.scale = kv_heads, heads // kv_heads, dim, scale
        self.q_width = heads * dim


def attend(qkv: torch.Tensor, number: int, cache: KVCache, plan: AttentionPlan, heads: Heads) -> torch.Tensor:
    """qkv [rows, (heads + 2 * kv) * dim] of layer `number` -> [rows, heads * dim]. Writes the rows' keys and values first."""
    fresh = qkv[:, heads.q_width :]
    if plan.write.targets is not None:
        plan.write.targets[number].copy_(fresh)
    else:
        cache.slots[number].index_copy_(0, plan.write.slots, fresh)
    layer = cache.layers[number]
    parts = [_decode(qkv, number, layer, group, heads) for group in plan.decodes]
    parts += [_prefill(qkv, layer, chunk, heads) for chunk in plan.prefills]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(qkv: torch.Tensor, number: int, layer: torch.Tensor, group: DecodeGroup, heads: Heads) -> torch.Tensor:
    rows = group.last - group.first
    # Query heads that share a key head stand where a longer query would: keys are read once and never repeated.
    q = qkv[group.first : group.last, : heads.q_width].view(rows, heads.kv, heads.group, heads.dim)
    if group.index is None:
        keys, values = group.views[number]
    else:
        gathered = layer.index_select(0, group.index).view(rows, -1, 2, heads.kv, heads.dim)
        keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=heads.scale)
    return out.reshape(rows, heads.q_width)


def _prefill(qkv: torch.Tensor, layer: torch.Tensor, chunk: PrefillChunk, heads: Heads) -> torch.Tensor:
    rows = chunk.last - chunk.first
    q = qkv[chunk.first : chunk.last, : heads.q_width].view(rows, heads.kv, heads.group, heads.dim).permute(1, 2, 0, 3)
    if chunk.index is None:
        kv = qkv[chunk.first : chunk.last, heads.q_width :].view(rows, 2, heads.kv, heads.dim)
    else:
        kv = layer.index_select(0, chunk.index).view(-1, 2, heads.kv, heads.dim)[: chunk.length]
    if chunk.index is None and not q.is_cuda:  # a CPU without bf16 matrices of its own multiplies float32 faster, and exactly
        q, kv = q.float(), kv.float()
    # [kv, group, tokens, dim] with stride 0 over the group: shared keys are not copied.
    kv = kv.permute(1, 2, 0, 3).unsqueeze(2).expand(2, heads.kv, heads.group, kv.shape[0], heads.dim)
    causal = chunk.index is None
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=chunk.mask, is_causal=causal, scale=heads.scale)
    return out.permute(2, 0, 1, 3).reshape(rows, heads.q_width).to(qkv.dtype)
