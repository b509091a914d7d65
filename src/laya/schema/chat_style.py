"""How a model writes tool calls and thoughts, told from its chat template. Pure; any thread.

In: the template's text, when a model is loaded. Out: a `ChatStyle`, kept on the model's card for those who read its answers.
"""

from __future__ import annotations

import re

import msgspec

CALL_STYLES = ("hermes", "llama3", "mistral", "none")
# Words of templates that show a style, the most telling first.
_CALL_MARKS = (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>"), ("llama3", "ipython"))
# Tokens of these words are spelled out although models call them special: answers are read by them.
SPELLED_MARKS = frozenset({
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
})  # fmt: skip
_PROMPT_END = re.compile(r"add_generation_prompt.*\Z", re.DOTALL)
_THOUGHT = re.compile(r"<(/?)think>")


class ChatStyle(msgspec.Struct, frozen=True):
    """`calls` is one of CALL_STYLES. `reasoning`: none; tags (an answer may begin with <think>); open (it begins inside)."""

    calls: str = "none"
    reasoning: str = "none"


def style_of(template: str, calls: str | None = None) -> ChatStyle:
    """The style of a chat template; `calls` overrides what its text shows.

    A template without a word about tools gets the Hermes style: tools are described to its model in that form.
    """
    if calls is None:
        calls = next((style for style, mark in _CALL_MARKS if mark in template), "hermes")
    return ChatStyle(calls, _reasoning_of(template))


def _reasoning_of(template: str) -> str:
    """Open where the template's last words to the model start a thought and nothing closes it."""
    if "</think>" not in template and "<think>" not in template:
        return "none"
    end = _PROMPT_END.search(template)
    marks = _THOUGHT.findall(end.group()) if end else []
    return "open" if marks and "/" not in marks else "tags"
