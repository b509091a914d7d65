"""One generation that several clients wait for, and that fills the cache when it lands.

In: what the exchange that generates writes. Out: the same to the client that asked first and to its twins, who asked the same
in the same form meanwhile; the whole answer to `landed`. The generation goes on as long as anybody waits for it, whoever of
them leaves. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.gateway.between import Between
from laya.gateway.cached import CachedExchange
from laya.gateway.proxy import outcome_of_status
from laya.gateway.staged import Staged, kind_of, value_of
from laya.wire.sse import EventStream

# A stream is one answer in at most so many clients' hands; the next twin begins a generation of its own.
MAX_TWINS = 1024


class Flight(Between):
    """`landed(flight, data)` once, with the whole answer: a body, or a stream's bytes (`streamed`); None where there is none to
    keep."""

    __slots__ = ("followers", "streamed", "_landed", "_most", "_leader", "_begun", "_parts", "_size", "_over")

    def __init__(self, staged: Staged, most: int, landed: Callable[[Flight, bytes | None], None]) -> None:
        super().__init__(staged.gateway, staged, staged.request, staged.body, staged.plan)
        self.exchange = staged.exchange  # what held the request's place until now, if anything did
        self.followers: list[CachedExchange] = []
        self.streamed = False
        self._landed = landed
        self._most = most  # bytes that are collected
        self._leader: Staged | None = staged
        self._begun: tuple[int, bytes] | None = None  # status and lines of an answer that comes in pieces
        self._parts: list[bytes] | None = []
        self._size = 0
        self._over = False

    @property
    def takes_more(self) -> bool:
        return not self._over and self._parts is not None and len(self.followers) < MAX_TWINS

    def join(self, follower: CachedExchange) -> None:
        """Give `follower` what has come and all that comes."""
        self.followers.append(follower)
        follower.follow(self)
        if self._begun is not None:
            follower.begin(*self._begun, b"".join(self._parts))

    def leave(self, follower: CachedExchange) -> None:
        self.followers.remove(follower)
        self._deserted()

    # -- the client that asked first, as its exchange ------------------------------------------------------------------

    def cancel(self) -> None:
        self._leader = None
        self._deserted()

    def _deserted(self) -> None:
        if self._leader is None and not self.followers and not self._over:
            self._land(0, b"", None)
            super().cancel()

    def log_note(self) -> bytes:
        return self.outer.log_note()

    # -- the exchange within, which generates --------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """The slowest reader is cut off by its own connection's bound; the generation waits only where nobody reads."""
        readers = [follower.connection for follower in self.followers]
        if self._leader is not None:
            readers.append(self._leader)
        return all(reader.paused for reader in readers)

    def ready_for(self, route) -> bool:
        return True

    def reply(self, status: int, lines: bytes, body: bytes) -> None:
        self._land(status, lines, body)
        outcome = "ok" if status < 400 else outcome_of_status(status)
        if self._leader is not None:
            self._leader.reply(status, lines, body)
        for follower in self._take_followers():
            follower.whole(status, lines, body, outcome)

    def start(self, status: int, lines: bytes, first: bytes = b"") -> None:
        self.streamed = kind_of(lines).startswith(b"text/event-stream")
        self._begun = (status, lines)
        if self._leader is not None:
            self._leader.start(status, lines, first)
        self._keep(first)
        for follower in tuple(self.followers):
            follower.begin(status, lines, first)

    def start_sized(self, status: int, lines: bytes, length: int) -> None:
        """A body of known length that comes in pieces; to those who wait it is the same as one of unknown length."""
        self.start(status, lines)

    def write(self, data: bytes) -> bool:
        self._keep(data)
        if self._leader is not None:
            self._leader.write(data)
        for follower in tuple(self.followers):
            follower.piece(data)
        return not self._over

    def finish(self) -> None:
        whole = b"".join(self._parts) if self._parts is not None else None
        self._land(*self._begun, whole)
        if self._leader is not None:
            self._leader.finish()
        for follower in self._take_followers():
            follower.end()

    def break_off(self, last: bytes = b"") -> None:
        self._land(0, b"", None)
        if self._leader is not None:
            self._leader.break_off(last)
        for follower in self._take_followers():
            follower.broken(last)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._parts is None:
            return
        if self._size > self._most:
            self._parts = None  # those who have joined go on; nobody joins any more
        else:
            self._parts.append(data)

    def _take_followers(self) -> list[CachedExchange]:
        followers, self.followers = self.followers, []
        for follower in followers:
            follower.flight = None
        return followers

    def _land(self, status: int, lines: bytes, data: bytes | None) -> None:
        self._over = True
        if value_of(lines, b"content-encoding") not in (b"", b"identity") or b"no-store" in value_of(lines, b"cache-control"):
            data = None
        self._landed(self, data if status == 200 else None)


def events_of(data: bytes) -> list[bytes]:
    """The data of each event of a whole stream. Raises BadUpstream for one that is too long."""
    stream = EventStream()
    frames = stream.feed(data)
    last = stream.finish()
    return [data for _, data, _ in ([*frames, last] if last is not None else frames) if data is not None]
