"""An Anthropic Messages request as a chat request: blocks to messages, tools to functions.

In: the decoded request. Out: a `ChatForm`. What means the same makes the same prompt: a text and one text block, any
`cache_control`, and the billing line that one client puts in front of its system text, which would keep a prefix cache from
ever hitting. Unknown kinds of blocks and tools are skipped. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest
from laya.gateway.api.chat_form import ChatForm, function_of, named_choice
from laya.gateway.api.toolnames import Tool, ToolNames, flat_name
from laya.gateway.api.turns import GAP, Part, Turns
from laya.schema.anthropic import Blocks, MessageParam, MessagesRequest, PromptParams
from laya.schema.codec import encode_members

BILLING_LINE = "x-anthropic-billing-header:"
MAX_MESSAGES = 20_000  # far beyond any window; bounds the work on one request
# Chat's members and what they are made from.
_MEMBERS = {"messages": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
# Members that mean the same in chat.
_SAME = ("temperature", "top_p", "top_k", "seed", "cache_salt", "chat_template_kwargs")


def chat_form_of(request: PromptParams) -> ChatForm:
    """Raises InvalidRequest naming the member at fault."""
    if not request.messages:
        raise InvalidRequest("at least one message is required", param="messages")
    if len(request.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", param="messages")
    turns = Turns()
    turns.system(_system_text(request.system))
    referenced: set[str] = set()
    for i, message in enumerate(request.messages):
        _add_message(turns, message, f"messages[{i}]", referenced)
    body: dict[str, Any] = {"messages": turns.messages()}
    if not body["messages"]:
        raise InvalidRequest("there is nothing in them that a model could read", param="messages")
    names = ToolNames()
    _add_tools(body, names, request, referenced)
    form = (request.output_config.format if request.output_config is not None else None) or request.output_format
    if form is not None and form.get("type") == "json_schema":
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        body["max_tokens"] = request.max_tokens
        if request.stop_sequences:
            body["stop"] = request.stop_sequences
    for member in _SAME:
        value = getattr(request, member, None)
        if value is not None:
            body[member] = value
    thinks = request.thinking is not None and request.thinking.type != "disabled"  # absent means disabled in this API
    return ChatForm(body=body, names=names, members=_MEMBERS, thinks=thinks)


def _system_text(system: str | Blocks | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block["text"] for block in system if isinstance(block.get("text"), str)]
    return GAP.join(text for text in texts if text and not text.startswith(BILLING_LINE))


# -- messages --------------------------------------------------------------------------------------------------------------


def _add_message(turns: Turns, message: MessageParam, where: str, referenced: set[str]) -> None:
    content: Blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "system":
        turns.system(_system_text(content))
    elif message.role == "assistant":
        for i, block in enumerate(content):
            _add_assistant(turns, block, f"{where}.content[{i}]")
    else:
        _add_user(turns, content, where, referenced)


def _add_assistant(turns: Turns, block: dict[str, Any], where: str) -> None:
    kind = block.get("type")
    if kind == "text":
        turns.assistant(_text(block, "text", where))
    elif kind == "thinking":
        turns.reasoning(_text(block, "thinking", where))
    elif kind == "tool_use":
        arguments = encode_members(block.get("input") or {}).decode()
        turns.call(_text(block, "id", where), flat_name(_text(block, "name", where)), arguments)


def _add_user(turns: Turns, content: Blocks, where: str, referenced: set[str]) -> None:
    """Results first, as they answer the turn before; then what the user says."""
    said: list[Part] = []
    for i, block in enumerate(content):
        place = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            turns.result(_text(block, "tool_use_id", place), _result_parts(block, place, referenced))
        else:
            said += _user_parts(block, place)
    if said or not content:
        turns.user(said)


def _result_parts(block: dict[str, Any], where: str, referenced: set[str]) -> list[Part]:
    content = block.get("content")
    mark: list[Part] = ["[the tool reports an error]"] if block.get("is_error") is True else []
    if content is None:
        return mark or [""]
    if isinstance(content, str):
        return [*mark, content]
    if not isinstance(content, list):
        raise InvalidRequest("must be a string or a list of blocks", param=f"{where}.content")
    parts = mark
    for i, inner in enumerate(content):
        place = f"{where}.content[{i}]"
        if not isinstance(inner, dict):
            raise InvalidRequest("must be an object", param=place)
        if inner.get("type") == "tool_reference":
            name = _text(inner, "tool_name", place)
            referenced.add(name)
            parts.append(f"The tool {name} can be called now.")
        else:
            parts += _user_parts(inner, place)
    return parts


def _user_parts(block: dict[str, Any], where: str) -> list[Part]:
    kind = block.get("type")
    if kind == "text":
        return [_text(block, "text", where)]
    if kind == "image":
        return [_image(block.get("source"), f"{where}.source")]
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        inner = block.get("content")
        blocks = inner if isinstance(inner, list) else ()
        texts = [b["text"] for b in blocks if isinstance(b, dict) and isinstance(b.get("text"), str)]
        return [GAP.join([f"{block.get('title', '')} ({block.get('source', '')})", *texts])]
    return []


def _image(source: object, where: str) -> Part:
    given = source if isinstance(source, dict) else {}
    if given.get("type") == "url" and isinstance(given.get("url"), str):
        return {"type": "image_url", "image_url": {"url": given["url"]}}
    if given.get("type") == "base64" and isinstance(given.get("data"), str):
        url = f"data:{given.get('media_type', 'image/png')};base64,{given['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise InvalidRequest("an image must be given as base64 or by url", param=where)


def _document(block: dict[str, Any], where: str) -> list[Part]:
    """A document of text; others a chat model cannot read."""
    source = block.get("source")
    given = source if isinstance(source, dict) else {}
    title = [block["title"]] if isinstance(block.get("title"), str) else []
    if given.get("type") == "text" and isinstance(given.get("data"), str):
        return [GAP.join([*title, given["data"]])]
    if given.get("type") == "content":
        inner = given.get("content")
        blocks = inner if isinstance(inner, list) else [{"type": "text", "text": inner}]
        return [*title, *(part for b in blocks if isinstance(b, dict) for part in _user_parts(b, where))]
    raise InvalidRequest("only documents of text can be read here", param=f"{where}.source.type")


def _text(source: dict[str, Any], key: str, where: str) -> str:
    value = source.get(key)
    if not isinstance(value, str):
        raise InvalidRequest("must be a string", param=f"{where}.{key}")
    return value


# -- tools -----------------------------------------------------------------------------------------------------------------


def _add_tools(body: dict[str, Any], names: ToolNames, request: PromptParams, referenced: set[str]) -> None:
    functions: list[dict[str, Any]] = []
    for tool in request.tools or ():
        name = tool.get("name")
        if not isinstance(name, str) or "input_schema" not in tool:
            continue  # a tool that only Anthropic's own service could run
        if tool.get("defer_loading") is True and name not in referenced:
            continue  # not shown to the model until a search has found it
        made = function_of(names, Tool(name), tool, tool["input_schema"])
        if made is not None:
            functions.append(made)
    if not functions:
        if not request.tools and request.tool_choice is not None and request.tool_choice.type in ("any", "tool"):
            raise InvalidRequest("a call is asked for, but there are no `tools`", param="tool_choice")
        return
    body["tools"] = functions
    choice = request.tool_choice
    if choice is None:
        return
    if choice.type == "tool":
        flat = flat_name(choice.name or "")
        if not any(function["function"]["name"] == flat for function in functions):
            raise InvalidRequest(f"there is no tool {(choice.name or '')[:100]!r} in `tools`", param="tool_choice.name")
        body["tool_choice"] = named_choice(flat)
    else:
        body["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use is not None:
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
