"""A CUDA card made of host memory: tensors that say they are on it, what torch refuses there, and its two 4-bit operations.

`Card()` is a context. Within it `device="cuda"` gives tensors of the host that call themselves CUDA's; an operation over tensors
of both places raises, as torch would. The packed 4-bit operations are written down here from their CUDA sources
(aten/src/ATen/native/cuda/int4mm.cu of torch 2.x: `_convert_weight_to_int4pack_cuda`, `_weight_int4pack_mm_cuda`, the kernels
they start, and what they check of their arguments), so numbers come out as the layouts' meaning has them. What it cannot tell:
speed, memory, and whether the kernels do what their sources say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda")
TILE_ROWS, TILE_COLUMNS, LANES = 8, 16, 32  # of a weight in m16n8k16, and threads of a warp
GRID = 65535  # blocks of a launch in its second and third direction
aten = torch.ops.aten


def need(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"int4mm.cu: {what}")


def check_packing(pairs: torch.Tensor, tiles: int) -> None:
    """What `_convert_weight_to_int4pack_cuda` asks for, and that its launch is possible."""
    need(pairs.dim() == 2 and pairs.dtype == torch.uint8 and pairs.is_contiguous(), "weights are contiguous uint8 [n][k / 2]")
    need(tiles in (2, 4, 8), f"innerKTiles {tiles}")
    need(pairs.shape[1] * 2 % (tiles * TILE_COLUMNS) == 0, f"{pairs.shape[1] * 2} columns are no multiple of {tiles} tiles")
    need(pairs.shape[0] % TILE_ROWS == 0, "rows are whole tiles: torch's shape of the result cuts what is left over")
    need(pairs.shape[0] // TILE_ROWS <= GRID and pairs.numel() < 2**31, "the matrix is too large for one launch")


def check_product(x: torch.Tensor, packed: torch.Tensor, group: int, scale_zero: torch.Tensor) -> None:
    """What `_weight_int4pack_mm_cuda` asks for."""
    columns, tiles = x.shape[1], packed.shape[3] * 2
    need(x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous(), "activations are contiguous bf16 [m][k]")
    need(packed.dim() == 4 and packed.dtype == torch.int32 and packed.is_contiguous(), "weights are contiguous int32")
    need(tiles in (2, 4, 8) and packed.shape[2] == LANES, "weights are [n / 8][k / (innerKTiles * 16)][32][innerKTiles / 2]")
    need(columns % TILE_COLUMNS == 0 and packed.shape[1] == columns // (tiles * TILE_COLUMNS), "columns are those of x")
    need(columns // TILE_COLUMNS >= tiles and columns // TILE_COLUMNS % tiles == 0, "whole runs of tiles")
    need(group in (32, 64, 128, 256) and columns >= group and columns % group == 0, f"groups of {group}")
    need(scale_zero.dim() == 3 and scale_zero.shape[1:] == (packed.shape[0] * TILE_ROWS, 2), "scales are [k / group][n][2]")
    # Not checked there, but read so: the kernel takes bf16 pairs from where they would lie in a whole tensor.
    need(scale_zero.dtype == torch.bfloat16 and scale_zero.is_contiguous(), "scales are contiguous bf16")
    need(scale_zero.shape[0] == columns // group, "a pair for each group")
    need(-(-x.shape[0] // TILE_COLUMNS) <= GRID and packed.shape[0] <= GRID, "the product is too large for one launch")


def pack(pairs: torch.Tensor, tiles: int) -> torch.Tensor:
    """uint8 [n, k / 2], the even column in the high half, as `matrix_to_m16n8k16_Bint4_layout` writes it.

    A lane of the warp has row lane / 4 of its tile. Its word holds four bytes of two neighbouring tiles: bytes lane % 4 and
    lane % 4 + 4 of each; their high halves in the low 16 bits, their low ones in the high 16.
    """
    check_packing(pairs, tiles)
    rows, width = pairs.shape
    runs = width * 2 // (tiles * TILE_COLUMNS)
    at = pairs.view(rows // TILE_ROWS, TILE_ROWS, runs, tiles // 2, 4, 4).permute(0, 2, 1, 5, 3, 4).long()
    shift = torch.arange(4) * 4
    words = ((at >> 4) << shift).sum(-1) | ((at & 15) << (shift + 16)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return words.reshape(rows // TILE_ROWS, runs, LANES, tiles // 2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The numbers [n, k] as the product's warp sees them: bits 4 i and 16 + 4 i of a word are neighbours, and mma.m16n8k16 has
    of its second operand in lane l columns (l % 4) * 2, then + 1, then the same 8 further, of row l / 4.
    """
    tiles_down, runs, _, words = packed.shape
    numbers = torch.full((tiles_down * TILE_ROWS, runs * words * 2 * TILE_COLUMNS), -1, dtype=torch.int64)
    for lane in range(LANES):
        for word in range(words):
            for place in range(4):  # register of the word: two of each tile
                column = (word * 2 + place // 2) * TILE_COLUMNS + place % 2 * 8 + lane % 4 * 2
                for odd in (0, 1):
                    nibbles = packed[:, :, lane, word].long() >> (16 * odd + 4 * place) & 15
                    numbers[lane // 4 :: TILE_ROWS, column + odd :: words * 2 * TILE_COLUMNS] = nibbles
    return numbers


def product(x: torch.Tensor, packed: torch.Tensor, group: int, scale_zero: torch.Tensor) -> torch.Tensor:
    """Each weight is one bf16 `fma` of its number less 8, its group's scale and zero; sums are float32, the result bf16."""
    check_product(x, packed, group, scale_zero)
    return (x.float() @ _weights(packed, group, scale_zero)).bfloat16()


@functools.lru_cache(maxsize=64)  # by identity: a model's matrices are unpacked once
def _weights(packed: torch.Tensor, group: int, scale_zero: torch.Tensor) -> torch.Tensor:
    scale, zero = scale_zero.double().repeat_interleave(group, 0).unbind(-1)
    return ((unpack(packed).t() - 8) * scale + zero).bfloat16().float()


class OnCard(torch.Tensor):
    """Memory of the host that a `Card` takes for its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl


Operation = Callable[..., torch.Tensor]


class Card(TorchFunctionMode):
    """`pack` and `product` stand for the device's operations: a test plants its faults there. Used in one thread."""

    def __init__(self, pack: Operation = pack, product: Operation = product) -> None:
        super().__init__()
        self.products = 0

        def counted(*arguments: Any) -> torch.Tensor:
            self.products += 1
            return product(*arguments)

        self._own = {aten._convert_weight_to_int4pack: pack, aten._weight_int4pack_mm: counted}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        here = any(isinstance(t, OnCard) for t in tensors)
        if func in _PLACES:
            return _PLACES[func](isinstance(args[0], OnCard)) if here else func(*args)
        name = getattr(func, "__name__", str(func))
        named, args, kwargs = _device_named(name, args, kwargs)
        if named is None:
            _insist_on_one_place(name, args, tensors)
        target = here if named is None else named == "cuda"
        kind = OnCard if target else torch.Tensor

        def placed(value: Any) -> Any:
            return value.as_subclass(kind) if isinstance(value, torch.Tensor) and type(value) is not kind else value

        return tree_map(placed, self._own.get(func, func)(*args, **kwargs))


_PLACES = {
    torch.Tensor.device.__get__: lambda on: CUDA if on else torch.device("cpu"),
    torch.Tensor.is_cuda.__get__: lambda on: on,
}  # fmt: skip
_FOR_CPU = ("_for_cpu", "_weight_int8pack_mm")


def _device_named(name: str, args: tuple, kwargs: dict) -> tuple[str | None, tuple, dict]:
    """The device that a call asks for, if any, and the call without it."""
    named = None
    pinned = kwargs.pop("pin_memory", False)
    if "device" in kwargs:
        named = torch.device(kwargs.pop("device")).type
    elif name == "cpu":
        return "cpu", args, kwargs
    elif name == "to":
        places = [a for a in args[1:] if isinstance(a, str | torch.device)]
        if places:
            named = torch.device(places[0]).type
            args = tuple(a for a in args if not isinstance(a, str | torch.device))
            if len(args) == 1 and not kwargs:  # nothing else is asked for: a copy, as it would be
                kwargs = {"dtype": args[0].dtype, "copy": named == "cuda" or isinstance(args[0], OnCard)}
    need(not (pinned and named == "cuda"), "only memory of the host can be pinned")
    return named, args, kwargs


def _insist_on_one_place(name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    """As torch: numbers without dimensions may come from the host, indices too, and `copy_` goes anywhere."""
    here = [t for t in tensors if isinstance(t, OnCard)]
    if not here:
        return
    if name == "numpy" or any(mark in name for mark in _FOR_CPU):
        raise TypeError(f"{name} of a CUDA tensor")
    elsewhere = [t for t in tensors if not isinstance(t, OnCard) and t.dim() > 0]
    indexing = name in ("__getitem__", "__setitem__", "index_put_") and isinstance(args[0], OnCard)
    if indexing:
        advanced = any(isinstance(i, torch.Tensor | list) for i in (args[1] if isinstance(args[1], tuple) else (args[1],)))
        value = args[2] if len(args) > 2 else None
        elsewhere = [value] if advanced and isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, OnCard) else []
    if elsewhere and name != "copy_":
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, cuda:0 and cpu")
