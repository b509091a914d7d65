"""`laya [command] [--config FILE]`: reads the command line, runs one command, turns what it raises into one line and a code.

In: argv. Out: an exit code; errors as one line on stderr. Main thread.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from laya import __version__, dependencies
from laya.cli import exits
from laya.cli.onefile import router_alone
from laya.errors import StartError

# name -> what --help says; the module of the same name has the rest and is loaded only when its turn comes.
COMMANDS = {
    "serve": "serve clients: router and, where a model is configured, the engine in this process (the default)",
    "router": "serve clients without an engine in this process; loads no torch",
    "engine": "serve the engine to routers, at inference.listen; start one process for each address",
    "check": "read the configuration, compile the rules, and say what would run",
    "plan": "show what memory the engines would take, before anything is loaded, and whether it fits",
    "route": "show which rule takes a model name, and why",
    "pull": "bring a model: `default`, or ORG/NAME from the hub",
    "doctor": "look for what keeps Laya from working here, and say what mends it; ends with one real generation",
    "top": "watch a running server in the terminal: what /ui shows",
    "bench": "put a short load on a running server and print its rates and latencies",
}
# What even the configuration needs; serve and router check the rest of their chain.
_NEEDED = ("msgspec", "yaml", "ahocorasick")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The code is one of `exits`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    try:
        arguments = parse(sys.argv[1:] if argv is None else list(argv))
        return _command(arguments.command).run(arguments)
    except StartError as exc:
        return _fail(str(exc), exc.exit_code)
    except exits.CommandFailed as exc:
        return _fail(str(exc), exc.code)
    except KeyboardInterrupt:
        return _fail("interrupted", exits.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED


def parse(argv: list[str]) -> argparse.Namespace:
    """No command means serve, or router in the executable without an engine.

    Ends the process with code 2, or with 0 for --help and --version."""
    named = _first_word(argv)
    if named is None and not {"-h", "--help", "--version"} & set(argv):
        argv = ["router" if router_alone() else "serve", *argv]
    parser = argparse.ArgumentParser(
        prog="laya",
        description="An LLM router and an in-process inference engine. Without a command: serve.",
        epilog="Settings: ./laya.yaml (or --config FILE) and LAYA_<SECTION>__<KEY> variables; docs/configuration.md has each.",
    )
    parser.add_argument("--version", action="version", version=f"laya {__version__}")
    parser.add_argument("--config", metavar="FILE", default=None, help="configuration file (default: ./laya.yaml if it exists)")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        command.add_argument(
            "--config", metavar="FILE", default=argparse.SUPPRESS, help="configuration file (default: ./laya.yaml if it exists)"
        )
        if name == named:
            _command(name).add_arguments(command)
    return parser.parse_args(argv)


def _first_word(argv: list[str]) -> str | None:
    """The first argument that is neither an option nor --config's value."""
    words = iter(argv)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _command(name: str):
    """The command's module; what it imports is checked first, so that a broken package is one line too."""
    dependencies.check({package: dependencies.ROUTER[package] for package in _NEEDED})
    return importlib.import_module(f"laya.cli.{name}")


def _fail(message: str, code: int) -> int:
    print(f"laya: {message}", file=sys.stderr)
    return code
