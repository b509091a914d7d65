"""The package is described in setup.cfg. This adds what only code can say: optional extensions in plain C.

Three small ones are built wherever there is a C compiler: the fast lane of common requests with its sockets
(`src/laya/net/native`), and the two readers that it and the long way share. The engine's compiled step
(`src/laya/model/native`, AVX-512) is built on x86-64 Linux. Without a compiler the installation goes on, and the same steps run
in Python and on torch's own operations. `LAYA_NATIVE=0` leaves them all out; what was built before is not removed.
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


def native() -> list[Extension]:
    if os.environ.get("LAYA_NATIVE") == "0":
        return []
    headers = sorted(map(str, Path("src/laya").glob("*/native/*.h")))
    found = [
        Extension(
            f"laya.{room}.native_{names[0]}", [f"src/laya/{room}/native/{name}.c" for name in names], depends=headers,
            extra_compile_args=["-O3", "-fvisibility=hidden"], optional=True,
        )
        for room, names in (("schema", ["routing"]), ("wire", ["whole"]), ("net", ["lane", "streams"]))
    ]
    if sys.platform == "linux" and platform.machine() == "x86_64":
        sources = sorted(map(str, NATIVE.glob("*.c")))
        found.append(Extension(
            "laya.model.native_step", sources, depends=headers, extra_compile_args=NATIVE_FLAGS, optional=True
        ))  # fmt: skip
    return found


setup(ext_modules=native())
