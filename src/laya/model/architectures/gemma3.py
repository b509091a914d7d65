"""Gemma 3, text only: sliding windows on five layers of six, norms around each part, scaled embeddings.

In: header fields. Out: `ModelSpec`. GGUF files hold norm weights with their +1 added; Hugging Face files do not, and the
format's reader adds it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from laya.model.architectures.llama import shared_from_gguf, shared_from_hf
from laya.model.architectures.rope import rope_from_hf
from laya.model.spec import ModelSpec, RopeSpec, UnsupportedModel

GLOBAL_EVERY = 6  # the sixth layer of each six sees everything
LOCAL_ROPE_BASE = 10000.0  # of windowed layers, fixed by the architecture


def from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    shared = shared_from_gguf("gemma3", fields, shapes)
    pattern = int(fields.get("gemma3.attention.sliding_window_pattern", GLOBAL_EVERY))
    return ModelSpec(
        sliding_window=int(fields["gemma3.attention.sliding_window"]),
        window_layers=tuple((i + 1) % pattern != 0 for i in range(shared["layers"])),
        local_rope=RopeSpec(base=LOCAL_ROPE_BASE),
        **_traits(shared["hidden"]),
        **shared,
    )


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("final_logit_softcapping") or config.get("attn_logit_softcapping"):
        raise UnsupportedModel("logit soft-capping is not supported")
    shared = shared_from_hf(config)
    head_dim, layers = shared["head_dim"], shared["layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % GLOBAL_EVERY == 0 else "sliding_attention" for i in range(layers)
    ]
    ropes = config.get("rope_parameters") or {}
    if "full_attention" in ropes:
        shared["rope"] = rope_from_hf(config, ropes["full_attention"], head_dim=head_dim)
        local = rope_from_hf(config, ropes["sliding_attention"], head_dim=head_dim)
    else:
        local = RopeSpec(base=float(config.get("rope_local_base_freq", LOCAL_ROPE_BASE)))
    return ModelSpec(
        sliding_window=int(config["sliding_window"]),
        window_layers=tuple(kind == "sliding_attention" for kind in kinds),
        local_rope=local,
        query_scale=float(config.get("query_pre_attn_scalar", head_dim)) ** -0.5,
        **_traits(shared["hidden"]),
        **shared,
    )


def _traits(hidden: int) -> dict[str, Any]:
    return {"activation": "gelu_tanh", "qk_norm": True, "post_norms": True, "embed_scale": math.sqrt(hidden)}
