"""A model's tokenizer: text to ids and back, byte for byte, and its chat template.

In: `Checkpoint.tokenizer`. Out: `laya.engine.step.Tokenizer`. Safe from any thread: encoding is the `tokenizers` package's,
which keeps no state, and the byte table is filled with values that never change.

Words that are special tokens are read as those tokens wherever they stand, in users' content too, as Hugging Face and vLLM do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from laya.errors import InvalidRequest
from laya.model.chat_template import ChatTemplate
from laya.model.gguf_tokenizer import Pipeline, from_fields
from laya.model.spec import BrokenModel
from laya.model.token_bytes import byte_level_bytes, sentencepiece_bytes
from laya.model.tokenizer_source import TOOL_TEMPLATE, TokenizerSource, read_source
from laya.model.tool_prompt import ToolForm
from laya.schema.chat_style import SPELLED_MARKS, style_of


class ModelTokenizer:
    """Implements `laya.engine.step.Tokenizer`."""

    def __init__(self, pipeline: Pipeline, source: TokenizerSource) -> None:
        self._tokenizer = pipeline.tokenizer
        self._special = pipeline.special_ids
        self._plain = pipeline.plain_ids  # added words that stand for their own text
        self._space_prefix = pipeline.space_prefix
        self._to_bytes = byte_level_bytes if pipeline.byte_level else sentencepiece_bytes
        self._templates = {name: ChatTemplate(text, source.special_words) for name, text in source.templates.items()}
        self._tool_forms = {name: ToolForm(text) for name, text in source.templates.items()}
        self.chat_style = style_of(source.template_for_tools)
        self._add_bos = source.add_bos
        self.has_chat_template = "default" in self._templates
        # Added words may leave a gap behind the vocabulary, which its size does not count.
        last_added = max(self._tokenizer.get_added_tokens_decoder(), default=-1)
        self.vocab_size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), last_added + 1)
        words = range(self.vocab_size)
        self.bos_token_id = source.bos_token_id if source.bos_token_id in words else None
        self.eos_token_ids = frozenset(token for token in source.eos_token_ids if token in words)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode (a lone surrogate)."""
        try:
            # One text as a batch: `encode` itself keeps the interpreter for the whole text, and the loop with it.
            ids = self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text holds a lone surrogate, which no character is") from error
        return [self.bos_token_id, *ids] if add_special and self._add_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""  # heads are often padded beyond the vocabulary
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._work_out(token_id)
        return known

    def decode(self, ids: list[int]) -> str:
        """The text of whole ids: without the space that `encode` put before it, where this vocabulary has that."""
        text = b"".join([self.token_bytes(i) for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._space_prefix else text

    def render_chat(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, /, **args: Any) -> str:
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("this model has no chat template: it serves completions only", param="messages")
        messages, tools = self._tool_forms[name].fit(messages, tools)
        return self._templates[name].render(messages, tools, add_generation_prompt, **args)

    def encode_chat(
        self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, /, **args: Any
    ) -> list[int]:
        return self.encode(self.render_chat(messages, tools, add_generation_prompt, **args), add_special=False)

    def _work_out(self, token_id: int) -> bytes:
        word = self._tokenizer.id_to_token(token_id)
        if word is not None and word in SPELLED_MARKS:
            return word.encode()
        if word is None or token_id in self._special:
            return b""
        return word.encode() if token_id in self._plain else self._to_bytes(word)


def build_tokenizer(described: Mapping[str, Any]) -> ModelTokenizer:
    """Raises UnsupportedModel for a kind not known here, BrokenModel for a vocabulary that contradicts itself."""
    source = read_source(described)
    return ModelTokenizer(from_fields(source.fields) if source.fields is not None else _from_json(source.directory), source)


def _from_json(directory: str) -> Pipeline:
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.exists(path):
        raise BrokenModel(f"{directory}: no tokenizer.json")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tokenizer = Tokenizer.from_str(text)
    except (AttributeError, TypeError, ImportError):
        raise  # the package is at fault, not the file
    except Exception as error:  # what it raises for a bad file is a bare Exception
        raise BrokenModel(f"{path}: cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = json.loads(text)
    added = described.get("added_tokens", [])
    return Pipeline(
        tokenizer=tokenizer,
        special_ids=frozenset(entry["id"] for entry in added if entry["special"]),
        plain_ids=frozenset(entry["id"] for entry in added if not entry["special"]),
        byte_level=_has_step(described.get("decoder"), "ByteLevel"),
        space_prefix=_has_step(described.get("decoder"), "Strip"),
    )


def _has_step(decoder: dict[str, Any] | None, kind: str) -> bool:
    if not decoder:
        return False
    return decoder.get("type") == kind or any(_has_step(part, kind) for part in decoder.get("decoders", []))
