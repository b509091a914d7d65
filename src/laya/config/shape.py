"""What each key may hold, as a small tree compiled once from the structs.

In: `Config` and its marks (through msgspec.inspect). Out: `Shape`s, walked by the decoder, the environment overrides and the
manual, so that all three agree by construction. Pure; any thread.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec import NODEFAULT, Struct, inspect

from laya.config.structs import Config
from laya.config.units import format_size


class Shape(Struct, kw_only=True):
    """What every kind has: whether null is allowed, and the marks of `section.about`."""

    nullable: bool = False
    description: str = ""
    marks: dict[str, Any] = {}


class Scalar(Shape, kw_only=True):
    """`kind` is bool, int, float, str, size, or "" when only `choices` (fixed words) are allowed."""

    kind: str = ""
    choices: tuple[str, ...] = ()


class Items(Shape, kw_only=True):
    item: Shape


class Entries(Shape, kw_only=True):
    """A map whose keys people choose."""

    key: Shape
    value: Shape


class Field(Struct, kw_only=True):
    name: str
    shape: Shape
    required: bool
    default: Any = None


class Fields(Shape, kw_only=True):
    """A section: `cls` is the struct that is built."""

    cls: type
    fields: dict[str, Field]


@functools.cache
def config_shape() -> Fields:
    """The shape of a whole file."""
    shape = _shape(inspect.type_info(Config))
    assert isinstance(shape, Fields)
    return shape


def _shape(kind: inspect.Type) -> Shape:
    """Marks further out win over those further in, so that a field can say more than its type."""
    description, marks = "", {}
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        marks = {**{k: v for k, v in (kind.extra or {}).items() if v is not None}, **marks}
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        shape = _union(kind)
    else:
        shape = _plain(kind)
    if marks.get("unit") == "size" and isinstance(shape, Scalar) and shape.kind == "int":
        shape.kind = "size"
    shape.description = description or shape.description
    shape.marks = {**shape.marks, **marks}
    return shape


def _union(kind: inspect.UnionType) -> Shape:
    """`X | None`, or `Literal[...] | X` of scalars; the structs use no other unions."""
    nullable = any(isinstance(t, inspect.NoneType) for t in kind.types)
    shapes = [_shape(t) for t in kind.types if not isinstance(t, inspect.NoneType)]
    words = [s for s in shapes if isinstance(s, Scalar) and s.choices]
    others = [s for s in shapes if s not in words]
    shape = (others or words)[0]
    if words and isinstance(shape, Scalar):
        shape.choices = words[0].choices
    shape.nullable = nullable
    return shape


def _plain(kind: inspect.Type) -> Shape:
    match kind:
        case inspect.BoolType():
            return Scalar(kind="bool")
        case inspect.IntType():
            return Scalar(kind="int")
        case inspect.FloatType():
            return Scalar(kind="float")
        case inspect.StrType():
            return Scalar(kind="str")
        case inspect.LiteralType(values=values):
            return Scalar(choices=tuple(str(v) for v in values))
        case inspect.VarTupleType(item_type=item):
            return Items(item=_shape(item))
        case inspect.DictType(key_type=key, value_type=value):
            return Entries(key=_shape(key), value=_shape(value))
        case inspect.StructType(cls=cls, fields=fields):
            return Fields(cls=cls, fields={f.name: f for f in map(_field, fields) if not f.shape.marks.get("hidden")})
    raise TypeError(f"laya.config has no loader for {kind}")


def _field(field: inspect.Field) -> Field:
    default = field.default if field.default is not NODEFAULT else None
    if field.default_factory is not NODEFAULT:
        default = field.default_factory()
    return Field(name=field.name, shape=_shape(field.type), required=field.required, default=default)


def allowed(shape: Shape) -> str:
    """What may stand there, in words, for errors and the manual."""
    match shape:
        case Fields():
            text = "a map with the keys " + ", ".join(shape.fields)
        case Entries():
            text = "a map of names"
        case Items():
            text = "one or a list of: " if shape.marks.get("one_or_many") else "a list of: "
            text += _item_words(shape.item)
        case Scalar():
            text = _scalar_words(shape)
    return text + (", or null" if shape.nullable else "")


def _item_words(item: Shape) -> str:
    if isinstance(item, Fields):
        short = item.marks.get("short")
        return f"maps with the keys {', '.join(item.fields)}" + (f", or just the {short}" if short else "")
    return allowed(item)


def _scalar_words(shape: Scalar) -> str:
    words = []
    if shape.choices:
        words.append(", ".join(shape.choices))
    if shape.kind == "bool":
        words.append("true or false")
    elif shape.kind == "str":
        words.append(shape.marks.get("form", "text"))
    elif shape.kind == "size":
        words.append(f"a size (16MiB, or {shape.marks['plain']})" + _range_words(shape, format_size))
    elif shape.kind:
        words.append(("a whole number" if shape.kind == "int" else "a number") + _range_words(shape, str))
    return ("one of " if shape.choices and not shape.kind else "") + ", or ".join(words)


def _range_words(shape: Scalar, show) -> str:
    marks, words = shape.marks, []
    if "ge" in marks:
        words.append(f"from {show(marks['ge'])}")
    if "gt" in marks:
        words.append(f"above {show(marks['gt'])}")
    if "le" in marks:
        words.append(f"to {show(marks['le'])}" if "ge" in marks else f"up to {show(marks['le'])}")
    if "lt" in marks:
        words.append(f"below {show(marks['lt'])}")
    return " " + " ".join(words) if words else ""


def within(shape: Scalar, number: float) -> bool:
    """Whether a number keeps the shape's bounds."""
    marks = shape.marks
    return (
        number >= marks.get("ge", number)
        and number <= marks.get("le", number)
        and ("gt" not in marks or number > marks["gt"])
        and ("lt" not in marks or number < marks["lt"])
    )
