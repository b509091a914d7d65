"""What a model is, in plain numbers: the one form that every file format and architecture is turned into. No torch here.

In: `formats/` reads a header, `architectures/` names the fields. Out: a frozen `ModelSpec`, read by `layers.py`,
`describe.py` and `load.py`.
"""

from __future__ import annotations

import msgspec

from laya.engine.sizes import ModelSizes
from laya.errors import StartError


class UnsupportedModel(StartError):
    """The file is whole, but its architecture, quantisation or tokenizer is not known here. Names it and what is known."""


class BrokenModel(StartError):
    """The file is missing, cut short or contradicts itself."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: angle of pair i at position p is p * base**(-2i/head_dim) / factor_i."""

    base: float = 10000.0
    linear_factor: float = 1.0  # positions are divided by it
    factors: tuple[float, ...] | None = None  # one divisor per pair (llama 3.1), or None


class ModelSpec(ModelSizes, frozen=True, kw_only=True):
    """Shapes and switches of a decoder-only transformer."""

    architecture: str
    rms_eps: float
    rope: RopeSpec
    activation: str = "silu"  # silu | gelu_tanh, of the gate
    qkv_bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3, gemma3: RMS norm of each query and key head
    post_norms: bool = False  # gemma3: a norm after attention and after the MLP, before the residual is added
    embed_scale: float = 1.0  # gemma3: sqrt(hidden)
    query_scale: float | None = None  # None: head_dim ** -0.5
    sliding_window: int | None = None  # positions a windowed layer sees, itself included
    window_layers: tuple[bool, ...] = ()  # which layers are windowed; empty: all where sliding_window is set
    local_rope: RopeSpec | None = None  # gemma3: rotary settings of windowed layers
    interleaved_rope: bool = False  # the file's q/k rows are paired (0,1),(2,3).. ; else halves (0,d/2),(1,d/2+1)..

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None if it sees everything."""
        if self.sliding_window is None or (self.window_layers and not self.window_layers[layer]):
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> RopeSpec:
        if self.local_rope is not None and self.window_of(layer) is not None:
            return self.local_rope
        return self.rope
