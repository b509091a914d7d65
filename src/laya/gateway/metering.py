"""What each key may take and has taken: limits, requests at the same time, tokens.

In: a request with its key, before anything is done for it; what its answer used, when it is over. Out: a `Ticket`, or
RateLimited with the time to come back. Keys are known here by their names alone. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterator

from laya.config.structs import KeyConfig
from laya.errors import RateLimited
from laya.gateway.limits import Limits, MemoryLimits, Standing
from laya.gateway.usage import UsageWatch

# Bytes of a request to a token, before anybody has counted: text has about four.
BYTES_PER_TOKEN = 4
# After so long a place may be free again: requests at the same time have no clock.
BUSY_RETRY_S = 1.0


class Ticket:
    """One request under way. `see` gets the pieces of its answer."""

    __slots__ = ("_meter", "_key", "_taken", "_usage", "_failed", "_waived")

    def __init__(self, meter: Metering, key: KeyConfig, taken: int) -> None:
        self._meter = meter
        self._key = key
        self._taken = taken
        self._usage = UsageWatch()
        self._failed = False
        self._waived = False

    def answered(self, status: int) -> None:
        self._failed = status >= 400

    def see(self, data: bytes) -> None:
        self._usage.see(data)

    def waive(self) -> None:
        """Its answer costs no tokens: it was there already."""
        self._waived = True

    def settle(self, tokens: tuple[int, int] | None) -> None:
        """It is over. `tokens` are exact where an engine of ours answered; else the answer's own usage counts, and where it
        has none what was taken stands, because nobody knows better."""
        if self._waived:
            used: tuple[int, int] | None = (0, 0)
        else:
            used = tokens or self._usage.tokens or ((0, 0) if self._failed else None)
        self._meter.over(self._key, self._taken, used)


class Metering:
    def __init__(self, limits: Limits | None = None) -> None:
        self.tokens: dict[tuple[str, str], int] = {}  # (key's name, kind) -> tokens so far
        self._limits = limits or MemoryLimits()
        self._running: dict[str, int] = {}

    def count_with(self, limits: Limits) -> None:
        """Limits that are kept elsewhere too. Before the first request."""
        self._limits = limits

    def admit(self, key: KeyConfig, size: int) -> Ticket:
        """A request whose body has `size` bytes. Raises RateLimited."""
        running = self._running.get(key.name, 0)
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise RateLimited(
                f"The key {key.name!r} has {running} requests under way, as many as it may.", retry_after=BUSY_RETRY_S
            )
        taken = size // BYTES_PER_TOKEN if key.tpm is not None else 0
        if key.rpm is not None or key.tpm is not None:
            wait = self._limits.take(key, taken)
            if wait is not None:
                limit = key.rpm if wait.what == "requests" else key.tpm
                raise RateLimited(f"The key {key.name!r} may take {limit} {wait.what} a minute.", retry_after=wait.seconds)
        self._running[key.name] = running + 1
        return Ticket(self, key, taken)

    def over(self, key: KeyConfig, taken: int, used: tuple[int, int] | None) -> None:
        self._running[key.name] -= 1
        if key.tpm is not None and used is not None:
            self._limits.settle(key, taken, sum(used))
        for kind, number in zip(("prompt", "generated"), used or (), strict=False):
            if number:
                self.tokens[key.name, kind] = self.tokens.get((key.name, kind), 0) + number

    def lines(self, key: KeyConfig) -> bytes:
        """The header lines that tell a client where it stands, as OpenAI's."""
        if key.rpm is None and key.tpm is None:
            return b""
        return b"".join(_lines(*self._limits.standing(key)))


def _lines(requests: Standing | None, tokens: Standing | None) -> Iterator[bytes]:
    for what, standing in ((b"requests", requests), (b"tokens", tokens)):
        if standing is not None:
            yield b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
                what, standing.limit, what, standing.remaining, what, duration(standing.reset_s),
            )  # fmt: skip


def duration(seconds: float) -> bytes:
    """As OpenAI writes it: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(round(seconds, 2), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%gs" % rest
