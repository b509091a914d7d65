"""Which room may import what: the table of docs/architecture.md, held by walking the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "laya"
FOUNDATION = {"laya", "errors", "schema", "telemetry", "log"}
# room -> rooms of ours it may import, beside itself
ALLOWED = {
    "errors": set(),
    "schema": {"errors"},
    "telemetry": {"errors", "schema"},
    "log": {"errors", "schema"},
    "config": {"errors"},
    "wire": {"errors", "schema"},
    "routing": FOUNDATION | {"config"},
    "stages": FOUNDATION | {"config"},
    "gateway": FOUNDATION | {"config", "wire", "routing", "stages"},
    "net": FOUNDATION | {"config", "wire", "routing", "gateway"},
    "ui": FOUNDATION | {"gateway", "routing", "engine"},
    "engine": FOUNDATION,
    "model": FOUNDATION | {"engine"},
    "dependencies": {"errors"},
}
# The composition root, and the commands that call it.
FREE = {"app", "inprocess", "cli", "__main__", "__init__"}
SOCKETS = {"socket", "asyncio", "uvloop", "ssl", "selectors", "socketserver", "http.client"}
FORBIDDEN = {
    "errors": SOCKETS | {"torch"},
    "schema": SOCKETS | {"torch"},
    "telemetry": SOCKETS | {"torch"},
    "log": SOCKETS | {"torch"},
    "config": SOCKETS | {"torch"},
    "wire": SOCKETS | {"torch"},
    "routing": SOCKETS | {"torch"},
    "stages": SOCKETS | {"torch"},
    "gateway": SOCKETS | {"torch"},
    "ui": SOCKETS | {"torch"},
    "net": {"torch", "transformers"},
    "engine": SOCKETS | {"torch", "transformers"},
    "model": SOCKETS,
    "cli": {"torch", "transformers"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "laya"}
    return names


def room_of(path: Path) -> str:
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    for name in imports(path):
        if name.startswith("laya."):
            other = name.split(".")[1]
            if room not in FREE and other != "__version__":
                assert other == room or other in ALLOWED[room], f"{room} must not import {name}"
        else:
            top = name.split(".")[0]
            assert top not in FORBIDDEN.get(room, set()), f"{room} must not import {name}"


def test_the_walk_sees_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    import torch\n    from laya.net import pool\n")
    assert {"torch", "laya.net"} <= imports(wrong)
