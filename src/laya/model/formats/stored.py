"""Tensors as they lie in a file: rows of bytes in a memory map, turned into numbers a few rows at a time. No torch here.

In: a memory map and a type's name. Out: float32 rows, or the (q, scale, zero) of a 4-bit type. The pages belong to the
file, so a model is never held twice.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from laya.model.spec import BrokenModel, ModelSpec, UnsupportedModel

FOUR_BIT = frozenset({"Q4_0", "Q4_1", "Q4_K", "AWQ"})
EIGHT_BIT = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"})  # held as int8: the next size that torch multiplies with
PLAIN = frozenset({"F32", "F16", "BF16"})

GROUP = 32  # weights that share a scale in every 4-bit GGUF type
ROWS_AT_ONCE = 4096  # rows turned into float32 together: 16 MiB at 1024 columns, small beside any model


class StoredTensor:
    """A matrix [rows, columns] or a vector [rows] in a file. `order` permutes its rows as they are read."""

    group = GROUP  # columns that share a scale, of 4-bit types

    def __init__(
        self, name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray, *, order: np.ndarray | None = None,
        add: float = 0.0,
    ) -> None:  # fmt: skip
        self.name = name
        self.kind = kind
        self.shape = shape
        self._raw = raw  # uint8 [rows, bytes of a row]
        self._order = order
        self._add = add  # added to every number (gemma keeps norm weights less one)

    @property
    def names(self) -> tuple[str, ...]:
        """What the file calls its parts."""
        return (self.name,)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    def reordered(self, order: np.ndarray) -> StoredTensor:
        """The same tensor with row i taken from row order[i]."""
        return StoredTensor(self.name, self.kind, self.shape, self._raw, order=order, add=self._add)

    def float32(self) -> np.ndarray:
        """Everything, as float32 in the tensor's own shape."""
        return np.concatenate([block for _, block in self.blocks()]).reshape(self.shape)

    def blocks(self, rows: int = ROWS_AT_ONCE) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, float32 [n, columns]) over the whole tensor, `rows` at a time."""
        for first in range(0, self.rows, rows):
            raw = self._bytes(first, first + rows)
            block = _to_float32(self.kind, raw).reshape(raw.shape[0], self.columns)
            yield first, block + np.float32(self._add) if self._add else block
            self.forget_pages()

    def affine4_blocks(self, rows: int = ROWS_AT_ONCE) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(first row, q uint8 [n, columns], scale and zero float32 [n, columns / group]): w = (q - 8) * scale + zero."""
        for first in range(0, self.rows, rows):
            yield first, *_AFFINE4[self.kind](self._bytes(first, first + rows))
            self.forget_pages()

    def forget_pages(self) -> None:
        """Let go of the pages read so far, of all the file's tensors: else a model counts twice as resident while it loads."""
        forget_pages(self._raw)

    def _bytes(self, first: int, last: int) -> np.ndarray:
        return self._raw[first:last] if self._order is None else self._raw[self._order[first:last]]


def forget_pages(raw: np.ndarray) -> None:
    mapped = getattr(raw, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An opened model. `tensors` is keyed by this package's own names (`names_for`)."""

    path: str
    spec: ModelSpec
    tensors: dict[str, StoredTensor]
    quantization: str  # the types in use, the commonest first, for people
    tokenizer: Mapping[str, Any]  # what tokenizer.py needs: {"gguf": fields} or {"directory": path}


def names_for(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this spec must have, with its shape (rows, columns)."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (spec.hidden,), "mlp_norm": (spec.hidden,),
        "q": (q_rows, spec.hidden), "k": (kv_rows, spec.hidden), "v": (kv_rows, spec.hidden), "o": (spec.hidden, q_rows),
        "gate": (spec.intermediate, spec.hidden), "up": (spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
    }  # fmt: skip
    if spec.qkv_bias:
        layer |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        layer |= {"post_attn_norm": (spec.hidden,), "post_mlp_norm": (spec.hidden,)}
    names: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.hidden), "final_norm": (spec.hidden,)}
    if not spec.tied_embeddings:
        names["head"] = (spec.vocab, spec.hidden)
    for i in range(spec.layers):
        names |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return names


def collect(
    path: str, spec: ModelSpec, lookup: Callable[[str], StoredTensor | None], *, needs_interleaving: bool
) -> dict[str, StoredTensor]:
    """Find every tensor by its own name, check shapes, and bring q/k rows into interleaved order."""
    order = functools.cache(functools.partial(_interleaving, head_dim=spec.head_dim))  # made when a shape has proved its size
    heads_of = {"q": spec.heads, "q_bias": spec.heads, "k": spec.kv_heads, "k_bias": spec.kv_heads, "q_norm": 1, "k_norm": 1}
    found = {}
    for name, shape in names_for(spec).items():
        tensor = lookup(name)
        if tensor is None:
            raise BrokenModel(f"{path}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise BrokenModel(f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, expected {shape}")
        heads = heads_of.get(name.rsplit(".", 1)[-1])
        found[name] = tensor.reordered(order(heads)) if heads is not None and needs_interleaving else tensor
    return found


def refuse_strangers(path: str, spec: ModelSpec, in_file: set[str], found: Mapping[str, StoredTensor]) -> None:
    """A tensor of a layer that nothing here would use means a variant that would be computed wrongly: refuse it by name."""
    strangers = sorted(in_file - {name for tensor in found.values() for name in tensor.names})
    if strangers:
        raise UnsupportedModel(f"{path}: tensor {strangers[0]!r} has no place in a {spec.architecture} model known here")


def _interleaving(heads: int, head_dim: int) -> np.ndarray:
    """Row order that puts the halves of each head side by side: (0, d/2, 1, d/2 + 1, ..)."""
    within = np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)


def _to_float32(kind: str, raw: np.ndarray) -> np.ndarray:
    if kind == "F32":
        return raw.copy().view(np.float32)  # the map itself cannot be written to, which torch warns of
    if kind == "F16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    import gguf  # here: a safetensors model does without it

    return gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[kind])


def _halves(blocks: np.ndarray, first: int) -> np.ndarray:
    """32 numbers of 4 bits from 16 bytes: low nibbles, then high nibbles."""
    packed = blocks[..., first : first + 16]
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _half(blocks: np.ndarray, first: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0].astype(np.float32)


def _affine_q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(raw.shape[0], -1, 18)
    scale = _half(blocks, 0)
    return _halves(blocks, 2).reshape(raw.shape[0], -1), scale, np.zeros_like(scale)


def _affine_q4_1(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    return _halves(blocks, 4).reshape(raw.shape[0], -1), scale, minimum + 8 * scale


def _affine_q4_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Super-blocks of 256: eight groups, each with a 6-bit scale and a 6-bit minimum of the block's own two halves."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 144)
    d, dmin = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    packed = blocks[..., 4:16].reshape(rows, -1, 3, 4)
    low_s, low_m, high = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([low_s & 63, (high & 15) | ((low_s >> 2) & 48)], axis=-1)
    minima = np.concatenate([low_m & 63, (high >> 4) | ((low_m >> 2) & 48)], axis=-1)
    quarters = blocks[..., 16:].reshape(rows, -1, 4, 32)  # each byte: one number of group 2j, one of group 2j + 1
    q = np.stack([quarters & 15, quarters >> 4], axis=-2)
    scale = (d * scales).reshape(rows, -1)
    return q.reshape(rows, -1), scale, 8 * scale - (dmin * minima).reshape(rows, -1)


_AFFINE4 = {"Q4_0": _affine_q4_0, "Q4_1": _affine_q4_1, "Q4_K": _affine_q4_k}
