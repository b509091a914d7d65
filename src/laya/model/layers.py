"""The decoder: embedding, layers, final norm and head, as a few large operations a layer.

In: token ids, rotary factors and attention plans of one step's rows. Out: hidden states [rows, hidden] float32, and logits of
chosen rows. The residual is float32; inputs of products are in the model's activation dtype. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from laya.model.attention import AttentionPlan, Heads, attend
from laya.model.kv_cache import KVCache
from laya.model.quant import DenseLinear, Int8Linear, Linear
from laya.model.spec import ModelSpec, RopeSpec

Table = DenseLinear | Int8Linear  # forms whose rows can be read one by one


class Layer:
    """One decoder layer's weights. Norms are float32 [hidden], `qk_norm` [heads + kv_heads, head_dim], `qkv_bias` a vector."""

    __slots__ = (
        "attn_norm", "qkv", "qkv_bias", "qk_norm", "o", "post_attn_norm", "mlp_norm", "gate_up", "down", "post_mlp_norm", "kind",
    )  # fmt: skip

    def __init__(
        self, *, attn_norm: torch.Tensor, qkv: Linear, o: Linear, mlp_norm: torch.Tensor, gate_up: Linear, down: Linear,
        kind: tuple[RopeSpec, int | None], qkv_bias: torch.Tensor | None = None, qk_norm: torch.Tensor | None = None,
        post_attn_norm: torch.Tensor | None = None, post_mlp_norm: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.attn_norm, self.qkv, self.o = attn_norm, qkv, o
        self.mlp_norm, self.gate_up, self.down = mlp_norm, gate_up, down
        self.kind = kind  # (rotary settings, window): layers of one kind share tables and plans
        self.qkv_bias, self.qk_norm = qkv_bias, qk_norm
        self.post_attn_norm, self.post_mlp_norm = post_attn_norm, post_mlp_norm


class Decoder:
    """A whole model's weights and its forward pass."""

    def __init__(
        self, spec: ModelSpec, *, embed: Table, layers: list[Layer], final_norm: torch.Tensor, head: Linear,
        dtype: torch.dtype, max_seq_len: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self.embed, self.layers, self.final_norm, self.head = spec, embed, layers, final_norm, head
        self.dtype = dtype
        self.heads = Heads(spec.heads, spec.kv_heads, spec.head_dim, spec.query_scale or spec.head_dim**-0.5)
        self.windows = {layer.kind[1] for layer in layers}
        self.norm = RmsNorm(spec.hidden, spec.rms_eps, device)
        self.head_norm = RmsNorm(spec.head_dim, spec.rms_eps, device)
        self.activation = _ACTIVATIONS[spec.activation]
        self.rope_tables = {rope: rope_table(rope, spec.head_dim, max_seq_len, device) for rope in {x.kind[0] for x in layers}}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: dict[int | None, AttentionPlan], cache: KVCache
    ) -> torch.Tensor:
        """[rows] ids and positions -> float32 [rows, hidden] before the final norm. `plans` is keyed by window."""
        rotations = {rope: table[positions].unsqueeze(1) for rope, table in self.rope_tables.items()}
        x = self.embed.rows(token_ids)
        if self.spec.embed_scale != 1.0:
            x.mul_(self.spec.embed_scale)
        for number, layer in enumerate(self.layers):
            rope, window = layer.kind
            qkv = self.project(layer, self.norm(x, layer.attn_norm, self.dtype), rotations[rope])
            seen = attend(qkv, cache.layers[number], cache.slots[number], plans[window], self.heads)
            out = layer.o(seen)
            x.add_(out if layer.post_attn_norm is None else self.norm(out.float(), layer.post_attn_norm, torch.float32))
            out = self.mlp(layer, self.norm(x, layer.mlp_norm, self.dtype))
            x.add_(out if layer.post_mlp_norm is None else self.norm(out.float(), layer.post_mlp_norm, torch.float32))
        return x

    def project(self, layer: Layer, h: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values side by side, [rows, (heads + 2 * kv) * dim], queries and keys rotated."""
        qkv = layer.qkv(h)
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        turned = self.spec.heads + self.spec.kv_heads
        qk = qkv[:, : turned * self.spec.head_dim]
        pairs = qk.float().view(-1, turned, self.spec.head_dim)
        if layer.qk_norm is not None:
            pairs = self.head_norm(pairs, layer.qk_norm, torch.float32)
        # Neighbours are the parts of a complex number (rows were brought into this order when loaded): one product turns all.
        spun = torch.view_as_complex(pairs.view(-1, turned, self.spec.head_dim // 2, 2)).mul(rotation)
        qk.copy_(torch.view_as_real(spun).view_as(qk))
        return qkv

    def mlp(self, layer: Layer, h: torch.Tensor) -> torch.Tensor:
        both = layer.gate_up(h)
        half = self.spec.intermediate
        return layer.down(self.activation(both[:, :half]).mul_(both[:, half:]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return self.head.float32(self.norm(hidden, self.final_norm, torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, one that is both embedding and head counted once."""
        total = self.final_norm.nbytes + self.embed.nbytes + (0 if self.head is self.embed else self.head.nbytes)
        for layer in self.layers:
            total += sum(part.nbytes for name in Layer.__slots__ if hasattr(part := getattr(layer, name), "nbytes"))
        return total


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in five small operations (torch's own takes nine on a CPU)."""

    def __init__(self, width: int, eps: float, device: torch.device) -> None:
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)
        self.share = 1.0 / width

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x float32 [.., width] -> the same shape in `dtype`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()
        if dtype == torch.float32:
            return torch.mul(x, inverse).mul_(weight)
        return torch.mul(torch.mul(x, inverse), weight, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def rope_table(rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """exp(i * angle) as complex64 [positions, head_dim / 2], worked out in float64 and rounded once."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.base**-pairs / rope.linear_factor
    if rope.factors is not None:
        frequencies /= torch.tensor(rope.factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}
