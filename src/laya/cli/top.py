"""`laya top`: what /ui shows, in a terminal. `--once` prints one frame and ends.

In: frames of /ui/events from a running server. Out: text on stdout, drawn anew each second until Ctrl-C. Main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

from laya.cli import exits
from laya.cli import running as server
from laya.errors import DependencyError

RETRY_S = 2.0  # a server that restarts is back within a few seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise DependencyError("rich is not installed; bring it with: pip install rich") from None
    from laya.cli.top_screen import lost, screen

    running = server.find(arguments)
    console = Console()
    if arguments.once:
        console.print(screen(next(frames(running)), console.width))
        return exits.OK
    frame = next(frames(running))  # a server that is not there is an error, one that goes away is not
    with (
        contextlib.suppress(KeyboardInterrupt),  # how one ends it
        Live(screen(frame, console.width), console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            try:
                for frame in frames(running):
                    live.update(screen(frame, console.width), refresh=True)
            except exits.CommandFailed as failed:
                live.update(lost(str(failed)), refresh=True)
            time.sleep(RETRY_S)
    return exits.OK


def frames(running: server.Running) -> Iterator[dict[str, Any]]:
    """One a second, until the server ends the stream. Raises CommandFailed when it is not there or refuses."""
    response = running.get("/ui/events")
    try:
        while line := response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    except (OSError, http.client.HTTPException) as exc:
        raise running.unreachable(exc) from None
    finally:
        response.close()
