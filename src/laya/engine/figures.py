"""What an engine has done so far, as numbers for metrics. Data only; any thread."""

from __future__ import annotations

import msgspec


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics. Totals since the start; seconds are of computing only."""

    sequences_running: int = 0
    sequences_waiting: int = 0
    sequences_allowed: int = 0  # how far concurrency has opened
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    step_seconds: float = 0.0
    longest_step_s: float = 0.0

    def after(self, past: EngineFigures) -> EngineFigures:
        """With the totals of an engine that was there before: counters must not fall when a model is loaded anew."""
        summed = {name: getattr(self, name) + getattr(past, name) for name in _TOTALS}
        return msgspec.structs.replace(self, longest_step_s=max(self.longest_step_s, past.longest_step_s), **summed)


_TOTALS = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps", "failed_steps", "step_seconds")
