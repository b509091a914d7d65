"""A model that comes and goes keeps its tokenizer: building a large one would hold up every other answer at each waking."""

from __future__ import annotations

import queue
import time

from engine.test_backend import Listener
from laya.config import Config, EngineConfig, InferenceConfig
from laya.inprocess import build_engines
from laya.model import load as loading
from laya.schema.generation import Finished, GenerationRequest, SamplingParams

LONGEST_S = 60.0


class Log:
    def event(self, level: str, name: str, **fields) -> None:
        assert level != "error", (name, fields)


def test_the_tokenizer_is_read_once_and_before_anything_is_served(model_path, monkeypatch):
    built = []
    real = loading.build_tokenizer
    monkeypatch.setattr(loading, "build_tokenizer", lambda described: built.append(1) or real(described))
    settings = EngineConfig(model=str(model_path), load="on_demand", max_seq_len=256, max_num_seqs=1, threads=1)
    calls: queue.SimpleQueue = queue.SimpleQueue()
    config = Config(inference=InferenceConfig(**{name: getattr(settings, name) for name in EngineConfig.__struct_fields__}))
    engine = build_engines(config, post=calls.put, on_failed=lambda error, ready: None, log=Log())["local"]

    def until(condition) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            assert time.monotonic() < deadline, engine.state
            engine.tick()
            try:
                calls.get(timeout=0.05)()
            except queue.Empty:
                pass

    assert built == [1], "before a request asks for the model"
    engine.start()
    assert engine.state == "asleep"
    for number in range(2):
        listener = Listener()
        engine.submit(GenerationRequest(id=f"r{number}", prompt="Hello", sampling=SamplingParams(max_tokens=2)), listener)
        until(lambda listener=listener: listener.end is not None)
        assert isinstance(listener.end, Finished)
        engine._idle_unload_s = 0.0  # sleeps at once
        until(lambda: engine.state == "asleep")
        engine._idle_unload_s = None
    assert built == [1]
    engine.stop(0)
    assert engine.join(LONGEST_S)
