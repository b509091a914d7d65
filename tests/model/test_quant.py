"""Products with quantised matrices against the same matrix in float64."""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
import torch

from laya.model.formats.stored import StoredTensor
from laya.model.holding import dense_dtype, held_as, held_bytes
from laya.model.int4 import DENSE_ROWS, LAYOUTS, PACK_ROWS, Int4Linear, packs_as_known, product_holds, unpack4
from laya.model.quant import INT8_ROWS, Int8Linear, StackedLinear, build_linear, two_planes

CPU = torch.device("cpu")
ROWS, COLUMNS = 192, 256


def stored(kind: str, rows: int = ROWS, seed: int = 0) -> StoredTensor:
    values = np.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return StoredTensor("w", kind, (rows, COLUMNS), raw.view(np.uint8).reshape(rows, -1))


def inputs(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int4_product_keeps_the_files_weights(kind, rows):
    tensor = stored(kind)
    linear = build_linear([tensor], ["int4"], CPU)
    x = inputs(rows).bfloat16()
    expected = x.double() @ torch.from_numpy(tensor.float32()).double().T
    # bf16 keeps 8 bits of scale, zero and result: relative steps of 2**-9 each, adding up as squares.
    assert isinstance(linear, Int4Linear) and relative_error(linear(x), expected) < 6e-3
    assert linear.nbytes == ROWS * COLUMNS // 2 + ROWS * COLUMNS // 32 * 4


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("rows", [192, 112])  # the last is no multiple of what a panel takes
def test_many_rows_take_the_same_weights_as_few(kind, rows):
    linear = build_linear([stored(kind, rows)], ["int4"], CPU)
    x = inputs(DENSE_ROWS).bfloat16()
    few = torch.cat([linear(x[:40]), linear(x[40:])])
    # Both multiply bf16 by float32 and add in float32: only the order of sums differs, and a step of the bf16 result.
    assert torch.allclose(linear(x).float(), few.float(), rtol=2**-7, atol=1e-2)


def test_panels_hold_the_files_own_numbers(monkeypatch):
    tensor = stored("Q4_1")
    linear = build_linear([tensor], ["int4"], CPU)
    monkeypatch.setattr(linear, "_panel", PACK_ROWS)
    x = inputs(DENSE_ROWS).bfloat16()
    expected = x.double() @ torch.from_numpy(tensor.float32()).double().T
    assert relative_error(linear(x), expected) < 6e-3
    if packs_as_known():  # else this processor packs in another way, and many rows take torch's product too
        panel = unpack4(linear.packed, linear.scale_zero, linear.group, 64, 192)
        assert relative_error(panel.t(), torch.from_numpy(tensor.float32()[64:192]).double()) < 6e-3


def test_a_lone_row_through_tiles_equals_the_same_row_beside_another(monkeypatch):
    linear = build_linear([stored("Q8_0")], ["int8"], CPU)
    monkeypatch.setattr(linear, "_tiles", [tile.t() for tile in linear.weight.split(50)])
    x = inputs(2)
    assert torch.equal(linear.float32(x[:1]), linear.float32(x)[:1])


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("integers", [True, False])
def test_int8_product_is_near_exact_in_its_activations(kind, integers):
    tensor = stored(kind)
    linear = build_linear([tensor], ["int8"], CPU)
    linear._integers = integers and linear._integers
    x = inputs()
    held = linear.weight.double() * linear.scale.double().unsqueeze(1)
    # Activations keep 15 bits of the row's peak; the sums themselves are exact integers.
    assert isinstance(linear, Int8Linear) and relative_error(linear.float32(x), x.double() @ held.T) < 2e-4
    # One step in 127 of each row's peak (about 3.5 sigma here) stands for its weights.
    assert relative_error(held, torch.from_numpy(tensor.float32()).double()) < 0.01
    assert relative_error(linear.rows(torch.tensor([3, 0])), held[[3, 0]]) < 1e-6


def test_parts_are_fused_where_they_are_held_alike():
    parts = [stored("Q4_1", 64, 1), stored("Q4_1", 32, 2), stored("Q8_0", 32, 3)]
    x = inputs().bfloat16()
    expected = torch.cat([x.double() @ torch.from_numpy(p.float32()).double().T for p in parts], dim=1)
    fused = build_linear(parts[:2], ["int4", "int4"], CPU)
    assert isinstance(fused, Int4Linear) and relative_error(fused(x), expected[:, :96]) < 6e-3
    mixed = build_linear(parts, ["int4", "int4", "int8"], CPU)
    assert isinstance(mixed, StackedLinear) and len(mixed.parts) == 2
    assert relative_error(mixed(x), expected) < 1e-2 and mixed(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind, held", [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind, held):
    """Bit for bit: this is what makes a decode independent of its batch."""
    linear = build_linear([stored(kind)], [held], CPU)
    x = inputs(64).bfloat16()
    together = linear.float32(x)
    for rows in ([0], [3, 4], list(range(7)), list(range(20, 50))):
        assert torch.equal(linear.float32(x[rows]), together[rows])


def test_rows_that_are_not_finite_or_zero_stay_so_and_touch_no_others():
    linear = build_linear([stored("Q8_0")], ["int8"], CPU)
    x = inputs(4)
    clean = linear.float32(x)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3] = 0
    out = linear.float32(x)
    assert torch.equal(out[0], clean[0]) and not out[3].any()
    assert not torch.isfinite(out[1]).any() and not torch.isfinite(out[2]).any()


def test_two_planes_rebuild_the_row():
    x = inputs(3) * torch.tensor([[1e-8], [1.0], [1e6]])
    planes, step = two_planes(x)
    rebuilt = (planes[:3].double() * 128 + planes[3:].double()) * step.double()
    assert ((rebuilt - x.double()).abs() / x.abs().amax(dim=1, keepdim=True)).max() < 0.51 / (127 * 128)


@pytest.mark.parametrize(("rows", "columns", "group"), [(32, 48, 16), (40, 128, 32), (32, 512, 512)])
def test_what_cudas_layout_does_not_take_is_held_and_planned_as_bf16(rows, columns, group):
    """Half a tile, rows that are no whole vectors, a group that its product does not know."""
    tensor = StoredTensor("w", "Q4_0", (rows, columns), np.empty((rows, 0), dtype=np.uint8))
    tensor.group = group
    held = held_as("layers.0.q", tensor, "cuda", "quantized", lambda *_: True)
    assert held == "bf16" and held_bytes(tensor, held) == rows * columns * 2


@pytest.fixture
def unchecked():
    """Nothing is known of any product."""
    product_holds.cache_clear()
    yield
    product_holds.cache_clear()


def halves_swapped(product, x, packed, group, scale_zero):
    return product(x, (packed << 4 | packed >> 4).view(packed.shape), group, scale_zero)


def raises(product, x, packed, group, scale_zero):
    raise RuntimeError("no kernel image is available")


def not_a_number(product, x, packed, group, scale_zero):
    return product(x, packed, group, scale_zero) * float("nan")


@pytest.mark.parametrize("fault", [halves_swapped, raises, not_a_number])
def test_4_bit_weights_whose_packed_product_is_wrong_are_held_dense_and_it_is_said(fault, unchecked, monkeypatch, caplog):
    layout = LAYOUTS["cpu"]
    monkeypatch.setitem(LAYOUTS, "cpu", layout._replace(product=partial(fault, layout.product)))
    held = held_as("layers.0.q", stored("Q4_1"), "cpu", "quantized", product_holds)
    assert held == ("bf16" if dense_dtype("cpu") == "bfloat16" else "f32") and "4-bit products on cpu" in caplog.text
    assert held_bytes(stored("Q4_1"), held) >= ROWS * COLUMNS * 2


@pytest.mark.parametrize("columns, group", [(96, 32), (576, 32), (1536, 128), (256, 256)])
def test_this_processors_packed_product_is_right_for_every_shape(columns, group, unchecked):
    assert product_holds("cpu", columns, group)


def test_an_8_bit_product_of_many_rows_is_computed_in_parts_and_says_the_same():
    linear = build_linear([stored("Q8_0")], ["int8"], CPU)
    x = inputs(2 * INT8_ROWS + 3).bfloat16()
    assert torch.equal(linear(x), linear.float32(x).bfloat16())
