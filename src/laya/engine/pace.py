"""How fast the engine serves, and how many sequences it dares to run. Written by the engine thread, read by any."""

from __future__ import annotations

# A step's weight in the rate halves every 350 steps: long enough to hold several answers, short enough to follow load.
_DECAY = 0.998
# Retry-After bounds in seconds: below one a client hammers, above a minute it gives up although the queue has moved.
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
# Steps that must succeed at one level of concurrency before the next opens: past the first prefill, into steady decode.
_STEPS_PER_LEVEL = 8


class ServiceRate:
    """Finished choices for each second that the engine was busy, recent steps weighing most."""

    def __init__(self) -> None:
        self._choices = 0.0
        self._busy_s = 0.0

    def add(self, choices: int, busy_s: float) -> None:
        self._choices = self._choices * _DECAY + choices
        self._busy_s = self._busy_s * _DECAY + busy_s

    def seconds_for(self, choices: int) -> float:
        """When a queue of `choices` will have been served, within the Retry-After bounds; the lower one before any data."""
        choices_done = self._choices
        estimate = choices * self._busy_s / choices_done if choices_done > 0 else 0.0
        return min(max(estimate, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)


class Opening:
    """Concurrency after warm-up: 1, 2, 4 ... `limit`, doubled as full steps succeed within their time.

    While `held` (set by the loop thread as the watchdog tells) it does not grow.
    """

    def __init__(self, limit: int, step_timeout_s: float) -> None:
        self.limit = limit
        self.allowed = 1
        self.held = False
        self._calm_s = step_timeout_s / 4  # a step slower than this is no ground to run more at once
        self._good_steps = 0

    def step(self, running: int, seconds: float) -> None:
        """Count one step that succeeded with `running` sequences in it."""
        if self.allowed >= self.limit or running < self.allowed:
            return
        self._good_steps = self._good_steps + 1 if seconds <= self._calm_s and not self.held else 0
        if self._good_steps >= _STEPS_PER_LEVEL:
            self.allowed = min(self.allowed * 2, self.limit)
            self._good_steps = 0
