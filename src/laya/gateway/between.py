"""What stands between a client's connection and the exchange that answers it.

In: the connection's calls, as an exchange gets them; the exchange's calls, as a connection gets them. Out: both passed on.
Subclasses change what passes. The exchange within never knows: forwarded, translated and in-process answers all go the same
way, and a hand-over to another kind of exchange stays behind the same connection. Loop thread only.
"""

from __future__ import annotations

from typing import Any

from laya.errors import LayaError
from laya.gateway.exchange import Exchange


class Between:
    """`outer` is the connection without, `exchange` the exchange within (None before it is made and when it is over)."""

    __slots__ = ("gateway", "outer", "exchange", "request", "body", "plan")

    staged = True
    passes = False  # `send` and `done` may be called, as on the connection without
    reads_answers = True  # a backend must not pack its answer

    def __init__(self, gateway, outer, request, body: bytes, plan) -> None:
        self.gateway = gateway
        self.outer = outer
        self.exchange: Any = None
        self.request = request
        self.body = body
        self.plan = plan

    # -- as a connection: what exchanges and the front ask for ---------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.outer.paused

    @property
    def peer(self) -> str:
        return self.outer.peer

    @property
    def server(self):
        return self.outer.server

    def hold(self, count: int) -> bool:
        return self.outer.hold(count)

    def ready_for(self, route) -> bool:
        return self.outer.ready_for(route)

    @property
    def tokens(self) -> tuple[int, int] | None:
        """What the exchange within has counted: prompt, completion."""
        return self.exchange.tokens if self.exchange is not None else None

    # -- as an exchange: what the connection without calls -------------------------------------------------------------

    def cancel(self) -> None:
        """The client has gone."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()

    def shut_down(self, error: LayaError) -> None:
        self.end_with(error)

    def on_fault(self, fault: Exception) -> None:
        """A mistake of ours while this request was served."""
        self.end_with(self.gateway.fault(fault))

    def end_with(self, error: LayaError) -> None:
        if self.exchange is None:
            self.exchange = Exchange(self.gateway, self, self.request, self.body, self.plan)
        self.exchange.end_with(error)

    def on_writable(self) -> None:
        if self.exchange is not None:
            self.exchange.on_writable()

    def on_tick(self, now: float) -> None:
        if self.exchange is not None:
            self.exchange.on_tick(now)
