"""laya.yaml, docs/configuration.md and the structs say the same."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import msgspec
import pytest

from laya.config import Config, InferenceConfig, load, loads
from laya.config.shape import Entries, Fields, Items, config_shape
from laya.config.yaml_strict import parse

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = {"CI_KEY": "a", "GPU_BOX_KEY": "b"}


@pytest.fixture(scope="module")
def manual():
    spec = importlib.util.spec_from_file_location("settings_manual", ROOT / "tools" / "settings_manual.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["settings_manual"] = module
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_code_says(manual, capsys):
    assert manual.main(["--check"]) == 0, capsys.readouterr().out


def test_laya_yaml_holds_the_defaults():
    config = load(str(ROOT / "laya.yaml"), {})
    assert msgspec.structs.replace(config, source=None) == Config(inference=InferenceConfig())


def uncommented() -> str:
    """laya.yaml with its examples switched on: the lines that begin with # and no single blank."""
    return re.sub(r"(?m)^#(?! [^ ])(?=.)", "", (ROOT / "laya.yaml").read_text(encoding="utf-8"))


def test_the_examples_in_laya_yaml_load():
    config = loads(uncommented(), REFERENCES)
    assert config.backends["gpu-box"].url and config.routes[0].classify and config.auth.keys[0].key == "a"


def test_laya_yaml_shows_every_key():
    root = parse(uncommented().encode(), "laya.yaml")
    missing = []

    def walk(shape, node, path):
        if isinstance(shape, Items | Entries):
            inner = shape.item if isinstance(shape, Items) else shape.value
            if isinstance(inner, Fields) and path != "inference.engines":
                walk(inner, node.value[0] if isinstance(shape, Items) else next(iter(node.value.values())), path + "[]")
        elif isinstance(shape, Fields):
            for name, field in shape.fields.items():
                if name not in node.value:
                    missing.append(f"{path}.{name}")
                else:
                    walk(field.shape, node.value[name], f"{path}.{name}".lstrip("."))

    walk(config_shape(), root, "")
    assert missing == []


def test_the_page_shows_every_exit_code_and_every_section(manual):
    page = manual.write_page()
    for code, text in manual.MEANINGS.items():
        assert f"| {code} | {text} |" in page
    for name in config_shape().fields:
        assert f"### `{name}`" in page
