"""AWQ 4-bit models: packed here as AutoAWQ packs them, against transformers with the same numbers dequantised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laya.model.describe import describe
from laya.model.formats import open_checkpoint
from laya.model.int4 import Int4Linear
from laya.model.load import load
from laya.model.spec import BrokenModel, UnsupportedModel
from laya.schema.generation import SamplingParams

from . import tiny
from .drive import continuation, prefill, prompt_ids, sequence

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.15}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column of eight stands at which 4 bits of a word
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def pack_words(numbers: np.ndarray) -> np.ndarray:
    """[rows, 8 n] numbers of 4 bits -> int32 [rows, n]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(ORDER):
        words |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def quantise(weight: np.ndarray, group: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """weight [out, in] -> AWQ's three tensors, and the weight that they stand for."""
    grouped = weight.T.reshape(-1, group, weight.shape[0])  # [groups, group, out]
    low, high = grouped.min(1), grouped.max(1)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, 15)
    q = np.clip(np.rint(grouped / scale.astype(np.float32)[:, None]) + zero[:, None], 0, 15)
    read = (q - zero[:, None]) * scale.astype(np.float32)[:, None]
    parts = {
        "qweight": torch.from_numpy(pack_words(q.reshape(-1, weight.shape[0]).astype(np.uint8))),
        "qzeros": torch.from_numpy(pack_words(zero.astype(np.uint8))),
        "scales": torch.from_numpy(np.ascontiguousarray(scale)),
    }
    return parts, np.ascontiguousarray(read.reshape(-1, weight.shape[0]).T.astype(np.float32))


def save_awq(kind: str, folder: Path, group: int = 128, **config):
    """Write a directory as AutoAWQ leaves it; returns the referee, which holds the numbers that the file stands for."""
    model = tiny.make(kind, **SIZES)
    model.save_pretrained(folder)
    tiny.byte_tokenizer().save(str(folder / "tokenizer.json"))
    written, state = {}, model.state_dict()
    for name, tensor in state.items():
        if "_proj.weight" in name:
            parts, read = quantise(tensor.numpy(), group)
            written |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
            state[name] = torch.from_numpy(read)
        else:
            written[name] = tensor.half()
            state[name] = tensor.half().float()
    save_file(written, folder / "model.safetensors")
    model.load_state_dict(state)
    described = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | config
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": method}))
    return model


def scores(runner, ids: list[int]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in prefill(runner, sequence(ids, range(8), SCORED))[0].prompt_logprobs])


def expected(referee, ids: list[int]) -> torch.Tensor:
    return tiny.logprobs(referee, ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("kind, group", [("llama", 128), ("qwen2", 128), ("qwen3", 64), ("mistral", 32), ("gemma3", 128)])
def test_logprobs_are_those_of_the_dequantised_model(kind, group, tmp_path):
    referee = save_awq(kind, tmp_path, group)
    ids = prompt_ids(60)
    runner, _, _ = load(str(tmp_path), device="cpu", dtype="float32", num_blocks=16)
    # float32 on both sides: the numbers are the same, what is left is the order of sums.
    assert (scores(runner, ids) - expected(referee, ids)).abs().max() < 2e-4
    runner, _, card = load(str(tmp_path), device="cpu", num_blocks=16)
    # 4 bits as they are in the file; activations, scales and zeros have bf16's 8 bits (bound as for GGUF's types).
    assert (scores(runner, ids) - expected(referee, ids)).abs().mean() < 0.3
    assert card.details["quantization"].startswith("AWQ") and card.details["dtype"] == "quantized"


def test_greedy_text_follows_the_dequantised_model(tmp_path):
    referee = save_awq("llama", tmp_path)
    runner, _, _ = load(str(tmp_path), device="cpu", dtype="float32", num_blocks=16)
    ids = prompt_ids(20)
    new = continuation(runner, sequence(ids, range(8)), 20)
    rows = tiny.logprobs(referee, ids + new)
    for i, token in enumerate(new):
        assert rows[len(ids) - 1 + i].max() - rows[len(ids) - 1 + i][token] < 2e-4


def test_weights_stay_at_4_bits_with_the_files_groups(tmp_path):
    save_awq("llama", tmp_path)
    runner, _, _ = load(str(tmp_path), device="cpu", num_blocks=16)
    for layer in runner.decoder.layers:
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(linear, Int4Linear) and linear.group == 128
    assert describe(str(tmp_path))["tensor_bytes"] == runner.memory()["params"]


@pytest.mark.parametrize("wrong, named", [
    ({"bits": 8}, "8 bits"), ({"group_size": -1}, "groups of -1"), ({"version": "gemv"}, "'gemv'"), ({"zero_point": False}, "zero points"),
])  # fmt: skip
def test_other_forms_of_awq_are_refused_by_name(wrong, named, tmp_path):
    save_awq("llama", tmp_path, **{"group": 128} | wrong)
    with pytest.raises(UnsupportedModel, match=named):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_other_quantisations_are_refused_by_name_before_loading(method, tmp_path):
    save_awq("llama", tmp_path, quant_method=method)
    with pytest.raises(UnsupportedModel, match=f"'{method}'.*awq"):
        open_checkpoint(str(tmp_path))


def test_parts_that_do_not_fit_are_refused(tmp_path):
    save_awq("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj."
    save_file(state | {name + "scales": state[name + "scales"][:1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match="down_proj"):
        open_checkpoint(str(tmp_path))
    del state[name + "qzeros"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match="missing"):
        open_checkpoint(str(tmp_path))
