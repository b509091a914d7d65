"""One running continuation: its tokens, its KV blocks, its place in the engine's life.

Owned by the engine thread from admission on. The runner reads it while a step is computed and never keeps it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

from laya.engine.tiles import Tiles
from laya.schema.generation import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # admitted, no KV yet (or preempted)
    PREFILL = "prefill"  # part of its known tokens have KV
    DECODE = "decode"  # every known token but the newest has KV
    SWAPPED = "swapped"  # its KV lies in host memory
    FINISHED = "finished"


class Sequence:
    """`token_ids` holds prompt then generated ids; KV exists for the first `num_computed` of them.

    `block_table[i]` is the pool block of positions [i * block_size, (i + 1) * block_size).
    """

    __slots__ = (
        "seq_id", "request", "index", "token_ids", "num_prompt_tokens", "num_computed", "num_cached", "block_table",
        "status", "sampling", "grammar", "seed", "arrival", "extra", "chain", "num_registered", "swap_ticket", "answer",
        "asked", "tiles",
    )  # fmt: skip

    def __init__(self, seq_id: int, prompt_ids: list[int], sampling: SamplingParams, *, index: int = 0, seed: int = 0) -> None:
        self.seq_id = seq_id
        self.request: Any = None  # the group that owns it (engine side)
        self.index = index  # choice number
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.num_computed = 0
        self.num_cached = 0  # prompt tokens served by the prefix cache
        self.block_table: list[int] = []
        self.status = Status.WAITING
        self.sampling = sampling
        self.grammar: Any = None  # matcher with a token mask, or None
        self.seed = seed  # always set: the request's seed plus the index, or drawn at admission
        self.arrival = 0.0
        self.extra: Any = None
        self.chain: Hashable = ""  # prefix-cache identity of the last registered block; the first one's parent before it
        self.num_registered = 0  # blocks of the table already offered to the prefix cache
        self.swap_ticket: Any = None  # what Runner.swap_out gave while its KV lies in host memory
        # Position -> (node, next tokens whose log-probabilities are wanted there), when options are scored.
        self.asked: dict[int, tuple[int, list[int]]] | None = None
        self.tiles: Tiles | None = None  # how it must be cut; None: anyhow
        self.answer: Any = None  # turns its tokens into text and decides where it ends

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
