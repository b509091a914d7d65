"""One frame of /ui/events as lines for a terminal. Pure; needs rich.

In: a frame (docs/operating.md) and the terminal's width in columns. Out: what rich can print. Names come from clients: they are
plain text and never markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN_REQUESTS = 12
BAR_COLUMNS = 24
MAX_NAME = 40  # characters of a name that a client chose
NAMES = ("engine", "backend", "model", "route")
WORDS = ("state", "breaker", "model", "route", "backend", "api", "outcome")  # columns of text; the others are of figures
NARROW, TINY = 90, 76  # columns below which a table leaves out what matters less
BLOCKS = " ▁▂▃▄▅▆▇█"
GOOD, WARN, BAD = "green", "yellow", "red"
STATES = {
    "ready": GOOD, "up": GOOD, "running": GOOD, "closed": GOOD, "stuck": BAD, "failed": BAD, "down": BAD, "open": BAD,
    "loading": WARN, "warming": WARN, "waking": WARN, "starting": WARN, "yielding": WARN, "paused": BAD,
    "draining": WARN, "half-open": WARN,
}  # fmt: skip


def screen(frame: dict[str, Any], width: int) -> RenderableType:
    parts: list[RenderableType] = [_head(frame), *_machine(frame.get("machine")), _now(frame)]
    if frame["figures"]:
        parts += [Text(), _engines(frame, width)]
    if frame["components"].get("backends"):
        parts += [Text(), _backends(frame["components"]["backends"])]
    if frame["minute"]["latency"]:
        parts += [Text(), _latency(frame["minute"]["latency"])]
    if frame["recent"]:
        parts += [Text(), _recent(frame["recent"], width)]
    return Group(*parts)


def lost(why: str) -> RenderableType:
    return Text(f"{time.strftime('%H:%M:%S')}  {why}", style=BAD)


def _head(frame: dict[str, Any]) -> Text:
    ready = ("ready", GOOD) if frame["ready"] else ("not ready", BAD)
    connected = frame["components"]["server"]["connections"]
    text = Text.assemble(
        ("laya ", "bold"), f"{frame['version']}  {frame['role']}  ", ready,
        f"  up {duration(frame['uptime_s'])}  {connected} connection{'s' * (connected != 1)}",
    )  # fmt: skip
    watchdog = frame["components"].get("watchdog", {})
    if watchdog.get("level", "calm") != "calm":
        text.append(f"  memory protection {watchdog['level']}: {watchdog.get('why', '')}", style=WARN)
    return text


def _machine(machine: dict[str, Any] | None) -> Iterable[Text]:
    if machine is None:
        return
    for gpu in machine["gpus"]:
        if gpu["lost"]:
            yield Text(f"GPU {gpu['index']}        lost: the driver says that a reset is needed", style=BAD)
            continue
        heat = "" if gpu["temperature_c"] is None else f"  {gpu['temperature_c']:.0f} °C"
        yield _meter(f"GPU {gpu['index']}", gpu["used"], gpu["total"], heat + f"  {gpu['name']}")
    if not machine["gpus"]:
        yield Text.assemble(f"{'GPU':<12}", ("none is visible here", "dim"))
    host, group, swap = machine["host"], machine["group"], machine["swap"]
    more = f"  Laya {size(machine['process']['resident'])}" + (f", swap {size(swap['used'])}" if swap["total"] else "")
    yield _meter("host", host["total"] - host["available"], host["total"], more)
    if group is not None:
        yield _meter("group", group["total"] - group["available"], group["total"], "")


def _meter(name: str, used: int, total: int, more: str) -> Text:
    share = used / total if total else 0.0
    style = BAD if share >= 0.97 else WARN if share >= 0.92 else GOOD
    filled = round(min(1.0, share) * BAR_COLUMNS)
    return Text.assemble(
        f"{name:<12}", ("━" * filled, style), ("━" * (BAR_COLUMNS - filled), "dim"), f"  {size(used)} of {size(total)}{more}"
    )


def _now(frame: dict[str, Any]) -> Text:
    minute, history = frame["minute"], frame["history"]
    inflight = sum(backend["inflight"] for backend in frame["components"].get("backends", {}).values())
    running = inflight + sum(f["running"] for f in frame["figures"].values())
    waiting = sum(f["waiting"] for f in frame["figures"].values())
    return Text.assemble(
        f"{'requests':<12}", (spark(history["requests"]), GOOD),
        f"  {minute['requests_s']:g}/s  {running} under way, {waiting} waiting\n",
        f"{'generated':<12}", (spark(history["generated"]), GOOD),
        f"  {minute['generated_s']:g} tokens/s  prompts {minute['prompt_s']:g} tokens/s",
    )  # fmt: skip


def _engines(frame: dict[str, Any], width: int) -> Table:
    extra = ["generated", "preempted"][: (width >= TINY) + (width >= NARROW)]
    table = _table("engine", "state", "running", "waiting", "KV blocks", *extra)
    for name, figures in frame["figures"].items():
        status = frame["components"]["engines"].get(name, {})
        state = "stuck" if status.get("stuck") else status.get("state", "")
        table.add_row(
            plain(figures["model"]), _state(state), f"{figures['running']} of {figures['allowed']}",
            str(figures["waiting"]), f"{figures['kv_used']} of {figures['kv_total']}",
            *[str(figures["generated_tokens"]), str(figures["preemptions"])][: len(extra)],
        )  # fmt: skip
    return table


def _backends(backends: dict[str, Any]) -> Table:
    table = _table("backend", "state", "breaker", "in flight")
    for name, backend in backends.items():
        down = backend["healthy"] is False or backend["breaker"] == "open"
        probed = "down" if down else "not probed" if backend["healthy"] is None else "up"
        state = backend.get("process", {}).get("state", probed)  # a command that is started on demand has states of its own
        table.add_row(plain(name), _state(state), _state(backend["breaker"]), str(backend["inflight"]))
    return table


def _latency(lines: list[dict[str, Any]]) -> Table:
    table = _table("last minute", "count", "p50", "p95", "p99")
    for line in lines:
        table.add_row(line["stage"], str(line["count"]), *(milliseconds(line[name]) for name in ("p50", "p95", "p99")))
    return table


def _recent(requests: list[dict[str, Any]], width: int) -> Table:
    wide = width >= NARROW
    table = _table("time", "model", *(["route", "backend", "api"] if wide else ["backend"]), "outcome", "took")
    if wide:
        table.add_column("tokens", no_wrap=True, justify="right")
    for request in requests[:SHOWN_REQUESTS]:
        outcome = request["outcome"].replace("_", " ")
        style = "" if request["outcome"] in ("ok", "client_closed") else WARN if request["status"] < 500 else BAD
        places = [request["route"], request["backend"], request["api"]] if wide else [request["backend"]]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(request["at"])),
            plain(request["model"]), *map(plain, places),
            Text(f"{request['status']} {outcome if width >= TINY else ''}", style=style), milliseconds(request["ms"]),
            *([" + ".join(map(str, request["tokens"] or ()))] if wide else []),
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in (first, *others):
        shrinks = name in NAMES  # only these become shorter where the terminal is too narrow
        side = "left" if name in (first, *WORDS) else "right"
        table.add_column(name, no_wrap=not shrinks, overflow="ellipsis", min_width=len(name), justify=side)
    return table


def plain(text: str) -> Text:
    """What a client named, in one word: without what a terminal would obey or a column would break at."""
    return Text("".join(char if char.isprintable() and char != " " else "·" for char in text[:MAX_NAME]))


def _state(word: str) -> Text:
    return Text(word, style=STATES.get(word, "dim"))


def spark(values: list[float]) -> str:
    """The newest values as one line of BAR_COLUMNS blocks."""
    shown = values[-BAR_COLUMNS:]
    most = max(shown, default=0.0)
    scaled = (BLOCKS[0 if value <= 0 else max(1, round(value / most * 8))] for value in shown)
    return "".join(scaled).rjust(BAR_COLUMNS)


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("B", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def milliseconds(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value >= 1 else f"{value * 1000:.0f} µs"


def duration(seconds: float) -> str:
    for limit, unit, each in ((90, "s", 1), (5400, "min", 60), (129600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
