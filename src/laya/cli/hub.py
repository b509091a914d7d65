"""Models of the hub, through the huggingface_hub package where it is installed: resumed, checked and with progress by it.

In: ORG/NAME, the models folder, patterns of files and a revision. Out: models/NAME; or CommandFailed with one line.
"""

from __future__ import annotations

import errno
import os
import re

from laya.cli.exits import FAILED, NO_NETWORK, USAGE, CommandFailed
from laya.errors import DependencyError

# What an engine can read; the rest of a repository (other frameworks' weights, pictures) is not brought.
READABLE = ["*.gguf", "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Failures of the disk that name no file.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def pull(repository: str, folder: str, include: list[str] | None, revision: str | None) -> str:
    """The folder that holds the model. Files that are there and right are not brought again."""
    if not _ID.fullmatch(repository):
        raise CommandFailed(f"{repository!r} is no model; allowed: default, gemma, or ORG/NAME of the hub", USAGE)
    try:
        import huggingface_hub
    except ImportError:
        raise DependencyError("huggingface_hub is not installed; bring it with: pip install 'laya-server[engine]'") from None
    target = os.path.join(folder, repository.split("/")[1])
    print(f"bringing {repository} into {target}", flush=True)
    try:
        huggingface_hub.snapshot_download(repository, revision=revision, local_dir=target, allow_patterns=include or READABLE)
    except Exception as exc:  # the hub's own classes, and those of whatever client it uses
        raise _failure(repository, revision, exc) from None
    if not any(name.endswith((".gguf", ".safetensors")) for _, _, names in os.walk(target) for name in names):
        taken = " that --include takes" if include else ""
        raise CommandFailed(f"{repository} has no .gguf or .safetensors file{taken}", FAILED)
    print(f"{target} is complete; set inference.model to it, or to a .gguf file in it")
    return target


def _failure(repository: str, revision: str | None, exc: Exception) -> CommandFailed:
    """The hub's failures by the names of their classes, which have stayed while their modules moved."""
    names = {cls.__name__ for cls in type(exc).__mro__}
    if "GatedRepoError" in names:
        return CommandFailed(f"{repository} is gated: accept its terms on the hub, then set HF_TOKEN", FAILED)
    if "RevisionNotFoundError" in names:
        return CommandFailed(f"{repository} has no revision {revision}", FAILED)
    if "RepositoryNotFoundError" in names:
        return CommandFailed(f"the hub has no model {repository}, or it is private and HF_TOKEN is not set", FAILED)
    if isinstance(exc, OSError) and (exc.errno in _DISK or (exc.errno is not None and exc.filename is not None)):
        return CommandFailed(f"cannot write the model: {exc.strerror}", FAILED)
    text = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
    if "LocalEntryNotFoundError" in names:  # its own words are about caches; the cause stands first
        text = "the hub does not answer: " + (text.partition("Got: ")[2] or text).partition(" An error happened")[0]
    return CommandFailed(f"cannot download {repository}: {text}; is the network up?", NO_NETWORK)
