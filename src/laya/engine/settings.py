"""The engine's own settings: a plain struct, filled in by the composition root from `inference:` of laya.yaml."""

from __future__ import annotations

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one engine. The defaults are laya.yaml's; times in seconds."""

    max_num_seqs: int = 4  # continuations that hold KV or wait preempted
    max_concurrent_prefills: int = 1  # requests that compute prompt tokens in one step
    prefill_chunk_tokens: int = 512  # token budget of a step: decodes first, the rest for prompts
    queue_limit: int = 64  # choices waiting (n counts n); an empty queue admits any request
    queue_tokens: int = 65536  # prompt tokens waiting
    queue_timeout_s: float = 30.0
    step_timeout_s: float = 120.0  # a step past it counts as stuck
    max_prompt_tokens: int | None = None  # cap on input besides the window
    thread_nice: int = 5  # added to the engine thread's nice value, so that the loop thread gets its core first
