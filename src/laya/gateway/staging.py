"""The stages of the configuration, and the way of a request through them: redact, the user's own, cache.

In: a request whose route has stages, before a target is chosen. Out: the request as the stages leave it, on a `Staged`
connection that does the rest on the way back. `Stages` is built at start and at a reload, on any thread; `Staging` is the loop
thread's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from laya.config import Config
from laya.errors import ConfigError, ContextLengthExceeded, InvalidRequest, LayaError, Unavailable
from laya.gateway.caching import Caching
from laya.gateway.facts import read_facts
from laya.gateway.metering import Metering
from laya.gateway.staged import FILTER_ON_LOOP, Staged
from laya.schema.fields import RoutingFields, invalid_body, read_routing
from laya.schema.pieces import member_spans
from laya.stages.custom import About, CustomStage, load_stages
from laya.stages.redact_json import Edited
from laya.stages.texts import TextFilter
from laya.wire.sse import EventStream, frame

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_key = msgspec.json.Decoder(str).decode


class Stages:
    """What `stages` of one configuration says. Raises ConfigError for a pattern that cannot be, StartError for a stage of the
    user's own that cannot be had."""

    def __init__(self, config: Config) -> None:
        self.caching = config.stages.cache
        self.caches = self.caching.enabled or any(route.cache for route in config.routes)
        self.backends = config.backends
        self.limit_s = config.stages.custom_timeout_s
        self.customs = load_stages(config.stages.custom, config.path_of(""))
        redact = config.stages.redact
        self.reports = redact.mode == "report"
        self.redactor = _redactor(redact) if redact.enabled or any(route.redact for route in config.routes) else None


def _redactor(settings):
    from laya.stages.redact import Redactor  # its automaton costs start-up time and memory: only where it is used

    try:
        return Redactor(settings)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None


class Staging:
    __slots__ = ("redacted", "metering", "caching", "_gateway", "_stages")

    def __init__(self, gateway, stages: Stages) -> None:
        self.redacted: dict[str, int] = {}  # kind -> values found so far
        self.metering = Metering()
        self.caching: Caching | None = Caching(gateway, stages.caching) if stages.caches else None
        self._gateway = gateway
        self._stages = stages

    def adopt(self, stages: Stages) -> None:
        """Requests from now on go through these. The cache stays, unless its answers may be those of other servers now."""
        old, self._stages = self._stages, stages
        if not stages.caches:
            self.caching = None
        elif self.caching is not None and (old.caching, old.backends) == (stages.caching, stages.backends):
            self.caching.forget_known()
        else:
            self.caching = Caching(self._gateway, stages.caching)

    @property
    def customs(self) -> tuple[CustomStage, ...]:
        return self._stages.customs

    # -- the request's way in ------------------------------------------------------------------------------------------

    def admit(self, connection, request, body: bytes, plan) -> Staged:
        """A key's request, before anything is done for it. Raises RateLimited."""
        ticket = self.metering.admit(plan.key, len(body))
        staged = self.between(connection, request, body, plan)
        staged.ticket = ticket
        staged.prepared = plan.key.max_prompt_tokens is None and not self._stages.customs
        return staged

    def prepare(self, connection, request, body: bytes, plan, fields: RoutingFields, route) -> Staged | None:
        """Where the request goes on: at once when the route wants nothing done to it. None: when what it wants is done, it is
        routed again, since a stage may have changed its model."""
        stages = self._stages
        staged = connection if connection.staged else self.between(connection, request, body, plan)
        redactor = stages.redactor if route.redact and not staged.redacted else None
        counted = plan.key is not None and plan.key.max_prompt_tokens is not None and not staged.prepared
        customs = () if staged.prepared else stages.customs
        staged.redacted = staged.redacted or route.redact
        staged.prepared = True
        if redactor is not None and plan.boundary is not None:
            if not stages.reports:
                raise InvalidRequest("This route redacts, and forms with files cannot be redacted.")
            redactor = None
        if plan.boundary is not None or not (redactor or counted or customs):
            return staged
        job = Preparation(body, plan, fields, redactor, stages.reports, counted, customs, route.name)
        if len(body) <= FILTER_ON_LOOP and not customs:
            self._go_on(staged, request, plan, body, job.run())
            return None
        gateway, limit_s = self._gateway, stages.limit_s
        offload = gateway.offload
        if customs:
            staged.limit_s = limit_s

            def offload(work, done) -> None:
                gateway.offload_guest(work, done, limit_s, lambda: job.late(limit_s))

        then = partial(self._go_on, staged, request, plan, body)
        gateway.park(staged, request, body, plan, job.run, then, offload)
        return None

    def check_prompt(self, staged: Staged, key) -> None:
        """A backend does not know the key's cap on prompts: the estimate must do."""
        if key is not None and key.max_prompt_tokens is not None and staged.prompt_tokens > key.max_prompt_tokens:
            raise ContextLengthExceeded(
                f"Prompts of this key are limited to {key.max_prompt_tokens} tokens, however the prompt is about "
                f"{staged.prompt_tokens} tokens.", param="messages",
            )  # fmt: skip

    def between(self, connection, request, body: bytes, plan) -> Staged:
        """Put a `Staged` before a client's connection."""
        staged = connection.exchange = Staged(self._gateway, connection, request, body, plan)
        return staged

    def _go_on(self, staged: Staged, request, plan, body: bytes, made: Preparation) -> None:
        if made.body is not body and not staged.hold(len(made.body)):
            raise Unavailable("too much data is held in memory just now")
        staged.prompt_tokens = made.prompt_tokens
        staged.filters = (*made.answers, *staged.filters)
        if made.found is not None:
            self._count(staged, made.found.counts)
            if made.found.vault is not None:
                staged.filters = (*staged.filters, Restoring(made.found.vault.restorer(plan.api, EventStream())))
        self._gateway.route(staged, request, made.body, plan, made.fields)

    def _count(self, staged: Staged, counts: dict[str, int]) -> None:
        staged.counts = counts
        for kind, number in counts.items():
            self.redacted[kind] = self.redacted.get(kind, 0) + number


class Restoring:
    """The restorer as a filter."""

    slow = False
    __slots__ = ("whole", "feed", "finish")

    def __init__(self, restorer) -> None:
        self.whole, self.feed, self.finish = restorer.whole, restorer.feed, restorer.finish


class Preparation:
    """What is done to a request before it is routed: redacted, given to the user's own stages, its prompt's tokens estimated
    (`counted`). `answers` are what those stages do to its answer, in the order in which it passes them."""

    def __init__(
        self, body: bytes, plan, fields: RoutingFields, redactor, reports: bool, counted: bool,
        customs: tuple[CustomStage, ...], route: str,
    ) -> None:  # fmt: skip
        self.body = body
        self.fields = fields
        self.found: Any = None  # what the redactor said
        self.prompt_tokens = 0
        self.answers: tuple[TextFilter, ...] = ()
        self._api = plan.api
        self._redactor = redactor
        self._reports = reports
        self._counted = counted
        self._customs = customs
        self._at = customs[0] if customs else None  # the stage whose turn it is
        self._about = About(plan.api, route, plan.key.name if plan.key is not None else "")

    def run(self) -> Preparation:
        """Any thread. Raises LayaError."""
        if self._redactor is not None:
            self._redact()
        if self._customs:
            self._customise()
        if self._counted:
            self.prompt_tokens = read_facts(self.fields)[0].prompt_tokens
        return self

    def _customise(self) -> None:
        readers = [stage for stage in self._customs if stage.reads_requests]
        if readers:
            value = _decoded(self.body)
            for stage in readers:
                self._at = stage
                value = stage.request(value, self._about)
            self.body = readers[-1].encoded(value)
            self.fields = read_routing(self.body)
        answers = []
        for stage in reversed(self._customs):
            self._at = stage
            if (answer := stage.answer(self._about)) is not None:
                answers.append(TextFilter(self._api, answer, EventStream(), frame))
        self.answers = tuple(answers)

    def late(self, limit_s: float) -> LayaError:
        """What the request ends with when this takes longer than it may."""
        return self._at.late(limit_s)

    def _redact(self) -> None:
        if self.fields.model is not None:
            self._redactor.check_name(self.fields.model)
        self.found = self._redactor.redact(self.body, self._api)
        body = self.found.body
        if self._api == "responses" and not self._reports:
            body = _unstored(body)
        if body is not self.body:
            self.body, self.fields = body, read_routing(body)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return _decode(body)
    except (ValueError, RecursionError) as exc:
        raise invalid_body(exc) from None


def _unstored(body: bytes) -> bytes:
    """A Responses request that nobody stores: what came from a redacted request is kept nowhere."""
    edited, found = Edited(body), False
    members = member_spans(body)
    for key, (start, end) in members:
        if _key(body[slice(*key)]) == "store":
            found, stored = True, body[start:end]
            if stored == b"true":
                raise InvalidRequest("`store` cannot be true on a route that redacts: nothing is stored there.", param="store")
            edited.put(start, end, b"false")
    if not found:
        at = body.index(b"{") + 1
        edited.put(at, at, b'"store":false,' if members else b'"store":false')
    return edited.whole()
