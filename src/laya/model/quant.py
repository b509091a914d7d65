"""Matrices that are multiplied with: the group-affine 4-bit linear, the int8 one, the dense one, and row tables.

In: `StoredTensor`s of a file. Out: callables from activations [rows, in] to [rows, out], in the activations' own dtype.
Built by `load.py`, called by `layers.py` on the engine thread. Rows of a product never depend on one another, so a
sequence's numbers do not depend on its batch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from laya.model.formats.stored import StoredTensor

aten = torch.ops.aten

INT8_MAX = 127
PLANE = 128  # an activation of 15 bits is PLANE * high + low, each a signed byte
ACTIVATION_MAX = INT8_MAX * PLANE  # the largest magnitude whose high byte stays within INT8_MAX after rounding
CUDA_INNER_K_TILES = 8  # layout of CUDA's packed 4-bit weights: the widest, as torch's own quantiser chooses


class Linear(Protocol):
    """A matrix [out, in] held in some form."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], same dtype as x."""

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """The same with the result in float32, as precise as the form allows (for logits)."""

    @property
    def nbytes(self) -> int: ...


class DenseLinear:
    """weight [out, in] in bf16 or float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 rows [n, in] of a table."""
        return self.weight[ids].float()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class Int4Linear:
    """w = (q - 8) * scale + zero in groups of `group` columns; bf16 activations, float32 sums inside the product."""

    def __init__(self, packed: torch.Tensor, scale_zero: torch.Tensor, group: int) -> None:
        self.packed = packed
        self.scale_zero = scale_zero  # bf16 [in / group, out, 2]
        self.group = group
        self._product = aten._weight_int4pack_mm if packed.is_cuda else aten._weight_int4pack_mm_for_cpu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.packed, self.group, self.scale_zero)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        return self(x.to(torch.bfloat16)).float()

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale_zero.nbytes


class Int8Linear:
    """w = q * scale per row. Activations become 15-bit integers per row, multiplied as two planes of signed bytes.

    The integer product is exact and runs on VNNI; processors without it take torch's int8 product on float32 activations.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight = weight  # int8 [out, in]
        self.scale = scale  # float32 [out]
        self._columns = weight.t()
        self._integers = has_vnni()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.float32(x).to(x.dtype)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if not self._integers:
            return aten._weight_int8pack_mm(x, self.weight, self.scale)
        rows = x.shape[0]
        planes, step = two_planes(x)
        # |sum| <= 127 * 127 * in: int32 holds it up to 133,000 columns.
        if rows == 1:  # one row at a time takes torch's vector product, which is faster twice than two rows are once
            high, low = torch._int_mm(planes[:1], self._columns), torch._int_mm(planes[1:], self._columns)
        else:
            high, low = torch._int_mm(planes, self._columns).split(rows)
        out = high.float().mul_(PLANE).add_(low)
        return out.mul_(self.scale).mul_(step)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 rows [n, in] of a table."""
        return self.weight[ids].float().mul_(self.scale[ids].unsqueeze(1))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes


class StackedLinear:
    """Matrices of different forms that share their input, their outputs side by side (Q4_K files mix types)."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.float32(x) for part in self.parts], dim=-1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def has_vnni() -> bool:
    """Whether int8 products are exact and fast: without VNNI, sums of byte products can saturate."""
    probe = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(probe and probe())


def two_planes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] float32 as int8 [2 * rows, in] (all high planes, then all low ones) and the step of each row [rows, 1].

    x ~ (PLANE * high + low) * step. A row with a number that is not finite gets a step that is not, so its results are not.
    """
    peak = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    step = peak.mul_(1.0 / ACTIVATION_MAX)
    q = (x / step).round_()
    high = (q * (1.0 / PLANE)).round_()
    rows = x.shape[0]
    planes = torch.empty((2 * rows, x.shape[1]), dtype=torch.int8, device=x.device)
    planes[:rows].copy_(high)
    planes[rows:].copy_(q.sub_(high, alpha=PLANE))
    return planes, step


def build_linear(parts: list[StoredTensor], held: list[str], device: torch.device) -> Linear:
    """One linear over the rows of all parts, fused where neighbours are held alike. `held` as `holding.held_as` says."""
    runs: list[tuple[tuple[str, int], list[StoredTensor]]] = []
    for part, kind in zip(parts, held, strict=True):
        alike = kind, part.group
        if runs and runs[-1][0] == alike:
            runs[-1][1].append(part)
        else:
            runs.append((alike, [part]))
    built = [_BUILDERS[kind](tensors, device) for (kind, _), tensors in runs]
    return built[0] if len(built) == 1 else StackedLinear(built)


def _dense(dtype: torch.dtype):
    def build(parts: list[StoredTensor], device: torch.device) -> DenseLinear:
        weight = torch.empty((sum(part.rows for part in parts), parts[0].columns), dtype=dtype, device=device)
        for first, block in _row_blocks(parts):
            weight[first : first + len(block)].copy_(torch.from_numpy(block))
        return DenseLinear(weight)

    return build


def _int8(parts: list[StoredTensor], device: torch.device) -> Int8Linear:
    rows = sum(part.rows for part in parts)
    weight = torch.empty((rows, parts[0].columns), dtype=torch.int8, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    for first, block in _row_blocks(parts):
        values = torch.from_numpy(block)
        step = values.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny).div_(INT8_MAX)
        weight[first : first + len(block)].copy_((values / step.unsqueeze(1)).round_())
        scale[first : first + len(block)].copy_(step)
    return Int8Linear(weight, scale)


def _int4(parts: list[StoredTensor], device: torch.device) -> Int4Linear:
    rows, columns, group = sum(part.rows for part in parts), parts[0].columns, parts[0].group
    q = np.empty((rows, columns), dtype=np.uint8)
    scale_zero = torch.empty((columns // group, rows, 2), dtype=torch.bfloat16)
    base = 0
    for part in parts:
        for first, numbers, scale, zero in part.affine4_blocks():
            at = slice(base + first, base + first + len(numbers))
            q[at] = numbers
            scale_zero[:, at, 0] = torch.from_numpy(scale).t()
            scale_zero[:, at, 1] = torch.from_numpy(zero).t()
        base += part.rows
    numbers = torch.from_numpy(q)
    if device.type == "cuda":
        numbers = numbers.to(device)
        packed = aten._convert_weight_to_int4pack(numbers[:, ::2] << 4 | numbers[:, 1::2], CUDA_INNER_K_TILES)
        return Int4Linear(packed, scale_zero.to(device), group)
    return Int4Linear(aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1), scale_zero, group)


def _row_blocks(parts: list[StoredTensor]):
    """(row of the fused matrix, float32 block) over all parts."""
    base = 0
    for part in parts:
        for first, block in part.blocks():
            yield base + first, block
        base += part.rows


_BUILDERS = {"int4": _int4, "int8": _int8, "bf16": _dense(torch.bfloat16), "f32": _dense(torch.float32)}
