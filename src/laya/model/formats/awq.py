"""AWQ: 4-bit matrices in safetensors, as AutoAWQ writes them for its "gemm" product. No torch here.

In: `quantization_config` of config.json and three mapped tensors a matrix. Out: `AwqTensor`, read like any other stored tensor.
Each matrix [out, in] lies transposed: `qweight` [in, out / 8] words of eight 4-bit numbers, `qzeros` [in / group, out / 8]
packed alike, `scales` [in / group, out]. A weight is (q - zero) * scale, hence (q - 8) * scale + (8 - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from laya.model.formats.stored import ROWS_AT_ONCE, StoredTensor, forget_pages
from laya.model.spec import BrokenModel, UnsupportedModel

GROUPS = (32, 64, 128, 256)  # numbers that share a scale; torch's packed 4-bit product knows these
PACKED = 8  # numbers in a word
# Output column 8 * w + c lies in word w from bit 4 * _PLACE[c] on: columns are packed in the order 0, 2, 4, 6, 1, 3, 5, 7.
_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])

PARTS = ("qweight", "qzeros", "scales")


def group_size(path: str, config: Mapping[str, Any]) -> int:
    """The group of a `quantization_config` whose method is awq. Raises UnsupportedModel for another form of it."""
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", "gemm")).lower()
    known = f"known: 4 bits, version gemm, zero points, groups of {', '.join(map(str, GROUPS))}"
    if bits != 4 or group not in GROUPS:
        raise UnsupportedModel(f"{path}: AWQ with {bits} bits in groups of {group} is not supported; {known}")
    if version != "gemm" or not config.get("zero_point", True):
        form = "without zero points" if version == "gemm" else f"of version {version!r}"
        raise UnsupportedModel(f"{path}: AWQ {form} is not supported; {known}")
    return int(group)


class AwqTensor(StoredTensor):
    """A matrix [out, in] of three tensors. `columns_of` are the file's output columns that make the rows, in order."""

    def __init__(
        self, base: str, qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group: int, *,
        columns_of: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """uint32 [in, out / 8], uint32 [in / group, out / 8], float16 [in / group, out]. Raises BrokenModel."""
        rows, columns = qweight.shape[1] * PACKED, qweight.shape[0]
        groups = columns // group
        if columns % group or qzeros.shape != (groups, rows // PACKED) or scales.shape != (groups, rows):
            raise BrokenModel(f"{base}: qweight {qweight.shape}, qzeros {qzeros.shape} and scales {scales.shape} do not fit")
        super().__init__(f"{base}.qweight", "AWQ", (rows, columns), qweight)
        self.group = group
        self._base, self._qzeros, self._scales = base, qzeros, scales
        self._columns_of = np.arange(rows) if columns_of is None else columns_of

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self._base}.{part}" for part in PARTS)

    def reordered(self, order: np.ndarray) -> AwqTensor:
        columns_of = self._columns_of[order]
        return AwqTensor(self._base, self._raw, self._qzeros, self._scales, self.group, columns_of=columns_of)

    def blocks(self, rows: int = ROWS_AT_ONCE) -> Iterator[tuple[int, np.ndarray]]:
        for first, q, scale, zero in self.affine4_blocks(rows):
            numbers = q.reshape(len(q), -1, self.group).astype(np.float32) - 8
            yield first, (numbers * scale[..., None] + zero[..., None]).reshape(len(q), -1)

    def affine4_blocks(self, rows: int = ROWS_AT_ONCE) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        for first in range(0, self.rows, rows):
            columns = self._columns_of[first : first + rows]
            scale = self._scales[:, columns].T.astype(np.float32)
            zero = (8 - _unpack(self._qzeros, columns).T.astype(np.float32)) * scale
            yield first, np.ascontiguousarray(_unpack(self._raw, columns).T), scale, zero

    def forget_pages(self) -> None:
        for part in (self._raw, self._qzeros, self._scales):
            forget_pages(part)


def _unpack(words: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """uint8 [rows, n]: the 4-bit numbers of these output columns."""
    shifts = (4 * _PLACE[columns % PACKED]).astype(np.uint32)
    return (words[:, columns // PACKED] >> shifts & 15).astype(np.uint8)
