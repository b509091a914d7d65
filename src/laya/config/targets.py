"""Structs of the sections `backends` and `routes`: where requests can go, and which rule sends them there. Data only."""

from __future__ import annotations

from typing import Annotated, Literal

from laya.config.section import MIB, TIB, Name, Section, about, size

# No character may be in a name that no client could send or no log could show.
MAX_RULE_CHARS = 256
_DAY_S = 86_400
_MATCH = rf"[^\x00-\x1f\x7f]{{1,{MAX_RULE_CHARS}}}"
_PATH = r"/[!-~]*"
# Paths are sent as they are, so they must be ASCII; credentials belong in `key`.
_URL = r"https?://[^\s/?#@]+(?:/[!\x22$->A-~]*)?|unix:/[^\s?#]+"
_HEADER = r"(?i)(?!(?:host|connection|content-length|transfer-encoding)$)[a-z0-9!#$%&'*+.^_`|~-]{1,128}"
_HEADER_VALUE = r"[ -~]{0,4096}"
API_NAMES = (
    "chat", "completions", "responses", "messages", "embeddings", "rerank", "score", "moderations", "systemone", "audio",
    "images",
)  # fmt: skip
POLICIES = ("round_robin", "weighted", "least_busy", "power_of_two", "prefix", "session")


class BackendConfig(Section, kw_only=True):
    """Another server that speaks OpenAI's API: one that runs (`url`), or one that Laya starts on demand (`command`)."""

    url: Annotated[
        str | None,
        about("where it is, the API's path included; unix:/PATH for a socket", pattern=_URL,
              form="http://HOST[:PORT][/PATH], https://... or unix:/PATH", secret=True, example="http://127.0.0.1:8001/v1"),
    ] = None  # fmt: skip
    command: Annotated[
        str | None, about("start a server on demand instead, such as: llama-server -m m.gguf --port {port}, a port we choose")
    ] = None
    base: Annotated[
        str | None,
        about("what the API's paths are joined to; null: the url's own path, else /v1", pattern=_PATH, form="a path from /"),
    ] = None
    key: Annotated[
        str | None,
        about("bearer token sent to it", pattern=r"[!-~]{1,4096}", form="visible ASCII without spaces, never empty",
              secret=True, example="${GPU_BOX_KEY}"),
    ] = None  # fmt: skip
    apis: Annotated[
        tuple[Literal[API_NAMES], ...] | None,
        about("the APIs it has; requests of the others are translated to chat or refused; null: found out by asking",
              example=["chat", "embeddings"]),
    ] = None  # fmt: skip
    weight: Annotated[float, about("its share under `weighted`, against the others of a route", gt=0, le=1000)] = 1.0
    max_inflight: Annotated[int, about("requests it gets at the same time", ge=1, le=100_000)] = 64
    health: Annotated[
        str | None, about("path that answers 200 when it can serve, from the host's root; null: not probed", pattern=_PATH,
                          form="a path from /"),
    ] = "/health"  # fmt: skip
    connect_timeout_s: Annotated[float, about("time to connect", gt=0, le=600)] = 2.0
    first_byte_timeout_s: Annotated[
        float, about("time from the request to the first byte of the answer; long prompts need it", gt=0, le=_DAY_S)
    ] = 300.0
    idle_timeout_s: Annotated[float, about("longest silence within an answer", gt=0, le=_DAY_S)] = 120.0
    headers: Annotated[
        dict[
            Annotated[str, about("header", pattern=_HEADER, form="a header name; not host, connection or one of the framing")],
            Annotated[str, about("value", pattern=_HEADER_VALUE, form="one line of visible ASCII", secret=True)],
        ],
        about("headers added to each request"),
    ] = {}
    retry_ambiguous: Annotated[
        bool, about("retry on another backend when this one died without a byte, though the work may have been done")
    ] = True
    start_timeout_s: Annotated[float, about("command: time until its health path answers", gt=0, le=_DAY_S)] = 120.0
    idle_unload_s: Annotated[
        float | None, about("command: stop it after so long without a request; null: never", gt=0, le=366 * _DAY_S)
    ] = 600.0
    memory: Annotated[
        int | None, size("command: what it needs of the host's memory, for the plan; null: not counted", 1 * MIB, 16 * TIB)
    ] = None
    gpu_memory: Annotated[
        int | None, size("command: what it needs of the GPU's memory, for the plan; null: not counted", 1 * MIB, 16 * TIB)
    ] = None


class TargetConfig(Section, kw_only=True):
    """One place a route may send to. In the file a bare name is enough."""

    backend: Annotated[str, about("a name of `backends` or `inference.engines`, or `local`", example="gpu-box")]
    model: Annotated[str | None, about("the model name sent there; null: what the client asked for", example="qwen3-8b")] = None
    weight: Annotated[float | None, about("share under `weighted`; null: the backend's own", gt=0, le=1000)] = None


Targets = Annotated[
    tuple[Annotated[TargetConfig, about("a target", short="backend")], ...],
    about("one target or several: names, or maps of backend, model and weight", one_or_many=True, example=["gpu-box"]),
]
_Words = tuple[Annotated[str, about("word", pattern=r"(?s).{1,128}", form="1 to 128 characters")], ...]
_Count = Annotated[int | None, about("tokens", ge=0, le=100_000_000)]
_Flag = bool | None


class WhenConfig(Section, kw_only=True):
    """Conditions on a request; all that are given must hold. Words are looked for in the last user message only."""

    max_prompt_tokens: Annotated[_Count, about("prompt of at most so many tokens (estimated)", ge=0, le=100_000_000)] = None
    min_prompt_tokens: Annotated[_Count, about("prompt of at least so many tokens (estimated)", ge=0, le=100_000_000)] = None
    max_tokens_at_most: Annotated[
        _Count, about("the request's own max_tokens is given and at most this", ge=0, le=100_000_000)
    ] = None
    any_words: Annotated[_Words, about("one of these occurs; whole words in Latin script, anywhere in CJK")] = ()
    all_words: Annotated[_Words, about("all of these occur")] = ()
    no_words: Annotated[_Words, about("none of these occurs")] = ()
    has_code: Annotated[_Flag, about("true: the message holds code; false: it does not")] = None
    no_code: Annotated[_Flag, about("the reverse of has_code")] = None
    has_tools: Annotated[_Flag, about("true: the request offers tools; false: it does not")] = None
    has_images: Annotated[_Flag, about("true: some message holds an image; false: none does")] = None


class ClassifyRule(Section, kw_only=True):
    """One line of `classify`: the first whose conditions hold decides."""

    to: Targets
    when: Annotated[WhenConfig | None, about("conditions; null: always")] = None


class RouteConfig(Section, kw_only=True):
    """A rule: which model names it takes and where they go. The order in the file never matters."""

    name: Annotated[
        Name | None,
        about("its name in headers, metrics and auth.keys; null: its first exact match or a number", example="qwen"),
    ] = None
    match: Annotated[
        tuple[Annotated[str, about("rule", pattern=_MATCH, form=f"1 to {MAX_RULE_CHARS} printable characters")], ...],
        about("model names; * stands for any run of characters, also none", one_or_many=True, example=["qwen/*"]),
    ]
    to: Targets = ()
    policy: Annotated[
        Literal["round_robin", "weighted", "least_busy", "power_of_two", "prefix", "session"],
        about("how one of several targets is picked"),
    ] = "least_busy"
    redact: Annotated[bool | None, about("overrides stages.redact.enabled")] = None
    cache: Annotated[bool | None, about("overrides stages.cache.enabled")] = None
    max_prompt_tokens: Annotated[int | None, about("longest prompt; null: what the target allows", ge=1, le=100_000_000)] = None
    fallback: Annotated[
        tuple[str, ...], about("routes tried when the prompt is too long for this one, or all its targets are down")
    ] = ()
    classify: Annotated[
        tuple[ClassifyRule, ...], about("choose the target by the request itself; the first rule that holds wins")
    ] = ()
