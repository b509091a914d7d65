"""Chat templates: a model's own Jinja text, rendered in a sandbox as Hugging Face renders it.

In: messages as plain dicts. Out: the prompt's text, or InvalidRequest in the template's words. Any thread.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laya.errors import InvalidRequest
from laya.model.spec import UnsupportedModel


class ChatTemplate:
    """A compiled template. Values are not escaped: the output is a prompt, not a page."""

    def __init__(self, text: str, special_words: dict[str, str]) -> None:
        self.special_words = special_words
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise UnsupportedModel(f"the model's chat template cannot be compiled: {error}") from error

    def render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, /, **args: Any) -> str:
        given = {**self.special_words, **args}
        given |= {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused the messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest("the messages do not fit the model's chat template", param="messages") from error


class _GenerationTag(Extension):
    """``{% generation %}..{% endgeneration %}`` marks the assistant's text for training; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
