"""`laya plan` as a user runs it, on model files that are headers and holes; and that `serve` holds to the same verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from server import ROOT, running

ENV = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
GIB = 1 << 30
FLOATS = np.dtype(np.float32)  # as the shapes are given in: numbers, not bytes
Q4, BF16, F32 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32


def header_only(path: Path, layers: int, hidden: int, inner: int, heads: int, kv_heads: int = 8, dim: int = 128, vocab: int = 151936):
    """A GGUF with 4-bit linears and bf16 embedding and head whose tensor data is a hole in the file: nothing can be loaded."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32768)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    shapes = {"token_embd.weight": ((vocab, hidden), BF16), "output.weight": ((vocab, hidden), BF16)}
    shapes["output_norm.weight"] = ((hidden,), F32)
    for layer in range(layers):
        at = f"blk.{layer}."
        shapes |= {at + "attn_norm.weight": ((hidden,), F32), at + "ffn_norm.weight": ((hidden,), F32)}
        shapes |= {
            at + name: (shape, Q4) for name, shape in (
                ("attn_q.weight", (heads * dim, hidden)), ("attn_k.weight", (kv_heads * dim, hidden)),
                ("attn_v.weight", (kv_heads * dim, hidden)), ("attn_output.weight", (hidden, heads * dim)),
                ("ffn_gate.weight", (inner, hidden)), ("ffn_up.weight", (inner, hidden)), ("ffn_down.weight", (hidden, inner)),
            )
        }  # fmt: skip
    total = 0
    for name, (shape, kind) in shapes.items():
        items, size = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for side in shape:
            count *= side
        nbytes = count // items * size
        writer.add_tensor_info(name, shape, FLOATS, nbytes, raw_dtype=kind)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, os.path.getsize(path) + total + 64)


def plan(folder: Path, inference: dict, *arguments: str) -> tuple[int, dict]:
    config = folder / "plan.yaml"
    config.write_text(json.dumps({"inference": inference}))
    done = subprocess.run(
        [sys.executable, "-m", "laya", "plan", "--json", "--config", str(config), *arguments],
        env=ENV, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("big") / "27b.gguf"
    header_only(path, 64, 5120, 21504, 40)
    return path


@pytest.fixture(scope="module")
def medium(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("medium") / "7b.gguf"
    header_only(path, 32, 4096, 11008, 32)
    return path


BOX = ("--gpu-memory", "12GiB", "--host-memory", "32GiB")


def test_27b_in_4_bits_on_12_gib_is_refused_with_the_numbers(big, tmp_path):
    """(case 48) The shape that took the machine down."""
    code, report = plan(tmp_path, {"model": str(big), "max_seq_len": 4096, "max_num_seqs": 4}, *BOX)
    engine = report["engines"]["local"]
    assert code == 1 and not report["fits"]
    assert engine["device"]["params"] > 15 * GIB and engine["device_limit"] < 12 * GIB < engine["device_total"]
    assert engine["device"]["kv"] == 64 * 8 * 128 * 2 * 2 * 16 * (engine["kv_blocks"] + 2)
    assert any("llama.cpp" in text for text in engine["would_fit"])


def test_27b_at_2048_by_2_is_refused_because_the_weights_alone_exceed_the_share(big, tmp_path):
    """(case 48)"""
    inference = {"model": str(big), "max_seq_len": 2048, "max_num_seqs": 2, "gpu_memory_utilization": 0.75}
    code, report = plan(tmp_path, inference, *BOX)
    engine = report["engines"]["local"]
    assert code == 1 and engine["device"]["params"] > engine["device_limit"] == 9 * GIB


def test_7b_at_2048_by_2_is_accepted(medium, tmp_path):
    inference = {"model": str(medium), "max_seq_len": 2048, "max_num_seqs": 2, "gpu_memory_utilization": 0.75}
    code, report = plan(tmp_path, inference, *BOX)
    engine = report["engines"]["local"]
    assert code == 0 and report["fits"] and engine["max_seq_len"] == 2048 and engine["kv_blocks"] == 256
    assert all(engine["device"][part] > 0 for part in ("params", "kv", "activation", "runtime"))


def test_a_window_that_nobody_set_is_what_memory_allows_and_is_told(medium, tmp_path):
    """(case 50)"""
    _, report = plan(tmp_path, {"model": str(medium), "max_num_seqs": 1}, *BOX)
    engine = report["engines"]["local"]
    assert engine["fits"] and 2048 < engine["max_seq_len"] < 32768
    _, report = plan(tmp_path, {"model": str(medium), "max_num_seqs": 1}, "--gpu-memory", "0", "--host-memory", "24GiB")
    engine = report["engines"]["local"]
    assert engine["fits"] and engine["one_memory"] and engine["device"]["kv"] <= 6 * GIB


def test_several_engines_share_one_limit(medium, tmp_path):
    config = tmp_path / "two.yaml"
    engine = {"model": str(medium), "max_seq_len": 2048, "max_num_seqs": 2}
    config.write_text(json.dumps({"inference": {"engines": {"first": engine, "second": engine}}}))
    command = [sys.executable, "-m", "laya", "plan", "--json", "--config", str(config), *BOX]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)["engines"]
    assert done.returncode == 1 and report["first"]["fits"] and not report["second"]["fits"]
    assert report["second"]["device_limit"] == report["first"]["device_limit"] - report["first"]["device_total"]
    assert report["second"]["host"]["process"] == 0


def test_the_table_is_for_people_and_torch_is_never_loaded(medium, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"inference": {"model": str(medium), "max_seq_len": 2048}}))
    code = (
        "import sys; from laya.cli.main import main; "
        f"code = main(['plan', '--config', {str(tmp_path / 'c.yaml')!r}, '--gpu-memory', '12GiB']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "params" in done.stdout and "device total" in done.stdout and "everything fits" in done.stdout


@pytest.mark.parametrize(("arguments", "word"), [(["--gpu-memory", "12GB12"], "12GiB"), (["--host-memory", "much"], "12GiB")])
def test_a_size_that_is_none_is_a_usage_error(tmp_path, arguments, word):
    done = subprocess.run([sys.executable, "-m", "laya", "plan", *arguments], env=ENV, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and word in done.stderr


def test_serve_refuses_with_the_table_and_the_settings_that_fit(model_path, tmp_path):
    """(case 48)"""
    (tmp_path / "c.yaml").write_text(json.dumps({"inference": {"model": str(model_path), "max_seq_len": 512, "kv_cache": "900GiB"}}))
    command = [sys.executable, "-m", "laya", "serve", "--config", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and "does not fit" in done.stderr and "params" in done.stderr
    assert "would fit: kv_cache: auto" in done.stderr


def test_shrink_applies_the_nearest_settings_and_the_window_is_clamped_aloud(model_path, tmp_path):
    """(cases 28, 48, 50) What is served is what was planned, and /v1/models shows the usable window."""
    inference = {"model": str(model_path), "name": "smol", "kv_cache": "900GiB", "fit": "shrink", "max_seq_len": 9000, "max_num_seqs": 1}
    with running({"inference": inference}, tmp_path, "serve") as laya:
        laya.wait_ready()
        assert laya.event("shrunk")["kv_cache"] is None
        clamped = laya.event("window_clamped")
        assert clamped["asked"] == 9000 and clamped["window"] == 8192
        assert laya.event("plan")["window"] == 8192
        model = next(model for model in json.loads(laya.get("/v1/models")[1])["data"] if model["id"] == "smol")
        assert model["max_model_len"] == 8192
        assert laya.metric("laya_plan_bytes", engine="local", part="kv") == laya.event("plan")["device"]["kv"]
        assert laya.metric("laya_sequences_allowed", engine="local") >= 1
        ready = json.loads(laya.get("/ready")[1])["components"]
        assert ready["watchdog"]["level"] in ("calm", "soft") and ready["watchdog"]["readings"] >= 0
        assert ready["engines"]["local"]["allowed_at_most"] == 1
        assert laya.metric("laya_host_memory_bytes", kind="peak") > 0 < laya.metric("laya_host_memory_bytes", kind="available")
        score = Path(f"/proc/{laya.process.pid}/oom_score_adj").read_text()
        assert int(score) >= 500
