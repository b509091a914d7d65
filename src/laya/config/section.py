"""The base of every section of laya.yaml, and the few marks by which a field says its unit, bounds and meaning.

In: nothing. Out: `Section` and the marks `about`, `size` and the shared `Name` type, used by the struct files beside this
one. Only `shape.py` reads the marks; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """One map of laya.yaml: frozen, every key known, every key but the required ones with a default."""


def about(description: str, *, ge=None, gt=None, le=None, lt=None, pattern: str | None = None, **marks: Any) -> Meta:
    """What a key means, its bounds, and marks for the loader and the manual.

    Marks: `secret` (never shown in an error), `form` (what a pattern stands for, in words), `one_or_many` (a single item may
    stand for a list), `short` (a bare string stands for a map with that one key), `example` (shown in the manual where
    the default would say little), `unit`, `hidden` (set by the loader, not a key of the file).
    """
    return Meta(description=description, extra={"ge": ge, "gt": gt, "le": le, "lt": lt, "pattern": pattern, **marks})


def size(description: str, least: int, most: int, *, plain: str = "bytes") -> Meta:
    """A size: ``16MiB``, or a plain number in `plain` (``bytes`` or ``GiB``); held as an int of bytes."""
    return about(description, ge=least, le=most, unit="size", plain=plain)


# A name that people choose becomes a metric label, a header value and part of a variable's name: ASCII, 64 at most.
Name = Annotated[
    str,
    about("a name", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", form="a name: letters, digits, '.', '_', '-', at most 64"),
]
