"""`tools` and `tool_choice` of a chat request: which tools the model is shown, and whether it must call one.

In: members of a request. Out: a `ToolPlan`. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.errors import InvalidRequest
from laya.gateway.api.structured import Grammar, forced_calls
from laya.schema.chat_style import ChatStyle

MAX_TOOLS = 512  # OpenAI allows 128, agents with many servers send more; each costs prompt tokens


class ToolPlan(msgspec.Struct, frozen=True):
    """`shown` goes to the chat template; `grammar` is set where a call must be made."""

    shown: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    grammar: Grammar | None = None


def plan_tools(tools: list[dict] | None, choice: str | dict | None, parallel: bool | None, style: ChatStyle) -> ToolPlan:
    """Raises InvalidRequest naming the member at fault. A tool of a kind that is no function is not shown."""
    functions = _functions(tools or [])
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        functions, choice = _allowed(functions, choice)
    if choice in (None, "auto", "none") or not isinstance(choice, str | dict):
        must, wanted = False, None
    else:
        must, wanted = True, _wanted(choice)
    names = frozenset(function["name"] for function in functions)
    if must and not functions:
        raise InvalidRequest("`tool_choice` asks for a call, but there are no `tools`.", param="tool_choice")
    if wanted is not None and wanted not in names:
        raise InvalidRequest(f"`tool_choice` names {wanted[:100]!r}, which is not among the tools.", param="tool_choice")
    if choice == "none" or not functions:
        return ToolPlan()
    grammar = None
    if must:
        allowed = [function for function in functions if wanted in (None, function["name"])]
        grammar = forced_calls(allowed, style.calls, several=bool(parallel) and wanted is None)
    shown = tuple(t for t in tools or () if t.get("type", "function") == "function" and t["function"]["name"] in names)
    return ToolPlan(shown, names, grammar)


def _functions(tools: list[dict]) -> list[dict]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"At most {MAX_TOOLS} tools are allowed.", param="tools")
    functions = []
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            continue
        function, where = tool.get("function"), f"tools[{i}].function"
        if not isinstance(function, dict):
            raise InvalidRequest("A tool needs a `function` with a name.", param=where)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest("A function's name must be text.", param=f"{where}.name")
        if not isinstance(function.get("parameters"), dict | None):
            raise InvalidRequest("A function's parameters must be a JSON schema.", param=f"{where}.parameters")
        functions.append(function)
    return functions


def _allowed(functions: list[dict], choice: dict) -> tuple[list[dict], str]:
    """The functions that a choice among allowed tools leaves, and its mode."""
    given = choice.get("allowed_tools")
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise InvalidRequest("`allowed_tools` needs a mode, auto or required, and tools.", param="tool_choice.allowed_tools")
    named = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in named if isinstance(function, dict)]
    return [function for function in functions if function["name"] in names], mode


def _wanted(choice: str | dict) -> str | None:
    """The one function that must be called, or None for any."""
    if choice == "required":
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str):
            return name
    raise InvalidRequest("`tool_choice` must be none, auto, required or name a function.", param="tool_choice")
