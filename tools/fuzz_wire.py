"""Differential fuzz of the wire parsers: whichever parser reads, and however the bytes are cut, the answer is the same.

    python tools/fuzz_wire.py --seconds 60 --seed 7

Each case is a stream of requests or of responses, well-formed, nearly so, or with its bytes mutated. It is read four
times: by h11 behind policy in one segment (the reference), by h11 in random segments, with the fast parser in one
segment, and with the fast parser in random segments. Method, target, headers, body and framing of every message must
agree, and so must what follows the last one: the same refusal status, or the same wish for more. A difference is shrunk
and printed with the seed; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from laya.wire.inbound import Inbound
from laya.wire.messages import PAUSED, BodyData, EndOfBody, Limits, Refusal, Request, Response
from laya.wire.outbound import Outbound

ROOMY = Limits()
# Small enough that short messages reach every bound.
TIGHT = Limits(max_head_bytes=400, max_headers=8, max_target_bytes=40, max_body_bytes=60, max_chunk_line_bytes=24)
SHRINK_TRIES = 3000
# What is compared beside the body. (The memo says nothing about the bytes: it is for the parser's callers.)
FACTS = ("fields", "headers", "http10", "keep_alive", "content_length", "chunked")
REQUEST_FACTS = (*FACTS, "method", "target", "path", "query", "expect_continue")
RESPONSE_FACTS = (*FACTS, "status", "reason")

REQUEST_LINES = [
    b"POST /v1/chat/completions HTTP/1.1", b"GET /v1/models?x=1 HTTP/1.1", b"GET / HTTP/1.1", b"HEAD /health HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"GET http://x/ready?a HTTP/1.1", b"GET http://y HTTP/1.1", b"POST / HTTP/1.0", b"get / HTTP/1.1",
    b"CONNECT x:1 HTTP/1.1", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET / HTTP/2.0", b"GET /\tx HTTP/1.1",
    b"GET /\xc3\xa9 HTTP/1.1", b"PUT //v1//models HTTP/1.1", b"GET / http/1.1", b"GET /" + b"a" * 60 + b" HTTP/1.1", b"",
    b"DELETE /v1/responses/r HTTP/1.1", b"GET v1 HTTP/1.1", b"PRI * HTTP/2.0", b"GET /" + b"a" * 120 + b" HTTP/1.1",
]  # fmt: skip
STATUS_LINES = [
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200 ", b"HTTP/1.1 200", b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 404 Not Found", b"HTTP/1.1 500 Internal Server Error", b"HTTP/1.0 200 OK", b"HTTP/1.1 100 Continue",
    b"HTTP/1.1 103 Early Hints", b"HTTP/1.1 101 Switching", b"HTTP/1.1 999 X", b"HTTP/1.1 2000 X", b"HTTP/1.1 099 X",
    b"HTTP/2 200", b"HTTP/1.1  200 OK", b"HTTP/1.1 200 O\xc3\xa9", b"HTTP/1.1 200 a\tb", b"HTTP/1.1\t200 OK",
    b"http/1.1 200 OK",
]  # fmt: skip
PLAIN_FIELDS = [
    b"User-Agent: fuzz/1", b"Accept: */*", b"content-type: application/json", b"X-A: 1", b"X-a: 2", b"Authorization: Bearer k",
    b"X-Empty:", b"X-Wide:   a b  ", b"Connection: keep-alive", b"Connection: close", b"Set-Cookie: a=b", b"date: now",
    b"set-cookie: c=d", b"Vary: a", b"Content-Encoding: gzip", b"X-Strength: 5", b"X-Request-Id: r",
    b"X-Long: " + b"l" * 300, *(b"X-%d: %d" % (i, i) for i in range(6)),
]  # fmt: skip
ODD_FIELDS = [
    b"Connection: close, X-A", b"Connection: Upgrade", b"Upgrade: h2c", b"Expect: 100-continue", b"Expect: more", b"X-Tab:\ta",
    b"X-B : 1", b" folded", b"\tfolded", b"X-Nul: \x00", b"X-Ctl: \x01", b"X-High: \xff", b"NoColon", b": empty", b"X(: 1",
    b"Host: a", b"Host: a b", b"Host:", b"host : x", b"Content-Length : 5", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: Chunked", b"Transfer-Encoding: chunked,", b"Transfer-Encoding:",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"transfer-encoding:chunked\t", b"Trailer: x",
    b"TE: trailers", b"X-CR: a\rb", b"X-LF: a\nb", b"X-FF: a\x0cb",
]  # fmt: skip
ODD_LENGTHS = [
    b"+5", b"-1", b"5_0", b"0x5", b"5, 5", b"05", b"", b" 5 ", b"\xd9\xa5", b"5.0", b"61", b"99999999999999999999999", b"5\t",
    b"12345678901",
]  # fmt: skip
SIZE_FORMS = [b"%x", b"%X", b"0%x", b"%x;a=b", b"%x ", b"%x;" + b"e" * 20, b"0x%x", b"+%x", b"%x ;q", b"000000000%x"]
TRAILERS = [b"x: 1\r\n", b"x: 1\r\ny:2\r\n", b"x : 1\r\n", b"x: \n\r\n", b" x\r\n", b"Content-Length: 5\r\n"]
SPLICES = [
    b"\r\n", b"\n", b"\r", b" ", b":", b"\x00", b"0\r\n\r\n", b"\r\n\r\n", b"\n\n", b"Content-Length: 3\r\n", b",", b";", b"\t",
]  # fmt: skip

CHUNK_BEGINS = re.compile(rb"(?<=\r\n)(?=[0-9a-fA-F]+\r\n)")


class Writer:
    """Writes streams of messages with one random source."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def turns(self, requests: bool) -> list[bytes]:
        """What the peer sends: requests pipelined in one go; or, for each request of ours, its response."""
        count = self.rng.choice((1, 1, 1, 2, 3))
        if requests:
            return [self.perhaps_mutated(b"".join(self.request() for _ in range(count)))]
        return [self.perhaps_mutated(self.response()) for _ in range(count)]

    def perhaps_mutated(self, data: bytes) -> bytes:
        if self.rng.random() < 0.35:
            for _ in range(self.rng.randint(1, 3)):
                data = self.mutate(data)
        return data

    def request(self) -> bytes:
        line = REQUEST_LINES[0] if self.rng.random() < 0.7 else self.rng.choice(REQUEST_LINES)
        fields = [b"Host: x"] if self.rng.random() < 0.95 else []
        return self.message(line, fields, 0.5)

    def response(self) -> bytes:
        early = b"".join(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" for _ in range(3)) if self.rng.random() < 0.1 else b""
        line = STATUS_LINES[0] if self.rng.random() < 0.6 else self.rng.choice(STATUS_LINES)
        return early + self.message(line, [], 0.9)

    def message(self, line: bytes, fields: list[bytes], body_odds: float) -> bytes:
        rng = self.rng
        fields += rng.sample(PLAIN_FIELDS, rng.choice((0, 1, 2, 3, 9)))
        if rng.random() < 0.2:
            fields.append(rng.choice(ODD_FIELDS))
        framing, body = self.body() if rng.random() < body_odds else ([], b"")
        fields += framing
        rng.shuffle(fields)
        return b"\r\n".join([line, *fields, b"", b""]) + body

    def body(self) -> tuple[list[bytes], bytes]:
        rng = self.rng
        text = bytes(rng.choice(b"ab\r\n0{") for _ in range(rng.choice((0, 1, 5, 5, 17, 61, 90))))
        kind = rng.random()
        if kind < 0.5:
            return [b"Content-Length: %d" % len(text)], text
        if kind < 0.6:
            return [b"Content-Length: " + rng.choice(ODD_LENGTHS)], text
        if kind < 0.7:
            return [b"Content-Length: %d" % len(text), b"content-length: %d" % rng.choice((len(text), 0, 5))], text
        if kind < 0.75:
            return [], text
        return [b"transfer-encoding: chunked"], self.chunked(text)

    def chunked(self, text: bytes) -> bytes:
        rng = self.rng
        out = []
        while text:
            size = rng.randint(1, len(text))
            form = b"%x" if rng.random() < 0.85 else rng.choice(SIZE_FORMS)
            out += [form % size, b"\r\n", text[:size], b"\r\n"]
            text = text[size:]
        trailers = rng.choice(TRAILERS) if rng.random() < 0.15 else b""
        return b"".join([*out, b"00" if rng.random() < 0.1 else b"0", b"\r\n", trailers, b"\r\n"])

    def mutate(self, data: bytes) -> bytes:
        rng = self.rng
        at = rng.randint(0, len(data))
        kind = rng.randrange(4)
        if kind == 0:
            return data[:at] + rng.choice(SPLICES) + data[at:]
        if kind == 1:
            return data[:at] + data[at + rng.randint(1, 4) :]
        if kind == 2:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        start = rng.randint(0, at)
        return data[:at] + data[start : start + rng.randint(1, 40)] + data[at:]

    def cuts(self, turns: list[bytes]) -> list[int]:
        rng = self.rng
        longest = max(turns, key=len)
        kind = rng.random()
        if kind < 0.25:
            return list(range(1, len(longest)))
        if kind < 0.5:  # a segment for each chunk, as streams come
            return [match.start() for match in CHUNK_BEGINS.finditer(longest)]
        return sorted(rng.randint(0, len(longest)) for _ in range(rng.randint(0, 6)))


@dataclass
class Case:
    requests: bool  # the direction
    turns: list[bytes]
    cuts: list[int]  # offsets in each turn
    limits: Limits
    methods: list[bytes]  # of the requests that the responses answer, one a turn
    eof: bool

    def segments(self, turn: bytes, cut: bool) -> Iterator[bytes]:
        edges = [0, *(edge for edge in self.cuts if cut and edge < len(turn)), len(turn)]
        return (turn[a:b] for a, b in itertools.pairwise(edges) if b > a)


def read(case: Case, fast: bool, cut: bool) -> list[Any]:
    """The messages and the ending that a parser makes of a case; bodies joined, so that segments do not show."""
    parser = Inbound(case.limits, fast=fast) if case.requests else Outbound(case.limits, fast=fast)
    out: list[Any] = []
    for turn, method in zip(case.turns, case.methods, strict=True):
        if isinstance(parser, Outbound):
            parser.expect(method)
        for segment in case.segments(turn, cut):
            if not _take_whole(parser, segment, out):
                parser.receive(segment)
            _drain(parser, out)
        if isinstance(parser, Outbound) and not parser.reusable:
            break
    if case.eof:
        parser.receive_eof()
    ending = _drain(parser, out)
    refusals = [event for event in out if type(event) is Refusal]
    messages = [event for event in out if type(event) is dict]
    if refusals and messages and not messages[-1]["whole"]:
        messages[-1]["body"] = b"(broken)"  # how much of it came out first depends on the segments
    return [*messages, ("refused", *(refusal.status for refusal in refusals)) if refusals else ending]


def _take_whole(parser: Inbound | Outbound, segment: bytes, out: list[Any]) -> bool:
    """The ways that the connections try first."""
    if isinstance(parser, Outbound) and (piece := parser.take_piece(segment)) is not None:
        out[-1]["body"] += piece
        return True
    taken = parser.take_whole(segment)
    if taken is None:
        return False
    if type(taken) is Response:
        out.append(_facts(taken))
    else:
        request, body = taken
        out.append({**_facts(request), "body": body, "whole": True})
    return True


def _drain(parser: Inbound | Outbound, out: list[Any]) -> Any:
    """Take events until there are no more; the last one says why."""
    while True:
        event = parser.next_event()
        kind = type(event)
        if kind is Request or kind is Response:
            out.append(_facts(event))
        elif kind is BodyData:
            out[-1]["body"] += event.data
        elif kind is EndOfBody:
            out[-1]["whole"] = True
        elif kind is Refusal:
            out.append(event)
        elif event is PAUSED:
            parser.start_next()
        else:
            return event


def _facts(message: Request | Response) -> dict[str, Any]:
    facts = {name: getattr(message, name) for name in (REQUEST_FACTS if type(message) is Request else RESPONSE_FACTS)}
    return {**facts, "body": message.body or b"", "whole": message.body is not None}


def _comparable(found: list[Any]) -> list[Any]:
    """Without the lengths of requests: one that was taken whole shares its head with others of another length. Bodies are
    compared, and a length is never forwarded as it came."""
    return [_without_length(item) if type(item) is dict and "method" in item else item for item in found]


def _without_length(facts: dict[str, Any]) -> dict[str, Any]:
    fields = {**facts["fields"], b"content-length": b""}
    headers = [(name, value if name != b"content-length" else b"") for name, value in facts["headers"]]
    return {**facts, "content_length": None, "fields": fields, "headers": headers}


def difference(case: Case) -> str | None:
    """The first way of reading that disagrees with the reference, described; None if all agree."""
    reference = _comparable(read(case, fast=False, cut=False))
    for fast, cut in ((True, False), (True, True), (False, True)):
        found = _comparable(read(case, fast=fast, cut=cut))
        if found != reference:
            return f"fast={fast} cut={cut}\n  found     {found}\n  reference {reference}"
    return None


def make_case(rng: random.Random) -> Case:
    writer = Writer(rng)
    requests = rng.random() < 0.5
    turns = writer.turns(requests)
    methods = [rng.choice((b"POST", b"POST", b"GET", b"HEAD")) for _ in turns]
    cuts = writer.cuts(turns)
    return Case(requests, turns, cuts, ROOMY if rng.random() < 0.7 else TIGHT, methods, rng.random() < 0.5)


def shrink(case: Case, differs: Callable[[Case], Any]) -> Case:
    """A shorter case that still differs: turns, then pieces of them, are left out, within SHRINK_TRIES."""
    longest = max(map(len, case.turns))
    trials = [replace(case, cuts=[]), replace(case, cuts=list(range(1, longest)))]
    trials += [replace(case, turns=[turn], methods=[method]) for turn, method in zip(case.turns, case.methods, strict=True)]
    for trial in trials:
        if differs(trial):
            case = trial
    tries, size = 0, max(1, longest // 2)
    while size and tries < SHRINK_TRIES:
        shorter = False
        for index in range(len(case.turns)):
            at = 0
            while at < len(case.turns[index]) and tries < SHRINK_TRIES:
                tries += 1
                trial = _without(case, index, at, size)
                if differs(trial):
                    case, shorter = trial, True
                else:
                    at += size
        if not shorter:
            size //= 2
    return case


def _without(case: Case, index: int, at: int, size: int) -> Case:
    turn = case.turns[index]
    turns = [*case.turns[:index], turn[:at] + turn[at + size :], *case.turns[index + 1 :]]
    return replace(case, turns=turns)


@dataclass
class Report:
    seed: int
    counts: Counter = field(default_factory=Counter)
    failure: Case | None = None
    detail: str = ""


def run(seconds: float, seed: int) -> Report:
    """Fuzz until `seconds` have passed or a difference is found (then shrunk)."""
    report = Report(seed)
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        case = make_case(rng)
        detail = difference(case)
        report.counts["cases"] += 1
        report.counts["request streams" if case.requests else "response streams"] += 1
        if detail is not None:
            report.failure = shrink(case, difference)
            report.detail = difference(report.failure) or detail
            return report
        ending = read(case, fast=True, cut=False)
        report.counts["messages read whole"] += sum(message["whole"] for message in ending[:-1])
        report.counts[f"ended {ending[-1]}"] += 1
    return report


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    arguments = options.parse_args()
    report = run(arguments.seconds, random.randrange(2**32) if arguments.seed is None else arguments.seed)
    print(f"seed {report.seed}")
    for name, count in sorted(report.counts.items(), key=lambda item: str(item[0])):
        print(f"{count:>10}  {name}")
    if report.failure is None:
        print("no difference")
        return 0
    kind = "requests" if report.failure.requests else f"responses to {report.failure.methods}"
    limits = "tight" if report.failure.limits is TIGHT else "default"
    print(f"DIFFERENCE, {kind}, {limits} limits, eof={report.failure.eof}, cuts={report.failure.cuts}")
    print(f"  data      {report.failure.turns!r}\n  {report.detail}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
