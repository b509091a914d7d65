"""Files: read exactly, or refused by name before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from laya.model.describe import describe
from laya.model.formats import open_checkpoint
from laya.model.formats.gguf_header import read_header
from laya.model.formats.stored import StoredTensor
from laya.model.load import load
from laya.model.spec import BrokenModel, UnsupportedModel
from laya.schema.generation import SamplingParams

from . import gguf_files, tiny
from .drive import prefill, prompt_ids, sequence

SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def test_header_agrees_with_the_gguf_package(smollm2_path):
    header = read_header(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.fields[name] == field.contents(), name
    assert [(t.name, t.dimensions, t.type_id, t.offset) for t in header.tensors] == [
        (t.name, tuple(int(d) for d in t.shape), int(t.tensor_type), int(t.data_offset)) for t in reader.tensors
    ]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_affine_form_equals_the_gguf_packages_numbers(kind):
    """(q - 8) * scale + zero is the weight, for random blocks of every 4-bit type."""
    quantisation = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(0).integers(0, 256, (6, 512 // block * block_bytes), dtype=np.uint8)
    halves = raw.reshape(6, -1, block_bytes)[..., :4].view(np.float16)  # scales and minima: any sane half
    halves[...] = np.random.default_rng(1).standard_normal(halves.shape).astype(np.float16)
    if kind == "Q4_0":
        raw.reshape(6, -1, block_bytes)[..., 2:4] = 0x5A
    expected = gguf.quants.dequantize(raw, quantisation)
    ((first, q, scale, zero),) = StoredTensor("w", kind, (6, 512), raw).affine4_blocks()
    rebuilt = (q.reshape(6, -1, 32).astype(np.float32) - 8) * scale[..., None] + zero[..., None]
    assert first == 0 and q.max() <= 15
    np.testing.assert_allclose(rebuilt.reshape(6, 512), expected, rtol=1e-4, atol=1e-3)


# float32 mode computes with the file's very numbers. Quantised mode rounds activations to bf16 and, for 4 bits, scales and
# zeros too; 5 and 8 bits become one scale a row. These models' logits have a standard deviation of 10, so bounds are wide;
# SmolLM2's own bound is in test_reference.py.
MIXES = [("llama", kind) for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]
MIXES += [(name, kind) for name in ("qwen2", "qwen3", "gemma3") for kind in ("F16", "Q4_1", "Q4_K", "Q6_K")]


@pytest.mark.parametrize("architecture, kind", MIXES)
def test_gguf_types_give_what_transformers_gives_with_the_files_numbers(architecture, kind, tiny_gguf):
    ids = prompt_ids(50, vocab=256)
    for dtype, bound in (("float32", 2e-4), (None, 0.3)):
        runner, referee = tiny_gguf(kind, dtype, architecture)
        expected = tiny.logprobs(referee, ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        got = torch.tensor([entry[0] for entry in prefill(runner, sequence(ids, range(4), SCORED))[0].prompt_logprobs])
        error = (got - expected).abs()
        assert (error.max() if dtype else error.mean()) < bound


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_described_bytes_are_those_held(kind, dtype, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.save_gguf(path, gguf.GGMLQuantizationType[kind])
    runner, _, _ = load(str(path), device="cpu", dtype=dtype, num_blocks=4)
    # Norms of a query and key head, and biases, are expanded when loaded; llama has neither.
    assert describe(str(path), dtype=dtype)["tensor_bytes"] == runner.memory()["params"]


def test_describe_reads_smollm2_from_its_header(smollm2_path):
    told = describe(smollm2_path)
    assert told | {"tensor_bytes": 0} == {
        "architecture": "llama", "quantization": "Q4_1 + Q8_0", "dtype": "quantized", "layers": 30, "hidden": 576,
        "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49152, "context_length": 8192,
        "tied_embeddings": True, "sliding_window": 0, "window_layers": 0, "kv_item_bytes": 2, "tensor_bytes": 0, "unpacked_bytes": 0,
        "parameters": 134515008, "folder": False, "rope_scaled": False, "chat_template": True, "chat_style": {"calls": "hermes", "reasoning": "none"},
    }  # fmt: skip
    assert told["tensor_bytes"] < 100 << 20


def test_describe_needs_no_torch(smollm2_path):
    code = (
        "import sys; from laya.model.describe import describe; describe(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    source = str(Path(__file__).parents[2] / "src")
    out = subprocess.run(
        [sys.executable, "-c", code, smollm2_path], env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "[]", out.stderr


def write_header(path: Path, architecture: str = "llama", pre: str = "gpt-2", model: str = "gpt2") -> str:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    gguf_files.write_vocabulary(writer, pre=pre, model=model)
    writer.add_tensor("token_embd.weight", np.zeros((tiny.VOCAB, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    path = write_header(tmp_path / "m.gguf", "mamba")
    with pytest.raises(UnsupportedModel, match="'mamba'.*gemma3, llama, qwen2, qwen3"):
        describe(path)


def test_an_unknown_quantisation_is_named_with_the_known_ones(tmp_path):
    path = tmp_path / "m.gguf"
    write_header(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)  # F32
    data[at] = 16  # IQ2_XXS
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="token_embd.weight.*IQ2_XXS.*Q4_K"):
        describe(str(path))


def test_an_unknown_hf_architecture_or_quantisation_is_named(tmp_path):
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["FalconForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM.*LlamaForCausalLM"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModel, match="gptq"):
        open_checkpoint(str(tmp_path))


def test_a_rope_scaling_that_is_not_known_is_refused(tmp_path):
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="'yarn'.*llama3"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_with_no_place_is_refused(tmp_path):
    """Computing without it would give wrong text and no error."""
    from safetensors.torch import load_file, save_file

    tiny.save("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="o_proj.bias"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 3000, -4])
def test_a_file_cut_short_is_refused_as_broken(keep, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.save_gguf(path, gguf.GGMLQuantizationType.Q8_0)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenModel):
        describe(str(path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(BrokenModel, match="nothing.gguf"):
        open_checkpoint(str(tmp_path / "nothing.gguf"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="weights.bin"):
        open_checkpoint(str(tmp_path / "weights.bin"))
    path = write_header(tmp_path / "m.gguf")
    with pytest.raises(BrokenModel, match="missing"):
        describe(path)


def test_the_window_is_clamped_to_the_model_and_the_pool(tmp_path, caplog):
    tiny.save("llama", tmp_path)
    runner, _, card = load(str(tmp_path), device="cpu", num_blocks=64, max_seq_len=4096)
    assert runner.max_seq_len == card.max_model_len == 512 and "clamped to 512" in caplog.text
    runner, _, card = load(str(tmp_path), device="cpu", num_blocks=4, max_seq_len=300)
    assert runner.max_seq_len == card.max_model_len == 64 and "holds 64 tokens" in caplog.text
