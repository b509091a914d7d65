"""The decision alone, in this process: from a parsed request to the picked backend."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace

from gateway_bench.figures import percentile
from laya.config import loads
from laya.gateway.backends import Backend
from laya.gateway.models import ModelList
from laya.gateway.selection import Selection
from laya.gateway.steering import Steering, Way
from laya.routing.sessions.hot import HotTable
from laya.routing.sessions.store import MemorySessions
from laya.routing.table import RouteTable
from laya.schema.fields import read_routing

BACKENDS = 4
PLAN = SimpleNamespace(key=None, target=None)
Q = '"'


def table(rules: int) -> RouteTable:
    """Half exact names, half patterns with a star at the end or in the middle."""
    lines = [f"backends: {{{', '.join(f'b{i}: {{url: {Q}http://h{i}:1{Q}}}' for i in range(BACKENDS))}}}", "routes:"]
    targets = ", ".join(f"b{i}" for i in range(BACKENDS))
    for i in range(0, rules, 2):
        lines.append(f"- {{name: e{i}, match: 'model-{i:05d}', to: [{targets}]}}")
        lines.append(f"- {{name: p{i}, match: 'org-{i:05d}/{'*' if i % 4 else '*-instruct'}', to: [{targets}]}}")
    return RouteTable.compile(loads("\n".join(lines)))


def names(rules: int, count: int, rng: random.Random) -> list[str]:
    """Names that some rule takes; each pattern's name is a new one, so that no memory of names met helps."""
    picked = [rng.randrange(0, rules, 2) for _ in range(count)]
    return [f"model-{i:05d}" if n % 2 else f"org-{i:05d}/some-model-{n}-8b-instruct" for n, i in enumerate(picked)]


def selection(compiled: RouteTable) -> Selection:
    """As the gateway has it, over backends that no connection is made to."""
    pool = SimpleNamespace(address=SimpleNamespace(authority=b"h", base="/v1"), inflight=0)
    settings = SimpleNamespace(headers={}, key=None, weight=1.0, apis=None)
    backends = {f"b{i}": Backend(f"b{i}", settings, pool) for i in range(BACKENDS)}
    return Selection(compiled, backends, {}, ModelList(compiled, {}), lambda: 0.0)


def each_ns(call: Callable, arguments: list) -> list[int]:
    """Nanoseconds of each call, the clock's own time taken off, sorted."""
    bare = sorted(-(perf_counter_ns() - perf_counter_ns()) for _ in range(2000))
    off = bare[len(bare) // 2]
    spent = []
    for argument in arguments:
        began = perf_counter_ns()
        call(argument)
        spent.append(perf_counter_ns() - began - off)
    return sorted(spent)


def decisions(rounds: int) -> dict[str, float]:
    """decision_us: a parsed body's fields to the candidates in order. rules_10k_over_10: the same names' share, found anew."""
    rng = random.Random(1)
    figures: dict[str, float] = {}
    small, large = table(10), table(10_000)
    picks = selection(large)
    fields = [read_routing(b'{"model":"%b","messages":[]}' % name.encode()) for name in names(10_000, 4000, rng)]

    def decide(found) -> None:
        _, route = picks.route_of(found.model, PLAN)
        picks.choose(route)

    spent = min((each_ns(decide, fields) for _ in range(rounds)), key=lambda found: found[len(found) // 2])
    figures["decision_us_p50"] = percentile(spent, 50) / 1000
    figures["decision_us_p99"] = percentile(spent, 99) / 1000
    for kind, other in (("exact", 1), ("pattern", 0)):
        medians: dict[int, list[float]] = {10: [], 10_000: []}
        for _ in range(rounds):
            for rules, compiled in ((10, small), (10_000, large)):
                asked = [name for n, name in enumerate(names(rules, 8000, rng)) if n % 2 == other]
                medians[rules].append(median(each_ns(compiled.match, asked)))
        figures[f"match_{kind}_10_us"] = min(medians[10]) / 1000
        figures[f"match_{kind}_10k_us"] = min(medians[10_000]) / 1000
    figures["rules_10k_over_10"] = _over(small, large, rounds, seen=True)
    figures["rules_10k_over_10_unseen"] = _over(small, large, rounds, seen=False)
    return figures


def _over(small: RouteTable, large: RouteTable, rounds: int, *, seen: bool) -> float:
    """What a decision costs with 10,000 rules over what it costs with 10: route, pick and all.

    `seen`: 500 names, asked for as often as names are (by Zipf's law); else each pattern's name is one that never came before.
    """
    sides = []
    for rules, compiled in ((10, small), (10_000, large)):
        picks = selection(compiled)
        asked = names(rules, 500 if seen else 8000, random.Random(2))
        if seen:
            asked = random.Random(2).choices(asked, [1 / (rank + 1) for rank in range(len(asked))], k=8000)

        def decide(name: str, picks: Selection = picks) -> None:
            _, route = picks.route_of(name, PLAN)
            picks.choose(route)

        sides.append((decide, asked))
    costs = [[median(each_ns(decide, asked)) for decide, asked in sides] for _ in range(rounds)]
    return min(cost[1] for cost in costs) / min(cost[0] for cost in costs)


STEERED = """
backends: {b0: {url: "http://h0:1"}, b1: {url: "http://h1:1"}, b2: {url: "http://h2:1"}, b3: {url: "http://h3:1"}}
routes:
- {name: session, match: session, to: [b0, b1, b2, b3], policy: session}
- {name: prefix, match: prefix, to: [b0, b1, b2, b3], policy: prefix}
- name: classify
  match: classify
  classify:
  - {to: b0, when: {max_prompt_tokens: 800, any_words: [keywords, extract, reformat], no_code: true}}
  - {to: b1}
"""
PROMPT = "Please summarise the following notes in three sentences, and name the people in them. " * 4


def steered(rounds: int) -> dict[str, float]:
    """The policies that look at the request itself, on bodies of about 500 bytes; members are decoded anew for each."""
    compiled = RouteTable.compile(loads(STEERED))
    gateway = SimpleNamespace(selection=selection(compiled), dispatch=lambda *_: None)
    steering = Steering(gateway, MemorySessions(100_000))
    figures = {}
    for kind in compiled.routes:
        bodies = [
            b'{"model":"%b","messages":[{"role":"user","content":"%b %d"}]}' % (kind.encode(), PROMPT.encode(), n % 500)
            for n in range(2000)
        ]

        def decide(found, route=compiled.routes[kind], kind=kind) -> None:
            plan = SimpleNamespace(key=None, target=None, session=b"s" + found[0][-8:], api="chat")
            steering.steer(Way(None, None, found[0], plan, found[1], kind, route))

        spent = []
        for _ in range(rounds):
            spent.append(each_ns(decide, [(body, read_routing(body)) for body in bodies]))
        best = min(spent, key=lambda found: found[len(found) // 2])
        figures[f"{kind}_us_p50"] = percentile(best, 50) / 1000
        figures[f"{kind}_us_p99"] = percentile(best, 99) / 1000
    return figures


def eviction(rounds: int) -> dict[str, float]:
    """The hot table alone: find, and put what is not there, under ten times more keys than places and under room for all."""
    figures = {}
    for name, capacity in (("full", 4096), ("room", 100_000)):
        rng = random.Random(3)
        held = HotTable(capacity)
        keys = [rng.randrange(40_960).to_bytes(16, "big") for _ in range(60_000)]

        def step(key: bytes, held: HotTable = held) -> None:
            if held.get(key) is None:
                held.put(key, "b0")

        each_ns(step, keys)
        spent = min((each_ns(step, keys[:20_000]) for _ in range(rounds)), key=lambda found: percentile(found, 99))
        figures[f"table_{name}_us_p50"] = percentile(spent, 50) / 1000
        figures[f"table_{name}_us_p99"] = percentile(spent, 99) / 1000
    return figures
