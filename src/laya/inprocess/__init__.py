"""Engines of this process, put together from configuration: `plans` (headers to bytes), `engines` (backends), `protection`.

The only rooms beside `app` that see engine and model together. Torch is imported by `engines` alone, and only when asked for
an engine, so that `laya plan` and the router never load it.
"""

import os

# Read by OpenMP when torch is loaded, so before everything below. Threads that spin while they wait take the core that the
# loop needs: beside other work, decode steps were eight times as long. Threads that sleep at once are woken a hundred times a
# step: a decode on two threads took 24 ms instead of 10. So they spin a little (well under
# a millisecond), then sleep. A user's own setting wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from laya.inprocess.engines import build_engines  # noqa: E402
from laya.inprocess.protection import build_watchdog, memory_gauges  # noqa: E402

__all__ = ["build_engines", "build_watchdog", "memory_gauges"]
