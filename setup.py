"""The package is described in setup.cfg. This adds what only code can say: two optional extensions.

The engine's compiled step (`src/laya/model/native`, plain C with AVX-512) is built wherever there is a C compiler on x86-64
Linux; without one the installation goes on and torch's own operations run. `LAYA_NATIVE=0` leaves it out.

`LAYA_COMPILE=1 pip install .` (with mypy and a C compiler there) turns the modules below into C extensions with mypyc; the same
sources run without. They are the rooms that every proxied byte passes and that nothing else derives classes from. What it gains
is in docs/benchmarks.md.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/laya/model/native")
# Which instructions are there is asked when a model is loaded. OpenMP is the libgomp that torch brings and
# has loaded by then: two of them would each have threads of their own.
NATIVE_FLAGS = [
    "-O3", "-std=gnu11", "-fopenmp", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma",
]  # fmt: skip

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


def native_step() -> list[Extension]:
    fits = sys.platform == "linux" and platform.machine() == "x86_64"
    if not fits or os.environ.get("LAYA_NATIVE") == "0":
        return []
    sources = sorted(map(str, NATIVE.glob("*.c")))
    return [Extension(
        "laya.model.native_step", sources, depends=sorted(map(str, NATIVE.glob("*.h"))), extra_compile_args=NATIVE_FLAGS,
        optional=True,
    )]  # fmt: skip


setup(ext_modules=[*extensions(), *native_step()])
