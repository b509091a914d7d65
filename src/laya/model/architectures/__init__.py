"""The architectures this engine knows: from the names in a model's own header to a `ModelSpec`. No torch here.

In: a GGUF key-value mapping or a Hugging Face config. Out: `ModelSpec`; an unknown name is refused with the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from laya.model.architectures import gemma3, llama, qwen
from laya.model.spec import BrokenModel, ModelSpec, UnsupportedModel

LARGEST = (1 << 31) - 1  # the compiled step counts in 32 bits
_UNREADABLE = (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError)

FROM_GGUF: dict[str, Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], ModelSpec]] = {
    "llama": llama.from_gguf,  # SmolLM, SmolLM2, Mistral and TinyLlama carry this name too
    "qwen2": qwen.qwen2_from_gguf,
    "qwen3": qwen.qwen3_from_gguf,
    "gemma3": gemma3.from_gguf,
}

FROM_HF: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama.from_hf,
    "MistralForCausalLM": llama.from_hf,
    "Qwen2ForCausalLM": qwen.qwen2_from_hf,
    "Qwen3ForCausalLM": qwen.qwen3_from_hf,
    "Gemma3ForCausalLM": gemma3.from_hf,
}


def spec_from_gguf(path: str, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """Read a GGUF header. `shapes` maps tensor names to (rows, columns). Raises UnsupportedModel."""
    name = fields.get("general.architecture")
    if name not in FROM_GGUF:
        raise UnsupportedModel(f"{path}: architecture {name!r} is not supported; known: {', '.join(sorted(FROM_GGUF))}")
    return _read(path, FROM_GGUF[name], fields, shapes)


def spec_from_hf(path: str, config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face config.json. Raises UnsupportedModel."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FROM_HF:
        raise UnsupportedModel(f"{path}: architecture {name!r} is not supported; known: {', '.join(sorted(FROM_HF))}")
    return _read(path, FROM_HF[name], config)


def _read(path: str, reader: Callable[..., ModelSpec], *header: Mapping[str, Any]) -> ModelSpec:
    try:
        spec = reader(*header)
        fault = fault_of(spec)
    except _UNREADABLE as error:  # a field is missing, or a list where one number is
        raise BrokenModel(f"{path}: the model's header cannot be read: {error!r}") from error
    if fault is not None:
        raise BrokenModel(f"{path}: the model's header says {fault}")
    return spec


def fault_of(spec: ModelSpec) -> str | None:
    """What no model can be; None for a sound one. Tables and loops are sized by these numbers before any tensor is seen."""
    for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context_length"):
        if not 1 <= getattr(spec, name) <= LARGEST:
            return f"{name} {getattr(spec, name)}"
    if spec.heads % spec.kv_heads:
        return f"{spec.heads} heads over {spec.kv_heads} of keys"
    if spec.head_dim % 2:
        return f"heads of {spec.head_dim} numbers, which do not pair"
    if spec.sliding_window is not None and spec.sliding_window < 1:
        return f"a window of {spec.sliding_window} tokens"
    if spec.window_layers and len(spec.window_layers) != spec.layers:
        return f"{len(spec.window_layers)} kinds of layers for {spec.layers}"
    if not 0 <= spec.rms_eps < 1:
        return f"a norm's epsilon of {spec.rms_eps}"
    for rope in (spec.rope, *([] if spec.local_rope is None else [spec.local_rope])):
        divisors = (rope.linear_factor, *(rope.factors or ()))
        if not all(0 < number < math.inf for number in (rope.base, *divisors)):
            return "rotary settings that are no positive numbers"
        if rope.factors is not None and len(rope.factors) != spec.head_dim // 2:
            return f"{len(rope.factors)} rotary factors for heads of {spec.head_dim}"
    if spec.query_scale is not None and not 0 < spec.query_scale < math.inf:
        return f"queries scaled by {spec.query_scale}"
    return None
