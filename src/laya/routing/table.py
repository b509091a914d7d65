"""Which route takes a model name, and why.

In: the configuration, once at start and at each reload. Out: `RouteTable`, read on the loop thread for every request. An exact
name is one dict lookup; other names go through the pattern automaton. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laya.config import LOCAL, Config, RouteConfig, TargetConfig, served_name
from laya.config.node import nearest
from laya.errors import ConfigError
from laya.routing.automaton import Pattern, PatternAutomaton
from laya.routing.classify import Classifier, RequestFacts

# Real names have below 200 characters; a longer one is no name, and no time is spent on it.
MAX_NAME_CHARS = 512
# More rules than anybody has models; bounds the start.
MAX_RULES = 100_000
# Names remembered with the pattern that took them: clients use few names, and a flood of others only costs the search.
_MET_NAMES = 1024
# `explain` shows the strongest candidates only.
_SHOWN_CANDIDATES = 20


class Target:
    """Where one request can go: an engine or backend by name, the model name to send (None: the client's), its share."""

    __slots__ = ("backend", "model", "weight")

    def __init__(self, backend: str, model: str | None = None, weight: float = 1.0) -> None:
        self.backend = backend
        self.model = model
        self.weight = weight

    def shown(self) -> dict[str, Any]:
        return {"backend": self.backend, "model": self.model, "weight": self.weight}


class Route:
    """A compiled rule. `state` belongs to the dispatcher (counters, picks); the table never touches it."""

    __slots__ = (
        "name", "targets", "policy", "redact", "cache", "staged", "keeps", "max_prompt_tokens", "fallback", "classify",
        "implicit", "state",
    )  # fmt: skip

    def __init__(
        self, name: str, targets: tuple[Target, ...], *, redact: bool, cache: bool, reports: bool = False,
        implicit: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.targets = targets
        self.policy = "least_busy"
        self.redact = redact
        self.cache = cache
        self.staged = redact or cache  # a request stops at the stages; the table adds the user's own
        self.keeps = reports or not redact  # conversations may be stored: nothing was replaced in them
        self.max_prompt_tokens: int | None = None
        self.fallback: tuple[str, ...] = ()
        self.classify: Classifier | None = None
        self.implicit = implicit  # made for an engine's name, not written in the file
        self.state: Any = None

    @property
    def reads_prompts(self) -> bool:
        """The decision needs more of a request than its members' names: its text, or an estimate of its length."""
        return self.classify is not None or self.max_prompt_tokens is not None


class RouteTable:
    """Built by `compile`; immutable afterwards but for the routes' `state` and the memo of names met."""

    def __init__(self, config: Config) -> None:
        self.routes: dict[str, Route] = {}
        self.default_model: str | None = None
        self._config = config
        self._exact: dict[str, Route] = {}
        self._patterns = PatternAutomaton([])
        self._met: dict[str, Route] = {}  # names that a pattern took before

    @classmethod
    def compile(cls, config: Config, engine_names: Iterable[str] | Mapping[str, str] = ()) -> RouteTable:
        """Compile the rules.

        `engine_names` are public model ids of the engines, if known by now: a mapping of id to engine, or ids that go to
        the engine of that name or else the first. Without it they come from the file names. Raises ConfigError for a name
        or pattern that two rules claim, for too many rules, and for a default_model that nothing takes.
        """
        table = cls(config)
        try:
            table._add_rules()
            table._add_engines(engine_names)
            table._check_fallbacks()
            table._set_default()
            if config.stages.custom:
                for route in (*table.routes.values(), *table._exact.values()):
                    route.staged = True
        except ConfigError as exc:
            raise ConfigError(f"{config.source}: {exc}" if config.source else str(exc)) from None
        return table

    def match(self, name: str) -> Route | None:
        """The route of a model name, or None. Names are compared byte for byte."""
        route = self._exact.get(name) or self._met.get(name)
        if route is not None:
            return route
        if len(name) > MAX_NAME_CHARS or not name:
            return None
        pattern = self._patterns.find(name)
        if pattern is None:
            return None
        if len(self._met) >= _MET_NAMES:
            self._met.clear()
        self._met[name] = pattern.value
        return pattern.value

    @property
    def default_route(self) -> Route | None:
        """The route of requests that name no model, or None: then they are refused with 400."""
        return None if self.default_model is None else self.match(self.default_model)

    def names(self) -> list[str]:
        """Names a client can ask for: exact names and aliases as written, then engines; never patterns."""
        return list(self._exact)

    def explain(self, name: str, message: str | None = None, facts: RequestFacts | None = None) -> dict[str, Any]:
        """The decision for a name in words and data: for `laya route` and the page. Not for the hot path.

        With `message` (the last user message) and `facts` a route that classifies decides as it would for such a request.
        """
        route = self.match(name)
        exact = name in self._exact
        taking = [p for p in self._patterns.patterns if len(name) <= MAX_NAME_CHARS and name and p.takes(name)]
        winner = None if exact or not taking else taking[0]
        return {
            "model": name,
            "route": route and route.name,
            "rule": name if exact else winner and winner.text,
            "kind": "none" if route is None else "pattern" if winner else "engine" if route.implicit else "exact",
            "why": self._why(name, route, winner),
            "policy": route and route.policy,
            "targets": [target.shown() for target in self._targets(route)],
            "fallback": list(route.fallback) if route else [],
            "classify": route.classify.shown() if route and route.classify else [],
            "decision": _decision(route, message, facts),
            "candidates": [_candidate(pattern, winner) for pattern in taking[:_SHOWN_CANDIDATES]],
        }

    def _why(self, name: str, route: Route | None, winner: Pattern | None) -> str:
        if route is None:
            return f"no rule takes this name{nearest(name[:MAX_NAME_CHARS], self.names())}"
        if winner is None:
            return "the name of an engine" if route.implicit else "an exact name, which wins over every pattern"
        chars = f"{winner.literal_chars} literal characters"
        return f"the most specific pattern that takes it: {chars}, prefix of {len(winner.prefix)}"

    def _targets(self, route: Route | None) -> list[Target]:
        if route is None:
            return []
        return list(route.targets) or [target for group in route.classify.groups for target in group]

    def _add_rules(self) -> None:
        config = self._config
        rules = config.routes or (RouteConfig(name="default", match=("*",), to=(TargetConfig(backend=LOCAL),)),)
        total = sum(len(rule.match) for rule in rules)
        if total > MAX_RULES:
            raise ConfigError(f"routes: found {total} rules; allowed: at most {MAX_RULES}")
        patterns: list[Pattern] = []
        for index, rule in enumerate(rules):
            route = self._route(rule, index)
            self.routes[route.name] = route
            for text in rule.match:
                if "*" in text:
                    patterns.append(Pattern(text, route))
                else:
                    self._claim(text, route)
        self._patterns = PatternAutomaton(patterns)

    def _claim(self, name: str, route: Route) -> None:
        other = self._exact.setdefault(name, route)
        if other is not route:
            raise ConfigError(
                f'routes: the name "{name}" is matched by route {other.name} and by route {route.name}; allowed: one of them'
            )

    def _route(self, rule: RouteConfig, index: int) -> Route:
        stages = self._config.stages
        route = Route(
            rule.name or _default_name(rule, index, self.routes),
            self._compiled(rule.to),
            redact=stages.redact.enabled if rule.redact is None else rule.redact,
            cache=stages.cache.enabled if rule.cache is None else rule.cache,
            reports=stages.redact.mode == "report",
        )
        route.policy = rule.policy
        route.max_prompt_tokens = rule.max_prompt_tokens
        route.fallback = rule.fallback
        if rule.classify:
            route.classify = Classifier(rule.classify, [self._compiled(item.to) for item in rule.classify], route.targets)
        return route

    def _compiled(self, targets: tuple[TargetConfig, ...]) -> tuple[Target, ...]:
        """Targets with `local` replaced by the engine it means, and weights filled in."""
        compiled = []
        for target in targets:
            backend = self._config.engine_target(target.backend) or target.backend
            settings = self._config.backends.get(backend)
            weight = target.weight if target.weight is not None else settings.weight if settings else 1.0
            compiled.append(Target(backend, target.model, weight))
        return tuple(compiled)

    def _add_engines(self, engine_names: Iterable[str] | Mapping[str, str]) -> None:
        """Public ids and target names of engines are routable as they are; a rule for the same name wins."""
        engines, stages = self._config.engines_by_name(), self._config.stages
        reports = stages.redact.mode == "report"
        routes = {
            key: Route(
                key, (Target(key),), redact=stages.redact.enabled, cache=stages.cache.enabled, reports=reports, implicit=True
            ) for key in engines
        }  # fmt: skip
        for name, key in self._public_ids(engine_names).items():
            self._exact.setdefault(name, routes[key])
        for key, route in routes.items():
            self._exact.setdefault(key, route)
            self.routes.setdefault(key, route)

    def _public_ids(self, engine_names: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
        """Public id to engine. Two engines of one id: the first written has it, and both have their target names."""
        engines = self._config.engines_by_name()
        if isinstance(engine_names, Mapping):
            ids = dict(engine_names)
        else:
            ids = {name: name if name in engines else next(iter(engines)) for name in engine_names}
        if not ids:
            for key, settings in engines.items():
                ids.setdefault(served_name(settings), key)
        return ids

    def _check_fallbacks(self) -> None:
        """A route that redacts must not get, by another's fallback, what was not redacted."""
        for route in self.routes.values():
            for name in route.fallback:
                if self.routes[name].redact and not route.redact:
                    raise ConfigError(
                        f"routes: route {route.name} does not redact and falls back to {name}, which does; allowed: both, or "
                        "a fallback that does not"
                    )

    def _set_default(self) -> None:
        wanted = self._config.router.default_model
        if wanted is not None and self.match(wanted) is None:
            known = ", ".join(self.names()) or "none"
            raise ConfigError(f'router.default_model: found "{wanted}", which no rule takes; known names: {known}')
        first = next((name for name, route in self._exact.items() if route.implicit), None)
        only = next(iter(self._exact)) if len(self._exact) == 1 else None
        self.default_model = wanted or first or only


def _decision(route: Route | None, message: str | None, facts: RequestFacts | None) -> dict[str, Any] | None:
    if route is None or route.classify is None or message is None or facts is None:
        return None
    decided = route.classify.decide(message, facts)
    targets = [target.shown() for target in decided.targets]
    return {"rule": decided.rule + 1 if decided.rule >= 0 else None, "why": decided.reason, "targets": targets}


def _candidate(pattern: Pattern, winner: Pattern | None) -> dict[str, Any]:
    return {
        "rule": pattern.text,
        "route": pattern.value.name,
        "literal_chars": pattern.literal_chars,
        "prefix_chars": len(pattern.prefix),
        "wins": pattern is winner,
        "lost_because": None if pattern is winner else _lost(pattern, winner),
    }


def _lost(pattern: Pattern, winner: Pattern | None) -> str:
    if winner is None:
        return "an exact name wins"
    if pattern.literal_chars < winner.literal_chars:
        return f"{pattern.literal_chars} literal characters are fewer than {winner.literal_chars}"
    return f"a literal prefix of {len(pattern.prefix)} is shorter than {len(winner.prefix)}"


def _default_name(rule: RouteConfig, index: int, taken: Mapping[str, Route]) -> str:
    """The first exact match if it is a plain word, else a number; names become header values and metric labels."""
    first = next((text for text in rule.match if "*" not in text), "")
    plain = first.isascii() and len(first) <= 64 and first.replace("-", "").replace(".", "").replace("_", "").isalnum()
    name = first if plain and first not in taken else f"route-{index + 1}"
    return name if name not in taken else f"{name}-{len(taken)}"
