"""A backend with the pool that suits it: one that runs, an engine process of ours, or a command that is started on demand.

In: a name and its settings. Out: `Backend`. At start and at a reload; loop thread.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from laya.config import Config
from laya.config.roles import backend_settings, is_link
from laya.config.structs import BackendConfig
from laya.errors import StartError
from laya.gateway.backends import Backend
from laya.net.clock import Clock
from laya.net.gated_pool import GatedPool
from laya.net.pool import Pool
from laya.net.streams import Streams

# A command is reached on loopback, at a port that is chosen anew with each start.
_COMMAND_URL = "http://127.0.0.1:1"
_COMMAND_AUTHORITY = b"localhost"
# So many may wait for a command that starts, as in the queue of an engine of our own; more where it takes more at a time.
MIN_WAITING = 64


def make_backend(
    name: str, settings: BackendConfig, config: Config, clock: Clock, loop: asyncio.AbstractEventLoop, streams: Streams | None
) -> Backend:
    """A backend with its pool, which waits for an engine process or a command. Raises StartError."""
    try:
        if settings.command is not None:
            pool: Pool = GatedPool(
                name, replace(settings, url=_COMMAND_URL, base=settings.base or "/v1"), clock, loop, streams,
                limit=max(MIN_WAITING, settings.max_inflight), wait_s=settings.start_timeout_s,
            )  # fmt: skip
            pool.address.authority = _COMMAND_AUTHORITY
        elif is_link(config, name):
            engine = config.engines_by_name()[name]
            limit, wait_s = max(1, engine.queue_limit), engine.queue_timeout_s  # as if they waited in its queue
            pool = GatedPool(name, settings, clock, loop, streams, limit=limit, wait_s=wait_s)
        else:
            pool = Pool(name, settings, clock, loop, streams)
        return Backend(name, settings, pool, link=is_link(config, name))
    except (ValueError, OSError) as exc:
        raise StartError(f"backends.{name}.url: {exc}") from None


def make_backends(
    config: Config, role: str, present: dict[str, Backend], clock: Clock, loop: asyncio.AbstractEventLoop,
    streams: Streams | None = None,
) -> dict[str, Backend]:
    """Every server a route may send to, by name. Those `present` with the same settings are kept. Raises StartError."""
    result = {}
    for name, settings in backend_settings(config, role).items():
        kept = present.get(name)
        if kept is None or kept.settings != settings:
            kept = make_backend(name, settings, config, clock, loop, streams)
        result[name] = kept
    return result
