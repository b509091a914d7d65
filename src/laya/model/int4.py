"""The group-affine 4-bit linear: w = (q - 8) * scale + zero, packed and multiplied as each device's own operations want it.

In: `StoredTensor`s of 4-bit types. Out: an `Int4Linear` from bf16 activations [rows, in] to [rows, out]. What differs between
devices stands in one `Int4Layout` each. Whether a device's product is right is tried before anything is planned or loaded
(`product_holds`). Built by `quant.py`, called by `layers.py` on the engine thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from laya.model.formats.stored import StoredTensor
from laya.model.holding import cuda_tiles
from laya.model.rows import ALL_FREE, Rows

aten = torch.ops.aten
log = logging.getLogger("laya.model")

DENSE_ROWS = 64  # from here on the 4-bit product loses to unpacking a panel and multiplying in float32 (measured, one thread)
PANEL_WEIGHTS = 1 << 19  # weights unpacked at once: 2 MiB of float32 stay in a core's cache until they are multiplied
PACK_ROWS = 64  # rows that torch's AVX-512 layout of 4-bit weights interleaves
CHECKED_ROWS = 17  # of activations in the check of the packed product: one more than a tile of CUDA's
# Weights, scales and results of 8 bits of bf16 make about 0.004; another layout makes more than 1.
INT4_ERROR = 0.02
CUDA_CAPABILITY = (8, 0)  # devices before it lack the packed product


class Int4Layout(NamedTuple):
    """How a device holds 4-bit numbers and multiplies with them."""

    pack: Callable[[torch.Tensor, torch.device], torch.Tensor]  # uint8 [rows, columns] below 16 on the host -> on the device
    product: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor]  # (x, packed, group, scale_zero)
    panels: Callable[[], bool]  # whether `unpack4` reads what `pack` gives


class Int4Linear:
    """w = (q - 8) * scale + zero in groups of `group` columns; bf16 activations, float32 sums inside the product. Weights are
    float32 there on a CPU, on CUDA each is rounded to bf16 once.

    On a CPU a prefill chunk of many rows is multiplied with panels of the matrix that are unpacked to float32 for the purpose:
    the same numbers in another order, at the speed of a dense product.
    """

    def __init__(self, packed: torch.Tensor, scale_zero: torch.Tensor, group: int, layout: Int4Layout) -> None:
        self.packed = packed
        self.scale_zero = scale_zero  # bf16 [in / group, out, 2]
        self.group = group
        self._product = layout.product
        out_rows, columns = scale_zero.shape[1], scale_zero.shape[0] * group
        self._dense_rows = DENSE_ROWS if out_rows % PACK_ROWS == 0 and layout.panels() else None
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


def _pack_for_cpu(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    return aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)


def _pack_for_cuda(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Two numbers a byte, put together on the host: what is on its way takes half of a byte each on the device."""
    pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
    return aten._convert_weight_to_int4pack(pairs.to(device), cuda_tiles(numbers.shape[1]))


LAYOUTS = {
    "cpu": Int4Layout(_pack_for_cpu, aten._weight_int4pack_mm_for_cpu, packs_as_known),
    "cuda": Int4Layout(_pack_for_cuda, aten._weight_int4pack_mm, lambda: False),
}


def build_int4(parts: list[StoredTensor], device: torch.device) -> Int4Linear:
    """One linear over the rows of all parts, which have their columns and groups in common."""
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
    return _packed_on(device, LAYOUTS[device.type], torch.from_numpy(q), scale_zero, group)


def _packed_on(
    device: torch.device, layout: Int4Layout, numbers: torch.Tensor, scale_zero: torch.Tensor, group: int
) -> Int4Linear:  # fmt: skip
    return Int4Linear(layout.pack(numbers, device), scale_zero.to(device), group, layout)


@functools.cache
def product_holds(device: str, columns: int, group: int) -> bool:
    """Whether the device's packed product gives what the same numbers give dequantised: tried once for a shape, with a small
    matrix, before weights of that shape are planned and loaded. A layout that this package and torch read differently would
    give wrong text and no error; such weights are held dequantised.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < CUDA_CAPABILITY:
        log.warning("CUDA devices before %d.%d lack the 4-bit product: weights are held in bf16", *CUDA_CAPABILITY)
        return False
    try:
        error = product_error(torch.device(device), LAYOUTS[device], columns, group)
    except (RuntimeError, NotImplementedError) as failure:
        log.warning("4-bit products on %s fail (%s): weights are held dequantised", device, failure)
        return False
    if error < INT4_ERROR:  # not a number is no good either
        return True
    log.warning("4-bit products on %s are wrong (relative error %.2g): weights are held dequantised", device, error)
    return False


@torch.inference_mode()
def product_error(device: torch.device, layout: Int4Layout, columns: int, group: int) -> float:
    """How far a product of small random numbers is from the same ones dequantised, relative. Raises what the device raises."""
    made = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (PACK_ROWS, columns), generator=made, dtype=torch.uint8)
    scale_zero = torch.randn((columns // group, PACK_ROWS, 2), generator=made).bfloat16()
    x = torch.randn((CHECKED_ROWS, columns), generator=made).bfloat16()
    scale, zero = scale_zero.float().repeat_interleave(group, 0).unbind(-1)
    expected = x.float() @ ((numbers.t().float() - 8) * scale + zero)
    got = _packed_on(device, layout, numbers, scale_zero, group)(x.to(device)).float().cpu()
    return ((got - expected).norm() / expected.norm()).item()
