"""Where one request goes: the route of its model name, and the route's targets, best first.

In: the routing members of a body and the head's plan. Out: candidates for the exchange to go down, or a LayaError. Loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.errors import Forbidden, InvalidRequest, Unavailable
from laya.gateway.api.systemone import ALIAS
from laya.gateway.backends import Backend, Candidate, EngineCandidate
from laya.gateway.models import ModelList
from laya.gateway.plan import HeadPlan
from laya.routing.balance import order
from laya.routing.table import Route, RouteTable, Target


class Group:
    """Targets that one decision leads to: the route's own, or those of one rule of `classify`."""

    __slots__ = ("candidates", "fallback")

    def __init__(self, candidates: list[Any], fallback: list[tuple[str, list[Any]]]) -> None:
        self.candidates = candidates
        self.fallback = fallback  # (name, candidates) of each fallback route, in the order written


class RouteState:
    """A route's targets as this process reaches them. `steered`: the model name alone does not settle which comes first."""

    __slots__ = ("own", "classes", "steered")

    def __init__(self, own: Group, classes: list[Group], steered: bool) -> None:
        self.own = own
        self.classes = classes
        self.steered = steered


class Selection:
    def __init__(
        self, table: RouteTable, backends: dict[str, Backend], engines: dict[str, Any], models: ModelList,
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self.turn = 0  # requests for which there was a choice
        self._table = table
        self._backends = backends
        self._engines = engines
        self._models = models
        self._now = now
        self._named: dict[tuple[str, str], Any] = {}  # by route and name: what x-laya-target named

    def route_of(self, name: str | None, plan: HeadPlan) -> tuple[str, Route]:
        """(the model name in force, its route). Raises InvalidRequest or ModelNotFound."""
        if name == ALIAS and plan.api == "systemone" and self._table.match(name) is None:
            name = None
        if name is None:
            name = self._table.default_model
            if name is None:
                raise InvalidRequest("`model` is required: there is no default model here.", param="model")
        route = self._table.match(name)
        allowed = None if plan.key is None else plan.key.routes
        if route is None or (allowed is not None and route.name not in allowed):
            raise self._models.not_found(name, allowed)
        return name, route

    def choose(self, route: Route) -> list[Any] | None:
        """The route's candidates, best first; None where `Steering` must look at the request itself. Raises Unavailable when
        none is in this process's reach."""
        state = route.state
        if state is None:
            state = route.state = self._state(route)
        if state.steered:
            return None
        candidates = state.own.candidates
        if len(candidates) > 1:
            self.turn += 1
            return order(route.policy, candidates, self.turn, self._now())
        if not candidates:
            raise self._unreachable(route)
        return candidates

    # -- for steering --------------------------------------------------------------------------------------------------

    def group(self, route: Route, rule: int | None) -> Group:
        """The targets of a rule of `classify`; None or -1: the route's own."""
        if route.state is None:
            route.state = self._state(route)
        return route.state.own if rule is None or rule < 0 else route.state.classes[rule]

    def ordered(self, route: Route, group: Group, preferred: str | None, key) -> list[Any]:
        """The group's candidates best first, then those of the fallback routes that the key may use, then what is not usable
        now."""
        self.turn += 1
        now = self._now()
        found = order(route.policy, group.candidates, self.turn, now, preferred=preferred)
        if group.fallback:
            others = [
                c for name, candidates in group.fallback if key is None or key.routes is None or name in key.routes
                for c in order("least_busy", candidates, self.turn, now)
            ]  # fmt: skip
            found = [c for c in found if c.usable(now)] + [c for c in others if c.usable(now)] + [
                c for c in (*found, *others) if not c.usable(now)
            ]  # fmt: skip
        if not found:
            raise self._unreachable(route)
        return found

    def usable(self, group: Group, name: str) -> bool:
        now = self._now()
        return any(candidate.name == name and candidate.usable(now) for candidate in group.candidates)

    def override(self, route: Route, plan: HeadPlan) -> Any:
        """The target that x-laya-target names. Raises InvalidRequest for an unknown one, Forbidden where the key forbids it."""
        name = plan.target
        if name not in self._backends and name not in self._engines:
            raise InvalidRequest("x-laya-target names no backend or engine of this server.")
        key = plan.key
        if key is not None and key.routes is not None and name not in key.routes and name not in self._reached_by(key.routes):
            raise Forbidden("This key may not use the target that x-laya-target names.")
        found = self._named.get((route.name, name))
        if found is None:
            of_route = (target for target in _targets(route) if target.backend == name)
            found = self._candidate(route, next(of_route, Target(name)), "", route.max_prompt_tokens)
            self._named[route.name, name] = found
        return found

    # -- inside --------------------------------------------------------------------------------------------------------

    def _reached_by(self, routes: tuple[str, ...]) -> set[str]:
        """Every target that these routes lead to."""
        allowed = (self._table.routes[name] for name in routes if name in self._table.routes)
        return {target.backend for route in allowed for target in _targets(route)}

    def _unreachable(self, route: Route) -> Unavailable:
        return Unavailable(f"The route {route.name!r} has no target that this process can reach.")

    def _state(self, route: Route) -> RouteState:
        fallback = [
            (name, found)
            for name in route.fallback
            if (found := self._candidates(self._table.routes[name], route, f"; fallback={name}"))
        ]
        own = Group(self._candidates(route, route), fallback)
        cap = route.max_prompt_tokens
        groups = route.classify.groups if route.classify else []
        classes = [Group(self._reachable(group, route, "", cap), fallback) for group in groups]
        affine = route.policy in ("prefix", "session") and len(own.candidates) > 1
        return RouteState(own, classes, bool(classes or fallback or affine or route.reads_prompts))

    def _candidates(self, source: Route, route: Route, note: str = "") -> list[Any]:
        """Of a route that classifies and has no targets of its own, those that stand last."""
        targets = source.targets or (source.classify.groups[-1] if source.classify else ())
        return self._reachable(targets, route, note, source.max_prompt_tokens)

    def _reachable(self, targets, route: Route, note: str, cap: int | None) -> list[Any]:
        found = (self._candidate(route, target, note, cap) for target in targets)
        return [candidate for candidate in found if candidate is not None]

    def _candidate(self, route: Route, target: Target, note: str = "", cap: int | None = None) -> Any:
        if target.backend in self._engines:
            return EngineCandidate(target.backend, self._engines[target.backend], target.weight, note, cap)
        if target.backend in self._backends:
            return Candidate(route.name, self._backends[target.backend], target.model, target.weight, note, cap)
        return None


def _targets(route: Route) -> list[Target]:
    groups = route.classify.groups if route.classify else []
    return [*route.targets, *(target for group in groups for target in group)]
