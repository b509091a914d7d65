"""Where an engine step's time goes: the real loop over the real model in this process, its parts wrapped with a clock.

`python split.py MODEL THREADS SEQUENCES STEPS` prints JSON: milliseconds a step by part. A process of its own, because torch's
threads are set once.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

import numpy as np  # noqa: E402

import laya.inprocess  # noqa: E402, F401  (sets how OpenMP waits, before torch is loaded)
from laya.engine import answer, thread  # noqa: E402
from laya.engine.admission import Admission, Offer  # noqa: E402
from laya.engine.prepare import Prepared  # noqa: E402
from laya.engine.scheduler import Scheduler  # noqa: E402
from laya.engine.settings import EngineSettings  # noqa: E402
from laya.model import attention, layers, quant, runner  # noqa: E402
from laya.model.batch_plan import BatchPlanner  # noqa: E402
from laya.model.compiled import SPENT, CompiledForward  # noqa: E402
from laya.model.load import load  # noqa: E402
from laya.schema.generation import GenerationRequest, SamplingParams  # noqa: E402

BLOCK, WINDOW = 16, 1024
WARM_STEPS = 12  # for each sequence: prompts read, concurrency open (8 good steps a level), buffers grown
PARTS = ("schedule", "prepare", "matmul", "attention", "sample", "detokenise", "post")


class Clock:
    """Seconds by part. A wrapped function's time is its own part's, less that of wrapped ones inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        work: Callable = getattr(owner, name)

        def timed(*arguments, **named):
            self._inner.append(0.0)
            began = perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                took = perf_counter() - began
                self.spent[part] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)


def wrap_all(clock: Clock) -> None:
    clock.wrap(Scheduler, "schedule", "schedule")
    clock.wrap(Scheduler, "commit", "schedule")
    clock.wrap(BatchPlanner, "plan", "prepare")
    for linear in (quant.Int4Linear, quant.Int8Linear, quant.DenseLinear):
        clock.wrap(linear, "__call__", "matmul")
        clock.wrap(linear, "float32", "matmul")
    clock.wrap(layers, "attend", "attention")
    clock.wrap(attention.F, "scaled_dot_product_attention", "attention")
    clock.wrap(runner, "sample", "sample")
    clock.wrap(answer.Answer, "accept", "detokenise")
    clock.wrap(thread.EngineLoop, "_flush", "post")


def measure(model: str, threads: int, sequences: int, steps: int) -> dict[str, float]:
    """Milliseconds a step by part; `norms, rotary, glue` is what is left of the runner's time, `step` the whole."""
    clock = Clock()
    wrap_all(clock)
    blocks = sequences * WINDOW // BLOCK
    loaded, tokenizer, _ = load(model, device="cpu", num_blocks=blocks, block_size=BLOCK, threads=threads, max_seq_len=WINDOW)
    settings = EngineSettings(max_num_seqs=sequences, max_concurrent_prefills=sequences)
    admission = Admission(settings)
    loop = thread.EngineLoop(runner=loaded, tokenizer=tokenizer, settings=settings, admission=admission, post=lambda _: None)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        admission.reserve(1)
        ids = [1000 + number * 97 + i for i in range(32)]
        request = GenerationRequest(id=str(number), prompt=ids, sampling=sampling)
        prepared = Prepared(request=request, prompt_ids=ids, max_new_tokens=WINDOW - 40, prompt_text=None)
        admission.offer(Offer(prepared, number, monotonic()))
    for _ in range(WARM_STEPS * sequences):
        loop.turn()
    if len(loop.scheduler.running) != sequences:
        raise RuntimeError(f"{len(loop.scheduler.running)} of {sequences} sequences run")
    clock.spent.clear()
    compiled = np.zeros(len(SPENT), dtype=np.int64)  # of the compiled step, which is one call for the clock above
    if isinstance(loaded.forward, CompiledForward):
        loaded.forward.spent = compiled
    began = perf_counter()
    for _ in range(steps):
        loop.turn()
    whole = (perf_counter() - began) / steps * 1e3
    found = {part: clock.spent[part] / steps * 1e3 for part in PARTS}
    for part, nanoseconds in zip(("matmul", "attention"), compiled.tolist(), strict=False):  # what is left is in the rest
        found[part] += nanoseconds / steps / 1e6
    return {**found, "norms, rotary, glue": whole - sum(found.values()), "step": whole}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:5]))))
