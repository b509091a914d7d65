"""Which targets of a route have an API that not every server has. Pure; loop thread.

In: the candidates of a request, best first. Out: those that can take it, or InvalidRequest with the routes that could.
"""

from __future__ import annotations

from laya.errors import InvalidRequest

# APIs that are passed on as they are and that in-process engines lack.
FORWARDED = frozenset({"embeddings", "rerank", "score", "moderations", "audio", "images"})
# APIs that an engine answers itself and that a backend may have; nothing is translated between them.
NATIVE = frozenset({"systemone", "tokenize"})
PICKED = FORWARDED | NATIVE
_MOST_NAMED = 20  # routes in the error's text


def offering(gateway, api: str, model: str, candidates: list) -> list:
    """The candidates that have `api`, in the same order. Raises InvalidRequest when there are none."""
    able = [candidate for candidate in candidates if _has(candidate, api)]
    if able:
        return able
    names = [name for name in gateway.table.names() if _route_has(gateway, name, api)]
    rules = [route.name for route in gateway.table.routes.values() if _route_has(gateway, None, api, route)]
    known = list(dict.fromkeys(names + rules))
    where = f"These routes may have it: {', '.join(known[:_MOST_NAMED])}." if known else "No route here has it."
    raise InvalidRequest(f"The model {model[:100]!r} does not offer this API. {where}", param="model")


def _has(candidate, api: str) -> bool:
    if candidate.engine is not None:
        return api not in FORWARDED
    return api == "tokenize" or candidate.backend_state.apis.offers(api)


def _route_has(gateway, name: str | None, api: str, route=None) -> bool:
    route = route or gateway.table.match(name)
    return route is not None and any(
        target.backend in gateway.backends and gateway.backends[target.backend].apis.offers(api) for target in route.targets
    )
