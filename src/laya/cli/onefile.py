"""The single executable is two processes, one that unpacked it and waits, and the one that runs Laya: they are to end as one.

In: nothing. Out: this process is told once of Ctrl-C, by the other; it gets SIGTERM when the other ends, however that ends, and
then removes what the other had unpacked. Called before anything else, in the main thread. Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import shutil
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def settle() -> None:
    """A group of its own: a terminal's Ctrl-C goes to a whole group and is passed on too; twice means `now`, not `drain`."""
    parent, folder = os.getppid(), sys._MEIPASS
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    os.setpgid(0, 0)
    atexit.register(_clear_away, parent, folder)


def router_alone() -> bool:
    """Whether this is the small executable, which has no engine: it serves as a router where no command is named."""
    return hasattr(sys, "_MEIPASS") and importlib.util.find_spec("torch") is None


def _clear_away(parent: int, folder: str) -> None:
    if os.getppid() != parent:  # nobody else is left to do it
        shutil.rmtree(folder, ignore_errors=True)
