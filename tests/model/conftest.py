"""Models that several tests share; each is loaded once."""

from __future__ import annotations

import os

import gguf
import pytest
import torch

from laya.model.load import load

from . import gguf_files, tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny products gain nothing from a second thread, and waiting for one on a busy machine costs the most."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _device():
    """`LAYA_TEST_DEVICE=cuda`, as tools/gpu_check.sh sets it: models that tests load go there."""
    device = os.environ.get("LAYA_TEST_DEVICE", "cpu")
    if device == "cpu":
        yield
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("laya.model.load.pick_device", lambda asked: torch.device(device))
            yield


@pytest.fixture(scope="session")
def smollm2_path(model_path) -> str:
    return str(model_path)


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
    """(type of matrices, dtype, architecture) -> (runner, transformers model with the file's own numbers)."""
    made = {}
    folder = tmp_path_factory.mktemp("gguf")

    def get(kind: str, dtype: str | None = None, architecture: str = "llama"):
        if (kind, dtype, architecture) not in made:
            path = folder / f"{architecture}-{kind}.gguf"
            referee = gguf_files.save_gguf(path, gguf.GGMLQuantizationType[kind], architecture=architecture)
            runner, _, _ = load(str(path), device="cpu", dtype=dtype, num_blocks=64, swap_bytes=1 << 20)
            made[kind, dtype, architecture] = runner, referee
        return made[kind, dtype, architecture]

    return get
