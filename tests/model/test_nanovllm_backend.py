"""The nano-vllm driver as the gateway has it: an engine thread, admission with its bounds, loading, stopping, loading again."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.test_backend import House, Listener
from laya.errors import ContextLengthExceeded, RateLimited
from laya.schema.generation import Finished

from . import nano_device
from .driven import WINDOW, Referee, load, make_folder, prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("qwen3"))


class NanoHouse(House):
    """A backend over the driven package; `runner` stays the double that the base class asks whether it was closed."""

    def __init__(self, folder, **settings) -> None:
        super().__init__(load=partial(load, folder), **settings)

    def end(self) -> None:
        self.backend.stop(20)
        self.until(lambda: self.backend.state in ("stopped", "failed"))
        assert self.backend.join(20) and self.backend.state == "stopped" and self.backend.figures().kv_blocks_used == 0


def test_admission_keeps_from_the_package_what_it_cannot_take(folder):
    """Empty prompts, no tokens asked for, prompts over the window, more than the queue holds, more than there are slots."""
    referee = Referee()
    house = NanoHouse(folder, max_num_seqs=4, queue_limit=12).ready()
    assert house.states == ["loading", "warming", "ready"] and house.backend.card.max_model_len == WINDOW
    empty, over, full = house.submit([]), house.submit(prompt(WINDOW, 1)), house.submit(prompt(WINDOW - 1, 1), max_tokens=50)
    nothing = house.submit(prompt(9, 2), max_tokens=0)
    house.until(lambda: all(listener.end for listener in (empty, over, full, nothing)))
    assert isinstance(over.end, ContextLengthExceeded) and empty.end.prompt_tokens == 1  # the start token stands in
    assert full.end.completion_tokens == 1 and nothing.end.completion_tokens == 0
    many: list[Listener] = []
    with pytest.raises(RateLimited):
        for i in range(60):
            many.append(house.submit(prompt(300 + i, i), max_tokens=6, ignore_eos=True))
    assert len(many) >= 12
    many[3].handle.cancel()
    house.until(lambda: all(listener.end for i, listener in enumerate(many) if i != 3))
    for i, listener in enumerate(many):
        if i != 3:
            assert isinstance(listener.end, Finished) and listener.ids == referee.greedy(prompt(300 + i, i), 6)
    figures = house.backend.figures()
    assert figures.generated_tokens >= 6 * (len(many) - 1) and figures.steps > 0
    house.end()


def test_it_can_be_unloaded_and_loaded_again(folder):
    for _ in range(2):
        house = NanoHouse(folder, max_num_seqs=2).ready()
        ends: list = []
        house.submit(prompt(20, 1), max_tokens=4).on_finished = ends.append
        house.until(lambda ends=ends: ends)
        house.end()


def test_a_loading_that_fails_leaves_the_process_as_it_was(folder, monkeypatch):
    """Half of its constructor has run: the defaults are set, the group is made, the one place is taken."""
    nano_device.bring_to_host()
    from nanovllm.engine import model_runner

    def fails(model, path):
        assert torch.get_default_dtype() is torch.float64
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "load_model", fails)
        house = NanoHouse(folder)
        house.until(lambda: house.backend.state == "failed")
        assert house.backend.join(20)
    assert torch.get_default_dtype() is torch.float32 and not torch.distributed.is_initialized()
    house = NanoHouse(folder).ready()
    house.end()
