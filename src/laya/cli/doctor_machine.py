"""What `laya doctor` asks of the machine: Python and packages, namesakes, GPUs, limits, the disk.

In: nothing, or the configuration. Out: findings. Importing the engine's packages takes seconds. Main thread.
"""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata

from laya import dependencies
from laya.cli.doctor_finding import FAIL, OK, WARN, Finding
from laya.config import Config
from laya.config.environ import TOP_LEVEL
from laya.engine.cards import Nvml
from laya.errors import DependencyError

TESTED_PYTHON = ((3, 11), (3, 13))  # oldest and newest that the tests have run on
NVIDIA = "/dev/nvidiactl"  # there wherever the driver is
# Descriptors besides connections: files, listeners, the session table, pipes to commands, and some to spare.
OTHER_FILES = 64
FOUR_BIT_SHAPES = ((32, 32), (64, 64), (128, 32), (128, 128), (256, 256))  # columns, group: each layout and each size of groups
REDIS_S = 2.0  # a table that is slower than this is of no use to routing


def python() -> Iterator[Finding]:
    version, text = sys.version_info[:2], f"{platform.python_version()} on {platform.machine()}, {platform.system()}"
    if version < TESTED_PYTHON[0]:
        yield Finding("python", FAIL, text, "use Python 3.11 or newer")
    elif version > TESTED_PYTHON[1]:
        yield Finding("python", WARN, f"{text}: newer than the tested ones", "use Python 3.11 to 3.13 if something fails")
    else:
        yield Finding("python", OK, text)


def packages(*, engine: bool) -> Iterator[Finding]:
    yield from _chain("router packages", dependencies.ROUTER)
    if engine:
        failed = False
        for finding in _chain("engine packages", dependencies.ENGINE):
            failed = failed or finding.state == FAIL
            yield finding
        if not failed:
            yield torch_build()
            yield from four_bit_product()
    there = {name: pair for name, pair in dependencies.OPTIONAL.items() if dependencies.installed_version(pair[0]) is not None}
    yield from _versions("optional packages", there)


def _chain(name: str, chain: dict[str, tuple[str, str]]) -> Iterator[Finding]:
    """One finding for all that are as tested, and one for each that is not."""
    try:
        dependencies.check(chain)
    except DependencyError as error:
        text, _, mend = str(error).rpartition(" it with: ")
        yield Finding(name, FAIL, text.rpartition(";")[0] or str(error), mend)
        return
    yield from _versions(name, chain)


def _versions(name: str, chain: dict[str, tuple[str, str]]) -> Iterator[Finding]:
    same = 0
    for distribution, tested in chain.values():
        installed = dependencies.installed_version(distribution)
        if installed is None or installed.partition("+")[0] == tested:  # torch's versions end with the build, as +cpu
            same += 1
        else:
            mend = f"pip install '{distribution}=={tested}' if something fails"
            yield Finding(name, WARN, f"{distribution} {installed}; tested with {tested}", mend)
    yield Finding(name, OK, f"{same} of {len(chain)} in the tested versions")


def torch_build() -> Finding:
    """Whether torch sees the GPU that is here. Call it when torch has been imported."""
    torch = sys.modules["torch"]
    cuda = torch.version.cuda
    text = f"{torch.__version__}, {'CPU only' if cuda is None else f'CUDA {cuda}'}"
    if os.path.exists(NVIDIA) and not torch.cuda.is_available():
        mend = "install torch for your driver: https://pytorch.org/get-started/locally/"
        return Finding("torch", WARN, f"{text}: an NVIDIA GPU is here that torch does not see; engines run on the CPU", mend)
    return Finding("torch", OK, text)


def four_bit_product() -> Iterator[Finding]:
    """On a card: whether 4-bit weights stay packed there. Call it when torch has been imported."""
    if not sys.modules["torch"].cuda.is_available():
        return
    from laya.model.int4 import product_holds

    shapes = [shape for shape in FOUR_BIT_SHAPES if not product_holds("cuda", *shape)]
    wrong = "; ".join(f"{columns} columns in groups of {group}" for columns, group in shapes)
    if wrong:
        mend = "use another torch, or plan for dense weights: laya serve counts them"
        yield Finding("4-bit product", WARN, f"wrong or missing on the card for {wrong}: such weights are dense", mend)
    else:
        yield Finding("4-bit product", OK, "right on the card: 4-bit weights stay packed")


def namesakes() -> Iterator[Finding]:
    """The unrelated package that is called laya, and variables that it reads and we do not."""
    found = []
    try:
        found.append(f"the unrelated package laya {metadata.version('laya')} is installed beside laya-server")
    except metadata.PackageNotFoundError:
        pass
    strange = [name for name in os.environ if name.startswith("LAYA_") and "__" not in name and name not in TOP_LEVEL]
    if found:
        mend = "pip uninstall laya, then install laya-server again, as its files may have gone too"
        yield Finding("namesakes", WARN, f"{found[0]}: both are imported as laya", mend)
    if strange:
        named = ", ".join(sorted(strange)[:5])
        yield Finding("variables", WARN, f"{named}: not read here", "ours have two underscores, as LAYA_SERVER__PORT")
    if not found and not strange:
        yield Finding("namesakes", OK, "no other package called laya, no variable of it")


def gpus() -> Iterator[Finding]:
    nvml = Nvml.find()
    if nvml is None:
        if os.path.exists(NVIDIA):
            mend = "pip install 'laya-server[gpu]'"
            yield Finding("gpu", WARN, "an NVIDIA driver is here, but its figures cannot be read", mend)
        else:
            yield Finding("gpu", OK, "none is visible: engines run on the CPU")
        return
    driver = nvml.driver_version()
    for card in nvml.cards():
        if card.lost:
            yield Finding(f"gpu {card.index}", FAIL, "the driver has lost it", "nvidia-smi -r, or restart the machine")
            continue
        heat = "" if card.temperature_c is None else f", {card.temperature_c:.0f} degrees"
        used, total = card.used >> 20, card.total >> 20
        yield Finding(f"gpu {card.index}", OK, f"{card.name}, {used} of {total} MiB used{heat}, driver {driver}")


def limits(config: Config) -> Iterator[Finding]:
    """Descriptors for clients, for as many connections to backends, and the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    upstream = sum(backend.max_inflight for backend in config.backends.values())
    wanted = config.server.max_connections + upstream + OTHER_FILES
    text = f"{soft} descriptors; {config.server.max_connections} clients and {upstream} upstream connections may want {wanted}"
    if soft >= wanted:
        yield Finding("open files", OK, text)
    else:
        how = f"ulimit -n {wanted}" if hard >= wanted or hard == resource.RLIM_INFINITY else f"LimitNOFILE={wanted} in the unit"
        yield Finding("open files", WARN, text, f"{how}; or a smaller server.max_connections")


def storage(config: Config) -> Iterator[Finding]:
    """Where the session table and stored conversations are kept besides memory."""
    if config.router.mode == "shared":
        yield shared_table(config.router.redis)
        return
    version = sqlite3.sqlite_version
    if config.router.mode not in ("hybrid", "persistent"):
        yield Finding("sqlite", OK, f"{version}, not used in mode {config.router.mode}")
        return
    yield table_file(config.path_of(config.router.path))


def table_file(path: str) -> Finding:
    """Whether a table can be kept there, tried with another file beside it; the table itself is only looked at."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return Finding("sqlite", FAIL, f"{folder}, where {os.path.basename(path)} would be, is not there", f"mkdir -p {folder}")
    if os.path.exists(path) and not (os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)):
        return Finding("sqlite", FAIL, f"{path} is no file that can be written", f"chown $(id -un) {path}, or set router.path")
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".laya-doctor-", dir=folder) as work,
            closing(sqlite3.connect(os.path.join(work, "try.sqlite"))) as connection,
        ):
            kind = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            connection.execute("CREATE TABLE tried (x)")
    except (OSError, sqlite3.Error) as exc:
        text = f"{folder} takes no table: {getattr(exc, 'strerror', None) or exc}"
        return Finding("sqlite", FAIL, text, f"chown $(id -un) {folder}, make room there, or set router.path")
    if kind != "wal":
        text = f"{folder} is on a file system without write-ahead logs: each commit takes longer there"
        return Finding("sqlite", WARN, text, "set router.path to a local disk")
    if os.path.exists(path) and not _is_table(path):
        return Finding("sqlite", WARN, f"{path} is damaged: the next start puts it aside", "restore it if you can")
    return Finding("sqlite", OK, f"{sqlite3.sqlite_version}, {path}")


def _is_table(path: str) -> bool:
    """By its first bytes: a running Laya may hold it."""
    with open(path, "rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


def shared_table(url: str) -> Finding:
    """Whether the common table answers; its URL may hold a password and is not shown."""
    try:
        from redis import Redis, RedisError
    except ImportError:
        return Finding("redis", FAIL, "router.mode shared needs the redis package", "pip install 'laya-server[shared]'")
    try:
        with Redis.from_url(url, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S) as client:
            version = client.info("server").get("redis_version", "of an unknown version")
    except (RedisError, OSError, ValueError) as exc:
        text = f"the common table does not answer ({type(exc).__name__}): until it does each router works alone"
        return Finding("redis", WARN, text, "start it, or set router.redis to where it is")
    return Finding("redis", OK, f"the common table answers, version {version}")
