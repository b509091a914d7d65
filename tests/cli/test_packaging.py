"""The packaging files agree with each other and with the code."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from laya import dependencies

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(section: str) -> dict[str, str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = setup["options"]["install_requires"] if section == "base" else setup["options.extras_require"][section]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return {canonical(re.split(r"[<>=!]", line)[0]): line for line in lines}


def test_the_tested_versions_are_those_of_the_constraints():
    pinned = {canonical(name): version for name, version in pins().items()}
    for distribution, version in {**dependencies.ROUTER, **dependencies.ENGINE, **dependencies.OPTIONAL}.values():
        assert pinned.get(canonical(distribution)) == version, distribution


def test_every_requirement_that_the_tests_install_is_pinned():
    pinned = {canonical(name) for name in pins()}
    wanted = {**requirements("base"), **requirements("engine"), **requirements("dev")}
    assert set(wanted) - pinned == set()


def test_the_base_install_pulls_no_torch_and_has_what_the_router_needs():
    base = requirements("base")
    assert not {"torch", "transformers", "numpy"} & set(base)
    assert set(base) == {canonical(distribution) for distribution, _ in dependencies.ROUTER.values()}


def test_pins_are_plain_versions_that_any_index_can_serve():
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def test_every_package_folder_is_found_by_the_build():
    folders = {path.parent for path in (ROOT / "src" / "laya").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_readme_names_every_dependency():
    text = (ROOT / "README.md").read_text()
    for name in {**requirements("base"), **requirements("engine")}:
        assert name in canonical(text) or canonical(name) in canonical(text), name
