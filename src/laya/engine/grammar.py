"""Structured output: a JSON schema, regular expression or grammar becomes a mask over the vocabulary at every step.

In (preparation worker): kind and text. Out: a `Grammar`, of which each choice takes a fork; the fork belongs to the engine
thread, where the sampler asks for its mask and the loop tells it of each token. The work is `llguidance`'s, in Rust and without
the interpreter's lock. Nothing here raises on the engine thread: a matcher that fails allows no token, which ends its request
and nobody else's.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from typing import Any

from laya.engine.step import Tokenizer
from laya.errors import InvalidRequest

log = logging.getLogger("laya.engine")

MAX_TEXT = 256 * 1024  # characters of a schema; compiling takes about a millisecond a kilobyte
_KEPT = 16  # compiled grammars: clients send the same schema with each request; a large one holds a few MB
_MESSAGE_CHARACTERS = 300  # of the compiler's own words that a client sees
# One way to put white space: a small model that may add more can go on adding it for ever.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PARAMS = {"json_schema": "response_format", "json_object": "response_format", "tool_calls": "tools"}


class Grammar:
    """The state of one choice. `token_mask` has one bit a token, the lowest bit of the first byte being token 0."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> Grammar:
        """A state of its own at the same place."""
        return Grammar(self._matcher.deep_copy())

    def token_mask(self) -> bytes:
        """What may come next; b"" allows nothing."""
        try:
            mask = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return mask
            log.warning("a grammar failed, its request is ended: %s", self._matcher.get_error()[:_MESSAGE_CHARACTERS])
        except Exception:
            log.exception("a grammar's mask failed; its request is ended")
        return b""

    def accept(self, token_id: int) -> None:
        """The token was chosen. One outside the grammar puts it into its failed state."""
        try:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        except Exception:
            log.exception("a grammar refused a token; its request is ended")


class GrammarCompiler:
    """For one model. The vocabulary is read when the first grammar comes: a few hundred milliseconds for a large one."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos_token_ids)
        self._vocabulary: Any = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, kind: str, text: str) -> Grammar:
        """`kind` is that of `GenerationRequest.grammar`. Raises InvalidRequest in the compiler's words."""
        key = (kind, text)
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = self._compile(kind, text)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return known

    def _compile(self, kind: str, text: str) -> Grammar:
        param = _PARAMS.get(kind, "structured_outputs")
        if len(text) > MAX_TEXT:
            raise InvalidRequest(f"A schema or grammar may have {MAX_TEXT} characters.", param=param)
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise InvalidRequest("Structured output needs the package llguidance, which is not here.", param=param) from None
        try:
            matcher = LLMatcher(self._words(), _source(LLMatcher, kind, text), log_level=0)
            failed = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, TypeError, RecursionError) as error:
            failed = str(error) or "it cannot be read"
        if failed:
            raise InvalidRequest(f"The schema or grammar cannot be used: {failed[:_MESSAGE_CHARACTERS]}", param=param)
        return Grammar(matcher)

    def _words(self) -> Any:
        if self._vocabulary is None:
            if not self._eos:
                raise InvalidRequest("This model has no token that ends an answer, so its answers cannot be structured.")
            from llguidance import LLTokenizer, TokenizerWrapper

            self._vocabulary = LLTokenizer(TokenizerWrapper(_Words(self._tokenizer, self._eos)), eos_token=self._eos)
        return self._vocabulary


class _Words:
    """A tokenizer as `llguidance.TokenizerWrapper` takes one."""

    def __init__(self, tokenizer: Tokenizer, eos: list[int]) -> None:
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, spelled in enumerate(self.tokens) if not spelled]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False)


def _source(matcher: Any, kind: str, text: str) -> str:
    """The grammar in llguidance's own form."""
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if kind in ("lark", "tool_calls"):
        return matcher.grammar_from_lark(text)
    schema = {"type": "object"} if kind == "json_object" else json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return matcher.grammar_from_json_schema(schema, overrides=_JSON_FORM)
