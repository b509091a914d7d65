"""`laya top`: what /ui shows, in a terminal. `--once` prints one frame and ends.

In: frames of /ui/events from a running server. Out: text on stdout, drawn anew each second until Ctrl-C; where stdout is no
terminal, one frame below the other. Main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from laya.cli import exits
from laya.cli import running as server
from laya.errors import DependencyError

RETRY_S = 2.0  # a server that restarts is back within a few seconds
MAX_LINE = 8 << 20  # a frame of a hundred engines and a thousand backends has less than 1 MiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
    except ImportError:
        raise DependencyError("rich is not installed; bring it with: pip install rich") from None
    from laya.cli.top_screen import lost

    running = server.find(arguments)
    console = Console()
    frame = next(frames(running))  # a server that is not there is an error, one that goes away is not
    shown = drawn(frame, console.width)
    if arguments.once:
        console.print(shown)
        return exits.OK
    with contextlib.suppress(KeyboardInterrupt), display(console, shown) as show:  # Ctrl-C is how one ends it
        while True:
            try:
                for frame in frames(running):
                    show(drawn(frame, console.width))
            except exits.CommandFailed as failed:
                show(lost(str(failed)))
            time.sleep(RETRY_S)
    return exits.OK


@contextlib.contextmanager
def display(console, shown) -> Iterator[Callable[[Any], None]]:
    """What shows one thing in place of the one before."""
    if not console.is_terminal:
        console.print(shown)
        yield console.print
        return
    from rich.live import Live

    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        yield lambda what: live.update(what, refresh=True)


def drawn(frame: dict[str, Any], width: int):
    """What the console can print. Raises CommandFailed for a frame that is not as docs/operating.md has it."""
    from laya.cli.top_screen import screen

    try:
        return screen(frame, width)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise exits.CommandFailed(f"the server's figures cannot be read ({exc!r}): it has another version") from None


def frames(running: server.Running) -> Iterator[dict[str, Any]]:
    """One a second. Raises CommandFailed when the server is not there or refuses, and when it ends the stream."""
    response = running.get("/ui/events")
    try:
        while line := response.readline(MAX_LINE):
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    except (OSError, http.client.HTTPException) as exc:
        raise running.unreachable(exc) from None
    except ValueError:
        raise exits.CommandFailed(f"what answers at {running.url}/ui/events is not Laya") from None
    finally:
        response.close()
    if not (response.getheader("content-type") or "").startswith("text/event-stream"):
        raise exits.CommandFailed(f"what answers at {running.url}/ui/events is not Laya")
    raise exits.CommandFailed(f"{running.url} has ended the stream: it stops", exits.NO_NETWORK)
