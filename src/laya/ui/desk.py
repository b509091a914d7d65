"""What /ui and what lies under it answer: the page, its events, and the route explainer.

In: an exchange of the front's whose path begins with /ui. Out: its answer. Loop thread only; the page's files are read and a
route is explained in the preparation worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from time import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from laya import __version__
from laya.errors import Forbidden, InvalidRequest, LayaError, Unavailable
from laya.gateway.exchange import DONE, JSON_LINE, Exchange
from laya.gateway.facts import estimate_tokens
from laya.routing.classify import RequestFacts
from laya.schema.codec import encode_json
from laya.ui.history import History
from laya.ui.machine import Machine
from laya.ui.page import page
from laya.ui.watching import WatchExchange

# People looking at once: a team's worth. Each costs 10 KB a second; the frame itself is made once for all.
MAX_WATCHERS = 16
FRAME_S = 1.0
RECENT_SHOWN = 40
SHOWN = ("id", "client", "api", "route", "backend", "model", "status", "outcome")  # of a recent request, as the log names them
MAX_FIELDS = 8  # of the explainer's query, which knows two
FOREIGN = frozenset({b"cross-site", b"same-site"})


class Desk:
    """`gateway()` and `components()` (the JSON of /ready) are asked when somebody looks."""

    def __init__(
        self, role: str, *, gateway: Callable[[], Any], ready: Callable[[], bool], components: Callable[[], dict],
        history: History, now: Callable[[], float], machine: Machine | None = None,
    ) -> None:  # fmt: skip
        self.watchers = 0
        self._role = role
        self._gateway = gateway
        self._ready = ready
        self._components = components
        self._history = history
        self._now = now
        self._machine = machine or Machine()
        self._began = now()
        self._frame = b""
        self._frame_at = float("-inf")

    def has(self, path: bytes) -> bool:
        return path in (b"/ui", b"/ui/events", b"/ui/route")

    def answer(self, exchange: Exchange) -> None:
        path = exchange.plan.path
        if path == b"/ui":
            self._offloaded(exchange, page, lambda made: (made.lines, made.body))
            return
        fields = exchange.request.fields
        # What a foreign page embeds comes without an Origin; it could not read the answer, but would take a watcher's place.
        if b"origin" not in fields and fields.get(b"sec-fetch-site") in FOREIGN:
            raise Forbidden("Pages from elsewhere may not embed this.")
        if path == b"/ui/events":
            self._watch(exchange)
        else:
            self._explain(exchange)

    # -- events --------------------------------------------------------------------------------------------------------

    def _watch(self, exchange: Exchange) -> None:
        if self.watchers >= MAX_WATCHERS:
            raise Unavailable(f"{MAX_WATCHERS} are looking already.", retry_after=10)
        self._machine.look()  # so that the first frame has it
        watching = WatchExchange(self, exchange)
        exchange.connection.exchange = watching
        watching.start()

    def frame(self) -> bytes:
        """The present as one event, made once a second however many look."""
        now = self._now()
        if now - self._frame_at >= FRAME_S * 0.9:
            self._frame = b"data: " + encode_json(self.snapshot()) + b"\n\n"
            self._frame_at = now
        return self._frame

    def snapshot(self) -> dict[str, Any]:
        """docs/operating.md says what is in it. No prompts, no answers, no keys."""
        gateway, now = self._gateway(), self._now()
        outcomes: dict[str, int] = {}
        for (_, _, api, outcome), count in gateway.telemetry.requests.items():
            if api != "page":
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        return {
            "at": time(),
            "version": __version__,
            "role": self._role,
            "uptime_s": round(now - self._began),
            "ready": self._ready(),
            "machine": self._machine.look(),
            "components": self._components(),
            "figures": {name: figures_of(engine) for name, engine in gateway.engines.items()},
            "minute": self._history.last_minute(now),
            "history": self._history.series(),
            "outcomes": outcomes,
            "recent": recent(gateway.recent),
        }

    # -- the explainer -------------------------------------------------------------------------------------------------

    def _explain(self, exchange: Exchange) -> None:
        try:
            asked = parse_qs(exchange.request.query.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
        except ValueError:
            raise InvalidRequest(f"The query has more than {MAX_FIELDS} fields; known: model, message.") from None
        table = exchange.gateway.table
        name = asked.get("model", [table.default_model or ""])[0]
        message = asked.get("message", [None])[0]
        if not name:
            raise InvalidRequest("`model` is required: there is no default model here.", param="model")
        facts = None if message is None else RequestFacts(prompt_tokens=estimate_tokens(message))
        self._offloaded(
            exchange, lambda: encode_json(table.explain(name, message, facts)), lambda body: (JSON_LINE + NO_STORE, body)
        )

    @staticmethod
    def _offloaded(exchange: Exchange, work: Callable[[], Any], shown: Callable[[Any], tuple[bytes, bytes]]) -> None:
        def done(result: Any) -> None:
            if exchange.state is DONE:
                return  # the client left
            if isinstance(result, LayaError):
                exchange.fail(result)
            else:
                exchange.answer(200, *shown(result), "ok")

        exchange.gateway.offload(work, done)


NO_STORE = b"cache-control: no-store\r\n"


def recent(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The newest requests first, from their lines in the log: where each went and how it ended; `at` in seconds since the
    epoch."""
    newest = [msgspec.json.decode(line) for line in list(lines)[-RECENT_SHOWN:][::-1]]
    return [
        {
            "at": datetime.fromisoformat(line["time"]).timestamp(), "ms": round(line["seconds"] * 1000, 2),
            "tokens": [line["prompt_tokens"], line["completion_tokens"]] if "prompt_tokens" in line else None,
            **{name: line[name] for name in SHOWN},
        }
        for line in newest
    ]  # fmt: skip


def figures_of(engine) -> dict[str, Any]:
    """An engine's figures, its plan and what it is, for one panel."""
    figures = engine.figures()
    plan = engine.plan
    return {
        "model": engine.card.id, "window": engine.card.max_model_len,
        "running": figures.sequences_running, "waiting": figures.sequences_waiting, "allowed": figures.sequences_allowed,
        "kv_used": figures.kv_blocks_used, "kv_total": figures.kv_blocks_total,
        "prompt_tokens": figures.prompt_tokens, "cached_tokens": figures.cached_tokens,
        "generated_tokens": figures.generated_tokens, "preemptions": figures.preemptions,
        "plan": {} if plan is None else dict(plan.device | plan.host),
    }  # fmt: skip
