"""The part of this room that is in C, where it was built: `native_lane`, else None. Its sources are in native/."""

from __future__ import annotations

from typing import Any

native_lane: Any
try:
    from laya.net import native_lane
except ImportError:  # installed without a C compiler
    native_lane = None
# What the C expects of our classes, and we of it: raised here and in lane.c with every change of that. A build of other sources
# is not used.
CONTRACT = 5
if getattr(native_lane, "CONTRACT", None) != CONTRACT:
    native_lane = None
IN_C = native_lane is not None  # told by the log's line `listening`
