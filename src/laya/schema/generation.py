"""The one internal request that every API is turned into, and what the engine answers.

In: gateway/api builds a `GenerationRequest` on the loop thread. Out: an engine backend calls the `GenerationListener`
on the loop thread. Frozen structs cross threads; nothing here is mutated after it is built.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from laya.errors import LayaError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. The defaults are OpenAI's; `top_k` 0 and `min_p` 0.0 mean off."""

    temperature: float = 1.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0
    min_p: float = 0.0  # [0, 1)
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens
    logit_bias: dict[int, float] | None = None
    seed: int | None = None  # same seed, prompt and model: same text, whatever else is in the batch
    max_tokens: int | None = None  # None: the room left in the window
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo)
    n: int = 1


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for the model's chat template: role, content (text) and, where present, tool fields."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    template_args: dict[str, Any] = {}


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine. `prompt` is a ChatPrompt, plain text, or token ids."""

    id: str  # unique; the x-request-id of the exchange plus a suffix where one exchange makes several
    prompt: ChatPrompt | str | list[int]
    sampling: SamplingParams
    client: str = ""  # fairness key: API key name, else peer address
    salt: str = ""  # separates tenants in the prefix cache
    grammar: tuple[str, str] | None = None  # (kind, text), kind json_schema | json_object | regex | lark | tool_calls
    max_prompt_tokens: int | None = None  # cap of the key or route, besides the engine's own
    options: tuple[str, ...] = ()  # score these as the answer instead of writing one: `Finished.option_logprobs`


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of one token, and of the likeliest ones at that place."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class Queued(msgspec.Struct, frozen=True):
    """The prompt was tokenised, fits, and waits for its turn: a stream may send its head now."""

    prompt_tokens: int


class Started(msgspec.Struct, frozen=True):
    """The request was admitted and its prompt is being read."""

    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_text: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """New text of one choice; `text` may be empty when `finish_reason` is set (stop | length)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_match: str | int | None = None  # the stop string or token id that ended it


class Finished(msgspec.Struct, frozen=True):
    """Every choice has ended. Token counts are over all choices; times in seconds since the offer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    option_logprobs: tuple[float, ...] | None = None  # of each of the request's options, given its prompt


class GenerationListener(Protocol):
    """Called on the loop thread: on_queued?, on_started?, on_delta*, then exactly one of on_finished and on_failed.

    After `Handle.cancel` nothing is called any more.
    """

    def on_queued(self, event: Queued) -> None: ...

    def on_started(self, event: Started) -> None: ...

    def on_delta(self, event: Delta) -> None: ...

    def on_finished(self, event: Finished) -> None: ...

    def on_failed(self, error: LayaError) -> None: ...


class Handle(Protocol):
    """What the gateway holds while work is under way."""

    def cancel(self) -> None:
        """Stop the work and free what it holds. Idempotent; loop thread only."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/models and validation need to know of an engine's model."""

    id: str
    max_model_len: int  # usable window in tokens, prompt and answer together
    chat: bool  # it has a chat template
    created: int = 0
    details: dict[str, Any] = {}


class Engine(Protocol):
    """An in-process engine as the gateway sees it. All methods are for the loop thread and never block."""

    card: ModelCard

    def submit(self, request: GenerationRequest, listener: GenerationListener) -> Handle:
        """Queue the work. Raises LayaError when it is refused at once (window, queue bound, engine down)."""

    def tokenize(self, prompt: ChatPrompt | str, done: Any, *, add_special: bool = True) -> None:
        """Count in the preparation worker; `done(ids: list[int] | LayaError)` is called on the loop thread."""

    def detokenize(self, ids: list[int], done: Any) -> None:
        """The reverse; `done(text: str | LayaError)` is called on the loop thread."""

    def status(self) -> dict[str, Any]:
        """State for /ready: {"state": "loading" | "warming" | "ready" | "draining" | "failed", ...}."""
