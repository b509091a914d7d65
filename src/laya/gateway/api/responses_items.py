"""The items of a Responses answer, each with the events of its life: begun, more, whole.

In: text as it comes. Out: events as plain objects, in order; the answer numbers and frames them. `status` is in_progress,
completed or incomplete. Loop thread only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.gateway.api.sampling import new_id
from laya.gateway.api.toolnames import Tool
from laya.schema.codec import decode_members

Event = dict[str, Any]


class OutputItem:
    """`index` is the item's place in the answer's output."""

    prefix = ""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id(self.prefix)
        self.status = "in_progress"
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def shown(self) -> dict[str, Any]:
        """The item as it stands; each kind adds its own members."""
        return {"id": self.id, "status": self.status}

    def start(self) -> list[Event]:
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.shown()}]

    def add(self, text: str) -> list[Event]:
        self._parts.append(text)
        return []

    def close(self) -> list[Event]:
        """`status` was set before."""
        return [{"type": "response.output_item.done", "output_index": self.index, "item": self.shown()}]

    def _about(self, kind: str, **members: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **members}


class MessageItem(OutputItem):
    prefix = "msg_"

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def shown(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self._part()]
        return {**super().shown(), "type": "message", "role": "assistant", "content": content}

    def start(self) -> list[Event]:
        return [*super().start(), self._about("response.content_part.added", content_index=0, part=self._part())]

    def add(self, text: str) -> list[Event]:
        super().add(text)
        return [self._about("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def close(self) -> list[Event]:
        return [
            self._about("response.output_text.done", content_index=0, text=self.text, logprobs=[]),
            self._about("response.content_part.done", content_index=0, part=self._part()),
            *super().close(),
        ]


class ReasoningItem(OutputItem):
    prefix = "rs_"

    def shown(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [{"type": "reasoning_text", "text": self.text}]
        return {**super().shown(), "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}

    def start(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        return [*super().start(), self._about("response.content_part.added", content_index=0, part=part)]

    def add(self, text: str) -> list[Event]:
        super().add(text)
        return [self._about("response.reasoning_text.delta", content_index=0, delta=text)]

    def close(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": self.text}
        return [
            self._about("response.reasoning_text.done", content_index=0, text=self.text),
            self._about("response.content_part.done", content_index=0, part=part),
            *super().close(),
        ]


class _Wrapped(msgspec.Struct):
    input: str


class CallItem(OutputItem):
    """A call of a function, or of a tool of free text whose input stands in a function's one argument."""

    prefix = "fc_"

    def __init__(self, index: int, call_id: str, tool: Tool) -> None:
        super().__init__(index)
        self.ended = False  # its arguments are known to be whole
        self._call_id = call_id
        self._tool = tool

    def shown(self) -> dict[str, Any]:
        kind, key = ("custom_tool_call", "input") if self._tool.custom else ("function_call", "arguments")
        item = {
            **super().shown(), "type": kind, "call_id": self._call_id, "name": self._tool.name,
            key: "" if self.status == "in_progress" else self._given(),
        }  # fmt: skip
        return item if self._tool.namespace is None else {**item, "namespace": self._tool.namespace}

    def add(self, text: str) -> list[Event]:
        super().add(text)
        if self._tool.custom or not text:
            return []  # the text is inside JSON that must be whole to be read
        return [self._about("response.function_call_arguments.delta", delta=text)]

    def settle(self, *, cut: bool) -> None:
        """The step is over: the call is whole unless the answer was cut inside it."""
        self.status = "incomplete" if cut and not self.ended and not _is_object(self.text) else "completed"

    def close(self) -> list[Event]:
        given = self._given()
        if self._tool.custom:
            told = [
                self._about("response.custom_tool_call_input.delta", delta=given),
                self._about("response.custom_tool_call_input.done", input=given),
            ]
        else:
            told = [self._about("response.function_call_arguments.done", name=self._tool.name, arguments=given)]
        return [*told, *super().close()]

    def _given(self) -> str:
        if not self._tool.custom:
            return self.text or "{}"
        try:
            return msgspec.json.decode(self.text, type=_Wrapped).input
        except ValueError:
            return self.text  # the model gave the input as it is


def _is_object(text: str) -> bool:
    try:
        decode_members(text.encode())
    except (ValueError, RecursionError):
        return False
    return True
