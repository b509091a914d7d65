"""The package is described in setup.cfg. This adds what only code can say: an optional compiled data plane.

`LAYA_COMPILE=1 pip install .` (with mypy and a C compiler there) turns the modules below into C extensions with mypyc; the same
sources run without. They are the rooms that every proxied byte passes and that nothing else derives classes from. What it gains
is in docs/benchmarks.md.
"""

import os

from setuptools import setup

COMPILED = [
    *(f"src/laya/wire/{name}.py" for name in (
        "chunked", "fast", "inbound", "messages", "outbound", "parser", "recall", "reply", "sse",
    )),
    *(f"src/laya/net/{name}.py" for name in ("answering", "clock", "connection", "flow", "gated_pool", "pool", "upstream")),
]  # fmt: skip


def extensions() -> list:
    if os.environ.get("LAYA_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    # What mypy takes for unreachable would be left out: it forgets that a call may change an attribute it has just looked at.
    flags = ["--follow-imports=silent", "--ignore-missing-imports", "--warn-unreachable"]
    return mypycify([*flags, *COMPILED], group_name="laya_data_plane", opt_level="3", debug_level="0")


setup(ext_modules=extensions())
