"""Runs one command as a process group that cannot outlive whoever holds the other end of this process's stdin.

In: argv `GRACE_S COMMAND WORD...`; the command's output goes where ours goes. Out: the command's exit code (128 + n for
signal n). End of stdin, however it comes about (a kill -9 of the holder closes it too), means: SIGTERM to the group, SIGKILL
after GRACE_S seconds, and SIGKILL to whatever had left the group. A process of its own, standard library alone, so that it is
small (some 8 MiB) and starts in milliseconds; it needs Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
# Rounds of killing what is left: each kills all that it sees, and a process that forks meanwhile is seen in the next one.
_SWEEPS = 50
_SWEEP_PAUSE_S = 0.02
_NOT_STARTED = 127  # the shell's code for a command that is not there


def main(words: list[str]) -> int:
    """Run the command to its end. Main thread of a process of its own."""
    grace_s, command = float(words[0]), words[1:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what detaches itself becomes our child, and is found at the end
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's: its server drains and then tells us
        signal.signal(number, signal.SIG_IGN)
    leash = os.getpid()
    started, starting = os.pipe()
    child = os.fork()
    if child == 0:
        _become(command, leash, prctl)
    os.close(starting)
    os.read(started, 1)  # ends with the child's exec: a signal before that would find no group, or our own handler
    code = _wait(child, woken, stopping)
    if code is None:
        code = _end(child, woken, grace_s)
    _sweep(child)
    return code if code >= 0 else 128 - code


def _become(command: list[str], leash: int, prctl) -> None:
    """The child: a session and group of its own, killed with the leash even if that is killed itself."""
    try:
        os.setsid()
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != leash:
            os._exit(_NOT_STARTED)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"{command[0]}: {exc.strerror}\n".encode())
    os._exit(_NOT_STARTED)


def _wait(child: int, woken: int, stopping: list[int]) -> int | None:
    """The child's exit code; None when it shall be ended."""
    while True:
        code = _reap(child)
        if code is not None:
            return code
        if stopping:
            return None
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
        if 0 in ready and not os.read(0, 512):
            return None


def _end(child: int, woken: int, grace_s: float) -> int:
    _kill_group(child, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while (left := until - time.monotonic()) > 0:
        code = _reap(child)
        if code is not None:
            return code
        if select.select([woken], [], [], left)[0]:
            os.read(woken, 512)
    _kill_group(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _reap(child: int) -> int | None:
    """Take every child that has ended (orphans too); the exit code of ours, if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _sweep(child: int) -> None:
    """Kill what is left of the group, and what had left it: by now those are our children."""
    _kill_group(child, signal.SIGKILL)
    for _ in range(_SWEEPS):
        left = _children()
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_SWEEP_PAUSE_S)
        _reap(child)


def _children() -> list[int]:
    """Children of this process, from /proc: the file of a process has its parent after its name in parentheses."""
    found, own = [], os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile
            if parent == own:
                found.append(int(name))
    return found


def _kill_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
