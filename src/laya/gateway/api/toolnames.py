"""Names of tools on their way to a chat model and back: namespaces are flattened, what a chat API cannot take is replaced.

In: tools as Responses and Messages clients name them. Out: names that every chat API takes (1 to 64 of A-Z a-z 0-9 _ -), and
for a name that a model wrote, the tool it means. The flat name of a tool depends on nothing but the tool, so that prompts of
one conversation stay the same from step to step. Pure; any thread.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

MAX_NAME = 64  # OpenAI's bound on a function's name
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_JOIN = "__"


class Tool(msgspec.Struct, frozen=True):
    """`custom` marks a tool whose input is free text: the model sees a function of one string, `input`."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(name: str, namespace: str | None = None) -> str:
    """The name a chat model sees; shortened names end in a digest of the whole."""
    whole = name if not namespace else f"{namespace}{_JOIN}{name}"
    tidy = _ODD.sub("_", whole)
    if len(tidy) > MAX_NAME:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        tidy = f"{tidy[: MAX_NAME - 9]}_{digest}"
    return tidy


class ToolNames:
    """The tools of one request by flat name."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}

    def add(self, tool: Tool) -> str | None:
        """The flat name, or None when a tool of that name is there already."""
        flat = flat_name(tool.name, tool.namespace)
        if flat in self._tools:
            return None
        self._tools[flat] = tool
        return flat

    def keep(self, flat_names: set[str]) -> None:
        """Leave only these, for a choice among allowed tools."""
        self._tools = {flat: tool for flat, tool in self._tools.items() if flat in flat_names}

    def meant_by(self, written: str) -> Tool:
        """The tool that a model means: by flat name, else by a bare or dotted name that only one tool can have."""
        tool = self._tools.get(written)
        if tool is not None:
            return tool
        close = [t for t in self._tools.values() if written in (t.name, f"{t.namespace}.{t.name}", f"{t.namespace}/{t.name}")]
        return close[0] if len(close) == 1 else Tool(written)

    def __len__(self) -> int:
        return len(self._tools)
