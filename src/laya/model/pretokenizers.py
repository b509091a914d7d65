"""How byte-pair models cut text before merging, by the name that GGUF files carry (`tokenizer.ggml.pre`).

In: a name. Out: a pre-tokenizer of the `tokenizers` package. An unknown name is refused, since a wrong cut gives other
tokens without any error.
"""

from __future__ import annotations

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from laya.model.spec import UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _split(*patterns: str) -> PreTokenizer:
    """Cut by each pattern in turn, each within what those before it left whole."""
    cuts = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


_KNOWN = {
    "default": lambda: _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "gpt2", "olmo", "jais", "trillion"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _single_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), lambda: _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), lambda: _split(_QWEN2)),
}

# These look a whole word up in the vocabulary before they try merges.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """Raises UnsupportedModel with the known names. A file without a name gets `default`, as in llama.cpp."""
    name = name or "default"
    if name not in _KNOWN:
        raise UnsupportedModel(f"pre-tokenizer {name!r} is not supported; known: {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name]()
