"""Which tools a chat request shows to the model, and which it must call."""

from __future__ import annotations

import pytest

from laya.errors import InvalidRequest
from laya.gateway.api.toolplan import plan_tools
from laya.schema.chat_style import ChatStyle

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "look", "write")]


def among(mode: object, *names: object) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "must"), [("auto", False), ("required", True)])
def test_a_choice_among_allowed_tools_takes_the_others_away(mode, must):
    plan = plan_tools(TOOLS, among(mode, "look", "write", "unknown"), None, ChatStyle("hermes", "none"))
    assert plan.names == {"look", "write"} and [tool["function"]["name"] for tool in plan.shown] == ["look", "write"]
    assert (plan.grammar is not None) is must
    assert not must or ('look' in plan.grammar[1] and 'add' not in plan.grammar[1])


def test_where_none_is_left_none_is_shown():
    assert not plan_tools(TOOLS, among("auto", "unknown", 5), None, ChatStyle("hermes", "none")).shown
    with pytest.raises(InvalidRequest):
        plan_tools(TOOLS, among("required", "unknown"), None, ChatStyle("hermes", "none"))


@pytest.mark.parametrize("choice", [among("always", "add"), {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}])
def test_a_choice_that_says_nothing_is_refused_by_name(choice):
    with pytest.raises(InvalidRequest) as caught:
        plan_tools(TOOLS, choice, None, ChatStyle("hermes", "none"))
    assert caught.value.param == "tool_choice.allowed_tools"
