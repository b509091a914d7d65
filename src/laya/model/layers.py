"""The decoder: embedding, layers, final norm and head, as a few large operations a layer.

In: token ids, rotary factors and attention plans of one step's rows. Out: hidden states [rows, hidden] float32, and logits of
chosen rows. The residual is float32; inputs of products are in the model's activation dtype. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from laya.model.attention import Heads, attend
from laya.model.attention_plan import AttentionPlan
from laya.model.kv_cache import KVCache
from laya.model.quant import DenseLinear, Int8Linear, Linear
from laya.model.rows import Rows
from laya.model.spec import ModelSpec, RopeSpec

STREAM_TAIL = 16  # floats behind each row of the residual: one is used, 16 keep rows aligned to cache lines

Table = DenseLinear | Int8Linear  # forms whose rows can be read one by one


class Layer:
    """One decoder layer's weights. `attn_norm` and `mlp_norm` are as `norm_weight` gives them, float32 [hidden]; `qk_norm` is
    [(heads + kv_heads) * head_dim], the post norms [hidden].
    """

    __slots__ = (
        "attn_norm", "qkv", "qkv_bias", "qk_norm", "o", "post_attn_norm", "mlp_norm", "gate_up", "down", "post_mlp_norm",
        "kind",
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
        self.turned_width = (spec.heads + spec.kv_heads) * spec.head_dim
        self.windows = {layer.kind[1] for layer in layers}
        self.head_norm = VectorNorm(spec.head_dim, spec.rms_eps)
        self.post_norm = VectorNorm(spec.hidden, spec.rms_eps)
        self.activation = _ACTIVATIONS[spec.activation]
        self.rope_tables = {rope: rope_table(rope, spec.head_dim, max_seq_len, device) for rope in {x.kind[0] for x in layers}}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: dict[int | None, AttentionPlan], cache: KVCache,
        rows: Rows,
    ) -> torch.Tensor:  # fmt: skip
        """[rows] ids and positions -> the residual stream after the last layer (`Stream.wide`). `plans` is keyed by window."""
        turned = self.spec.heads + self.spec.kv_heads
        rotations = {rope: table[positions].repeat(1, turned) for rope, table in self.rope_tables.items()}
        stream = self.stream(token_ids)
        h = torch.empty(stream.values.shape, dtype=self.dtype, device=stream.values.device)
        for number, layer in enumerate(self.layers):
            rope, window = layer.kind
            qkv = self.project(layer, stream.normed(layer.attn_norm, h), rotations[rope], rows)
            seen = attend(qkv, number, cache, plans[window], self.heads)
            self._add(stream, layer.o(seen, rows), layer.post_attn_norm)
            self._add(stream, self.mlp(layer, stream.normed(layer.mlp_norm, h), rows), layer.post_mlp_norm)
        return stream.wide

    def stream(self, token_ids: torch.Tensor) -> Stream:
        """The residual before the first layer."""
        return Stream(self.embed.rows(token_ids), self.spec.rms_eps, self.spec.embed_scale)

    def _add(self, stream: Stream, out: torch.Tensor, post_norm: torch.Tensor | None) -> None:
        stream.values.add_(out if post_norm is None else self.post_norm(out.float(), post_norm))

    def project(self, layer: Layer, h: torch.Tensor, rotation: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Queries, keys and values side by side, [rows, (heads + 2 * kv) * dim], queries and keys rotated."""
        qkv = layer.qkv(h, rows)
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        qk = qkv[:, : self.turned_width]
        pairs = qk.to(torch.float32, copy=True)
        if layer.qk_norm is not None:
            self.head_norm(pairs, layer.qk_norm)
        # Neighbours are the parts of a complex number (rows were brought into this order when loaded): one product turns all.
        pairs.view(torch.complex64).mul_(rotation)
        qk.copy_(pairs)
        return qkv

    def mlp(self, layer: Layer, h: torch.Tensor, rows: Rows) -> torch.Tensor:
        gate, up = layer.gate_up(h, rows).chunk(2, dim=-1)
        h = self.activation(gate).mul_(up)
        del gate, up  # the product that follows needs room of its own
        return layer.down(h, rows)

    def logits(self, wide: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Rows of what `forward` gave -> float32 [rows, vocab]. `exact`: each row's are the same to the bit in any company."""
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return self.head.float32(torch.div(wide[:, : self.spec.hidden], length).mul_(self.final_norm), exact)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, one that is both embedding and head counted once."""
        total = self.final_norm.nbytes + self.embed.nbytes + (0 if self.head is self.embed else self.head.nbytes)
        for layer in self.layers:
            total += sum(part.nbytes for name in Layer.__slots__ if hasattr(part := getattr(layer, name), "nbytes"))
        return total


class Stream:
    """The residual, float32 [rows, hidden], in a buffer whose rows end with sqrt(hidden * eps) and zeros.

    The length of a whole row is then sqrt(sum(x^2) + hidden * eps), so that an RMS norm is a length, a quotient and a product
    with weights that were multiplied by sqrt(hidden) when loaded: three small operations where torch's own takes nine.
    """

    __slots__ = ("wide", "values")

    def __init__(self, values: torch.Tensor, eps: float, scale: float = 1.0) -> None:
        rows, hidden = values.shape
        self.wide = torch.zeros((rows, hidden + STREAM_TAIL), dtype=torch.float32, device=values.device)
        self.wide[:, hidden] = math.sqrt(hidden * eps)
        self.values = self.wide[:, :hidden]
        torch.mul(values, scale, out=self.values)

    def normed(self, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """RMS norm into `out` [rows, hidden]; `weight` as `norm_weight` gives it."""
        return torch.mul(torch.div(self.values, torch.linalg.vector_norm(self.wide, dim=-1, keepdim=True)), weight, out=out)


def norm_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight * math.sqrt(len(weight))


class VectorNorm:
    """RMS norm, in place, of each vector of `width` numbers in float32 rows; `weight` covers a whole row."""

    def __init__(self, width: int, eps: float) -> None:
        self.width, self.eps = width, eps

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        vectors = x.view(x.shape[0], -1, self.width)
        vectors.mul_(vectors.square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_())
        return x.mul_(weight)


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
