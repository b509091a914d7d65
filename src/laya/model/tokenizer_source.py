"""What a model's files say of its tokenizer: vocabulary, special ids, chat templates. No torch, no tokenizers here.

In: `Checkpoint.tokenizer`. Out: `TokenizerSource`, read by `tokenizer.py` and `describe.py`.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from laya.model.spec import BrokenModel

TOOL_TEMPLATE = "tool_use"  # the name under which models keep a second template for requests with tools
# End-of-turn markers besides eos: an answer ends at either.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")  # llama.cpp adds bos for these unless told otherwise


class TokenizerSource(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` (GGUF) or `directory` (tokenizer.json) holds the vocabulary; the rest is read from either."""

    fields: Mapping[str, Any] | None = None
    directory: str | None = None
    templates: dict[str, str] = {}  # "default" and perhaps TOOL_TEMPLATE
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    add_bos: bool = False  # for plain text; tokenizer.json says it itself
    special_words: dict[str, str] = {}  # bos_token, eos_token, .. as templates name them

    @property
    def chat_template(self) -> str | None:
        return self.templates.get("default")

    @property
    def template_for_tools(self) -> str:
        """The template that requests with tools are put into; empty where there is none."""
        return self.templates.get(TOOL_TEMPLATE) or self.chat_template or ""


def read_source(tokenizer: Mapping[str, Any]) -> TokenizerSource:
    if "gguf" in tokenizer:
        return _from_gguf(tokenizer["gguf"])
    return _from_directory(tokenizer["directory"])


def _from_gguf(fields: Mapping[str, Any]) -> TokenizerSource:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BrokenModel("the GGUF file holds no tokenizer")
    templates = {}
    if isinstance(fields.get("tokenizer.chat_template"), str):
        templates["default"] = fields["tokenizer.chat_template"]
    if isinstance(fields.get(f"tokenizer.chat_template.{TOOL_TEMPLATE}"), str):
        templates[TOOL_TEMPLATE] = fields[f"tokenizer.chat_template.{TOOL_TEMPLATE}"]
    ids = {
        name: int(fields[key]) for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"), ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"), ("pad_token", "tokenizer.ggml.padding_token_id"),
        ) if key in fields and 0 <= int(fields[key]) < len(tokens)
    }  # fmt: skip
    default_bos = fields.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT or fields.get("tokenizer.ggml.model") == "llama"
    return TokenizerSource(
        fields=fields,
        templates=templates,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=frozenset(int(fields[key]) for key in _END_KEYS if key in fields),
        add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", default_bos)) and "bos_token" in ids,
        special_words={name: tokens[number] for name, number in ids.items()},
    )


def _from_directory(directory: str) -> TokenizerSource:
    try:
        return _described_in(directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # another kind of value than the files have there
        raise BrokenModel(f"{directory}: the tokenizer's settings cannot be read: {error!r}") from error


def _described_in(directory: str) -> TokenizerSource:
    config = _json(directory, "tokenizer_config.json")
    words = {
        name: word if isinstance(word, str) else word["content"]
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (word := config.get(name))
    }
    model, generation = _json(directory, "config.json"), _json(directory, "generation_config.json")
    ends: set[int] = set()
    for value in (generation.get("eos_token_id"), model.get("eos_token_id")):
        ends.update(map(operator.index, value if isinstance(value, list) else [] if value is None else [value]))
    bos = generation.get("bos_token_id", model.get("bos_token_id"))
    if isinstance(bos, list):
        bos = bos[0] if bos else None
    return TokenizerSource(
        directory=directory, templates=_templates(directory, config), eos_token_ids=frozenset(ends), special_words=words,
        bos_token_id=None if bos is None else operator.index(bos),
    )  # fmt: skip


def _templates(directory: str, config: Mapping[str, Any]) -> dict[str, str]:
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            return {"default": file.read()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _json(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise BrokenModel(f"{path}: cannot be read as JSON") from error
