"""`laya router`: clients and backends; no engine and no torch in this process."""

from __future__ import annotations

import argparse

from laya.cli.role import run_role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    return run_role(arguments.config, "router")
