"""File formats: a path becomes a `Checkpoint`, that is a spec, named tensors left in the file, and what the tokenizer needs.

In: a path. Out: `Checkpoint`. Nothing is read but headers until a tensor is asked for; no torch here.
"""

from __future__ import annotations

import os

from laya.model.formats import gguf, safetensors
from laya.model.formats.stored import Checkpoint
from laya.model.spec import BrokenModel, UnsupportedModel


def open_checkpoint(path: str) -> Checkpoint:
    """A .gguf file, or a directory with config.json and safetensors. Raises BrokenModel or UnsupportedModel."""
    if not os.path.exists(path):
        raise BrokenModel(f"{path}: no such file")
    if os.path.isfile(path) and path.endswith(".gguf"):
        return gguf.open_gguf(path)
    if os.path.isdir(path) and os.path.exists(os.path.join(path, "config.json")):
        return safetensors.open_safetensors(path)
    raise UnsupportedModel(f"{path}: not a model; known: a .gguf file, a directory with config.json and .safetensors files")
