"""Messages with tools, made fit for templates that know tools and for those that do not."""

from __future__ import annotations

import pytest

from laya.config import InferenceConfig
from laya.errors import StartError
from laya.inprocess.cards import with_settings
from laya.inprocess.choice import Choice
from laya.inprocess.plans import EnginePlan
from laya.model.chat_template import ChatTemplate
from laya.model.tool_prompt import ToolForm
from laya.schema.generation import ModelCard

KNOWS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.arguments.city }}]{% endfor %};{% endfor %}{{ tools | length }}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
TALK = [
    {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Rain", "tool_call_id": "call_0123456789"}, {"role": "tool", "content": "Wind", "tool_call_id": "x"},
]  # fmt: skip


def render(template: str, messages: list[dict], tools: list[dict] | None) -> str:
    fitted, shown = ToolForm(template).fit(messages, tools)
    return ChatTemplate(template, {}).render(fitted, shown, True)


def test_a_template_that_knows_tools_gets_arguments_as_an_object():
    assert render(KNOWS, TALK, TOOLS) == "user:Weather?;assistant:[Köln];tool:Rain;tool:Wind;1"
    assert TALK[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'  # the request itself is not changed


def test_a_template_that_does_not_gets_everything_as_text():
    text = render(PLAIN, TALK, TOOLS)
    assert text.startswith("<system>") and '"name": "weather"' in text and text.count("<user>") == 2
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    assert text.endswith("<user><tool_response>\nRain\n</tool_response>\n<tool_response>\nWind\n</tool_response>")
    spoken = render(PLAIN, [{"role": "system", "content": "Be kind."}, *TALK[:1]], TOOLS)
    assert spoken.count("<system>") == 1 and spoken.startswith("<system>Be kind.\n\n")


def test_nothing_is_touched_without_tools():
    messages = TALK[:1]
    assert ToolForm(PLAIN).fit(messages, None) == (messages, None) and ToolForm(PLAIN).fit(messages, [])[0] is messages
    assert render(PLAIN, messages, None) == "<user>Weather?"


def test_arguments_that_are_no_object_pass_as_they_are():
    """(case 20)"""
    for arguments in ("not json", "[1]", None, {"a": 1}, "[" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        fitted, _ = ToolForm("tools").fit([{"role": "assistant", "tool_calls": [call]}], TOOLS)
        kept = fitted[0]["tool_calls"][0]["function"]["arguments"]
        assert kept == ({} if arguments is None else arguments)


def test_ids_of_nine_letters_where_the_template_insists():
    form = ToolForm("{% if tools and call.id|length != 9 %}{% endif %}")
    fitted, _ = form.fit(TALK, TOOLS)
    call_id, result_id = fitted[1]["tool_calls"][0]["id"], fitted[2]["tool_call_id"]
    assert call_id == result_id and len(call_id) == 9 and call_id.isalnum()
    kept, _ = form.fit([{"role": "tool", "content": "x", "tool_call_id": "abcdefgh9"}], TOOLS)
    assert kept[0]["tool_call_id"] == "abcdefgh9"


def planned(settings: InferenceConfig) -> EnginePlan:
    choice = Choice(engine="torch", why="asked for")
    return EnginePlan(name="m", settings=settings, path="", description={}, choice=choice, plan=None, max_num_seqs=1)


def test_settings_override_what_the_template_shows(tmp_path):
    card = ModelCard(id="m", max_model_len=1, chat=True, details={"chat_style": {"calls": "hermes", "reasoning": "tags"}})
    settings = InferenceConfig(tool_calls="mistral", decision_temperature=2.0, decision_options=8,
                               decision_calibration=str(tmp_path / "found.json"))  # fmt: skip
    (tmp_path / "found.json").write_text('{"choice": 1.5}')
    details = with_settings(lambda: (None, None, card), planned(settings))()[2].details
    assert details["chat_style"] == {"calls": "mistral", "reasoning": "tags"}
    assert details["decision_temperatures"] == {"noul": 2.0, "choice": 1.5, "score": 2.0} and details["decision_options"] == 8
    for wrong in ('{"choice": 0}', '{"colour": 1}', "[]", "{"):
        (tmp_path / "found.json").write_text(wrong)
        with pytest.raises(StartError, match="decision_calibration"):
            with_settings(lambda: (None, None, card), planned(settings))()
    assert with_settings(lambda: (None, None, card), planned(InferenceConfig()))()[2].details["chat_style"]["calls"] == "hermes"
