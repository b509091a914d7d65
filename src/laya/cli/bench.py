"""`laya bench`: a short closed-loop load on a running server.

In: the command line. Out: a table, or one JSON object, of rates and latencies; exit code 0 when anything succeeded. Ctrl-C ends
it early and shows what was measured. Every request is a chat completion of its own text, so that no cache answers it. Main
thread, and one thread for each connection.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from laya.cli import exits
from laya.cli import running as server
from laya.cli.load import Load, Wanted

MAX_CONNECTIONS = 256  # threads of this process; more measure this command and not the server
MAX_SECONDS, MAX_REQUESTS = 600, 100_000
MAX_WORDS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server.add_arguments(parser)
    parser.add_argument("--model", help="model name to ask for (default: the server's default)")
    parser.add_argument("--concurrency", "-c", type=_within(1, MAX_CONNECTIONS), default=4, metavar="N", help="connections (4)")
    parser.add_argument("--duration", "-d", type=_within(1, MAX_SECONDS), default=10, metavar="S", help="seconds (10)")
    parser.add_argument(
        "--requests", "-n", type=_within(1, MAX_REQUESTS), default=None, metavar="N",
        help="end after so many requests, at most --duration seconds",
    )  # fmt: skip
    parser.add_argument("--prompt-words", type=_within(1, MAX_WORDS), default=32, metavar="N", help="words a prompt (32)")
    parser.add_argument("--max-tokens", type=_within(1, 32768), default=32, metavar="N", help="tokens to generate (32)")
    parser.add_argument("--no-stream", action="store_true", help="plain answers: no times of tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    running = server.find(arguments)
    running.get("/health").read()  # one line now rather than a table of refusals
    wanted = Wanted(
        model=arguments.model, concurrency=arguments.concurrency, duration_s=arguments.duration, requests=arguments.requests,
        prompt_words=arguments.prompt_words, max_tokens=arguments.max_tokens, stream=not arguments.no_stream,
    )  # fmt: skip
    found = Load(running, wanted).run()
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(lines(running.url, wanted, found)))
    if found["interrupted"]:
        return exits.INTERRUPTED
    return exits.OK if found["ok"] else exits.FAILED


def _within(low: int, high: int):
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"found {value}; allowed: {low} to {high}")
        return value

    return number


def lines(url: str, wanted: Wanted, found: dict[str, Any]) -> list[str]:
    how = "streamed" if wanted.stream else "plain"
    shown = [
        f"{url}  {wanted.concurrency} connections, {how}, {wanted.prompt_words} words in, {wanted.max_tokens} tokens out",
        f"{'requests':<20}{found['ok']} in {found['seconds']:.1f} s, {found['requests_s']:.2f}/s",
        f"{'generated':<20}{found['generated_tokens']} tokens, {found['generated_s']:.1f}/s",
        f"{'prompts':<20}{found['prompt_tokens']} tokens, {found['prompt_s']:.1f}/s",
    ]
    for name in ("whole answer", "first token", "between tokens"):
        times = found["latency_ms"].get(name)
        if times:
            shown.append(f"{name:<20}p50 {times['p50']:.1f} ms, p95 {times['p95']:.1f} ms, p99 {times['p99']:.1f} ms")
    for kind, count in found["errors"].items():
        reason = found["reasons"][kind]
        shown.append(f"{'failed':<20}{count} x {kind}" + (f": {reason}" if reason else ""))
    if found["cut_off"]:
        shown.append(f"{'note':<20}{found['cut_off']} were under way at the end: they are not counted")
    if found["unmeasured"]:
        shown.append(f"{'note':<20}{found['unmeasured']} answers told no usage: their tokens are not counted")
    return shown
