"""One model in an engine of this process, as `laya serve` builds it: plan against measured peak, speed, equal answers.

Prints JSON. Ends non-zero where the device took more than was planned, a request failed, or a greedy answer depends on its
company beyond rounding. `tools/gpu_check.sh` runs it on a CUDA device; it runs on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402

from laya.config import Config, EngineConfig, InferenceConfig  # noqa: E402
from laya.inprocess import build_engines  # noqa: E402
from laya.schema.generation import Finished, GenerationRequest, SamplingParams  # noqa: E402

NEW_TOKENS = 64
PROMPT_TOKENS = 512
SEQUENCES = 8
# Greedy text of random weights may turn at a tie when sums are rounded in another order; most of it must not.
EQUAL_SHARE = 0.5


class Log:
    """What the server would log, on standard error."""

    def event(self, level: str, name: str, **fields) -> None:
        print(json.dumps({"level": level, "event": name, **fields}, default=str), file=sys.stderr)


class Request:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.end = None

    def on_queued(self, event) -> None:
        pass

    def on_started(self, event) -> None:
        pass

    def on_delta(self, event) -> None:
        self.ids.extend(event.token_ids)

    def on_finished(self, event) -> None:
        self.end = event

    def on_failed(self, error) -> None:
        self.end = error


class Bench:
    """The engine, and the loop thread that it posts to, which is this one."""

    def __init__(self, settings: EngineConfig, limit_s: float) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._deadline = time.monotonic() + limit_s
        fields = {name: getattr(settings, name) for name in EngineConfig.__struct_fields__}
        config = Config(inference=InferenceConfig(**fields))
        self.engine = build_engines(config, post=self._calls.put, on_failed=self._failed, log=Log())["local"]
        self.engine.start()
        self.until(lambda: self.engine.state == "ready")

    def _failed(self, error: Exception, was_ready: bool) -> None:
        sys.exit(f"the engine failed: {error}")

    def until(self, condition) -> None:
        while not condition():
            if time.monotonic() > self._deadline:
                sys.exit("the engine took too long")
            try:
                self._calls.get(timeout=0.01)()
            except queue.Empty:
                pass

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Request], float]:
        """All prompts at once; (requests, seconds)."""
        began, requests = time.monotonic(), [Request() for _ in prompts]
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for number, (ids, request) in enumerate(zip(prompts, requests, strict=True)):
            self.engine.submit(GenerationRequest(id=f"r{number}", prompt=ids, sampling=sampling), request)
        self.until(lambda: all(request.end is not None for request in requests))
        bad = [request.end for request in requests if not isinstance(request.end, Finished)]
        if bad:
            sys.exit(f"a request failed: {bad[0]}")
        return requests, time.monotonic() - began

    def close(self) -> None:
        self.engine.stop(5.0)
        self.until(lambda: self.engine.state in ("stopped", "failed"))
        self.engine.join(10.0)


def measure(bench: Bench, new_tokens: int, prompt_tokens: int) -> dict:
    prompts = [[(7 * i + 31 * seed) % 250 for i in range(prompt_tokens)] for seed in range(1, SEQUENCES + 1)]
    for _ in range(2):  # concurrency opens step by step
        bench.run(prompts, 8)
    (alone,), one_s = bench.run(prompts[:1], new_tokens)
    together, all_s = bench.run(prompts, new_tokens)
    fresh = [[(11 * i + 3) % 250 for i in range(prompt_tokens)]]
    _, read_s = bench.run(fresh, 1)
    same = sum(a == b for a, b in zip(alone.ids, together[0].ids, strict=True))
    return {
        "prompt_tokens": prompt_tokens, "decode_1_tokens_per_s": round(new_tokens / one_s, 1),
        f"decode_{SEQUENCES}_tokens_per_s": round(SEQUENCES * new_tokens / all_s, 1),
        "prefill_tokens_per_s": round(prompt_tokens / read_s, 1), "equal_tokens": same, "of_tokens": len(alone.ids),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--engine", default="auto", choices=("auto", "torch", "nano-vllm"))
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--quick", action="store_true", help="short prompts and answers, for a CPU")
    arguments = parser.parse_args()
    settings = EngineConfig(
        engine=arguments.engine, model=str(Path(arguments.model).resolve()), max_seq_len=arguments.window,
        max_num_seqs=SEQUENCES,
    )  # fmt: skip
    bench = Bench(settings, arguments.limit_s)
    plan, card = bench.engine.plan, bench.engine.card
    report = {"engine": card.details["engine"], "why": card.details["engine_why"], "device": card.details["device"]}
    report |= measure(bench, 8, 64) if arguments.quick else measure(bench, NEW_TOKENS, PROMPT_TOKENS)
    memory = bench.engine.memory()
    report |= {"planned": plan.device, "planned_total": plan.device_total, "measured": memory}
    bench.close()
    peak = memory.get("device_peak")
    fits = peak is None or peak <= plan.device_total
    if peak is not None:
        report["peak_of_plan"] = round(peak / plan.device_total, 3)
        report["device_name"] = torch.cuda.get_device_name()
    print(json.dumps(report, indent=2))
    equal = report["equal_tokens"] >= report["of_tokens"] * EQUAL_SHARE
    return 0 if fits and equal else 1


if __name__ == "__main__":
    sys.exit(main())
