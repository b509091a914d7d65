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
        self._results: list[list[dict[str, Any]]] = []  # behind each of them: the results of its calls
        self._calls: dict[str, list[dict[str, Any]]] = {}  # call id -> where its result belongs
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
            self._add({"role": "user", "content": list(parts)})
        else:
            last["content"].extend(parts)

    def assistant(self, text: str) -> None:
        if text:
            self._assistant()["content"].append(text)

    def reasoning(self, text: str) -> None:
        if text:
            self._assistant().setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        message = self._assistant()
        message.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        )
        self._calls[call_id] = self._results[-1]

    def result(self, call_id: str, parts: list[Part]) -> None:
        """A tool's result; one whose call is not there (its turn was cut away) is told in words."""
        text = GAP.join(part for part in parts if isinstance(part, str))
        images = [part for part in parts if not isinstance(part, str)]
        results = self._calls.get(call_id)
        if results is None:
            self.user([f"[result of the tool call {call_id}]\n{text}", *images])
            return
        results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        self._images.extend(images)

    def messages(self) -> list[dict[str, Any]]:
        """The messages; the builder is of no further use."""
        self._flush_images()
        made = [{"role": "system", "content": GAP.join(self._system)}] if self._system else []
        for message, results in zip(self._messages, self._results, strict=True):
            if message["role"] == "user":
                message["content"] = _content(message["content"])
            else:
                text = GAP.join(message["content"])
                message["content"] = text if text or "tool_calls" not in message else None
                if "reasoning_content" in message:
                    message["reasoning_content"] = GAP.join(message["reasoning_content"])
            made += (message, *results)
        return made

    def _add(self, message: dict[str, Any]) -> dict[str, Any]:
        self._messages.append(message)
        self._results.append([])
        return message

    def _last(self, role: str) -> dict[str, Any] | None:
        """The last message, if it is of that role and what is added now would stand right behind it."""
        if not self._messages or self._messages[-1]["role"] != role or self._results[-1]:
            return None
        return self._messages[-1]

    def _assistant(self) -> dict[str, Any]:
        self._flush_images()
        message = self._last("assistant")
        return self._add({"role": "assistant", "content": []}) if message is None else message

    def _flush_images(self) -> None:
        images, self._images = self._images, []
        if images:
            self.user(images)


def _content(parts: list[Part]) -> str | list[dict[str, Any]]:
    """One text where there is nothing else: servers that know only strings take it, and it makes the same tokens."""
    if all(isinstance(part, str) for part in parts):
        return GAP.join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
