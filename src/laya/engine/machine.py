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

    @property
    def used_share(self) -> float:
        return 1 - self.available / self.total if self.total > 0 else 1.0


class Swap(msgspec.Struct, frozen=True):
    """Bytes of swap, and how many were moved in and out since the machine started."""

    total: int
    free: int
    moved: int


def host_memory(root: str = "/") -> Memory:
    """The lower of the kernel's figures and what the control groups above this process allow."""
    levels = memory_levels(root)
    return Memory(min(level.total for level in levels), max(0, min(level.available for level in levels)))


def memory_levels(root: str = "/") -> list[Memory]:
    """The machine's memory, then that of every control group with a limit, this process's own first."""
    base = Path(root)
    kernel = _kernel(base)
    # A group without a limit of its own shows an absurdly large one in version 1.
    groups = [Memory(limit, free) for limit, free in _control_groups(base) if limit < kernel.total]
    return [kernel, *groups]


def swap(root: str = "/") -> Swap:
    """Zeros where there is no swap or no such figure."""
    base = Path(root)
    figures = _meminfo(base)
    moved = 0
    for line in _lines(base / "proc/vmstat"):
        name, _, value = line.partition(" ")
        if name in ("pswpin", "pswpout"):
            moved += int(value) * os.sysconf("SC_PAGE_SIZE")
    return Swap(figures.get("SwapTotal", 0), figures.get("SwapFree", 0), moved)


def resident(root: str = "/") -> int:
    """Resident bytes of this process; 0 where the kernel does not tell."""
    text = "".join(_lines(Path(root) / "proc/self/statm")).split()
    return int(text[1]) * os.sysconf("SC_PAGE_SIZE") if len(text) > 1 else 0


def peak_resident(root: str = "/") -> int:
    """The most that was ever resident of this process; 0 where the kernel does not tell."""
    for line in _lines(Path(root) / "proc/self/status"):
        if line.startswith("VmHWM:"):
            return _kib(line.partition(":")[2])
    return 0


def offer_to_oom_killer(score: int, root: str = "/") -> bool:
    """Raise this process's (and so its later children's) oom_score_adj to `score`: the kernel takes it before others.

    Never lowers it, which would take a privilege. False where it could not be set.
    """
    path = Path(root) / "proc/self/oom_score_adj"
    try:
        if int(path.read_text()) < score:
            path.write_text(str(score))
        return True
    except (OSError, ValueError):
        return False


def _kernel(base: Path) -> Memory:
    figures = _meminfo(base)
    if "MemTotal" in figures and "MemAvailable" in figures:
        return Memory(figures["MemTotal"], figures["MemAvailable"])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: no figure of what is free
    return Memory(pages, pages)


def _meminfo(base: Path) -> dict[str, int]:
    figures = {}
    for line in _lines(base / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            figures[name] = _kib(rest)
    return figures


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
