"""Stored conversations that several routers share: in Redis, with a local copy for when Redis is away.

In and out: as `ResponseStore`. Redis is asked first, because another router may have deleted the answer; past the bound, or
where Redis gives no answer, the local copies speak. In Redis too all of them stay within `max_bytes`. Loop thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from laya.config import RouterConfig
from laya.gateway.store import HOT_BYTES, ResponseStore
from laya.routing.sessions.journal import Journal
from laya.routing.sessions.once import Once
from laya.routing.sessions.redis_link import AWAY, RedisLink
from laya.routing.sessions.store import Later

_KEY, _BY_AGE, _SIZES, _TOTAL = "laya:response:", "laya:responses:age", "laya:responses:sizes", "laya:responses:bytes"
# Keys: the value, then the three of the books. The oldest go until the rest fits, so many at a time.
_DROP = """
local function drop(key)
  local size = tonumber(redis.call('HGET', KEYS[3], key) or 0)
  redis.call('HDEL', KEYS[3], key) redis.call('ZREM', KEYS[2], key)
  if size > 0 then redis.call('DECRBY', KEYS[4], size) end
  return redis.call('DEL', key)
end
"""
_PUT = _DROP + """
drop(KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], KEYS[1]) redis.call('HSET', KEYS[3], KEYS[1], #ARGV[1])
local total = redis.call('INCRBY', KEYS[4], #ARGV[1])
for _ = 1, 100 do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  local expired = tonumber(oldest[2]) < tonumber(ARGV[3]) - tonumber(ARGV[2])
  if oldest[1] == KEYS[1] or (total <= tonumber(ARGV[4]) and not expired) then break end
  drop(oldest[1])
  total = tonumber(redis.call('GET', KEYS[4]))
end
"""
_DELETE = _DROP + "return drop(KEYS[1])"


class SharedResponses(ResponseStore):
    def __init__(
        self, *, max_bytes: int, ttl_s: float, link: RedisLink, timeout_s: float, later: Later,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        super().__init__(max_bytes=max_bytes, ttl_s=ttl_s, wall=wall)
        self.late = 0
        self._hot_bytes = min(max_bytes, HOT_BYTES)
        self._link = link
        self._timeout_s = timeout_s
        self._later = later

    def get(self, id: str, scope: str, done: Callable[[bytes | None], Any]) -> None:
        def settled(answer: Any, in_time: bool) -> None:
            if in_time and answer is not AWAY:
                if answer is None:
                    self._forget((scope, id))  # deleted by way of another router, or expired
                done(answer)
            else:
                ResponseStore.get(self, id, scope, done)

        waiting = Once(self, settled)
        if not self._link.answers or not self._link.send("GET", _key(scope, id), done=lambda a: waiting.settle(a, True)):
            waiting.settle(AWAY, True)
            return
        waiting.timer = self._later(self._timeout_s, lambda: waiting.settle(None, False))

    def delete(self, id: str, scope: str, done: Callable[[bool], Any]) -> None:
        had = self._forget((scope, id))
        waiting = Once(self, lambda answer, in_time: done(had or (in_time and answer is not AWAY and bool(answer))))
        sent = self._link.send(
            "EVAL", _DELETE, 4, *_keys(scope, id), keep=True, done=lambda answer: waiting.settle(answer, True)
        )
        if not sent or not self._link.answers:
            waiting.settle(AWAY, True)
            return
        waiting.timer = self._later(self._timeout_s, lambda: waiting.settle(None, False))

    def settled(self, in_time: bool) -> None:
        if not in_time:
            self.late += 1
            self._link.silent = True

    def _put_behind(self, id: str, scope: str, value: bytes, now: float) -> None:
        self._link.send(
            "EVAL", _PUT, 4, *_keys(scope, id), value, max(1, int(self._ttl_s)), now, self._max_bytes, keep=True,
            size=len(value),
        )  # fmt: skip


def _key(scope: str, id: str) -> bytes:
    return b"\0".join((_KEY.encode() + scope.encode("utf-8", "surrogatepass"), id.encode("utf-8", "surrogatepass")))


def _keys(scope: str, id: str) -> tuple:
    return _key(scope, id), _BY_AGE, _SIZES, _TOTAL


def open_responses(router: RouterConfig, journal: Journal | None, link: RedisLink | None, later: Later) -> ResponseStore:
    """The store of the configured mode; `journal` and `link` are what `open_journal` and `open_redis` gave."""
    bounds = router.responses
    if link is None:
        return ResponseStore(max_bytes=bounds.max_bytes, ttl_s=bounds.ttl_s, journal=journal)
    return SharedResponses(
        max_bytes=bounds.max_bytes, ttl_s=bounds.ttl_s, link=link, timeout_s=router.timeout_ms / 1000, later=later
    )
