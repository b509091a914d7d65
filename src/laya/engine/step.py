"""The interface between the schedule (no torch) and the device (torch): one step's work and its outcome.

In: the engine thread builds a list of `Scheduled`. Out: a `Runner` returns one `Sampled` for each, in order. Both live for
one step only.
"""

from __future__ import annotations

from typing import Any, Protocol

from laya.engine.sequence import Sequence


class DeviceLost(Exception):
    """Raised by a `Runner` whose device is gone for good (a lost GPU): the engine thread ends, nothing is retried."""


class Scheduled:
    """Run `sequence.token_ids[start:start + count]`; KV for [0, start) exists and blocks for the rest are in its table.

    A token is sampled exactly when the run reaches the last known token. A decode is count == 1 there.
    """

    __slots__ = ("sequence", "start", "count")

    def __init__(self, sequence: Sequence, start: int, count: int) -> None:
        self.sequence = sequence
        self.start = start
        self.count = count

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.token_ids)


class Sampled:
    """Outcome for one `Scheduled`: `token_id` is None when nothing was to be sampled or `error` is set.

    `logprob` and `top` [(token_id, logprob)] are filled when the sequence asked for them. `prompt_logprobs` holds, for
    each token in [max(start, 1), start + count) of a prompt whose log-probabilities were asked for, a pair
    (logprob, top): the value of that token given those before it (carried over chunk borders by the runner's caller:
    entry j belongs to position j).
    """

    __slots__ = ("token_id", "logprob", "top", "prompt_logprobs", "error", "told")

    def __init__(
        self,
        token_id: int | None = None,
        logprob: float | None = None,
        top: list[tuple[int, float]] | None = None,
        prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.top = top
        self.prompt_logprobs = prompt_logprobs
        self.error = error
        # (node, token) -> log-probability, for the positions of `sequence.asked` in this run
        self.told: dict[tuple[int, int], float] | None = None


class Runner(Protocol):
    """A loaded model with its KV pool on one device. Every method is called on the engine thread only."""

    block_size: int  # tokens in a KV block
    num_blocks: int  # blocks in the pool
    vocab_size: int
    max_seq_len: int  # usable window
    eos_token_ids: frozenset[int]
    # Whether a row's numbers are the same to the bit whatever is computed beside it and however its prompt is cut. If not,
    # they are so for sequences with `tiles`, in the pieces that these tell.
    rows_are_exact: bool

    def run(self, batch: list[Scheduled]) -> list[Sampled]:
        """Compute one step. A fault that concerns one sequence is its `Sampled.error`; any other is raised."""

    def swap_out(self, blocks: list[int]) -> Any:
        """Copy blocks to host memory; returns a ticket, or None if the swap space is full."""

    def swap_in(self, ticket: Any, blocks: list[int]) -> None:
        """Copy a ticket's KV into `blocks` (same number, same order) and free the ticket."""

    def drop_swapped(self, ticket: Any) -> None:
        """Free a ticket without copying."""

    def warm_up(self, max_num_seqs: int, chunk_tokens: int) -> None:
        """One full prefill chunk and one full decode batch over scratch blocks, so that peaks happen now."""

    def memory(self) -> dict[str, int]:
        """Bytes by part: params, kv, and what the device reports."""

    def close(self) -> None:
        """Free the weights and the pool."""


class Blocks(Protocol):
    """How full a pool is, in blocks."""

    num_blocks: int

    @property
    def available(self) -> int: ...

    @property
    def used(self) -> int: ...


class PackageRunner(Protocol):
    """A `Runner` without swapping, whose package schedules its own steps (`driven.DrivenScheduler` feeds it).

    `run` gets everything the package holds, as candidates; it cuts the list down to what the step has run, with `start` and
    `count` set, also where it raises: only those are concerned.
    """

    schedules: bool  # True
    blocks: Blocks

    def add(self, sequence: Sequence) -> None:
        """Hand a sequence over, all its tokens to be read. The caller knows that there is room for it."""

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence back at any point and free its blocks; nothing happens if the package does not hold it."""

    def blocks_to_grow(self) -> int:
        """Blocks that the running sequences need for their next tokens."""

    def reset(self) -> None:
        """Drop everything, the prefix cache included."""


class Tokenizer(Protocol):
    """A model's tokenizer; safe to call from the preparation worker and the engine thread."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` adds what the model's own config adds for plain text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for (possibly part of a character); b"" for special tokens."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids: joined `token_bytes`, decoded with U+FFFD for what is not UTF-8."""

    def render_chat(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, /, **args: Any) -> str:
        """Apply the chat template; `args` may have any name. Raises InvalidRequest with the template's words if it refuses."""

    def encode_chat(
        self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, /, **args: Any
    ) -> list[int]:
        """`render_chat` then `encode` without adding special tokens (the template holds them)."""
