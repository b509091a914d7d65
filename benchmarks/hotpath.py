"""What one forwarded request costs in Python, by stage, and what each trick of the way saves. No sockets, one thread.

    python benchmarks/hotpath.py [--quick] [--json]

A figure is processor time, the least of many short rounds, on and off in turn, so that other work on the machine shows little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path as File
from time import thread_time

sys.path.insert(0, str(File(__file__).resolve().parent.parent / "src"))  # this tree's Laya, installed or not

from gateway_bench import machine, stub  # noqa: E402
from gateway_bench.bodies import LARGE_BYTES, SMALL_BYTES  # noqa: E402
from gateway_bench.figures import number, table  # noqa: E402
from gateway_bench.inprocess import Path, measured  # noqa: E402
from gateway_bench.tricks import FEATURES, TRICKS, Switch  # noqa: E402
from laya.log import access_line, who  # noqa: E402
from laya.net.in_c import IN_C  # noqa: E402
from laya.schema import fields  # noqa: E402
from laya.schema.codec import decode_members  # noqa: E402
from laya.schema.openai import decode_chat  # noqa: E402
from laya.schema.pieces import member_spans, spans_in_python  # noqa: E402
from laya.wire.inbound import Inbound  # noqa: E402
from laya.wire.messages import Limits  # noqa: E402
from laya.wire.outbound import Outbound  # noqa: E402

SIZES = {"200 B": SMALL_BYTES, "16 KB": LARGE_BYTES}


TWO_COOKIES = stub.COMPLETION.replace(b"\r\n", b"\r\nset-cookie: a=b\r\nset-cookie: c=d\r\n", 1)
LONG_TALK = json.dumps({"messages": [{"role": "user", "content": "He said no.\n" * 20}] * 4000}).encode()  # 1.2 MB


def least(work: Callable[[], float], rounds: int) -> float:
    """The least of `rounds` results, in us."""
    return min(work() for _ in range(rounds)) * 1e6


def each(call: Callable, arguments: list) -> Callable[[], float]:
    """A round: `call` with each of `arguments`; seconds for one."""

    def work() -> float:
        began = thread_time()
        for argument in arguments:
            call(argument)
        return (thread_time() - began) / len(arguments)

    return work


def compared(path: Path, off: Switch, base: Switch | None, rounds: int) -> dict[str, float]:
    """A small request with the trick (or feature) on and off, in turn."""

    def under(switch: Switch | None) -> float:
        with switch(path) if switch else contextlib.nullcontext():
            path.forward(SMALL_BYTES)  # fill or empty the memos
            return path.forward(SMALL_BYTES)

    pairs = [(under(base), under(off)) for _ in range(rounds)]
    on_us, off_us = min(on for on, _ in pairs) * 1e6, min(off for _, off in pairs) * 1e6
    return {"on_us": on_us, "off_us": off_us}


def parts(path: Path, rounds: int) -> dict[str, float]:
    """The pieces of the way alone, us."""
    inbound, outbound, by_h11 = Inbound(Limits()), Outbound(Limits()), Outbound(Limits(), fast=False)

    def parse_request(data: bytes) -> None:
        if inbound.take_whole(data) is None:
            inbound.receive(data)
            inbound.next_event()
        inbound.start_next()

    def parse_answer(data: bytes, outbound: Outbound = outbound) -> None:
        outbound.expect(b"POST")
        if outbound.take_whole(data) is None:
            outbound.receive(data)
            outbound.next_event()

    selection = path.gateway.selection
    plan = next(known.memo.plan for known in path.server.limits.request_heads.values() if known.memo.plan is not None)

    def choose(found: fields.RoutingFields) -> None:
        _, route = selection.route_of(found.model, plan)
        selection.choose(route)

    def line(request_id: bytes) -> bytes:
        return access_line(request_id, place, 200, "ok", 0.001, None, b"")

    small, large = path.bodies[SMALL_BYTES], path.bodies[LARGE_BYTES]
    ids = [b"req-%024x" % number for number in range(512)]
    place = who("127.0.0.1", b"POST", b"/v1/chat/completions", "chat", "all", "up", "gpt-4o-mini")
    return {
        "parse request, 200 B": least(each(parse_request, path.requests[SMALL_BYTES]), rounds),
        "parse request, 16 KB": least(each(parse_request, path.requests[LARGE_BYTES]), rounds),
        "routing fields, 200 B": least(each(fields.read_routing, small), rounds),
        "routing fields, 16 KB": least(each(fields.read_routing, large), rounds),
        "(whole body decoded instead, 200 B)": least(each(decode_chat, small), rounds),
        "(whole body decoded instead, 16 KB)": least(each(decode_chat, large), rounds),
        "route and pick": least(each(choose, [fields.read_routing(body) for body in small]), rounds),
        "parse answer": least(each(parse_answer, [stub.COMPLETION] * 512), rounds),
        "parse answer with a header twice": least(each(parse_answer, [TWO_COOKIES] * 512), rounds),
        "(read by h11 instead)": least(each(lambda data: parse_answer(data, by_h11), [TWO_COOKIES] * 64), rounds),
        "top level of 1 MiB of chat": least(each(member_spans, [LONG_TALK]), rounds),
        "(in Python, in pieces)": least(each(spans_in_python, [LONG_TALK]), rounds),
        "(at once instead, the interpreter held)": least(each(decode_members, [LONG_TALK]), rounds),
        "an access line": least(each(line, ids), rounds),
    }


def measure(path: Path, rounds: int) -> dict:
    path.forward(SMALL_BYTES)
    result: dict = {"lane": "c" if IN_C else "python"}
    result["request_us"] = {name: least(lambda s=size: path.forward(s), rounds) for name, size in SIZES.items()}
    runs = {name: [path.stages(size) for _ in range(rounds)] for name, size in SIZES.items()}
    result["stages_us"] = {
        name: {stage: min(run[stage] for run in found) * 1e6 for stage in found[0]} for name, found in runs.items()
    }
    result["frame_us"] = least(lambda: path.frame(512), rounds)
    result["parts_us"] = parts(path, rounds)
    result["tricks"] = {name: compared(path, *switches, rounds) for name, switches in TRICKS.items()}
    result["features"] = {name: compared(path, *switches, rounds) for name, switches in FEATURES.items()}
    costs = {name: told["on_us"] - told["off_us"] for name, told in result["features"].items()}
    result["ratios"] = {
        "metrics_share": costs["metrics"] / result["request_us"]["200 B"],
        "access_log_share": costs["access log"] / result["request_us"]["200 B"],
    }
    return result


def render(result: dict) -> str:
    about = result["machine"]
    rows = [["stage, us", *SIZES]]
    rows += [[stage, *(number(result["stages_us"][size][stage]) for size in SIZES)] for stage in result["stages_us"]["200 B"]]
    rows.append(["whole request", *(number(result["request_us"][size]) for size in SIZES)])
    rows.append(["one frame of a stream", number(result["frame_us"]), ""])
    pieces = [["piece", "us"], *([name, number(us)] for name, us in result["parts_us"].items())]
    tricks = [["trick", "request with it, us", "without, us", "saves, us"]]
    tricks += [[name, *_pair(told), number(told["off_us"] - told["on_us"])] for name, told in result["tricks"].items()]
    features = [["feature", "request with it, us", "without, us", "costs, us"]]
    features += [[name, *_pair(told), number(told["on_us"] - told["off_us"])] for name, told in result["features"].items()]
    where = f"{about['cpu']}, {about['cores']} cores, Python {about['python']}"
    heading = f"{where}; load before: {about['load_before']}; lane in {result['lane']}"
    return "\n\n".join([heading, *map(table, (rows, pieces, tricks, features))])


def _pair(told: dict[str, float]) -> tuple[str, str]:
    return number(told["on_us"]), number(told["off_us"])


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds: fewer rounds")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args(given)
    rounds = 10 if chosen.quick else 60  # of 512 requests, some 12 ms each
    result = {"machine": machine.describe(), **measured(lambda path: measure(path, rounds))}
    print(json.dumps(result, indent=1) if chosen.json else render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
