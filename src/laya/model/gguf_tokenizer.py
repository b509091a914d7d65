"""The vocabularies that GGUF files carry, as pipelines of the `tokenizers` package: byte-level pairs and sentencepiece.

In: the fields of a header (`TokenizerSource.fields`). Out: `Pipeline`, wrapped by `tokenizer.py`. Start-up only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.models import BPE

from laya.model.pretokenizers import WHOLE_WORDS_FIRST, pre_tokenizer
from laya.model.spec import BrokenModel, UnsupportedModel
from laya.model.token_bytes import SPACE

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of a GGUF vocabulary


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """`special_ids` stand for no text, `plain_ids` for their own words; `byte_level` says how the others spell bytes."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    plain_ids: frozenset[int]
    byte_level: bool
    space_prefix: bool = False  # a space is put before a text, and taken off again when ids are read back


def from_fields(fields: Mapping[str, Any]) -> Pipeline:
    """Raises UnsupportedModel for a kind not known here, BrokenModel for a vocabulary that contradicts itself."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedModel(f"tokenizer {kind!r} is not supported in GGUF; known: {', '.join(_KINDS)}")
    name, build = _KINDS[kind]
    try:
        return build(fields)
    except (AttributeError, TypeError, ImportError, UnsupportedModel, BrokenModel):
        raise  # refused here, or the package is at fault and not the file
    except Exception as error:  # what it raises for a bad file is a bare Exception
        raise BrokenModel(f"the tokenizer's {name} do not agree: {error}") from error


def _byte_level(fields: Mapping[str, Any]) -> Pipeline:
    words, types = _words(fields)
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    name = fields.get("tokenizer.ggml.pre")
    model = BPE({word: i for i, word in enumerate(words)}, merges, ignore_merges=name in WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    special, plain = _added(tokenizer, words, types)
    return Pipeline(tokenizer=tokenizer, special_ids=special, plain_ids=plain, byte_level=True)


def _sentencepiece(fields: Mapping[str, Any]) -> Pipeline:
    """Pairs are joined best score first; bytes stand for characters that the vocabulary lacks; words are not cut before."""
    words, types = _words(fields)
    scores = fields.get("tokenizer.ggml.scores") or []
    if len(scores) != len(words):
        raise BrokenModel(f"the tokenizer has {len(words)} tokens and {len(scores)} scores")
    unknown = int(fields.get("tokenizer.ggml.unknown_token_id", 0))
    model = BPE(
        {word: i for i, word in enumerate(words)}, _merges(words, types, scores), byte_fallback=True, fuse_unk=True,
        unk_token=words[unknown] if unknown < len(words) else None,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))  # as llama.cpp takes it where the file is silent
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    special, plain = _added(tokenizer, words, types)
    return Pipeline(tokenizer=tokenizer, special_ids=special, plain_ids=plain, byte_level=False, space_prefix=prefix)


def _words(fields: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    words = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(words)
    if len(types) != len(words):
        raise BrokenModel(f"the tokenizer has {len(words)} tokens and {len(types)} token types")
    return words, types


def _merges(words: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a word of two others, the best words first: sentencepiece files hold scores, not merges.

    Only ordinary words take part: sentencepiece keeps user-defined ones whole and never makes control words from text.
    """
    known = {word for word, kind in zip(words, types, strict=True) if kind == NORMAL}
    ranked = zip(words, types, scores, strict=True)
    joined = [(-score, word) for word, kind, score in ranked if kind == NORMAL and len(word) > 1]
    joined.sort(key=lambda pair: pair[0])
    return [
        (word[:cut], word[cut:])
        for _, word in joined
        for cut in range(1, len(word))
        if word[:cut] in known and word[cut:] in known
    ]


def _added(tokenizer: Tokenizer, words: Sequence[str], types: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Words that are taken whole before anything else: (special ids, plain ids)."""
    special = [i for i, kind in enumerate(types) if kind == CONTROL]
    plain = [i for i, kind in enumerate(types) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(words[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([AddedToken(words[i], special=False, normalized=False) for i in plain])
    return frozenset(special), frozenset(plain)


_Builder = Callable[[Mapping[str, Any]], Pipeline]

_KINDS: dict[str, tuple[str, _Builder]] = {
    "gpt2": ("vocabulary and merges", _byte_level),
    "llama": ("vocabulary and scores", _sentencepiece),
}
