"""`laya engine [NAME...]`: the engine in a process of its own, for routers; it can be restarted without them."""

from __future__ import annotations

import argparse

from laya.cli.role import run_role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="with inference.engines: those to run here; default: all, at one address"
    )


def run(arguments: argparse.Namespace) -> int:
    return run_role(arguments.config, "engine", arguments.names)
