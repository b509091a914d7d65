"""Matrices that are multiplied with: the group-affine 4-bit linear, the int8 one, the dense one, and row tables.

In: `StoredTensor`s of a file. Out: callables from activations [rows, in] to [rows, out], in the activations' own dtype.
Built by `load.py`, called by `layers.py` on the engine thread. Rows of a product never depend on one another, but where sums
are floating-point their order may depend on how many rows there are: `rows.py` says which rows must not feel that.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from laya.model.formats.stored import StoredTensor
from laya.model.holding import cuda_tiles
from laya.model.rows import ALL_FREE, Rows, product_apart, product_in_blocks

aten = torch.ops.aten
log = logging.getLogger("laya.model")

INT8_MAX = 127
PLANE = 128  # an activation of 15 bits is PLANE * high + low, each a signed byte
ACTIVATION_MAX = INT8_MAX * PLANE  # the largest magnitude whose high byte stays within INT8_MAX after rounding
DENSE_ROWS = 64  # from here on the 4-bit product loses to unpacking a panel and multiplying in float32 (measured, one thread)
PANEL_WEIGHTS = 1 << 19  # weights unpacked at once: 2 MiB of float32 stay in a core's cache until they are multiplied
PACK_ROWS = 64  # rows that torch's AVX-512 layout of 4-bit weights interleaves
CHECKED_ROWS = 17  # of activations in the check of the packed product: one more than a tile of CUDA's
# Weights, scales and results of 8 bits of bf16 make about 0.004; another layout makes more than 1.
INT4_ERROR = 0.02
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


class Int4Linear:
    """w = (q - 8) * scale + zero in groups of `group` columns; bf16 activations, float32 weights and sums inside the product.

    On a CPU a prefill chunk of many rows is multiplied with panels of the matrix that are unpacked to float32 for the purpose:
    the same numbers in another order, at the speed of a dense product.
    """

    def __init__(self, packed: torch.Tensor, scale_zero: torch.Tensor, group: int) -> None:
        self.packed = packed
        self.scale_zero = scale_zero  # bf16 [in / group, out, 2]
        self.group = group
        self._product = aten._weight_int4pack_mm if packed.is_cuda else aten._weight_int4pack_mm_for_cpu
        out_rows, columns = scale_zero.shape[1], scale_zero.shape[0] * group
        self._dense_rows = DENSE_ROWS if not packed.is_cuda and out_rows % PACK_ROWS == 0 and packs_as_known() else None
        self._panel = max(1, PANEL_WEIGHTS // (columns * PACK_ROWS)) * PACK_ROWS  # rows of the matrix

    def __call__(self, x: torch.Tensor, rows: Rows = ALL_FREE) -> torch.Tensor:
        """The packed product gives a row the same bits in any company, so decodes and short pieces take it together."""
        if self._dense_rows is None:
            return self._packed(x)
        spans = [(0, len(x))] if rows is ALL_FREE else rows.long(self._dense_rows)
        if not spans or len(x) < self._dense_rows:
            return self._packed(x)
        out = torch.empty((x.shape[0], self.scale_zero.shape[1]), dtype=x.dtype)
        done = 0
        for first, last in (*spans, (len(x), len(x))):
            if done < first:
                out[done:first] = self._packed(x[done:first])
            done = last
        self._by_panels([x[first:last].float() for first, last in spans], [out[first:last] for first, last in spans])
        return out

    def float32(self, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        x = x.to(torch.bfloat16)
        return (self._packed(x) if exact else self(x)).float()

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.packed, self.group, self.scale_zero)

    def _by_panels(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Each input is multiplied alone, so that its numbers depend on its own shape only."""
        rows = self.scale_zero.shape[1]
        for first in range(0, rows, self._panel):
            last = min(rows, first + self._panel)
            panel = unpack4(self.packed, self.scale_zero, self.group, first, last)
            for x, out in zip(inputs, outputs, strict=True):
                out[:, first:last] = torch.mm(x, panel)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale_zero.nbytes


def unpack4(packed: torch.Tensor, scale_zero: torch.Tensor, group: int, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) of a matrix in torch's AVX-512 layout, transposed: float32 [in, last - first].

    In the layout blocks of 64 rows follow one another; a block holds, for each column, 32 bytes: rows 0-31 in the low halves,
    rows 32-63 in the high ones. `first` and `last` are multiples of 64.
    """
    groups, blocks = scale_zero.shape[0], (last - first) // PACK_ROWS
    half = PACK_ROWS // 2
    bytes_ = packed.view(-1, groups, group, half)[first // PACK_ROWS : last // PACK_ROWS].permute(1, 2, 0, 3)
    panel = torch.empty((groups, group, blocks, 2, half), dtype=torch.float32)
    panel[..., 0, :] = bytes_ & 15
    panel[..., 1, :] = bytes_ >> 4
    pair = scale_zero[:, first:last].float().view(groups, 1, blocks, 2, half, 2)
    scale, zero = pair.unbind(-1)
    torch.addcmul(zero - scale * 8, panel, scale, out=panel)
    return panel.view(groups * group, last - first)


@functools.cache
def packs_as_known() -> bool:
    """Whether torch packs 4-bit weights on this processor as `unpack4` reads them: tried with a small matrix."""
    q = torch.arange(2 * PACK_ROWS * 32, dtype=torch.int32).view(2 * PACK_ROWS, 32) * 2654435 % 61 % 16
    scale_zero = torch.tensor([1.0, 8.0], dtype=torch.bfloat16).expand(1, 2 * PACK_ROWS, 2)
    packed = aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return torch.equal(unpack4(packed, scale_zero, 32, 0, 2 * PACK_ROWS), q.t().float())


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


def _int4(parts: list[StoredTensor], device: torch.device) -> Int4Linear | DenseLinear:
    rows, columns, group = sum(part.rows for part in parts), parts[0].columns, parts[0].group
    if not int4_product_holds(device.type, columns, group):
        return _dense(torch.bfloat16)(parts, device)
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
    return _packed_on(device, torch.from_numpy(q), scale_zero, group)


def _packed_on(device: torch.device, numbers: torch.Tensor, scale_zero: torch.Tensor, group: int) -> Int4Linear:
    """uint8 [rows, columns] below 16 and bf16 [columns / group, rows, 2] in the device's form."""
    if device.type == "cuda":
        return Int4Linear(cuda_packed(numbers.to(device)), scale_zero.to(device), group)
    return Int4Linear(aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1), scale_zero, group)


@functools.cache
def int4_product_holds(device: str, columns: int, group: int) -> bool:
    """Whether the device's packed product gives what the same numbers give dequantised: tried once for a shape, with a small
    matrix. A layout that this package and torch read differently would give wrong text and no error; weights are bf16 then.
    """
    made = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (PACK_ROWS, columns), generator=made, dtype=torch.uint8)
    scale_zero = torch.randn((columns // group, PACK_ROWS, 2), generator=made).bfloat16()
    x = torch.randn((CHECKED_ROWS, columns), generator=made).bfloat16()
    scale, zero = scale_zero.float().repeat_interleave(group, 0).unbind(-1)
    expected = x.float() @ ((numbers.t().float() - 8) * scale + zero)
    try:
        got = _packed_on(torch.device(device), numbers, scale_zero, group)(x.to(device)).float().cpu()
        error = ((got - expected).norm() / expected.norm()).item()
    except (RuntimeError, NotImplementedError) as failure:
        log.warning("4-bit products on %s fail (%s): weights are held in bf16", device, failure)
        return False
    if error < INT4_ERROR:  # not a number is no good either
        return True
    log.warning("4-bit products on %s are wrong (relative error %.2g): weights are held in bf16", device, error)
    return False


def cuda_packed(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns] below 16 in CUDA's layout, two numbers a byte."""
    return aten._convert_weight_to_int4pack(numbers[:, ::2] << 4 | numbers[:, 1::2], cuda_tiles(numbers.shape[1]))


def _row_blocks(parts: list[StoredTensor]):
    """(row of the fused matrix, float32 block) over all parts."""
    base = 0
    for part in parts:
        for first, block in part.blocks():
            yield base + first, block
        base += part.rows


_BUILDERS = {"int4": _int4, "int8": _int8, "bf16": _dense(torch.bfloat16), "f32": _dense(torch.float32)}
