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

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from laya.errors import InvalidRequest
from laya.model.chat_template import ChatTemplate
from laya.model.pretokenizers import WHOLE_WORDS_FIRST, pre_tokenizer
from laya.model.spec import BrokenModel, UnsupportedModel
from laya.model.token_bytes import byte_level_bytes, sentencepiece_bytes
from laya.model.tokenizer_source import TOOL_TEMPLATE, TokenizerSource, read_source
from laya.model.tool_prompt import ToolForm
from laya.schema.chat_style import SPELLED_MARKS, style_of

CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF vocabulary


class ModelTokenizer:
    """Implements `laya.engine.step.Tokenizer`."""

    def __init__(
        self, tokenizer: Tokenizer, source: TokenizerSource, *, special_ids: frozenset[int], plain_ids: frozenset[int],
        byte_level: bool,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._special = special_ids
        self._plain = plain_ids  # added words that stand for their own text
        self._to_bytes = byte_level_bytes if byte_level else sentencepiece_bytes
        self._templates = {name: ChatTemplate(text, source.special_words) for name, text in source.templates.items()}
        self._tool_forms = {name: ToolForm(text) for name, text in source.templates.items()}
        self.chat_style = style_of(source.templates.get(TOOL_TEMPLATE) or source.chat_template or "")
        self._add_bos = source.add_bos
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        self.has_chat_template = "default" in self._templates
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode (a lone surrogate)."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special).ids
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
        return b"".join([self.token_bytes(i) for i in ids]).decode("utf-8", "replace")

    def render_chat(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, **args: Any) -> str:
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("this model has no chat template: it serves completions only", param="messages")
        messages, tools = self._tool_forms[name].fit(messages, tools)
        return self._templates[name].render(messages, tools, add_generation_prompt, **args)

    def encode_chat(
        self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, **args: Any
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
    return _from_gguf(source) if source.fields is not None else _from_json(source)


def _from_gguf(source: TokenizerSource) -> ModelTokenizer:
    fields = source.fields
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(f"tokenizer {kind!r} is not supported in GGUF; known: gpt2 (byte-pair)")
    words, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type") or []
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    name = fields.get("tokenizer.ggml.pre")
    try:
        model = BPE({word: i for i, word in enumerate(words)}, merges, ignore_merges=name in WHOLE_WORDS_FIRST)
    except (AttributeError, TypeError, ImportError):
        raise  # the package is at fault, not the file
    except Exception as error:  # what it raises for a bad file is a bare Exception
        raise BrokenModel(f"the tokenizer's vocabulary and merges do not agree: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    special = [i for i, t in enumerate(types) if t == CONTROL]
    plain = [i for i, t in enumerate(types) if t == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(words[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([AddedToken(words[i], special=False, normalized=False) for i in plain])
    return ModelTokenizer(
        tokenizer, source, special_ids=frozenset(special), plain_ids=frozenset(plain), byte_level=True
    )  # fmt: skip


def _from_json(source: TokenizerSource) -> ModelTokenizer:
    path = os.path.join(source.directory, "tokenizer.json")
    if not os.path.exists(path):
        raise BrokenModel(f"{source.directory}: no tokenizer.json")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        tokenizer = Tokenizer.from_str(text)
    except (AttributeError, TypeError, ImportError):
        raise  # the package is at fault, not the file
    except Exception as error:  # what it raises for a bad file is a bare Exception
        raise BrokenModel(f"{path}: cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = json.loads(text).get("added_tokens", [])
    special = frozenset(entry["id"] for entry in added if entry["special"])
    plain = frozenset(entry["id"] for entry in added if not entry["special"])
    return ModelTokenizer(
        tokenizer, source, special_ids=special, plain_ids=plain, byte_level=_is_byte_level(json.loads(text).get("decoder"))
    )  # fmt: skip


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders", []))
