"""The whole decoder as one call of a compiled step (`native/`), on processors and for models that it fits.

In: a `BatchPlan`'s rows. Out: the residual stream and logits, as `EagerForward` gives them. The extension is optional: where it
was not built, the processor lacks AVX-512 with VNNI, or the weights stand in another form, `compiled_forward` says so and
torch's own operations run. Engine thread only; the interpreter is free while a step is computed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from ctypes import c_double, c_int32, c_int64, c_void_p

import numpy as np
import torch

from laya.model.batch_plan import BatchPlan
from laya.model.holding import cpu_flags
from laya.model.int4 import Int4Linear, packs_as_known
from laya.model.kv_cache import KVCache
from laya.model.layers import Decoder, Layer, norm_weight
from laya.model.quant import Int8Linear, Linear, StackedLinear

log = logging.getLogger("laya.model")

NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma"})
EXTENSION = "laya.model.native_step"
BLOCK_ROWS, LANES, MAX_PARTS, MAX_HEAD, SUM_COLUMNS = 64, 16, 3, 256, 32  # as in native/
SUMMED_ROWS = 1024  # of an 8-bit matrix at once: some MiB
ALIGNMENT = 64  # bytes; scratch begins at a cache line
SPENT = ("products", "attention", "rest")


class _Part(ctypes.Structure):
    _fields_ = [
        ("bits", c_int32), ("rows", c_int32), ("group", c_int32), ("pad", c_int32), ("weights", c_void_p),
        ("scales", c_void_p), ("sums", c_void_p),
    ]  # fmt: skip


class _Linear(ctypes.Structure):
    _fields_ = [
        ("rows", c_int32), ("columns", c_int32), ("parts", c_int32), ("pad", c_int32), ("part", _Part * MAX_PARTS)
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "qk_norm", "qkv_bias", "rotary", "pool",
        )),
        ("window", c_int64), ("qkv", _Linear), ("o", _Linear), ("gate_up", _Linear), ("down", _Linear),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in (
            "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "block_size", "gelu",
        )),
        ("eps", c_double), ("scale", c_double), ("layer", c_void_p), ("final_norm", c_void_p), ("head", _Linear),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64), ("stream_stride", c_int64), ("apart", c_int64), ("threads", c_int64),
        *((name, c_void_p) for name in ("stream", "positions", "slots", "tables", "table_of", "scratch", "spent")),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The extension's functions, None where it was not built or cannot be loaded. They let go of the interpreter."""
    found = importlib.util.find_spec(EXTENSION)
    if found is None or not NEEDED <= cpu_flags():
        return None
    try:
        functions = ctypes.CDLL(found.origin)  # its OpenMP is torch's, which is loaded for all to see
    except OSError as error:
        log.info("the compiled step cannot be loaded: %s", error)
        return None
    functions.laya_scratch_bytes.restype = c_int64
    functions.laya_scratch_bytes.argtypes = [c_void_p, c_int64, c_int64]
    functions.laya_step.argtypes = [c_void_p, c_void_p]
    functions.laya_logits.argtypes = [c_void_p, c_void_p, c_void_p]
    functions.laya_step.restype = functions.laya_logits.restype = None
    return functions


def why_not(decoder: Decoder, cache: KVCache) -> str | None:
    """Why a model runs without the compiled step; None if it can."""
    spec = decoder.spec
    if cache.pool.device.type != "cpu":
        return "it is for processors"
    if not NEEDED <= cpu_flags():
        return "the processor lacks AVX-512 with VNNI"
    if library() is None:
        return "the extension was not built (it needs a C compiler when Laya is installed)"
    if cache.pool.dtype != torch.bfloat16:
        return "keys and values are not held in bf16"
    if cache.block_size % LANES or spec.head_dim % LANES or spec.head_dim > MAX_HEAD or spec.intermediate % BLOCK_ROWS:
        return "its shapes do not divide into vectors"
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            if not _fits(linear):
                return "a matrix is held in a form that it lacks"
    return None


def _fits(linear: Linear) -> bool:
    parts = linear.parts if isinstance(linear, StackedLinear) else [linear]
    return len(parts) <= MAX_PARTS and all(_part_fits(part) for part in parts)


def _part_fits(part: Linear) -> bool:
    if isinstance(part, Int4Linear):
        return packs_as_known() and part.scale_zero.shape[1] % BLOCK_ROWS == 0 and part.group % SUM_COLUMNS == 0
    return isinstance(part, Int8Linear) and part.weight.shape[0] % BLOCK_ROWS == 0 and part.weight.shape[1] % LANES == 0


class CompiledForward:
    """Runs plans by the compiled step. `why_not(decoder, cache)` must be None."""

    kind = "compiled"
    rows_are_exact = True  # its sums have one order

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._threads = torch.get_num_threads()
        self._kept: list[torch.Tensor] = []  # what the structures point to besides the decoder's own
        self._layers = (_Layer * len(decoder.layers))(*map(self._layer, decoder.layers, cache.layers))
        spec = decoder.spec
        self._model = _Model(
            layers=len(decoder.layers), hidden=spec.hidden, intermediate=spec.intermediate, heads=spec.heads,
            kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_size=cache.block_size, gelu=spec.activation == "gelu_tanh",
            eps=spec.rms_eps, scale=decoder.heads.scale, layer=ctypes.addressof(self._layers),
            final_norm=self._pointer(decoder.final_norm),
        )  # fmt: skip
        self._has_head = isinstance(decoder.head, Int8Linear)
        if self._has_head:
            self._model.head = self._linear(decoder.head)
        self._functions = library()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._rows = 0  # that the scratch holds
        self._numbers = np.empty((4, 0), dtype=np.int32)  # positions, slots, table_of of each row, and tables
        self.spent: np.ndarray | None = None  # int64 nanoseconds by SPENT, where somebody measures

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> torch.Tensor:
        """The residual stream after the last layer, float32 [rows, hidden + tail], as `Decoder.logits` takes it."""
        decoder, rows = self._decoder, len(plan.token_ids)
        stream = decoder.stream(torch.tensor(plan.token_ids))
        positions, slots, table_of, tables = self._buffers(rows, sum(len(table) for table, _ in plan.tables))
        positions[:rows] = plan.positions
        slots[:rows] = plan.slots
        row = at = 0
        for table, count in plan.tables:
            tables[at : at + len(table)] = table
            table_of[row : row + count] = at
            row, at = row + count, at + len(table)
        step = self._step(stream.wide, rows)
        step.apart = len(plan.tables) == rows
        step.positions, step.slots = positions.ctypes.data, slots.ctypes.data
        step.table_of, step.tables = table_of.ctypes.data, tables.ctypes.data
        self._model.layers = len(decoder.layers)
        self._functions.laya_step(ctypes.byref(self._model), ctypes.byref(step))
        return stream.wide

    @torch.inference_mode()
    def logits(self, wide: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Rows of what `run` gave -> float32 [rows, vocab]."""
        if not self._has_head:
            return self._decoder.logits(wide, exact)
        logits = torch.empty((len(wide), self._model.head.rows), dtype=torch.float32)
        step = self._step(wide.contiguous(), len(wide))
        self._functions.laya_logits(ctypes.byref(self._model), ctypes.byref(step), logits.data_ptr())
        return logits

    def _step(self, stream: torch.Tensor, rows: int) -> _Step:
        if rows > self._rows:
            size = self._functions.laya_scratch_bytes(ctypes.byref(self._model), rows, self._threads)
            self._scratch = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
            self._rows = rows
        scratch = -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        spent = None if self.spent is None else self.spent.ctypes.data
        return _Step(
            rows=rows, stream_stride=stream.shape[1], threads=self._threads, stream=stream.data_ptr(), scratch=scratch,
            spent=spent,
        )  # fmt: skip

    def _buffers(self, rows: int, entries: int) -> np.ndarray:
        """Prepared index buffers, kept between steps and doubled when they are too small."""
        if max(rows, entries) > self._numbers.shape[1]:
            self._numbers = np.empty((4, 2 * max(rows, entries)), dtype=np.int32)
        return self._numbers

    def _layer(self, layer: Layer, pool: torch.Tensor) -> _Layer:
        rope, window = layer.kind
        bias = layer.qkv_bias
        return _Layer(
            attn_norm=self._pointer(layer.attn_norm), mlp_norm=self._pointer(layer.mlp_norm),
            post_attn_norm=self._pointer(_stream_norm(layer.post_attn_norm)),
            post_mlp_norm=self._pointer(_stream_norm(layer.post_mlp_norm)), qk_norm=self._pointer(layer.qk_norm),
            qkv_bias=self._pointer(None if bias is None else bias.float()),
            rotary=self._pointer(self._decoder.rope_tables[rope]), pool=pool.data_ptr(), window=window or 0,
            qkv=self._linear(layer.qkv), o=self._linear(layer.o), gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
        )  # fmt: skip

    def _linear(self, linear: Linear) -> _Linear:
        parts = linear.parts if isinstance(linear, StackedLinear) else [linear]
        made = _Linear(parts=len(parts), part=(_Part * MAX_PARTS)(*map(self._part, parts)))
        made.rows = sum(part.rows for part in made.part)
        made.columns = _columns(parts[0])
        return made

    def _part(self, part: Linear) -> _Part:
        if isinstance(part, Int4Linear):
            rows = part.scale_zero.shape[1]
            scales = part.scale_zero.data_ptr()
            return _Part(bits=4, rows=rows, group=part.group, weights=part.packed.data_ptr(), scales=scales)
        # Some rows at a time: torch makes int32 numbers of all that it adds up, four times the matrix.
        sums = torch.cat([rows.sum(dim=1, dtype=torch.int32) for rows in part.weight.split(SUMMED_ROWS)])
        weights, scales = part.weight.data_ptr(), part.scale.data_ptr()
        return _Part(bits=8, rows=len(sums), weights=weights, scales=scales, sums=self._pointer(sums))

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()


def _columns(part: Linear) -> int:
    return part.scale_zero.shape[0] * part.group if isinstance(part, Int4Linear) else part.weight.shape[1]


def _stream_norm(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else norm_weight(weight)
