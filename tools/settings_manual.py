"""Write the manual of the settings from the structs: laya.yaml and docs/configuration.md.

    python tools/settings_manual.py            writes both
    python tools/settings_manual.py --check    exit code 1 when one of them is not what it would write

In: laya.config.shape (kinds, defaults, bounds, meanings) and laya.cli.exits. Out: the two files. A test runs the check, so that
code, file and page cannot disagree.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.exits import MEANINGS
from laya.config.shape import Entries, Field, Fields, Items, Scalar, Shape, allowed, config_shape
from laya.config.units import format_size

ROOT = Path(__file__).resolve().parent.parent
# Wide enough that most settings take two lines, narrow enough for half a screen.
WIDTH = 110
# Names of the examples; `to` and `keys` refer to them.
EXAMPLE_NAMES = {"backends": "gpu-box"}
_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n)$)[A-Za-z][A-Za-z0-9./_-]*", re.IGNORECASE)

YAML_HEAD = """\
Laya's settings: every key with its default, its meaning and what is allowed. `laya check` reads this file and says what
would run; a mistake is refused with its line. Keys can be left out. A line that begins with # and no blank is an
example: remove the # to use it. Written by tools/settings_manual.py from the code.

Any string may hold ${NAME} or ${NAME:-default} from the environment ($${ stands for a plain ${). Every setting can be
overridden by a variable: server.port by LAYA_SERVER__PORT, lists and maps as JSON, `backends` and `routes` as a whole by
LAYA_BACKENDS and LAYA_ROUTES. Sizes: 16MiB. Times are in the unit that the key names.
"""

PAGE_HEAD = """\
# Configuration

*Written by `tools/settings_manual.py` from the code; `laya.yaml` at the root shows the same as a file.*

`python -m laya [command] [--config FILE]` reads one YAML file: the given one, else `./laya.yaml`, else built-in defaults with
the embedded model. `laya check` reads it, compiles the rules and says what would run.

## How a file is read

* Everything is checked: an unknown key, a wrong type, a value out of bounds, a key given twice, a name that does not exist.
  The error is one line with file, line, key, what was found and what is allowed; the exit code is 78.
* What YAML readers disagree on is refused without quotes: `yes`, `no`, `on`, `off`, `0123`, `12:30:45`, `1e3`, `1_000`,
  `0x10`, dates. So are tags, merge keys, several documents and keys that are no text.
* A file without `inference` and `backends` gets the embedded model.
* Sizes are `16MiB` (KiB, MiB, GiB, TiB; kB, MB, GB, TB are decimal) or a plain number. Durations are plain numbers in the
  unit that the key's name ends with.
* Relative paths start at the file's folder.
* `${NAME}` in any string is the variable's value and must exist; `${NAME:-default}` has a default for a variable that is unset
  or empty; `$${` stands for a plain `${`. The type of the setting decides how the value is read, so numbers and
  booleans work too.

## Variables

Every setting has one: `LAYA_<SECTION>__<KEY>`, two underscores for each step down (`LAYA_SERVER__TLS__CERTIFICATE`). Lists
and maps are JSON. `LAYA_BACKENDS` and `LAYA_ROUTES` replace these sections as a whole; a backend or an engine of the file is
reached by its name in capitals with `_` for other characters (`LAYA_BACKENDS__GPU_BOX__WEIGHT=3`). Booleans are true,
yes, on, 1 or false, no, off, 0, in any case. A variable with two underscores that means no setting is refused. Other variables
that begin with `LAYA_` are left alone: an unrelated package uses some.

## Matching

Names are compared byte for byte: case counts, Unicode is not folded. `*` stands for any run of characters, also none; `x/*`
does not match `x`. An exact name wins; else the pattern with most literal characters; else the one with the longer literal
prefix; two patterns equal in both that can match the same name are refused at start. The order in the file never
matters. Engines can be asked for by their id and by their name here (`local`). A request without a model takes
`router.default_model`; a name that no rule takes is 404 `model_not_found`. `laya route NAME` explains a match.

## Exit codes

| code | meaning |
|---|---|
"""

PAGE_SETTINGS = """
## Settings
"""


def write_yaml() -> str:
    lines = [f"# {line}".rstrip() for part in YAML_HEAD.split("\n\n") for line in ["", *textwrap.wrap(part, WIDTH)]][1:]
    for field in config_shape().fields.values():
        lines += ["", *_yaml_field(field, "", in_example=False)]
    return "\n".join(lines) + "\n"


def _yaml_fields(shape: Fields, indent: str, in_example: bool) -> list[str]:
    return [line for field in shape.fields.values() for line in _yaml_field(field, indent, in_example)]


def _yaml_field(field: Field, indent: str, in_example: bool) -> list[str]:
    """One key with its comment. Lists and maps of sections get one entry as an example, which is commented out unless it lies
    within another example."""
    lines = [*_comment(field.shape, indent), f"{indent}{field.name}:"]
    inner = _section_of(field.shape)
    if inner is None:
        lines[-1] += " " + _value(field, in_example)
        return lines
    if isinstance(field.shape, Fields):
        return lines + _yaml_fields(inner, indent + "  ", in_example)
    if field.name == "engines":  # the keys have just been shown
        return [*lines, f"{indent}  # small: {{model: models/small.gguf, max_seq_len: 2048}}    (any keys above)"]
    example = _yaml_entry(field, inner, indent + "  ")
    return lines + (example if in_example else ["#" + line for line in example])


def _yaml_entry(field: Field, inner: Fields, indent: str) -> list[str]:
    lines = _yaml_fields(inner, indent + "  ", in_example=True)
    if isinstance(field.shape, Entries):
        return [f"{indent}{EXAMPLE_NAMES[field.name]}:", *lines]
    first = next(place for place, line in enumerate(lines) if not line.lstrip().startswith("#"))
    lines[first] = f"{indent}- {lines[first].lstrip()}"
    return [indent + line.lstrip() for line in lines[:first]] + lines[first:]


def _comment(shape: Shape, indent: str) -> list[str]:
    text = shape.description
    if _section_of(shape) is None:
        text += f" [{allowed(shape)}]"
    prefix = f"{indent}# "
    return [prefix + line for line in textwrap.wrap(text, WIDTH - len(prefix), break_long_words=False)]


def _section_of(shape: Shape) -> Fields | None:
    """The section that a shape is, or that its items or entries are."""
    if isinstance(shape, Items):
        shape = shape.item
    elif isinstance(shape, Entries):
        shape = shape.value
    return shape if isinstance(shape, Fields) else None


def _comment(shape: Shape, start: str) -> list[str]:
    text = shape.description[:1].upper() + shape.description[1:]
    if isinstance(shape, Scalar | Items) and _section_of(shape) is None:
        text += f" [{allowed(shape)}]"
    prefix = f"{start}# "
    return [prefix + line for line in textwrap.wrap(text, WIDTH - len(prefix), break_long_words=False)]


def _value(field: Field, in_example: bool) -> str:
    example = field.shape.marks.get("example")
    return _shown(example if in_example and example is not None else field.default, field.shape)


def _shown(value: Any, shape: Shape) -> str:
    """A value as laya.yaml writes it."""
    if isinstance(value, int) and not isinstance(value, bool) and isinstance(shape, Scalar) and shape.kind == "size":
        return format_size(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else msgspec.json.encode(value).decode()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else str(int(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_shown(item, shape.item if isinstance(shape, Items) else shape) for item in value) + "]"
    if isinstance(value, dict):
        return "{}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def write_page() -> str:
    parts = [PAGE_HEAD, *(f"| {code} | {text} |\n" for code, text in MEANINGS.items()), PAGE_SETTINGS]
    for field in config_shape().fields.values():
        parts.append(f"\n### `{field.name}`\n\n{_sentence(field.shape.description)}\n")
        parts.append("\n| key | default | allowed | meaning |\n|---|---|---|---|\n")
        parts += [f"| `{key}` | {default} | {words} | {meaning} |\n" for key, default, words, meaning in _rows(field, "")]
    return "".join(parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _rows(field: Field, path: str) -> list[tuple[str, str, str, str]]:
    """The table's rows at and below a field; sections themselves have none."""
    path = f"{path}.{field.name}" if path else field.name
    inner = _section_of(field.shape)
    if inner is None:
        default = "required" if field.required else f"`{_shown(field.default, field.shape)}`"
        return [(path, default, _cell(allowed(field.shape)), _cell(field.shape.description))]
    rows = []
    if isinstance(field.shape, Items):
        default = "required" if field.required else "`[]`"
        rows.append((path, default, _cell(allowed(field.shape)), _cell(field.shape.description)))
        path += "[]"
    elif field.name == "engines":  # the keys of each are those just told
        return [(path, "`{}`", "a map of names to such keys", _cell(field.shape.description))]
    elif isinstance(field.shape, Entries):
        path += ".NAME"
    for below in inner.fields.values():
        rows += _rows(below, path)
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main(arguments: list[str]) -> int:
    files = {ROOT / "laya.yaml": write_yaml(), ROOT / "docs" / "configuration.md": write_page()}
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the code says; run: python tools/settings_manual.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
