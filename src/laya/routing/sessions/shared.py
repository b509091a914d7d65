"""Sessions that several routers share: the local table first, Redis behind it and never waited for beyond the bound.

In: `session_key`s and names of targets. Out: the name last assigned, by whichever router. While Redis is away each router goes
on by its own table, and what it assigned meanwhile is written when Redis is back. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.routing.sessions.hot import HotTable
from laya.routing.sessions.once import Once
from laya.routing.sessions.redis_link import RedisLink

# A session that nobody used for so long is forgotten: no backend has its KV cache any more.
SESSION_TTL_S = 86_400
# Sessions in use are confirmed this often, so many at a time: it keeps them from expiring, and brings them back to a Redis that
# has lost them.
CONFIRM_EVERY_S, CONFIRM_AT_ONCE = 10.0, 1000
_PREFIX = b"laya:session:"
# Sessions that went to another target, as a stream that every router reads four times a second. More moves than this between
# two looks are those of a lost backend, which every router sees by itself.
_MOVES, MOVES_KEPT = "laya:moves", 4096
# The first of two routers that meet a new session at the same moment decides for both.
_CLAIM = (
    "local had = redis.call('GET', KEYS[1]) if had then return had end "
    "redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2]) return ARGV[1]"
)

Later = Callable[[float, Callable[[], None]], Any]


class SharedSessions:
    def __init__(self, capacity: int, link: RedisLink, *, timeout_s: float, later: Later) -> None:
        self.late = 0
        self._hot = HotTable(capacity)
        self._link = link
        self._timeout_s = timeout_s
        self._later = later
        self._used: set[bytes] = set()
        self._confirm_at = 0.0
        self._moving: dict[bytes, int] = {}  # own moves that are not in the stream yet
        self._read_to: bytes | str = "0-0"  # the last move that was seen
        self._reading = False

    def find(self, key: bytes) -> str | None:
        target = self._hot.get(key)
        if target is not None and len(self._used) < CONFIRM_AT_ONCE:
            self._used.add(key)
        return target

    def may_fetch(self) -> bool:
        """Not while Redis is away or hangs: then the local table is all there is."""
        return self._link.answers

    def fetch(self, key: bytes, done: Callable[[str | None, bool], None]) -> None:
        """Past the bound it goes on as with a new session: a claim never takes what another router has."""
        waiting = Once(self, lambda target, _: done(target, True))

        def found(answer: Any) -> None:
            target = self._hot.get(key) or _text(answer)  # assigned meanwhile, or as Redis has it
            if target is not None:
                self._hot.put(key, target)
            waiting.settle(target, True)

        if not self._link.send("GET", _PREFIX + key, done=found):
            waiting.settle(None, False)
            return
        waiting.timer = self._later(self._timeout_s, lambda: waiting.settle(None, False))

    def assign(self, key: bytes, target: str, done: Callable[[], None]) -> bool:
        """Written behind: no request waits for it."""
        had = self._hot.get(key)
        if had == target:
            return True
        self._hot.put(key, target)
        if had is None:
            self._claim(key, target)
        else:
            self._link.send("SET", _PREFIX + key, target, "EX", SESSION_TTL_S, keep=True)
            move = ("XADD", _MOVES, "MAXLEN", "~", MOVES_KEPT, "*", "key", key, "to", target)
            if self._link.send(*move, keep=True, done=lambda _: self._moved(key)):
                self._moving[key] = self._moving.get(key, 0) + 1
        return True

    def on_tick(self, now: float) -> None:
        if self._link.state == "ok" and not self._reading:
            self._reading = self._link.send(
                "XREAD", "COUNT", MOVES_KEPT, "STREAMS", _MOVES, self._read_to, done=self._follow
            )
        if now < self._confirm_at:
            return
        self._confirm_at = now + CONFIRM_EVERY_S
        used, self._used = self._used, set()
        if self._link.state == "ok":
            for key in used:
                self._claim(key, self._hot.get(key), confirm=True)

    def _moved(self, key: bytes) -> None:
        left = self._moving.pop(key) - 1
        if left:
            self._moving[key] = left

    def _follow(self, answer: Any) -> None:
        """What was moved, by anybody and in Redis's order: of the sessions that are known here, and that we do not move anew
        just now."""
        self._reading = False
        streams = answer.items() if isinstance(answer, dict) else answer if isinstance(answer, list) else ()
        for _, moves in streams:
            for number, fields in _entries(moves):
                self._read_to = number
                key = fields.get(b"key")
                if key in self._hot and key not in self._moving:
                    self._hot.put(key, _text(fields.get(b"to")))

    def status(self) -> dict[str, Any]:
        status = {"mode": "shared", "entries": len(self._hot), **self._link.status()}
        if self.late:
            status["late"] = self.late
        return status

    def figures(self) -> tuple[int, int]:
        return len(self._hot), self._hot.evictions

    def settled(self, in_time: bool) -> None:
        if not in_time:
            self.late += 1
            self._link.silent = True

    def _claim(self, key: bytes, target: str | None, confirm: bool = False) -> None:
        """Put it unless another router has; what Redis has then is what holds here too."""
        if target is None:
            return  # it has left the local table meanwhile
        self._link.send(
            "EVAL", _CLAIM, 1, _PREFIX + key, target, SESSION_TTL_S, keep=not confirm,
            done=lambda answer: self._learn(key, target, _text(answer)),
        )  # fmt: skip
        if confirm:
            self._link.send("EXPIRE", _PREFIX + key, SESSION_TTL_S)

    def _learn(self, key: bytes, claimed: str, holds: str | None) -> None:
        if holds is not None and holds != claimed and self._hot.get(key) == claimed:  # not moved again meanwhile
            self._hot.put(key, holds)


def _entries(moves: Any):
    """(id, fields) of a stream's part, in whichever form the client's version gives it."""
    if len(moves) == 1 and isinstance(moves[0], list):
        moves = moves[0]
    for number, fields in moves:
        yield number, fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))


def _text(answer: Any) -> str | None:
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else None
