"""The texts in an answer, found and exchanged: plain bodies and event streams of the APIs that answer with text.

In: answers as they are sent to clients. Out: the same with each assistant text put through an `Answer` (custom.py), everything
else as it was. Tool arguments and thinking are left alone. Any thread, one answer each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from laya.schema.codec import encode_members
from laya.stages.custom import CustomAnswer

_decode = msgspec.json.Decoder(dict[str, Any]).decode
# (event or None, data or None, raw) of frames; wire.sse has such a parser.
Events = Any


class TextFilter:
    """`events` parses the stream: `feed(data)` gives frames, `finish()` the last. `frame(data, event)` writes one."""

    __slots__ = ("slow", "at_work", "stage", "_api", "_answer", "_events", "_frame", "_texts", "_open", "_shift")

    def __init__(self, api: str, answer: CustomAnswer, events: Events, frame: Callable[[bytes, bytes | None], bytes]) -> None:
        self.stage = answer.stage
        self.slow = answer.stage.slow
        self.at_work = False
        self._api = api
        self._answer = answer
        self._events = events
        self._frame = frame
        self._texts: dict[tuple[int, int], str] = {}  # what was sent of each text of a Responses answer, which repeats them
        self._open: set[str] = set()
        self._shift = 0  # frames that were put in: later sequence numbers grow by so many

    # -- plain ---------------------------------------------------------------------------------------------------------

    def whole(self, body: bytes) -> bytes:
        self.at_work = True
        made = self._whole(body)
        self.at_work = False
        return made

    def _whole(self, body: bytes) -> bytes:
        try:
            value = _decode(body)
        except (ValueError, RecursionError):
            return body
        changed = False
        for channel, holder, name in _plain_texts(self._api, value):
            text = self._answer.delta(holder[name], channel) + self._answer.end(channel)
            changed = changed or text != holder[name]
            holder[name] = text
        return encode_members(value) if changed else body

    # -- streams -------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        self.at_work = True
        made = b"".join([self._event(*found) for found in self._events.feed(data)])
        self.at_work = False
        return made

    def finish(self) -> bytes:
        self.at_work = True
        found = self._events.finish()
        made = b"" if found is None else self._event(*found)
        self.at_work = False
        return made

    def _event(self, event: bytes | None, data: bytes | None, raw: bytes) -> bytes:
        if data is None or data[:1] != b"{":
            return raw
        try:
            value = _decode(data)
        except (ValueError, RecursionError):
            return raw
        if self._api in ("chat", "completions"):
            return self._frame(encode_members(value), event) if self._choices(value) else raw
        if self._api == "messages":
            return self._message_event(event, value, raw)
        return self._response_event(event, value, raw) if self._api == "responses" else raw

    def _choices(self, value: dict[str, Any]) -> bool:
        changed = False
        for choice in _maps(value.get("choices")):
            holder, name = (choice.get("delta"), "content") if self._api == "chat" else (choice, "text")
            if not isinstance(holder, dict):
                continue
            channel, text = f"choices[{choice.get('index', 0)}]", holder.get(name)
            made = self._delta(text, channel) if isinstance(text, str) and text else text
            if choice.get("finish_reason") is not None:
                made = (made or "") + self._end(channel) or made
            changed = changed or made != text
            if made is not None:
                holder[name] = made
        return changed

    def _message_event(self, event: bytes | None, value: dict[str, Any], raw: bytes) -> bytes:
        channel = f"content[{value.get('index', 0)}]"
        delta = value.get("delta")
        if value.get("type") == "content_block_delta" and isinstance(delta, dict) and isinstance(delta.get("text"), str):
            delta["text"] = self._delta(delta["text"], channel)
            return self._frame(encode_members(value), event)
        rest = self._end(channel) if value.get("type") == "content_block_stop" else ""
        if not rest:
            return raw
        more = {"type": "content_block_delta", "index": value["index"], "delta": {"type": "text_delta", "text": rest}}
        return self._frame(encode_members(more), event and b"content_block_delta") + raw

    def _response_event(self, event: bytes | None, value: dict[str, Any], raw: bytes) -> bytes:
        kind, before = value.get("type"), b""
        place = value.get("output_index", 0), value.get("content_index", 0)
        channel = f"output[{place[0]}].content[{place[1]}]"
        if kind == "response.output_text.delta" and isinstance(value.get("delta"), str):
            value["delta"] = self._delta(value["delta"], channel)
            self._texts[place] = self._texts.get(place, "") + value["delta"]
        elif kind == "response.output_text.done" and place in self._texts:
            before = self._response_rest(event, value, place, channel)
            value["text"] = self._texts[place]
        elif not self._repeats(value) and not self._shift:
            return raw
        if self._shift and isinstance(value.get("sequence_number"), int):
            value["sequence_number"] += self._shift
        return before + self._frame(encode_members(value), event)

    def _response_rest(self, event: bytes | None, done: dict[str, Any], place: tuple[int, int], channel: str) -> bytes:
        """What the stage held back, as one more delta before the text's end."""
        rest = self._end(channel)
        if not rest:
            return b""
        self._texts[place] += rest
        number = done.get("sequence_number")
        more = {key: done[key] for key in ("item_id", "output_index", "content_index") if key in done}
        more = {"type": "response.output_text.delta", **more, "delta": rest}
        if isinstance(number, int):
            more["sequence_number"] = number + self._shift
        self._shift += 1
        return self._frame(encode_members(more), event and b"response.output_text.delta")

    def _repeats(self, value: dict[str, Any]) -> bool:
        """Put the texts as they were sent into an event that tells them again."""
        changed = False
        for place, holder in _told_again(value):
            if place in self._texts:
                holder["text"] = self._texts[place]
                changed = True
        return changed

    def _delta(self, text: str, channel: str) -> str:
        self._open.add(channel)
        return self._answer.delta(text, channel)

    def _end(self, channel: str) -> str:
        if channel not in self._open:
            return ""
        self._open.discard(channel)
        return self._answer.end(channel)


def _plain_texts(api: str, value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(channel, map, member) of each text of a plain answer."""
    if api in ("chat", "completions"):
        for choice in _maps(value.get("choices")):
            holder, name = (choice.get("message"), "content") if api == "chat" else (choice, "text")
            if isinstance(holder, dict) and isinstance(holder.get(name), str):
                yield f"choices[{choice.get('index', 0)}]", holder, name
    elif api == "messages":
        for index, block in enumerate(_maps(value.get("content"))):
            if block.get("type") == "text" and isinstance(block.get("text"), str):
                yield f"content[{index}]", block, "text"
    elif api == "responses":
        for (item, part), holder in _output_texts(value):
            yield f"output[{item}].content[{part}]", holder, "text"


def _output_texts(response: dict[str, Any]) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    for item, output in enumerate(_maps(response.get("output"))):
        for part, content in enumerate(_maps(output.get("content"))):
            if content.get("type") == "output_text" and isinstance(content.get("text"), str):
                yield (item, part), content


def _told_again(value: dict[str, Any]) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    kind, item = value.get("type"), value.get("output_index", 0)
    part, whole, response = value.get("part"), value.get("item"), value.get("response")
    if kind == "response.content_part.done" and isinstance(part, dict):
        yield (item, value.get("content_index", 0)), part
    elif kind == "response.output_item.done" and isinstance(whole, dict):
        for (_, place), content in _output_texts({"output": [whole]}):
            yield (item, place), content
    elif isinstance(response, dict):
        yield from _output_texts(response)


def _maps(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
