"""Where one request goes: the route of its model name, and the route's targets, best first.

In: the routing members of a body and the head's plan. Out: candidates for the exchange to go down, or a LayaError. Loop thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from laya.errors import InvalidRequest, Unavailable
from laya.gateway.backends import Backend, Candidate, EngineCandidate
from laya.gateway.models import ModelList
from laya.gateway.plan import HeadPlan
from laya.routing.balance import order
from laya.routing.table import Route, RouteTable
from laya.schema.fields import RoutingFields


class Selection:
    def __init__(
        self, table: RouteTable, backends: dict[str, Backend], engines: dict[str, Any], models: ModelList,
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._table = table
        self._backends = backends
        self._engines = engines
        self._models = models
        self._now = now
        self._turn = itertools.count()

    def route_of(self, name: str | None, plan: HeadPlan) -> tuple[str, Route]:
        """(the model name in force, its route). Raises InvalidRequest or ModelNotFound."""
        if name is None:
            name = self._table.default_model
            if name is None:
                raise InvalidRequest("`model` is required: there is no default model here.", param="model")
        route = self._table.match(name)
        if route is None:
            raise self._models.not_found(name)
        key = plan.key
        if key is not None and key.routes is not None and route.name not in key.routes:
            raise self._models.not_found(name)
        return name, route

    def choose(self, route: Route, fields: RoutingFields) -> list[Any]:
        """The route's candidates, best first. Raises Unavailable when none is in this process's reach."""
        candidates = route.state
        if candidates is None:
            candidates = route.state = self._candidates(route)
        if len(candidates) > 1:
            return order(route.policy, candidates, next(self._turn), self._now())
        if not candidates:
            raise Unavailable(f"The route {route.name!r} has no target that this process can reach.")
        return candidates

    def _candidates(self, route: Route) -> list[Any]:
        found: list[Any] = []
        for target in route.targets:
            if target.backend in self._engines:
                found.append(EngineCandidate(target.backend, self._engines[target.backend], target.weight))
            elif target.backend in self._backends:
                found.append(Candidate(route.name, self._backends[target.backend], target.model, target.weight))
        return found
