"""The header of a GGUF file, read straight from a memory map: key-value fields and the table of tensors. No torch here.

In: a path. Out: `Header`. The `gguf` package reads the same (it is the referee in the tests) but takes seconds over a
vocabulary, one object a token; start-up and `laya plan` need tens of milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import msgspec

from laya.model.spec import BrokenModel, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_COUNT = 1 << 24  # of fields, tensors, array items: beyond any real file, so a broken one is refused and not read for ever
MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorEntry(msgspec.Struct, frozen=True):
    """`dimensions` as in the file, fastest first; `offset` from the start of the file, in bytes."""

    name: str
    dimensions: tuple[int, ...]
    type_id: int
    offset: int


class Header(msgspec.Struct, frozen=True):
    fields: dict[str, Any]
    tensors: list[TensorEntry]


def read_header(path: str) -> Header:
    """Raises BrokenModel for what is not a whole GGUF header, UnsupportedModel for another version or byte order."""
    with open(path, "rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise BrokenModel(f"{path}: empty file") from error
    with view:
        try:
            return _Cursor(view, path).header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise BrokenModel(f"{path}: the GGUF header is cut short or damaged") from error


class _Cursor:
    def __init__(self, view: mmap.mmap, path: str) -> None:
        self.view, self.path, self.at = view, path, 0

    def header(self) -> Header:
        if self.view[:4] != MAGIC:
            raise BrokenModel(f"{self.path}: not a GGUF file")
        self.at = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{self.path}: GGUF version {version} (or byte order) is not supported; known: 2, 3")
        tensor_count, field_count = self.count(), self.count()
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = self.string()
            fields[key] = self.value(self.scalar("I"))
        entries = [self.entry() for _ in range(tensor_count)]
        alignment = int(fields.get("general.alignment", DEFAULT_ALIGNMENT)) or DEFAULT_ALIGNMENT
        start = -(-self.at // alignment) * alignment
        return Header(fields, [TensorEntry(e.name, e.dimensions, e.type_id, e.offset + start) for e in entries])

    def entry(self) -> TensorEntry:
        name = self.string()
        rank = self.scalar("I")
        if rank > MAX_DIMENSIONS:
            raise BrokenModel(f"{self.path}: tensor {name!r} has {rank} dimensions")
        dimensions = tuple(self.scalar("Q") for _ in range(rank))
        return TensorEntry(name, dimensions, self.scalar("I"), self.scalar("Q"))

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.view, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self) -> int:
        value = self.scalar("Q")
        if value > MAX_COUNT:
            raise BrokenModel(f"{self.path}: the GGUF header counts {value} items")
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.view, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self.view):
            raise IndexError(self.at)
        return self.view[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise BrokenModel(f"{self.path}: unknown field type {kind}")
        item, length = self.scalar("I"), self.count()
        if item in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[item]}", self.view, self.at)
            self.at += length * struct.calcsize("<" + _SCALARS[item])
            return list(values)
        return [self.value(item) for _ in range(length)]
