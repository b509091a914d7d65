"""The 4-bit linear as CUDA has it, without a card: torch's own registrations hold shapes and types, card.py the rest."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from engine.harness import Engine
from laya.model.describe import describe
from laya.model.formats import open_checkpoint
from laya.model.formats.stored import StoredTensor
from laya.model.holding import CUDA_GROUPS, cuda_tiles, held_as, held_bytes
from laya.model.int4 import INT4_ERROR, LAYOUTS, Int4Layout, Int4Linear, product_error, product_holds
from laya.model.load import load
from laya.model.quant import DenseLinear, build_linear
from laya.schema.generation import SamplingParams

from . import card, gguf_files
from .card import CUDA, Card, OnCard
from .drive import prefill, prompt_ids, sequence
from .test_awq import save_awq
from .test_engine_equivalence import Pooled

aten = torch.ops.aten
HOST, FAKE = torch.device("cpu"), torch.device("cuda", 0)  # without a number torch would look for the current card
# Columns of matrices: SmolLM2's and Gemma's, Qwen's and Llama's of all sizes up to 27B; and the narrowest.
WIDTHS = [32, 64, 96, 576, 640, 1024, 1536, 2048, 2560, 4096, 5120, 8192, 11008, 14336, 21504]
SHAPES = [(columns, group) for columns in WIDTHS for group in CUDA_GROUPS if columns % group == 0]
BY_SOURCE = Int4Layout(lambda numbers, _: card.pack(pairs_of(numbers), cuda_tiles(numbers.shape[1])), card.product, lambda: False)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def pairs_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[:, ::2] << 4 | numbers[:, 1::2]


def random_numbers(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


@pytest.fixture
def unchecked(monkeypatch):
    """Nothing is known of any product, and the card is one that has it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    product_holds.cache_clear()
    yield
    product_holds.cache_clear()


@pytest.mark.parametrize("columns, group", SHAPES)
@pytest.mark.parametrize("rows", [16, 2 * 21504])
def test_torchs_registration_takes_every_shape(columns, group, rows):
    """Tensors without memory that torch takes for CUDA's: its own rules for these operations, and what their sources check."""
    layout = LAYOUTS["cuda"]
    with FakeTensorMode():
        tensor = StoredTensor("w", "Q4_0", (rows, columns), np.empty((rows, 0), dtype=np.uint8))
        tensor.group = group
        assert held_as("layers.0.q", tensor, "cuda", "quantized", lambda *_: True) == "int4"
        numbers = torch.empty((rows, columns), dtype=torch.uint8)
        packed = layout.pack(numbers, FAKE)
        scale_zero = torch.empty((columns // group, rows, 2), dtype=torch.bfloat16).to(FAKE)
        assert packed.device.type == "cuda" and packed.dtype == torch.int32 and packed.is_contiguous()
        card.check_packing(torch.empty((rows, columns // 2), dtype=torch.uint8), packed.shape[3] * 2)
        linear = Int4Linear(packed, scale_zero, group, layout)
        assert linear.nbytes == held_bytes(tensor, "int4")
        for count in (1, 17, 2048):
            x = torch.empty((count, columns), dtype=torch.bfloat16, device=FAKE)
            card.check_product(x, packed, group, scale_zero)
            for out in (linear(x), linear.float32(x).bfloat16()):
                assert out.shape == (count, rows) and out.device.type == "cuda" and out.dtype == torch.bfloat16


@pytest.mark.parametrize("columns, tiles", [(32, 2), (64, 4), (128, 8), (576, 4), (96, 2), (640, 8), (21504, 8)])
def test_the_widest_interleaving_that_divides_is_taken(columns, tiles):
    assert cuda_tiles(columns) == tiles
    assert card.pack(pairs_of(random_numbers(8, columns)), tiles).shape == (1, columns // (tiles * 16), 32, tiles // 2)


@pytest.mark.parametrize("rows, columns", [(8, 32), (24, 64), (16, 128), (64, 576)])
def test_what_the_source_packs_its_product_reads(rows, columns):
    """The two halves of card.py were written from two kernels; each number is found where it was put."""
    numbers = random_numbers(rows, columns)
    assert torch.equal(card.unpack(card.pack(pairs_of(numbers), cuda_tiles(columns))), numbers.long())


@pytest.mark.parametrize("columns, group", [shape for shape in SHAPES if shape[0] <= 2048])
def test_our_packing_and_their_product_give_the_dequantised_product(columns, group):
    assert product_error(HOST, BY_SOURCE, columns, group) < INT4_ERROR / 3


FAULTS = {
    "odd columns in the high half": {"pack": lambda numbers, _: card.pack(numbers[:, ::2] | numbers[:, 1::2] << 4, 8)},
    "columns in order of halves": {"pack": lambda n, _: card.pack(n[:, : n.shape[1] // 2] << 4 | n[:, n.shape[1] // 2 :], 8)},
    "words of another interleaving": {"pack": lambda n, _: card.pack(pairs_of(n), 4).reshape(n.shape[0] // 8, -1, 32, 4)},
    "lanes by column": {"pack": lambda n, _: card.pack(pairs_of(n), 8).view(-1, 8, 4, 4).transpose(1, 2).reshape(n.shape[0] // 8, -1, 32, 4)},
    "scale and zero swapped": {"product": lambda x, w, group, pair: card.product(x, w, group, pair.flip(-1).contiguous())},
    "zero of another sign": {"product": lambda x, w, group, pair: card.product(x, w, group, pair * torch.tensor([1, -1]).bfloat16())},
    "numbers from 0": {"product": lambda x, w, group, pair: card.product(x, w, group, torch.stack([pair[..., 0], pair[..., 1] + 8 * pair[..., 0]], -1))},
    "the next group's scale": {"product": lambda x, w, group, pair: card.product(x, w, group, pair.roll(1, 0).contiguous())},
    "groups of another size": {"product": lambda x, w, group, pair: card.product(x, w, 2 * group, pair[::2].contiguous())},
    "rows beyond the first tile missing": {"product": lambda x, w, group, pair: torch.cat([card.product(x, w, group, pair)[:16], torch.zeros(1, w.shape[0] * 8)])},
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_another_layout_is_told_from_ours(fault):
    assert not product_error(HOST, BY_SOURCE._replace(**FAULTS[fault]), 256, 32) < INT4_ERROR


def quantised(kind: str, rows: int = 96, columns: int = 512) -> StoredTensor:
    values = np.random.default_rng(5).standard_normal((rows, columns)).astype(np.float32)
    raw = gguf_files.pack(values, gguf.GGMLQuantizationType[kind])
    return StoredTensor("w", kind, (rows, columns), raw.view(np.uint8).reshape(rows, -1))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_linear_on_the_card_keeps_the_files_weights(kind, unchecked):
    tensor = quantised(kind)
    x = torch.randn(33, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ torch.from_numpy(tensor.float32()).double().T
    with Card() as device:
        linear = build_linear([tensor], ["int4"], CUDA)
        out = linear(x.to(CUDA))
        assert isinstance(linear, Int4Linear) and isinstance(out, OnCard) and device.products == 1
        got = out.cpu().double()
    # bf16 keeps 8 bits of scale and zero, of each weight and of the result.
    assert ((got - expected).norm() / expected.norm()).item() < 8e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> path of a tiny model with 4-bit weights."""
    folder = tmp_path_factory.mktemp("card")
    for kind in ("Q4_0", "Q4_1", "Q4_K"):
        gguf_files.save_gguf(folder / f"{kind}.gguf", gguf.GGMLQuantizationType[kind])
    gguf_files.save_gguf(folder / "gemma3.gguf", gguf.GGMLQuantizationType.Q4_0, architecture="gemma3")
    (folder / "awq").mkdir()
    save_awq("qwen2", folder / "awq", 128)
    return {path.name.removesuffix(".gguf"): str(path) for path in folder.iterdir()}


def scores(runner, ids: list[int]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in prefill(runner, sequence(ids, range(8), SCORED))[0].prompt_logprobs])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "awq", "gemma3"])
def test_a_model_on_the_card_scores_as_its_own_numbers_do(kind, models, unchecked):
    """The whole forward pass: nothing of a step stands on the other side, and the weights are the file's."""
    ids = prompt_ids(60)
    exact, _, _ = load(models[kind], device="cpu", dtype="float32", num_blocks=16)
    expected = scores(exact, ids)
    with Card() as device:
        runner, _, told = load(models[kind], device="cuda", num_blocks=16)
        tried = device.products
        got = scores(runner, ids)
        assert told.details["device"] == "cuda" and device.products > tried
        assert all(isinstance(layer.o, Int4Linear) for layer in runner.decoder.layers)
    planned = describe(models[kind], device="cuda", holds=product_holds)  # from what was tried: no card is asked again
    # Biases are planned as float32 and norms of heads once: a thousandth of a real model, one in a hundred of these.
    assert runner.decoder.nbytes == pytest.approx(planned["tensor_bytes"], rel=0.01) and planned["unpacked_bytes"] == 0
    assert (got - expected).abs().mean() < 0.3  # as on the processor: docs/engine.md


def test_an_engine_on_the_card_gives_each_request_its_own_text(models, unchecked):
    """Chunks, batches, preemption, swapping, choices and every kind of sampling, on tensors that must all be the card's."""
    wanted = {"temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    with Card():
        runner, tokenizer, _ = load(models["Q4_1"], device="cuda", num_blocks=64, swap_bytes=1 << 20)
        runner.warm_up(4, 64)
        alone = []
        for i in range(4):
            engine = Engine(Pooled(runner, blocks=64), tokenizer=tokenizer, max_num_seqs=4, prefill_chunk_tokens=64)
            client = engine.offer(prompt_ids(28 + i, seed=i), 40, seed=1, **wanted)
            engine.settle()
            alone.append(client.token_ids())
        crowd = Engine(
            Pooled(runner, blocks=10, swap_blocks=64), tokenizer=tokenizer, max_num_seqs=6, prefill_chunk_tokens=32, queue_limit=100
        )  # fmt: skip
        same = [crowd.offer(prompt_ids(28 + i, seed=i), 40, seed=1, **wanted) for i in range(4)]
        for extra in (
            {"temperature": 1.0, "top_k": 5, "min_p": 0.1, "n": 2}, {"temperature": 0.7, "top_p": 0.9, "prompt_logprobs": 1},
            {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: -100.0, 9: 3.0}},
            {"min_tokens": 5, "stop_token_ids": (7,)},
        ):  # fmt: skip
            crowd.offer(prompt_ids(40, seed=9), 12, **extra)
        crowd.settle()
        assert crowd.runner.swaps_in > 0 and all(client.ok for client in crowd.clients)
    assert [client.token_ids() for client in same] == alone


def swapped_pairs(x, packed, group, scale_zero):
    return card.product(x, packed, group, scale_zero.flip(-1).contiguous())


def test_a_card_that_multiplies_otherwise_gets_dense_weights_which_the_plan_counts(models, unchecked, caplog):
    exact, _, _ = load(models["Q4_1"], device="cpu", dtype="float32", num_blocks=16)
    expected = scores(exact, prompt_ids(60))
    with Card(product=swapped_pairs):
        runner, _, _ = load(models["Q4_1"], device="cuda", num_blocks=16)
        got = scores(runner, prompt_ids(60))
    assert isinstance(runner.decoder.layers[0].qkv, DenseLinear) and "4-bit products on cuda are wrong" in caplog.text
    assert (got - expected).abs().mean() < 0.3
    planned = describe(models["Q4_1"], device="cuda", holds=product_holds)
    packed = sum(t.rows * t.columns for t in open_checkpoint(models["Q4_1"]).tensors.values() if t.kind == "Q4_1") 
    assert runner.decoder.nbytes == planned["tensor_bytes"]
    assert planned["unpacked_bytes"] == planned["tensor_bytes"] - describe(models["Q4_1"], device="cuda")["tensor_bytes"] > packed


def test_a_device_that_lacks_the_product_is_not_asked_for_it(unchecked, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with Card() as device:
        assert not product_holds("cuda", 128, 32) and device.products == 0
    assert "before 8.0" in caplog.text


def test_the_card_of_these_tests_refuses_what_torch_refuses():
    """Else the tests above could not fail."""
    with Card():
        on = torch.zeros((2, 4), device="cuda")
        for mixed in (lambda: on + torch.zeros(4), lambda: torch.zeros(3)[torch.tensor([0], device="cuda")], on.numpy):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        assert (on + torch.tensor(1.0)).is_cuda and on[torch.tensor([0])].is_cuda and not on.cpu().is_cuda
    for broken in (lambda: card.pack(torch.zeros((8, 24), dtype=torch.uint8), 2), lambda: card.pack(torch.zeros((8, 16)), 2)):
        with pytest.raises(RuntimeError):
            broken()
