"""The machine for the page: GPU memory and temperature, host memory. Read only while somebody looks.

In: `look`, from the loop thread. Out: `last`, a plain dict. Each reading is a thread of its own that lives for a millisecond: a
driver's call may hang for ever, and then nothing but this figure may stop.
"""

from __future__ import annotations

import threading
import time
from typing import Any


class Machine:
    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self._read_at = 0.0
        self._reader: threading.Thread | None = None
        self._nvml: Any = None

    def look(self) -> dict[str, Any] | None:
        """Begin a reading unless one is under way, and give the one before with its age; None before the first."""
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="laya-machine", daemon=True)
            self._reader.start()
        if self.last is None:
            return None
        return {**self.last, "age_s": round(time.monotonic() - self._read_at, 1)}

    def _read(self) -> None:
        # A router that nobody looks at does not load what reads GPUs.
        from laya.engine.cards import Nvml
        from laya.engine.machine import memory_levels, peak_resident, resident, swap

        if self._nvml is None:
            self._nvml = Nvml.find() or False
        machine, *groups = memory_levels()
        swapped = swap()
        tightest = max(groups, key=lambda group: group.used_share) if groups else None
        self.last = {
            "gpus": [
                {
                    "index": card.index, "name": card.name, "used": card.used, "total": card.total,
                    "temperature_c": card.temperature_c, "lost": card.lost,
                }
                for card in (self._nvml.cards() if self._nvml else ())
            ],
            "host": {"total": machine.total, "available": machine.available},
            "group": None if tightest is None else {"total": tightest.total, "available": tightest.available},
            "swap": {"total": swapped.total, "used": swapped.total - swapped.free},
            "process": {"resident": resident(), "peak": peak_resident()},
        }  # fmt: skip
        self._read_at = time.monotonic()
