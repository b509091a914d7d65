"""4-bit weights whose product is wrong on a card are dense there: the plan counts them, and what does not fit is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from laya.cli.doctor_finding import OK, WARN
from laya.cli.doctor_machine import four_bit_product
from laya.config import Config, EngineConfig, InferenceConfig
from laya.errors import StartError
from laya.inprocess import build_engines
from laya.model.int4 import product_holds
from model import card

MIB, GIB = 1 << 20, 1 << 30


class Log:
    def __init__(self) -> None:
        self.plans: list[dict] = []

    def event(self, level: str, name: str, **fields) -> None:
        if name == "plan":
            self.plans.append(fields)


@pytest.fixture
def a_card(monkeypatch):
    """Torch sees one, of which nothing is known yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    product_holds.cache_clear()
    yield
    product_holds.cache_clear()


@pytest.fixture
def on_card(monkeypatch, a_card):
    """(free bytes of the card, its product) -> the start of an engine on it, as far as the plan; SmolLM2 in 4 bits."""

    def start(model: str, free: int, product=card.product, **settings) -> Log:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
        wanted = EngineConfig(model=model, engine="torch", max_seq_len=512, max_num_seqs=1, gpu_memory_utilization=1.0, reserve=0)
        wanted = msgspec.structs.replace(wanted, **settings)
        config = Config(inference=InferenceConfig(**{name: getattr(wanted, name) for name in EngineConfig.__struct_fields__}))
        log = Log()
        product_holds.cache_clear()
        with card.Card(product=product):
            build_engines(config, post=lambda call: None, on_failed=lambda error, ready: None, log=log)
        return log

    return start


def swapped(x, packed, group, pair):
    return card.product(x, packed, group, pair.flip(-1).contiguous())


def raising(x, packed, group, pair):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def planned(log: Log) -> int:
    return sum(log.plans[0]["device"].values())


@pytest.mark.parametrize("product", [swapped, raising])
def test_dense_weights_that_exceed_the_card_are_refused_with_the_numbers(on_card, model_path, product):
    """Room for 4 bits, not for the more of bf16: said before a weight is read, not found out by an allocation."""
    packed = on_card(str(model_path), 4 * GIB)
    dense = on_card(str(model_path), 4 * GIB, product)
    more = (dense.plans[0]["device"]["params"] - packed.plans[0]["device"]["params"]) // MIB
    assert more > 100
    for free, fits in ((planned(packed), False), (planned(dense) - MIB, False), (planned(dense), True)):
        on_card(str(model_path), free)  # with the right product there is room
        if fits:
            assert planned(on_card(str(model_path), free, product)) == free
            continue
        with pytest.raises(StartError) as refused:
            on_card(str(model_path), free, product)
        text = str(refused.value)
        assert f"4-bit products are wrong or missing on this device: {more} MiB more" in text
        assert "does not fit" in text and "params" in text


def test_a_plan_that_may_shrink_does_so_for_dense_weights_too(on_card, model_path):
    large = {"max_seq_len": 8192, "fit": "shrink"}
    whole = on_card(str(model_path), 4 * GIB, **large)
    shrunk = on_card(str(model_path), planned(whole) - 40 * MIB, swapped, **large)
    assert shrunk.plans[0]["window"] < whole.plans[0]["window"] and planned(shrunk) <= shrunk.plans[0]["limit"]


@pytest.mark.parametrize("product, state", [(card.product, OK), (swapped, WARN), (raising, WARN)])
def test_doctor_tells_whether_a_cards_product_is_right(product, state, a_card):
    with card.Card(product=product):
        (found,) = four_bit_product()
    assert found.state == state and ("32 columns in groups of 32" in found.text) == (state == WARN)


def test_doctor_says_nothing_of_it_without_a_card():
    assert list(four_bit_product()) == []
