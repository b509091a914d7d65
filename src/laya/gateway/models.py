"""`GET /v1/models` and `/v1/models/{id}`: every routable name, in the form of both OpenAI's and System One's SDKs.

In: the route table and the engines' cards. Out: JSON. Pure; loop thread.
"""

from __future__ import annotations

import time
from urllib.parse import unquote_to_bytes

from laya.errors import ModelNotFound
from laya.routing.table import RouteTable


class ModelList:
    def __init__(self, table: RouteTable, engines: dict, backends: dict | None = None) -> None:
        self._table = table
        self._engines = engines
        self._backends = backends or {}
        self._created = int(time.time())

    def all(self) -> dict:
        data = [self._entry(name) for name in self._table.names()]
        return {"object": "list", "data": data, "models": [_system_one(entry) for entry in data]}

    def one(self, raw_id: bytes) -> dict:
        """`raw_id` is the rest of the path, percent-encoded or not; ids may hold slashes. Raises ModelNotFound."""
        name = unquote_to_bytes(raw_id).decode("utf-8", "replace")
        if name not in self._table.names():
            raise self.not_found(name)
        return self._entry(name)

    def not_found(self, name: str, routes: tuple[str, ...] | None = None) -> ModelNotFound:
        """`routes`: those of the key that asks, where it is limited to some; others' names are not told to it."""
        names = self._table.names()
        if routes is not None:
            names = [known for known in names if self._table.match(known).name in routes]
        known = (", ".join(names[:20]) + (", ..." if len(names) > 20 else "")) or "none by name"
        shown = name if len(name) <= 100 else name[:100] + "..."
        here, whose = ("here", "Known models") if routes is None else ("for this key", "Its models")
        return ModelNotFound(f"The model {shown!r} does not exist {here}. {whose}: {known}.", param="model")

    def _entry(self, name: str) -> dict:
        route = self._table.match(name)
        groups = [route.targets, *(route.classify.groups if route.classify else ())]
        targets = [target.backend for group in groups for target in group]
        entry: dict = {"id": name, "object": "model", "created": self._created, "owned_by": "laya"}
        cards = [card for card in map(self._card, targets) if card is not None]
        windows = [card["max_model_len"] for card in cards if "max_model_len" in card]
        if windows:
            entry["max_model_len"] = min(windows)
        details = [card["details"] for card in cards if "details" in card]
        if details:
            entry["details"] = details[0]
        return entry

    def _card(self, target: str) -> dict | None:
        """What is known of a target's model: of an engine here, or of one in a process of its own."""
        if target in self._engines:
            card = self._engines[target].card
            return {"max_model_len": card.max_model_len, "details": card.details} if card else None
        return self._backends[target].card if target in self._backends else None


def _system_one(entry: dict) -> dict:
    date = time.strftime("%Y-%m-%d", time.gmtime(entry["created"]))
    return {"name": entry["id"], "description": f"served by Laya as {entry['id']}", "release_date": date}
