"""Structs of the sections `server`, `auth`, `router` and `stages`. Data only; the bounds carry their reasons."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from laya.config.section import GIB, KIB, MIB, TIB, Name, Section, about, size

# A day bounds every wait of a client, so that no typing slip keeps a socket for a year.
_DAY_S = 86_400
_YEAR_S = 366 * _DAY_S
_ORIGIN = r"\*|https?://[A-Za-z0-9.\-\[\]:]+"


class TlsConfig(Section, kw_only=True):
    """`server.tls`: both paths, or neither."""

    certificate: Annotated[str | None, about("PEM file with the certificate chain; null: plain HTTP")] = None
    key: Annotated[str | None, about("PEM file with the private key of that certificate")] = None


class ServerConfig(Section, kw_only=True):
    """Where Laya listens, and the bounds on what a client may make it hold."""

    host: Annotated[
        str,
        about("address to listen on; one that other machines reach warns when there are no auth.keys; empty: only unix_socket"),
    ] = "127.0.0.1"
    port: Annotated[int, about("TCP port; 0 lets the system choose one, which is printed", ge=0, le=65535)] = 8000
    unix_socket: Annotated[str | None, about("listen on this socket file too; null: on TCP alone")] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("least severity that is logged; prompts are in no log")
    ] = "info"
    tls: Annotated[TlsConfig, about("serve HTTPS with this certificate")] = TlsConfig()
    cors_origins: Annotated[
        tuple[Annotated[str, about("origin", pattern=_ORIGIN, form='an origin such as https://app.example, or "*"')], ...],
        about("browser origins that may call; none: pages of other origins are refused, on loopback a foreign Host too"),
    ] = ()
    max_connections: Annotated[
        int, about("open client connections; the next one is closed at once, since each costs a descriptor", ge=1, le=1_000_000)
    ] = 4096
    max_head_bytes: Annotated[int, size("request line and headers together; more is 431", 1 * KIB, 1 * MIB)] = 32 * KIB
    max_body_bytes: Annotated[int, size("one request body, after unpacking; more is 413", 1 * KIB, 2 * GIB)] = 32 * MIB
    max_buffered_bytes: Annotated[
        int, size("all bodies of requests together; beyond it 503, so that memory stays in bounds", 1 * MIB, 1 * TIB)
    ] = 512 * MIB
    header_timeout_s: Annotated[float, about("time for a whole request head to arrive", gt=0, le=_DAY_S)] = 10.0
    body_timeout_s: Annotated[float, about("longest silence within a request body", gt=0, le=_DAY_S)] = 60.0
    keepalive_timeout_s: Annotated[float, about("how long an idle connection is kept between requests", gt=0, le=_DAY_S)] = 75.0
    drain_timeout_s: Annotated[
        float, about("after SIGTERM: how long running requests may go on; 0 cuts them at once", ge=0, le=_DAY_S)
    ] = 30.0


class KeyConfig(Section, kw_only=True):
    """One API key and what it may do."""

    name: Annotated[Name, about("the key's name in logs, metrics and the fair queue", example="ci")]
    key: Annotated[
        str | None,
        about(
            "the secret that clients send as a bearer token or x-api-key; take it from the environment",
            pattern=r"[!-~]{1,512}", form="visible ASCII without spaces, 1 to 512 characters, never empty",
            secret=True, example="${CI_KEY}",
        ),
    ] = None  # fmt: skip
    sha256: Annotated[
        str | None,
        about("in place of key: its SHA-256 in hex, from: printf %s KEY | sha256sum", pattern=r"[0-9a-f]{64}",
              form="64 lower-case hex digits", secret=True),
    ] = None  # fmt: skip
    routes: Annotated[
        tuple[str, ...] | None, about("names of the routes and engines it may use; null: all of them", example=["qwen"])
    ] = None
    rpm: Annotated[int | None, about("requests a minute; null: no limit", ge=1, le=10_000_000)] = None
    tpm: Annotated[int | None, about("tokens a minute, prompt and answer; null: no limit", ge=1, le=10_000_000_000)] = None
    max_concurrent: Annotated[int | None, about("requests at the same time; null: no limit", ge=1, le=1_000_000)] = None
    max_prompt_tokens: Annotated[int | None, about("longest prompt; null: what the route allows", ge=1, le=100_000_000)] = None

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret: what is compared, and all that is kept where the file has only that."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else hashlib.sha256((self.key or "").encode()).digest()


class AuthConfig(Section, kw_only=True):
    """Who may call. No keys: everybody who reaches the address."""

    keys: Annotated[tuple[KeyConfig, ...], about("API keys; none: authorization headers are ignored")] = ()
    keys_file: Annotated[
        str | None, about("YAML file with more of them under `keys`, with sha256 in place of key; read again at a reload")
    ] = None


class ResponsesConfig(Section, kw_only=True):
    """The store of conversations for `previous_response_id`."""

    max_bytes: Annotated[int, size("all stored conversations; the oldest go first", 1 * MIB, 1 * TIB)] = 256 * MIB
    ttl_s: Annotated[float, about("how long one is kept; the default is a week", gt=0, le=_YEAR_S)] = 604_800.0


class RouterConfig(Section, kw_only=True):
    """The session table (which backend holds whose KV) and what a request without a model gets."""

    mode: Annotated[
        Literal["memory", "hybrid", "persistent", "shared"],
        about("memory: lost at a restart; hybrid: written behind; persistent: committed before the answer; shared: in Redis"),
    ] = "memory"
    cache_size: Annotated[int, about("entries of the hot session table", ge=1, le=10_000_000)] = 4096
    timeout_ms: Annotated[
        float, about("bound on the session-table step of routing; past it the request goes without affinity", gt=0, le=10_000)
    ] = 50.0
    path: Annotated[str, about("the SQLite file of the modes hybrid and persistent")] = "laya.sqlite"
    flush_ms: Annotated[
        float, about("hybrid: the longest a change stays unwritten, which a kill -9 may lose", gt=0, le=60_000)
    ] = 200.0
    redis: Annotated[
        str | None,
        about("shared: where the common table is", pattern=r"(rediss?|unix)://\S+", form="a redis://, rediss:// or unix:// URL",
              secret=True),
    ] = None  # fmt: skip
    default_model: Annotated[
        str | None, about("for requests that name no model; null: the first engine, else the only exact name, else 400")
    ] = None
    command_memory: Annotated[
        int | None,
        size("what all backends started on demand may take together; null: what the machine has beside the engines", 1 * MIB,
             16 * TIB),
    ] = None  # fmt: skip
    command_gpu_memory: Annotated[int | None, size("the same of the GPU's memory", 1 * MIB, 16 * TIB)] = None
    responses: Annotated[ResponsesConfig, about("stored conversations, bounded in bytes and time")] = ResponsesConfig()


class RedactConfig(Section, kw_only=True):
    """Replace personal data and secrets before a model sees them, restore them in the answer."""

    enabled: Annotated[bool, about("redact on every route; a route's own `redact` overrides")] = False
    mode: Annotated[
        Literal["mask", "block", "report"], about("mask: replace and restore; block: refuse with 400; report: count only")
    ] = "mask"
    kinds: Annotated[
        tuple[Literal["phone", "id", "card", "email", "secret"], ...], about("what is looked for")
    ] = ("phone", "id", "card", "email", "secret")
    patterns: Annotated[
        dict[Name, Annotated[str, about("pattern", pattern=r"(?s).{1,512}", form="a pattern of 1 to 512 characters")]],
        about("own kinds: a name and an RE2 pattern (no look-around, no back-references) of what it looks like"),
    ] = {}


class CacheConfig(Section, kw_only=True):
    """Answer a repeated request from memory."""

    enabled: Annotated[bool, about("cache on every route; a route's own `cache` overrides")] = False
    max_bytes: Annotated[int, size("all cached answers together", 1 * MIB, 1 * TIB)] = 256 * MIB
    ttl_s: Annotated[float, about("how long an answer may be repeated", gt=0, le=_YEAR_S)] = 3600.0
    any_temperature: Annotated[bool, about("cache sampled answers too, not only deterministic ones")] = False


class StagesConfig(Section, kw_only=True):
    """What happens to a request between routing and dispatch, in this order."""

    redact: Annotated[RedactConfig, about("redaction with restore")] = RedactConfig()
    cache: Annotated[CacheConfig, about("the result cache")] = CacheConfig()
    custom: Annotated[
        tuple[
            Annotated[str, about("stage", pattern=r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", form='"module:factory"')], ...
        ],
        about('stages of your own, each "module:factory"'),
    ] = ()
    custom_timeout_s: Annotated[
        float, about("how long one call of a stage of your own may take; its request then ends with 500", gt=0, le=_DAY_S)
    ] = 30.0
