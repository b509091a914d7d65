"""The compiled step against torch's own operations: near them in numbers, the same to the bit in any company, and never missed."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from laya.engine.step import Scheduled
from laya.model import compiled
from laya.model.compiled import CompiledForward
from laya.model.forward import EagerForward, forward_of
from laya.model.load import load
from laya.schema.generation import SamplingParams

from .drive import prefill, prompt_ids, sequence
from .test_awq import save_awq

# Every architecture, and every form in which a matrix of quantised files is held; Q4_K files mix 4 and 8 bits.
MODELS = [("Q4_0", "llama"), ("Q4_1", "qwen2"), ("Q4_1", "gemma3"), ("Q8_0", "gemma3"), ("Q8_0", "qwen3"), ("Q4_K", "llama"), ("Q6_K", "qwen3")]


@pytest.fixture(autouse=True)
def _built():
    """Where there is no compiler or no AVX-512 the other tests of this room run on torch's operations alone."""
    if compiled.library() is None:
        pytest.skip("the compiled step is not built here, or the processor lacks AVX-512 with VNNI")


@pytest.fixture(params=MODELS, ids="-".join)
def runner(request, tiny_gguf):
    kind, architecture = request.param
    return tiny_gguf(kind, "quantized", architecture)[0]


def numbers(runner, forward, ids: list[int], cuts: list[int], table: range, beside: list[int] = ()) -> torch.Tensor:
    """Logits of every position of `ids`, read in pieces that end at `cuts`, with another sequence growing in the same steps."""
    seq, other = sequence(ids, table), sequence(list(beside), range(40, 60))
    rows, seen = [], 0
    with torch.inference_mode():
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            batch = [Scheduled(seq, start, end - start)]
            if seen < len(beside):
                batch.append(Scheduled(other, seen, min(7, len(beside) - seen)))
                seen += batch[-1].count
            plan = runner._planner.plan(batch)
            i = plan.order.index(0)
            wide = forward.run(plan)[plan.first_rows[i] : plan.last_rows[i] + 1]
            rows.append(forward.logits(wide))
    return torch.cat(rows)


def test_it_is_chosen_for_quantised_models(runner, smollm2):
    assert isinstance(runner.forward, CompiledForward)
    assert smollm2[0].forward.kind == "compiled" and smollm2[2].details["step"] == "compiled"


def test_its_numbers_are_those_of_torchs_operations(runner):
    """Both round differently (8 bits of bf16 between torch's operations, float32 here): 0.3 in the mean is what is allowed."""
    ids = prompt_ids(70, seed=3)
    eager = torch.log_softmax(numbers(runner, EagerForward(runner.decoder, runner.cache), ids, [50, 69], range(5)), -1)
    step = torch.log_softmax(numbers(runner, runner.forward, ids, [50, 69], range(5)), -1)
    chosen = eager.topk(3, dim=-1).indices
    assert (eager - step).gather(1, chosen).abs().mean() < 0.3


def test_numbers_are_the_same_to_the_bit_however_a_prompt_is_cut_and_whoever_runs_beside_it(runner):
    ids = prompt_ids(90, seed=4)
    whole = numbers(runner, runner.forward, ids, [], range(6))
    chance = random.Random(5)
    for cuts in ([1], [89], [16, 32, 48], sorted(chance.sample(range(1, 90), 9))):
        beside = prompt_ids(chance.randrange(1, 60), seed=6)
        assert torch.equal(numbers(runner, runner.forward, ids, cuts, [11, 3, 29, 8, 30, 7], beside), whole)


@pytest.mark.parametrize("kind, group", [("llama", 32), ("qwen3", 64), ("gemma3", 128)])
def test_awq_weights_of_every_group_take_it_too(kind, group, tmp_path):
    save_awq(kind, tmp_path, group)
    runner, _, _ = load(str(tmp_path), device="cpu", num_blocks=64)
    ids = prompt_ids(70, seed=3)
    whole = numbers(runner, runner.forward, ids, [], range(6))
    assert runner.forward.kind == "compiled"
    assert torch.equal(numbers(runner, runner.forward, ids, [3, 50], range(10, 16), prompt_ids(30)), whole)
    eager = torch.log_softmax(numbers(runner, EagerForward(runner.decoder, runner.cache), ids, [], range(6)), -1)
    chosen = eager.topk(3, dim=-1).indices
    assert (eager - torch.log_softmax(whole, -1)).gather(1, chosen).abs().mean() < 0.3


def test_numbers_do_not_depend_on_the_number_of_threads(smollm2_path):
    made = []
    for threads in (1, 3):
        model, _, _ = load(smollm2_path, device="cpu", num_blocks=64, threads=threads)
        made.append(numbers(model, model.forward, prompt_ids(150, seed=7, vocab=40000), [100, 149], range(10)))
        model.close()
    torch.set_num_threads(1)
    assert torch.equal(*made)


def test_a_number_that_is_not_finite_ends_its_request_alone(smollm2):
    runner, _, _ = smollm2
    greedy = SamplingParams(temperature=0.0)
    good, bad = sequence(prompt_ids(20, seed=1), range(2), greedy), sequence(prompt_ids(20, seed=2), range(4, 6), greedy)
    for seq in (good, bad):
        prefill(runner, seq)
        seq.token_ids.append(77)
    expected = runner.run([Scheduled(good, 20, 1)])[0].token_id
    with torch.inference_mode():
        runner.cache.pool[3, 4, 2] = float("nan")
    found = runner.run([Scheduled(bad, 20, 1), Scheduled(good, 20, 1)])
    assert found[0].error is not None and found[1].token_id == expected
    with torch.inference_mode():
        runner.cache.pool.zero_()


def test_scratch_and_index_buffers_are_made_once(smollm2):
    runner, _, _ = smollm2
    runner.warm_up(max_num_seqs=8, chunk_tokens=256)
    scratch, buffers = runner.forward._scratch, runner.forward._numbers
    prefill(runner, sequence(prompt_ids(256, seed=1), range(20)))
    assert runner.forward._scratch is scratch and runner.forward._numbers is buffers


@pytest.mark.parametrize("reason", ["extension", "AVX-512", "asked", "shapes", "form", "bf16"])
def test_without_it_torchs_operations_run_and_the_log_says_why(reason, tiny_gguf, tiny_models, monkeypatch, caplog):
    runner = tiny_gguf("Q4_1", "quantized")[0] if reason != "bf16" else tiny_models("llama")[0]
    if reason == "extension":
        monkeypatch.setattr(compiled, "library", lambda: None)
    if reason == "AVX-512":
        monkeypatch.setattr(compiled, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    if reason == "shapes":
        monkeypatch.setattr(runner.cache, "block_size", 8)
    if reason == "form":
        monkeypatch.setattr(compiled, "packs_as_known", lambda: False)
    with caplog.at_level(logging.INFO, "laya.model"):
        forward = forward_of(runner.decoder, runner.cache, eager=reason == "asked")
    assert forward.kind == "eager" and reason in caplog.text


def test_an_extension_that_cannot_be_loaded_counts_as_not_built(monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda _: type("Spec", (), {"origin": str(broken)}))
    assert compiled.library.__wrapped__() is None
