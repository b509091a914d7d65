"""The engine against llama.cpp and transformers: same GGUF file, same threads, measured in turn in one run.

    python benchmarks/engine.py [--json] [--quick] [--llamacpp DIR] [--threads 1,2] [--model FILE]

Laya is a whole server (`laya serve`) asked over HTTP. llama.cpp is `llama-bench` for a lone decode and for prefill, and
`llama-server` with 8 slots over HTTP for 8 sequences. A peer that is not found is named as skipped. Exit 1: a target is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

from engine_bench import client, peers, ratios  # noqa: E402
from gateway_bench import machine  # noqa: E402
from gateway_bench.figures import number, table  # noqa: E402
from serving import Served  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SEQUENCES = 8
WINDOW = 1024  # tokens of a sequence: prompt of 512 and answers of 128 fit
PREFILL = 512  # llama-bench's usual prompt
TTFT_PROMPT = 64  # tokens of a short question
SPLIT_STEPS = 60  # decode steps that are taken apart
SPLIT_LIMIT_S = 300.0


def serve(model: Path, threads: int) -> Served:
    engine = {"model": str(model), "name": "m", "threads": threads, "max_num_seqs": SEQUENCES, "max_seq_len": WINDOW}
    return Served({"inference": engine})


def measure(model: Path, threads: int, rounds: int, tokens: int, found: dict[str, str | None]) -> ratios.Samples:
    """`rounds` times each measurement, systems in turn. `found`: the peers' programs."""
    samples: ratios.Samples = defaultdict(list)
    with ExitStack() as stack:
        laya = stack.enter_context(serve(model, threads))
        laya.ready()
        servers = {"laya": laya.port}
        if found["llama-server"]:
            peer = peers.LlamaServer(found["llama-server"], model, threads, SEQUENCES, WINDOW)
            stack.callback(peer.stop)
            peer.ready()
            servers["llama_server"] = peer.port
        for port in servers.values():  # concurrency opens, threads and caches are warm
            client.decode_rate(port, "m", SEQUENCES, 64)
        for done in range(rounds):
            for name, port in servers.items():
                samples[f"{name}_decode_1"].append(client.decode_rate(port, "m", 1, tokens))
            if found["llama-bench"]:
                for what, rate in peers.llama_bench(found["llama-bench"], model, threads, PREFILL, tokens).items():
                    samples[f"llama_bench_{what}"].append(rate)
            for name, port in servers.items():
                samples[f"{name}_prefill"].append(PREFILL / client.first_token_s(port, "m", PREFILL))
            for name, port in servers.items():
                samples[f"{name}_decode_8"].append(client.decode_rate(port, "m", SEQUENCES, tokens))
            for name, port in servers.items():
                samples[f"{name}_ttft_s"].append(client.first_token_s(port, "m", TTFT_PROMPT))
            print(f"{threads} threads, round {done + 1} of {rounds}", file=sys.stderr)
    return samples


def split(model: Path, threads: int, sequences: int) -> dict[str, float]:
    """Milliseconds of a decode step by part."""
    command = [sys.executable, str(Path(__file__).parent / "engine_bench" / "split.py"), str(model)]
    command += [str(threads), str(sequences), str(SPLIT_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SPLIT_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"split: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def one(model: Path, threads: int, quick: bool, found: dict[str, str | None], skipped: list[str]) -> dict:
    rounds, tokens = (1, 64) if quick else (5, 128)
    medians = ratios.medians(measure(model, threads, rounds, tokens, found))
    reference = peers.transformers_rate(model, threads, 16 if quick else 32)
    if reference is None:
        skipped.append("transformers")
    else:
        medians["transformers_decode"] = reference["tokens_per_s"]
    steps = {f"{sequences} sequences": split(model, threads, sequences) for sequences in (1, SEQUENCES)}
    return {"medians": medians, "ratios": ratios.engine_ratios(medians), "step_ms": steps}


def show(results: dict[str, dict]) -> None:
    for threads, result in results.items():
        print(f"\n## {threads} threads\n")
        print(table([["figure", "value"], *[[name, number(value)] for name, value in result["medians"].items()]]))
        print()
        print(table(ratios.verdicts(result["ratios"])))
        print()
        parts = list(next(iter(result["step_ms"].values())))
        print(table([["ms a step", *parts], *[[n, *[f"{s[p]:.2f}" for p in parts]] for n, s in result["step_ms"].items()]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="one round of short answers, about two minutes")
    parser.add_argument("--llamacpp", type=Path, metavar="DIR", help="where llama-bench and llama-server lie; else PATH")
    parser.add_argument("--threads", default="1,2", help="thread counts, compared each on its own (default 1,2)")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    if not arguments.model.exists():
        print(f"skipped: {arguments.model} is not there (laya pull default)", file=sys.stderr)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    described = machine.describe()
    found = {name: peers.find(name, arguments.llamacpp) for name in ("llama-bench", "llama-server")}
    skipped = [name for name, program in found.items() if program is None]
    results = {}
    for threads in arguments.threads.split(","):
        results[threads] = one(arguments.model, int(threads), arguments.quick, found, skipped)
    versions = {name: peers.version(program) for name, program in found.items() if program}
    head = {"machine": described, "model": arguments.model.name, "versions": versions, "skipped": sorted(set(skipped))}
    if arguments.json:
        print(json.dumps({**head, "threads": results}, indent=2))
    else:
        print(json.dumps(head, indent=2))
        show(results)
    return 0  # a missed target is a finding


if __name__ == "__main__":
    raise SystemExit(main())
