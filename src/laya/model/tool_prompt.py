"""Messages with tools made fit for a chat template, whatever it knows of tools.

In: messages in OpenAI's form. Out: messages as templates take them. A template that knows tools gets a call's arguments as an
object, as Hugging Face's templates expect; one that does not gets tools, calls and results as text, in the form that
`schema.chat_style` then assumes of its model. Pure; any thread.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

_KNOWS_TOOLS = re.compile(r"\btools\b")
_SHORT_ID = re.compile(r"length\s*!=\s*9")  # Mistral's templates refuse ids of another length
_TOOLS_TEXT = (
    "You can call tools. Each of these lines describes one:\n<tools>\n{tools}\n</tools>\n"
    "To call a tool, write its name and arguments as JSON between tags, and nothing else:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


class ToolForm:
    """What one template needs."""

    def __init__(self, template: str) -> None:
        self._knows_tools = _KNOWS_TOOLS.search(template) is not None
        self._short_ids = _SHORT_ID.search(template) is not None

    def fit(self, messages: list[dict], tools: list[dict] | None) -> tuple[list[dict], list[dict] | None]:
        """(messages, tools) for the template; the same objects where nothing is to be done."""
        if not tools and not any("tool_calls" in m or m.get("role") == "tool" for m in messages):
            return messages, tools
        if self._knows_tools:
            return [self._with_objects(message) for message in messages], tools
        return _as_text(messages, tools), None

    def _with_objects(self, message: dict) -> dict:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if self._short_ids and isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _nine(message["tool_call_id"])
        return message

    def _call(self, call: dict) -> dict:
        function = call.get("function")
        if isinstance(function, dict):
            call = {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}
        if self._short_ids and isinstance(call.get("id"), str):
            call = {**call, "id": _nine(call["id"])}
        return call


def _as_text(messages: list[dict], tools: list[dict] | None) -> list[dict]:
    """Tools in the system message, calls in the assistant's text, results as the user's words; neighbours joined."""
    result: list[dict] = []
    for message in messages:
        role, text = message.get("role"), message.get("content") or ""
        if role == "assistant":
            for call in message.get("tool_calls") or ():
                function = call.get("function") if isinstance(call.get("function"), dict) else {}
                written = {"name": function.get("name"), "arguments": _object(function.get("arguments"))}
                text += ("\n" if text else "") + f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"
        elif role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if result and role == "user" and message.get("role") == "tool" and result[-1]["role"] == "user":
            result[-1]["content"] += "\n" + text
        else:
            result.append({"role": role, "content": text})
    if tools:
        described = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if result and result[0]["role"] == "system":
            result[0]["content"] += "\n\n" + described
        else:
            result.insert(0, {"role": "system", "content": described})
    return result


def _object(arguments: Any) -> Any:
    """Arguments as an object where their text is one."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return {} if arguments is None else arguments


def _nine(identity: str) -> str:
    """Nine letters and digits that stand for an id: itself where it is of that form."""
    if len(identity) == 9 and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]
