"""The architectures this engine knows: from the names in a model's own header to a `ModelSpec`. No torch here.

In: a GGUF key-value mapping or a Hugging Face config. Out: `ModelSpec`; an unknown name is refused with the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from laya.model.architectures import gemma3, llama, qwen
from laya.model.spec import BrokenModel, ModelSpec, UnsupportedModel

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
    names = config.get("architectures") or [None]
    if names[0] not in FROM_HF:
        raise UnsupportedModel(f"{path}: architecture {names[0]!r} is not supported; known: {', '.join(sorted(FROM_HF))}")
    return _read(path, FROM_HF[names[0]], config)


def _read(path: str, reader: Callable[..., ModelSpec], *header: Mapping[str, Any]) -> ModelSpec:
    try:
        return reader(*header)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:  # a field is missing, or a list where one number is
        raise BrokenModel(f"{path}: the model's header cannot be read: {error!r}") from error
