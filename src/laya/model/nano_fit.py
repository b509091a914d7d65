"""What the nano-vllm package can run, from a model's header and what is installed. No torch: memory plans ask before a start.

In: a model's description (`describe.describe`). Out: what stands in the way, in words. Any thread.
"""

from __future__ import annotations

import importlib.util
from typing import Any

BLOCK_TOKENS = 256  # the package's own: flash-attn reads paged KV in multiples of it
# import name -> how a person gets it
_PACKAGES = {
    "nanovllm": "the nano-vllm package (pip install 'laya-server[nano-vllm]')",
    "flash_attn": "the package flash-attn",
    "triton": "the package triton",
}
_DTYPES = ("auto", "bfloat16")


def missing_packages() -> list[str]:
    """Nothing is imported: that takes seconds, and CUDA."""
    return [words for name, words in _PACKAGES.items() if importlib.util.find_spec(name) is None]


def unfit(description: dict[str, Any], dtype: str) -> list[str]:
    """Why this model, held as `dtype` asks, is not one for it. Where it does not know a thing it would compute without it."""
    kinds = description["quantization"].split(" + ")
    why = []
    if description["architecture"] != "qwen3":
        why.append(f"a Qwen 3 model (this one is {description['architecture']})")
    if not description["folder"] or not set(kinds) <= {"BF16", "F16", "F32"} or kinds[0] == "F32":
        why.append("a folder with safetensors in BF16 or F16")
    if description["sliding_window"] or description["rope_scaled"]:
        why.append("a model without sliding windows and rotary scaling")
    if dtype not in _DTYPES:
        why.append(f"dtype {' or '.join(_DTYPES)}")
    return why


def graph_slots(sequences: int) -> int:
    """A number of sequences that the package has a captured graph for: it makes 1, 2, 4, 8 and multiples of 16."""
    return next((slots for slots in (1, 2, 4, 8) if slots >= sequences), -(-sequences // 16) * 16)
