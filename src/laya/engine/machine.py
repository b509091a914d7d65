"""What memory the machine really has: the kernel's figures and the control group's limit, whichever is lower.

In: files under /proc and /sys (their root can be another directory, for tests). Out: `Memory`. Any thread; no state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one kind of memory: all of it that may ever be used here, and what is free now."""

    total: int
    available: int


def host_memory(root: str = "/") -> Memory:
    """The lower of the kernel's figures and what the control groups above this process allow."""
    base = Path(root)
    total, available = _kernel(base)
    for limit, free in _control_groups(base):
        total, available = min(total, limit), min(available, free)
    return Memory(total, max(0, available))


def _kernel(base: Path) -> tuple[int, int]:
    figures = {}
    for line in _lines(base / "proc/meminfo"):
        name, _, rest = line.partition(":")
        figures[name] = rest
    if "MemTotal" in figures and "MemAvailable" in figures:
        return _kib(figures["MemTotal"]), _kib(figures["MemAvailable"])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: no figure of what is free
    return pages, pages


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _control_groups(base: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of every group from this process's own up to the root; a limit above binds as well."""
    for line in _lines(base / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, names = base / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, names = base / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # In a container the path is often the host's and not visible here: the mount's own root then holds the limit.
        group = mount / path.strip("/")
        while True:
            yield from _figures(group, names)
            if group == mount:
                break
            group = group.parent


def _figures(group: Path, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    limit_file, usage_file, reclaimable = names
    limit, usage = _number(group / limit_file), _number(group / usage_file)
    if limit is None or usage is None:
        return
    cached = 0  # clean file pages count as used, yet are given back under pressure
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == reclaimable:
            cached = int(value)
    yield limit, limit - max(0, usage - cached)


def _number(path: Path) -> int | None:
    """None for a missing file and for `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
