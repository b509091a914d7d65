"""A transformer's sizes, once for everybody: the memory plan's `ModelShape` and the model room's `ModelSpec` begin with them.

In: numbers of a header. Out: a frozen base of structs. No torch.
"""

from __future__ import annotations

import msgspec


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes count elements."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    tied_embeddings: bool = False  # the head is the embedding
