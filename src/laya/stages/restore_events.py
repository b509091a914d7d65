"""Where the texts of a stream's events are, and what waits in each of them, by API.

In: decoded events, in order. Out: the events changed in place, and frames with what waited in a text that has ended. One object
serves one stream; one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laya.schema.codec import encode_members

if TYPE_CHECKING:
    from laya.stages.vault import Vault

Key = tuple[Any, ...]


class Channel:
    """One text that comes in pieces."""

    __slots__ = ("_vault", "_json", "held", "about")

    def __init__(self, vault: Vault, json_text: bool | None) -> None:
        self._vault = vault
        self._json = json_text  # None: its first character will tell
        self.held = ""
        self.about: Any = None  # what a frame of it looks like

    def feed(self, text: str) -> str:
        """What can go out now."""
        if self._json is None and text.strip():
            self._json = self._vault.is_json(text)
        text = self.held + text
        if "[" not in text:
            self.held = ""
            return text
        text = self._vault.restore(text, bool(self._json))
        end = self._vault.labels.held(text)
        self.held = text[end:]
        return text[:end] if self.held else text

    def end(self) -> str:
        """What waited, now that nothing can follow it."""
        held, self.held = self.held, ""
        return held


class Events:
    """A stream of an API without texts in pieces: its events are restored whole. `changed` and `is_delta` are about the event
    taken last; an event that is no delta may still hold whole placeholders."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._channels: dict[Key, Channel] = {}
        self.changed = False
        self.is_delta = False

    def take(self, event: dict[str, Any]) -> bytes:
        """Look at an event and change it in place; frames that must go out before it."""
        self.changed = self.is_delta = False
        return self.flush()

    def flush(self) -> bytes:
        """Frames with all that waits."""
        return b"".join([self._flush(key) for key in list(self._channels)])

    def _flush(self, key: Key) -> bytes:
        channel = self._channels[key]
        return self._frame(key, channel.about, channel.end()) if channel.held else b""

    def _frame(self, key: Key, about: Any, text: str) -> bytes:
        raise AssertionError("there are no channels")

    def _put(self, holder: dict[str, Any], member: str, key: Key, about: Any, json_text: bool | None = None) -> None:
        """More of a text, which stands in `holder[member]`."""
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self._vault, json_text if json_text else None)
        channel.about = about
        text = holder[member]
        ready = channel.feed(text)
        if ready != text:
            holder[member] = ready
            self.changed = True


class ChoiceEvents(Events):
    """Chat and text completions. Keys: (choice, member, number of the tool call)."""

    _members = ("content", "reasoning_content", "reasoning", "refusal")

    def take(self, event: dict[str, Any]) -> bytes:
        self.changed = self.is_delta = False
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            return self.flush() if "error" in event else b""
        before = b""
        for choice in choices:
            if isinstance(choice, dict):
                before += self._choice(event, choice)
        self.is_delta = True
        return before

    def _choice(self, event: dict[str, Any], choice: dict[str, Any]) -> bytes:
        index = choice.get("index", 0)
        before = b""
        held = [key for key, channel in self._channels.items() if channel.held and key[0] == index]
        fed = list(self._texts(choice, index))
        if held:
            ended = choice.get("finish_reason") is not None
            members = {key[1] for _, _, key, _ in fed}
            going_on = {key for _, _, key, _ in fed}
            for key in held:  # another kind of text follows, or none; tool calls may take turns
                if (members and key[1] not in members) or (ended and key not in going_on):
                    before += self._flush(key)
        for holder, member, key, json_text in fed:
            self._put(holder, member, key, event, json_text)
        if choice.get("finish_reason") is not None:
            for holder, member, key, _ in fed:  # the last words come with the end
                if self._channels[key].held:
                    holder[member] += self._channels[key].end()
                    self.changed = True
        return before

    def _texts(self, choice: dict[str, Any], index: Any):
        """(holder, member, key, whether it is JSON) of each text with something in it."""
        if isinstance(choice.get("text"), str) and choice["text"]:
            yield choice, "text", (index, "text", 0), False
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        for member in self._members:
            if isinstance(delta.get(member), str) and delta[member]:
                yield delta, member, (index, member, 0), False
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                for form, member in (("function", "arguments"), ("custom", "input")):
                    holder = call.get(form)
                    if isinstance(holder, dict) and isinstance(holder.get(member), str) and holder[member]:
                        yield holder, member, (index, form, call.get("index", 0)), form == "function"
        old = delta.get("function_call")
        if isinstance(old, dict) and isinstance(old.get("arguments"), str) and old["arguments"]:
            yield old, "arguments", (index, "function_call", 0), True

    def _frame(self, key: Key, about: dict[str, Any], text: str) -> bytes:
        index, member, number = key
        choice: dict[str, Any] = {"index": index}
        if member == "text":
            choice["text"] = text
        elif member == "function":
            choice["delta"] = {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
        elif member == "custom":
            choice["delta"] = {"tool_calls": [{"index": number, "custom": {"input": text}}]}
        elif member == "function_call":
            choice["delta"] = {"function_call": {"arguments": text}}
        else:
            choice["delta"] = {member: text}
        frame = {**about, "choices": [{**choice, "logprobs": None, "finish_reason": None}]}
        if "usage" in frame:
            frame["usage"] = None
        return b"data: %b\n\n" % encode_members(frame)


class ResponsesEvents(Events):
    """Keys: (item, event type, part). Events are numbered: those behind an extra frame count on from it."""

    _shift = 0

    def take(self, event: dict[str, Any]) -> bytes:
        self.changed = self.is_delta = False
        kind = event.get("type")
        kind = kind if isinstance(kind, str) else ""
        before = b""
        if kind.endswith(".delta") and isinstance(event.get("delta"), str):
            self.is_delta = True
            self._renumber(event)
            part = event.get("content_index", event.get("summary_index", 0))
            self._put(event, "delta", (event.get("output_index", 0), kind, part), dict(event), "arguments" in kind)
            return b""
        if kind.endswith(".done") and "output_index" in event:
            before = self._flush_some(event, [key for key in self._channels if key[0] == event["output_index"]])
        elif kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"):
            before = self._flush_some(event, list(self._channels))
        self._renumber(event)
        return before

    def _flush_some(self, event: dict[str, Any], keys: list[Key]) -> bytes:
        frames = b""
        for key in keys:
            channel = self._channels[key]
            if channel.held:
                if isinstance(number := event.get("sequence_number"), int):
                    channel.about["sequence_number"] = number + self._shift
                    self._shift += 1
                frames += self._frame(key, channel.about, channel.end())
        return frames

    def _renumber(self, event: dict[str, Any]) -> None:
        if self._shift and isinstance(event.get("sequence_number"), int):
            event["sequence_number"] += self._shift
            self.changed = True

    def _frame(self, key: Key, about: dict[str, Any], text: str) -> bytes:
        about["delta"] = text
        return b"event: %b\ndata: %b\n\n" % (key[1].encode(), encode_members(about))


class MessagesEvents(Events):
    """Keys: (block, member)."""

    _members = {"text": False, "thinking": False, "partial_json": True}

    def take(self, event: dict[str, Any]) -> bytes:
        self.changed = self.is_delta = False
        kind, index, delta = event.get("type"), event.get("index"), event.get("delta")
        if kind == "content_block_delta" and isinstance(delta, dict):
            self.is_delta = True
            for member, json_text in self._members.items():
                if isinstance(delta.get(member), str):
                    self._put(delta, member, (index, member), delta.get("type"), json_text)
            return b""
        if kind == "content_block_stop":
            return b"".join([self._flush(key) for key in list(self._channels) if key[0] == index])
        return self.flush() if kind in ("message_delta", "message_stop", "error") else b""

    def _frame(self, key: Key, about: Any, text: str) -> bytes:
        event = {"type": "content_block_delta", "index": key[0], "delta": {"type": about, key[1]: text}}
        return b"event: content_block_delta\ndata: %b\n\n" % encode_members(event)


EVENTS: dict[str, type[Events]] = {
    "chat": ChoiceEvents, "completions": ChoiceEvents, "responses": ResponsesEvents, "messages": MessagesEvents,
}  # fmt: skip
