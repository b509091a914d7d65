"""Files that are there and wrong: each is refused in one line before a weight is read, never a traceback, a hang or a crash.

A header's numbers size tables and loops. A window of 0 once made a rotary table without rows, which the compiled step read past.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import gguf
import pytest

from laya.errors import StartError
from laya.model.describe import describe
from laya.model.load import load
from laya.model.spec import BrokenModel

from . import gguf_files, tiny

GARBAGE = [None, 0, -1, 2**40, 1.5, "x", [], {}, True, [1], {"a": 1}, float("inf")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gemma 3: every kind of setting stands in its config."""
    made = tmp_path_factory.mktemp("whole")
    tiny.save("gemma3", made)
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (made / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [257]}))
    return made


@pytest.fixture
def broken(folder, tmp_path):
    """(file, changes of its object) -> the folder's copy."""

    def change(name: str, **changes) -> str:
        copy = tmp_path / "m"
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        path = copy / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return str(copy)

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 0}, {"max_position_embeddings": -5}, {"num_hidden_layers": 0}, {"num_hidden_layers": 2**40},
        {"num_attention_heads": 0}, {"num_key_value_heads": 3}, {"head_dim": 15}, {"hidden_size": -64}, {"vocab_size": 2**40},
        {"rms_norm_eps": -1e-5}, {"rms_norm_eps": float("nan")}, {"sliding_window": 0}, {"query_pre_attn_scalar": 0},
        {"query_pre_attn_scalar": -4}, {"layer_types": ["full_attention"]}, {"architectures": 5}, {"quantization_config": [1]},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 0.0}, "sliding_attention": {}}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 0.0}, "sliding_attention": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_with_impossible_numbers_is_refused(changes, broken):
    with pytest.raises(StartError):
        describe(broken("config.json", **changes))


@pytest.mark.parametrize(
    "name, changes",
    [
        ("generation_config.json", {"bos_token_id": {"a": 1}}), ("generation_config.json", {"eos_token_id": ["x"]}),
        ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}), ("tokenizer_config.json", {"chat_template": [{}]}),
    ],
    ids=str,
)  # fmt: skip
def test_a_tokenizer_whose_settings_are_of_another_kind_is_refused(name, changes, broken):
    with pytest.raises(BrokenModel, match="tokenizer's settings"):
        describe(broken(name, **changes))


@pytest.mark.parametrize("bos", [[], 320, 2**40, -1])
def test_a_token_that_the_vocabulary_lacks_stands_for_no_start(bos, broken):
    _, tokenizer, _ = load(broken("generation_config.json", bos_token_id=bos, eos_token_id=[257, 9999]), device="cpu", num_blocks=4)
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_ids == {257}


def test_a_tokenizer_that_is_no_text_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_bytes(b'{"version": "\xfa"}')
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        load(str(tmp_path / "m"), device="cpu", num_blocks=4)


@pytest.mark.parametrize("garbage", [*GARBAGE, "gone"], ids=str)
@pytest.mark.parametrize("member", ["dtype", "shape", "data_offsets", None])
def test_a_safetensors_header_with_another_kind_of_value_is_refused(member, garbage, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    at = header if member is None else header["model.norm.weight"]
    at[member or "model.norm.weight"] = garbage
    if garbage == "gone":
        del at[member or "model.norm.weight"]
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + raw[8 + size :])
    with pytest.raises(StartError):
        describe(str(tmp_path / "m"))


@pytest.mark.parametrize(
    "key, form, value",
    [
        ("llama.block_count", "<I", 2**24 + 3), ("llama.context_length", "<I", 0), ("llama.attention.head_count", "<I", 2**31),
        ("llama.attention.layer_norm_rms_epsilon", "<f", -1e-5), ("llama.rope.freq_base", "<f", float("nan")),
        ("llama.attention.key_length", "<I", 17),
    ],
)  # fmt: skip
def test_a_gguf_header_with_impossible_numbers_is_refused_at_once(key, form, value, tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.save_gguf(path, gguf.GGMLQuantizationType.Q4_1)
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4  # the kind of value, then the value
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)
    with pytest.raises(StartError):
        describe(str(path))


def test_damaged_headers_are_refused_or_describe_a_model(tmp_path):
    """Bytes changed at random, as a bad disk or an interrupted copy leaves them: 300 files."""
    path, chance = tmp_path / "m.gguf", random.Random(7)
    gguf_files.save_gguf(path, gguf.GGMLQuantizationType.Q4_1)
    whole = path.read_bytes()
    end = whole.index(b"blk.2.ffn_up.weight")
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            data[chance.randrange(end)] = chance.choice([0, 1, 128, 255, chance.randrange(256)])
        Path(path).write_bytes(data)
        try:
            describe(str(path))
        except StartError:
            refused += 1
    assert 150 < refused < 300
