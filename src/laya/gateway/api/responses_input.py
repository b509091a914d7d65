"""A Responses request as a chat request: items to messages, tools of every kind to functions.

In: the decoded request and the items of the conversation it goes on from. Out: a `ChatForm`. Kinds of items and tools that
are not known here are skipped: clients send new ones every month, and refuse to go on after a 400. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest
from laya.gateway.api.chat_form import CUSTOM_PARAMETERS, ChatForm, function_of, named_choice
from laya.gateway.api.toolnames import Tool, ToolNames, flat_name
from laya.gateway.api.turns import GAP, Part, Turns
from laya.schema.codec import encode_members
from laya.schema.responses import PASSED_ON, ResponsesRequest

Item = dict[str, Any]
MAX_ITEMS = 20_000  # far beyond any window; bounds the work on one request

# Members that would need what is not here, and what to do instead.
_UNSUPPORTED = {
    "background": "stream the answer, or wait for it",
    "conversation": "use `previous_response_id`",
    "prompt": "send its text as `instructions` and `input`",
}
# Chat's members and what they are made from.
_MEMBERS = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}


def items_of(request: ResponsesRequest) -> list[Item]:
    """The request's own input as items."""
    given = request.input
    if given is None:
        if request.previous_response_id is None:
            raise InvalidRequest("`input` is required.", param="input")
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(f"`input` has more than {MAX_ITEMS} items.", param="input")
    return given


def chat_form_of(request: ResponsesRequest, own: list[Item], earlier: list[Item]) -> ChatForm:
    """`own` are the request's items, `earlier` those before them. Raises InvalidRequest naming the member at fault."""
    for member, instead in _UNSUPPORTED.items():
        if getattr(request, member):
            told = f"Unsupported parameter: `{member}` is not supported here; {instead}."
            raise InvalidRequest(told, param=member, code="unsupported_parameter")
    turns = Turns()
    turns.system(request.instructions or "")
    tools = list(request.tools or ())
    for item in earlier:
        _add(turns, item, "input", tools)
    for i, item in enumerate(own):
        _add(turns, item, f"input[{i}]", tools)
    messages = turns.messages()
    if not messages:
        raise InvalidRequest("`input` holds nothing that a model could answer.", param="input")
    body: dict[str, Any] = {"messages": messages}
    names = ToolNames()
    _add_tools(body, names, tools, request)
    for member in PASSED_ON:
        value = getattr(request, member)
        if value is not None:
            body[member] = value
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        _add_format(body, request.text.format)
    thinks = request.reasoning is None or request.reasoning.effort not in ("none", "minimal")
    return ChatForm(body=body, names=names, members=_MEMBERS, thinks=thinks)


def _add_format(body: dict[str, Any], form: dict[str, Any]) -> None:
    kind = form.get("type")
    if kind == "json_schema":
        schema = {key: form[key] for key in ("name", "description", "schema", "strict") if form.get(key) is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", **schema}}
    elif kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif kind != "text":
        raise InvalidRequest("The format must be text, json_object or json_schema.", param="text.format.type")


# -- items -----------------------------------------------------------------------------------------------------------------


def _add(turns: Turns, item: Item, where: str, tools: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(turns, item, where)
    elif kind == "reasoning":
        turns.reasoning(GAP.join(_texts(item.get("content")) or _texts(item.get("summary"))))
    elif kind == "function_call":
        name = flat_name(_text(item, "name", where), item.get("namespace"))
        turns.call(_text(item, "call_id", where), name, _arguments(item.get("arguments")))
    elif kind == "custom_tool_call":
        given = encode_members({"input": _text(item, "input", where)}).decode()
        turns.call(_text(item, "call_id", where), flat_name(_text(item, "name", where), item.get("namespace")), given)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turns.result(_text(item, "call_id", where), _parts(item.get("output"), f"{where}.output"))
    elif kind == "additional_tools":
        given = item.get("tools")
        tools.extend(tool for tool in (given if isinstance(given, list) else ()) if isinstance(tool, dict))


def _add_message(turns: Turns, item: Item, where: str) -> None:
    role = item.get("role")
    parts = _parts(item.get("content"), f"{where}.content")
    if role == "user":
        turns.user(parts)
        return
    if role not in ("assistant", "system", "developer"):
        raise InvalidRequest("The role must be one of user, assistant, system, developer.", param=f"{where}.role")
    text = GAP.join(part for part in parts if isinstance(part, str))
    if role == "assistant":
        turns.assistant(text)
    else:
        turns.system(text)


def _parts(content: object, where: str) -> list[Part]:
    """Content parts as texts and chat parts."""
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest("Content must be a string or a list of parts.", param=where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: object, where: str) -> Part:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("A content part must be an object with a `type`.", param=where)
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return _text(part, "text", where)
    if kind == "refusal":
        return _text(part, "refusal", where)
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        names = ("file_data", "file_id", "filename")
        return {"type": "file", "file": {name: part[name] for name in names if part.get(name) is not None}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise InvalidRequest(f"A part of type {str(kind)[:50]!r} cannot be used here.", param=f"{where}.type")


def _image(part: dict[str, Any], where: str) -> Part:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise InvalidRequest("An image must be given by `image_url`.", param=f"{where}.image_url")
    image = {"url": url}
    if isinstance(part.get("detail"), str):
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _texts(parts: object) -> list[str]:
    found = parts if isinstance(parts, list) else ()
    return [part["text"] for part in found if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _text(source: dict[str, Any], key: str, where: str) -> str:
    value = source.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{key}` must be a string.", param=f"{where}.{key}")
    return value


def _arguments(given: object) -> str:
    return given if isinstance(given, str) else encode_members(given if given is not None else {}).decode()


# -- tools -----------------------------------------------------------------------------------------------------------------


def _add_tools(body: dict[str, Any], names: ToolNames, tools: list[dict[str, Any]], request: ResponsesRequest) -> None:
    functions: list[dict[str, Any]] = []
    for tool in tools:
        if tool.get("type") == "namespace":
            inner = tool.get("tools")
            for one in inner if isinstance(inner, list) else ():
                _add_tool(functions, names, one, tool.get("name"))
        else:
            _add_tool(functions, names, tool, None)
    choice = _choice(request.tool_choice, functions, names)
    if functions:
        body["tools"] = functions
        if choice is not None:
            body["tool_choice"] = choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls


def _add_tool(functions: list[dict[str, Any]], names: ToolNames, tool: object, namespace: object) -> None:
    """Functions and tools of free text; what only the vendor's own service could run is skipped."""
    if not isinstance(tool, dict):
        return
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        return
    within = namespace if isinstance(namespace, str) and namespace else None
    made = None
    if tool.get("type") == "function":
        made = function_of(names, Tool(name, within), tool, tool.get("parameters"))
    elif tool.get("type") == "custom":
        form = tool.get("format")
        described = dict(tool)
        if isinstance(form, dict) and isinstance(form.get("definition"), str):
            hint = f"The input must match this {form.get('syntax', '')} grammar:\n{form['definition']}"
            described["description"] = GAP.join(filter(None, (tool.get("description"), hint)))
        made = function_of(names, Tool(name, within, custom=True), described, CUSTOM_PARAMETERS)
    if made is not None:
        functions.append(made)


def _choice(choice: str | dict[str, Any] | None, functions: list[dict[str, Any]], names: ToolNames) -> Any:
    """Chat's form of `tool_choice`; a choice among allowed tools takes the others away."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "auto", "none", "required"):
            raise InvalidRequest("`tool_choice` must be auto, none, required or an object.", param="tool_choice")
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        flat = flat_name(_text(choice, "name", "tool_choice"), choice.get("namespace"))
        if not any(function["function"]["name"] == flat for function in functions):
            raise InvalidRequest(f"There is no tool {choice['name'][:100]!r} in `tools`.", param="tool_choice")
        return named_choice(flat)
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        allowed = [tool for tool in allowed if isinstance(tool, dict)] if isinstance(allowed, list) else []
        flat = {flat_name(tool["name"], tool.get("namespace")) for tool in allowed if isinstance(tool.get("name"), str)}
        functions[:] = [function for function in functions if function["function"]["name"] in flat]
        names.keep(flat)
        return "required" if choice.get("mode") == "required" else "auto"
    return "auto"
