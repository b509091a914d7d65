"""Matrices that are multiplied with: the int8 linear, the dense one, row tables, and what builds them (int4.py has 4 bits).

In: `StoredTensor`s of a file. Out: callables from activations [rows, in] to [rows, out], in the activations' own dtype.
Built by `load.py`, called by `layers.py` on the engine thread. Rows of a product never depend on one another, but where sums
are floating-point their order may depend on how many rows there are: `rows.py` says which rows must not feel that.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from laya.model.formats.stored import StoredTensor
from laya.model.int4 import build_int4
from laya.model.rows import ALL_FREE, Rows, product_apart, product_in_blocks

aten = torch.ops.aten

INT8_MAX = 127
PLANE = 128  # an activation of 15 bits is PLANE * high + low, each a signed byte
ACTIVATION_MAX = INT8_MAX * PLANE  # the largest magnitude whose high byte stays within INT8_MAX after rounding
INT8_ROWS = 128  # activations multiplied at once: sums in two planes and float32 take 12 bytes a result beside it
HEAD_TILE_BYTES = 1 << 20  # of int8 rows that both planes of a lone row are multiplied with while they are in cache


class Linear(Protocol):
    """A matrix [out, in] held in some form."""

    def __call__(self, x: torch.Tensor, rows: Rows = ALL_FREE) -> torch.Tensor:
        """[rows, in] -> [rows, out], same dtype as x."""

    def float32(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """The same with the result in float32, as precise as the form allows (for logits). `exact`: each row's numbers must be
        the same to the bit whatever rows stand beside it.
        """

    @property
    def nbytes(self) -> int: ...


class DenseLinear:
    """weight [out, in] in bf16 or float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, rows: Rows = ALL_FREE) -> torch.Tensor:
        given = x.to(self.weight.dtype)
        return (product_apart(given, rows, self._product) if rows.exact else self._product(given)).to(x.dtype)

    def float32(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        given = x.to(self.weight.dtype)
        return (product_in_blocks(given, self._product) if exact else self._product(given)).float()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 rows [n, in] of a table."""
        return self.weight[ids].float()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class Int8Linear:
    """w = q * scale per row. Activations become 15-bit integers per row, multiplied as two planes of signed bytes.

    The integer product is exact and runs on VNNI; processors without it take torch's int8 product on float32 activations.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight = weight  # int8 [out, in]
        self.scale = scale  # float32 [out]
        self._columns = weight.t()
        self._tiles = [tile.t() for tile in weight.split(max(1, HEAD_TILE_BYTES // weight.shape[1]))]
        self._integers = has_vnni()

    def __call__(self, x: torch.Tensor, rows: Rows = ALL_FREE) -> torch.Tensor:
        if len(x) <= INT8_ROWS:
            return self.float32(x).to(x.dtype)
        out = torch.empty((len(x), len(self.scale)), dtype=x.dtype, device=x.device)
        for given, part in zip(x.split(INT8_ROWS), out.split(INT8_ROWS), strict=True):
            part.copy_(self.float32(given))
        return out

    def float32(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        x = x.float()
        if not self._integers:
            return aten._weight_int8pack_mm(x, self.weight, self.scale)
        rows = x.shape[0]
        planes, step = two_planes(x)
        # |sum| <= 127 * 127 * in: int32 holds it up to 133,000 columns.
        sums = self._one_row(planes) if rows == 1 else torch._int_mm(planes, self._columns)
        high, low = sums.split(rows)
        out = high.float().mul_(PLANE).add_(low)
        return out.mul_(self.scale).mul_(step)

    def _one_row(self, planes: torch.Tensor) -> torch.Tensor:
        """Both planes of a lone row, int32 [2, out]: torch's vector product twice a tile is faster than two rows once."""
        sums = torch.empty((2, self.weight.shape[0]), dtype=torch.int32)
        first = 0
        for tile in self._tiles:
            last = first + tile.shape[1]
            for plane in (0, 1):
                torch._int_mm(planes[plane : plane + 1], tile, out=sums[plane : plane + 1, first:last])
            first = last
        return sums

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

    def __call__(self, x: torch.Tensor, rows: Rows = ALL_FREE) -> torch.Tensor:
        return torch.cat([part(x, rows) for part in self.parts], dim=-1)

    def float32(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        return torch.cat([part.float32(x, exact) for part in self.parts], dim=-1)

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


def _row_blocks(parts: list[StoredTensor]):
    """(row of the fused matrix, float32 block) over all parts."""
    base = 0
    for part in parts:
        for first, block in part.blocks():
            yield base + first, block
        base += part.rows


_BUILDERS = {"int4": build_int4, "int8": _int8, "bf16": _dense(torch.bfloat16), "f32": _dense(torch.float32)}
