"""Chat messages under construction: what every chat template and chat API takes, from items or blocks in any order.

In: texts, images, tool calls and their results, as a conversation brings them. Out: messages in which neighbours of one role
are one message, system texts stand at the front (one message; a later one becomes a user's text, because many templates
refuse it and moving it would change the prompt's beginning), and results stand right behind their calls. What is added later
never changes what was built from the part before, so that a prefix cache hits. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

# Between texts that were separate parts, blocks or messages.
GAP = "\n\n"
Part = str | dict[str, Any]  # a text, or a chat content part such as an image


class Turns:
    def __init__(self) -> None:
        self._system: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._calls: dict[str, dict[str, Any]] = {}  # call id -> the assistant message that holds it
        self._images: list[Part] = []  # of tool results: they follow in a user's message

    def system(self, text: str) -> None:
        if not text:
            return
        if not self._messages:
            self._system.append(text)
        else:
            self.user([f"<system-reminder>\n{text}\n</system-reminder>"])

    def user(self, parts: list[Part]) -> None:
        self._flush_images()
        last = self._last("user")
        if last is None:
            self._messages.append({"role": "user", "content": list(parts)})
        else:
            last["content"].extend(parts)

    def assistant(self, text: str) -> None:
        if text:
            self._assistant()["content"].append(text)

    def reasoning(self, text: str) -> None:
        if text:
            message = self._assistant()
            message["reasoning_content"] = GAP.join(filter(None, (message.get("reasoning_content"), text)))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        message = self._assistant()
        message.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        )
        self._calls[call_id] = message

    def result(self, call_id: str, parts: list[Part]) -> None:
        """A tool's result; one whose call is not there (its turn was cut away) is told in words."""
        text = GAP.join(part for part in parts if isinstance(part, str))
        images = [part for part in parts if not isinstance(part, str)]
        caller = self._calls.get(call_id)
        if caller is None:
            self.user([f"[result of the tool call {call_id}]\n{text}", *images])
            return
        at = next(i for i, message in enumerate(self._messages) if message is caller) + 1
        while at < len(self._messages) and self._messages[at]["role"] == "tool":
            at += 1
        self._messages.insert(at, {"role": "tool", "tool_call_id": call_id, "content": text})
        self._images.extend(images)

    def messages(self) -> list[dict[str, Any]]:
        """The messages; the builder is of no further use."""
        self._flush_images()
        for message in self._messages:
            if message["role"] == "user":
                message["content"] = _content(message["content"])
            elif message["role"] == "assistant":
                text = GAP.join(message["content"])
                message["content"] = text if text or "tool_calls" not in message else None
        front = [{"role": "system", "content": GAP.join(self._system)}] if self._system else []
        return front + self._messages

    def _last(self, role: str) -> dict[str, Any] | None:
        return self._messages[-1] if self._messages and self._messages[-1]["role"] == role else None

    def _assistant(self) -> dict[str, Any]:
        self._flush_images()
        message = self._last("assistant")
        if message is None:
            message = {"role": "assistant", "content": []}
            self._messages.append(message)
        return message

    def _flush_images(self) -> None:
        images, self._images = self._images, []
        if images:
            self.user(images)


def _content(parts: list[Part]) -> str | list[dict[str, Any]]:
    """One text where there is nothing else: servers that know only strings take it, and it makes the same tokens."""
    if all(isinstance(part, str) for part in parts):
        return GAP.join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
