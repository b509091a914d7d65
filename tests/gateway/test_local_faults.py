"""A mistake of ours while an engine's event is passed on: the client hears of it, whatever the event was."""

from __future__ import annotations

import pytest

from laya.errors import RateLimited
from laya.gateway.local import Part
from laya.schema.generation import Delta, Finished, Queued, Started

EVENTS = {
    "on_queued": Queued(1), "on_started": Started(1, 0), "on_delta": Delta(0, "x", (1,)), "on_failed": RateLimited("full"),
    "on_finished": Finished(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
}  # fmt: skip


class Broken:
    """An exchange that fails at every event."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []

    def on_fault(self, fault: Exception) -> None:
        self.faults.append(fault)

    def __getattr__(self, name: str):
        def step(*arguments):
            raise KeyError(name)

        return step


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("first", [0, 2])
def test_an_exchange_that_fails_at_an_event_is_told_so(event, first):
    exchange = Broken()
    part = Part(exchange, first)
    getattr(part, event)(EVENTS[event])
    assert [fault.args for fault in exchange.faults] == [(event,)]
    part.cancel()
    getattr(part, event)(EVENTS[event])
    assert len(exchange.faults) == 1, "nothing more once it is closed"
