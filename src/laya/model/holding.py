"""How each tensor is held in memory, and how many bytes that takes: one answer for the memory plan and for the loader.

In: a tensor's type in the file, its shape, the device, the dtype setting, and whether the device's 4-bit product holds. Out:
int4 | int8 | bf16 | f32. No torch here.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

from laya.errors import ConfigError
from laya.model.formats.stored import EIGHT_BIT, FOUR_BIT, Checkpoint, StoredTensor

DTYPES = ("auto", "quantized", "bfloat16", "float32")
INT4_ROW_MULTIPLE = 16  # the packed product works on whole vectors of rows
# CUDA's packed 4-bit weights interleave so many tiles of 16 columns, the widest loads first; the columns must be whole tiles.
CUDA_TILES = (8, 4, 2)
CUDA_TILE_COLUMNS = 16
CUDA_GROUPS = (32, 64, 128, 256)  # columns that may share a scale in CUDA's product
SCALE_BYTES = 4  # int4: bf16 scale and bf16 zero a group; int8: one float32 a row

Holds = Callable[[str, int, int], bool]  # (device, columns, group) -> whether the packed 4-bit product of that shape is right


def assumed(device: str, columns: int, group: int) -> bool:
    """For a plan without the device at hand: that its product holds."""
    return True


def resolve_dtype(checkpoint: Checkpoint, device: str, dtype: str | None) -> str:
    """quantized | bfloat16 | float32. `auto` keeps what is quantised quantised and everything else in bf16."""
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    if dtype not in (None, "auto"):
        return dtype
    quantised = any(tensor.kind in FOUR_BIT or tensor.kind in EIGHT_BIT for tensor in checkpoint.tensors.values())
    return "quantized" if quantised else dense_dtype(device)


def dense_dtype(device: str) -> str:
    """What unquantised matrices are multiplied in: bf16, or float32 on processors whose bf16 product is emulated."""
    return "bfloat16" if device == "cuda" or "avx512f" in cpu_flags() or not cpu_flags() else "float32"


def held_as(name: str, tensor: StoredTensor, device: str, dtype: str, holds: Holds) -> str:
    """`name` is this package's own; `dtype` a result of `resolve_dtype`. 4-bit weights whose product does not hold are dense:
    who plans with `assumed` and loads with what was tried may need more than planned.
    """
    if len(tensor.shape) == 1 or dtype == "float32":
        return "f32"
    if dtype == "bfloat16":
        return "bf16"
    dense = "bf16" if dense_dtype(device) == "bfloat16" else "f32"
    looked_up = name in ("embed", "head")  # rows are read one by one (and decide the token): int8, not packed 4 bits
    if tensor.kind in FOUR_BIT and not looked_up:
        packs = _packs(tensor, device) and has_int4_product(device) and holds(device, tensor.columns, tensor.group)
        return "int4" if packs else dense
    if tensor.kind in EIGHT_BIT or tensor.kind in FOUR_BIT:
        return "int8" if device == "cpu" else dense
    return dense


def _packs(tensor: StoredTensor, device: str) -> bool:
    """Whether the packed layout of the device takes this shape."""
    fits = tensor.rows % INT4_ROW_MULTIPLE == 0 and tensor.columns % tensor.group == 0
    return fits and (device != "cuda" or (cuda_tiles(tensor.columns) is not None and tensor.group in CUDA_GROUPS))


def cuda_tiles(columns: int) -> int | None:
    """The widest interleaving that divides the columns, None where even the narrowest does not."""
    return next((tiles for tiles in CUDA_TILES if columns % (tiles * CUDA_TILE_COLUMNS) == 0), None)


def held_bytes(tensor: StoredTensor, held: str) -> int:
    size = tensor.rows * tensor.columns
    if held == "int4":
        return size // 2 + size // tensor.group * SCALE_BYTES
    if held == "int8":
        return size + tensor.rows * SCALE_BYTES
    return size * (2 if held == "bf16" else 4)


def has_int4_product(device: str) -> bool:
    """CUDA devices are tried (8.0 or later have it); processors need AVX2 or AVX-512."""
    return device == "cuda" or bool(cpu_flags() & {"avx2", "avx512f"})


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature names as Linux tells them; empty where it does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        return frozenset()
    return frozenset()
