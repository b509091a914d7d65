"""Models that several tests share; each is loaded once."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from laya.model.load import load

from . import tiny

SMOLLM2 = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session", autouse=True)
def _two_threads():
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    assert SMOLLM2.is_file(), f"{SMOLLM2.name} is missing under models/: run `make model`"
    return str(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """(runner, tokenizer, card) in the mode that serves: 4-bit weights."""
    return load(smollm2_path, device="cpu", num_blocks=192, max_seq_len=1024, swap_bytes=32 << 20)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """kind -> (runner in float32, transformers model) from safetensors."""
    made = {}

    def get(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            referee = tiny.save(kind, folder)
            runner, _, _ = load(str(folder), device="cpu", dtype="float32", num_blocks=64, swap_bytes=1 << 20)
            made[kind] = runner, referee
        return made[kind]

    return get


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """(type of matrices, dtype) -> (runner, transformers model with the file's own numbers)."""
    made = {}
    folder = tmp_path_factory.mktemp("gguf")

    def get(kind: str, dtype: str | None = None):
        if (kind, dtype) not in made:
            path = folder / f"{kind}.gguf"
            referee = tiny.save_gguf(path, gguf.GGMLQuantizationType[kind])
            runner, _, _ = load(str(path), device="cpu", dtype=dtype, num_blocks=64, swap_bytes=1 << 20)
            made[kind, dtype] = runner, referee
        return made[kind, dtype]

    return get
