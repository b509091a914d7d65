"""Requests of the APIs that are turned into chat: read, joined with the conversation they go on from, translated.

In: an exchange with its body. Out: `Translating.read` calls `translated` with what `Api.translate` made, at once or when a
worker or the store has answered. Large bodies are read in the preparation worker. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from laya.errors import InvalidRequest, LayaError, NotFound, Unavailable
from laya.gateway.api import messages, responses
from laya.gateway.api.answer import Answer
from laya.gateway.api.chat_form import ChatForm
from laya.gateway.exchange import DONE, JSON_LINE, STREAMING, Exchange, outcome_of
from laya.schema.codec import encode_json
from laya.schema.fields import READ_ON_LOOP, invalid_body
from laya.schema.responses import decode_kept

# Building every member of a body costs about four times what skipping them does, and so does writing a conversation.
WORK_ON_LOOP = READ_ON_LOOP // 4

TRANSLATED: dict[str, Any] = {"responses": responses, "messages": messages}


# Paths that count a prompt's tokens: the name of the ability, and what their answer holds besides the number.
COUNTS: dict[bytes, tuple[str, dict[str, str]]] = {
    b"/v1/messages/count_tokens": ("count_tokens", {}),
    b"/v1/responses/input_tokens": ("input_tokens", {"object": "response.input_tokens"}),
}


class Translation(Protocol):
    form: ChatForm
    stream: bool

    def answer(self, model: str, keep: Callable[[str, Callable[[], bytes]], None] | None) -> Answer: ...


class Translating(Exchange):
    """What exchanges of these APIs share, whoever answers. `rule` is the route."""

    rule: Any

    def counts(self) -> bool:
        """The request asks for a number of tokens, not for an answer."""
        return self.plan.path in COUNTS

    def answer_count(self, tokens: int, lines: bytes = b"") -> None:
        _, members = COUNTS[self.plan.path]
        self.answer(200, JSON_LINE + lines, encode_json({**members, "input_tokens": tokens}), "ok")

    def read(self) -> None:
        """Raises LayaError for what can be said at once; then nothing more is called."""
        api = TRANSLATED[self.plan.api]
        decode = api.decode_count if self.counts() else api.decode
        self.work(len(self.body), lambda: _decoded(decode, self.body), lambda request: self._join(api, request))

    def translated(self, translation: Translation, made: Any) -> None:
        """For subclasses: go on. `made` is what `prepared` gave."""

    def prepared(self, translation: Translation) -> Any:
        """For subclasses: more that is worth a worker. Any thread."""

    def _join(self, api, request) -> None:
        """With the conversation that the request goes on from."""
        previous = api.previous_of(request)
        if previous is None:
            self._translate(api, request, None)
            return
        self.find_kept(previous, lambda kept: self._found(api, request, previous, kept))

    def _found(self, api, request, previous: str, kept: bytes | None) -> None:
        if kept is None:
            raise self.not_found(previous)
        holder = decode_kept(kept).backend
        if holder is None:
            self._translate(api, request, kept)
        else:
            self.held_by(holder, previous)

    def held_by(self, backend: str, previous: str) -> None:
        """The conversation lies at a backend; only an exchange that can reach it can go on."""
        raise self.not_found(previous)

    def _translate(self, api, request, kept: bytes | None) -> None:
        ids = api.references_of(request)
        if ids and self.gateway.store is not None and self.rule.keeps:
            self._gather(ids, lambda referenced: self._build(api, request, kept, referenced))
        else:
            self._build(api, request, kept, {})

    def _gather(self, ids: list[str], then: Callable[[dict[str, bytes | None]], None]) -> None:
        """Stored items by id, None for those that are not there under the key's name."""
        found: dict[str, bytes | None] = {}
        wanted = set(ids)

        def have(id: str, kept: bytes | None) -> None:
            found[id] = kept
            if len(found) == len(wanted):
                self.guarded(then, found)

        for id in wanted:
            self.gateway.store.find(responses.item_key(id), self._scope(), partial(have, id))

    def _build(self, api, request, kept: bytes | None, referenced: dict[str, bytes | None]) -> None:
        def work() -> tuple[Translation, Any]:
            translation = api.translate(request, kept, referenced)
            return translation, self.prepared(translation)

        size = len(self.body) + len(kept or b"") + sum(len(value or b"") for value in referenced.values())
        self.work(size, work, lambda pair: self.translated(*pair))

    # -- what is stored ------------------------------------------------------------------------------------------------

    def find_kept(self, id: str, then: Callable[[bytes | None], None]) -> None:
        """What the store has under the key's name. Raises InvalidRequest where nothing may be stored."""
        if not self.rule.keeps:
            raise InvalidRequest(
                "`previous_response_id` cannot be used on a route that redacts: nothing is stored there.",
                param="previous_response_id",
            )
        store = self.gateway.store
        if store is None:
            then(None)
        else:
            store.find(id, self._scope(), lambda kept: self.guarded(then, kept))

    def not_found(self, id: str) -> NotFound:
        return NotFound(
            f"Previous response with id {id[:100]!r} not found.", param="previous_response_id",
            code="previous_response_not_found",
        )  # fmt: skip

    def keeper(self) -> Callable[[str, Callable[[], bytes]], None] | None:
        """Stores conversations under the key's name; None where nothing may be stored."""
        return self._keep if self.rule.keeps and self.gateway.store is not None else None

    def _keep(self, id: str, value: Callable[[], bytes]) -> None:
        store, scope = self.gateway.store, self._scope()
        if len(self.body) > WORK_ON_LOOP:
            try:
                self.gateway.offload(value, lambda made: store.settle(id, scope, None if isinstance(made, LayaError) else made))
            except Unavailable:
                pass  # the worker is busy, and the answer must not fail for it
            else:
                store.promise(id, scope)  # its client may ask for it before it is made
                return
        store.put(id, scope, value())

    def _scope(self) -> str:
        return self.plan.key.name if self.plan.key is not None else ""

    # -- steps that may wait -------------------------------------------------------------------------------------------

    def work(self, size: int, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then(work())`, here or with the work in a worker. Raises LayaError only where it is done here."""
        if size <= WORK_ON_LOOP:
            then(work())
            return

        def done(result: Any) -> None:
            if isinstance(result, LayaError):
                raise result
            then(result)

        self.gateway.offload(work, lambda result: self.guarded(done, result))

    def guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """A step that goes on after waiting: the client may have left, and an error has nobody above to answer it."""
        if self.state is DONE:
            return
        try:
            step(*arguments)
        except LayaError as error:
            self.fail(error)
        except Exception as fault:
            self.fail(self.gateway.fault(fault))

    # -- the end of a stream that fails --------------------------------------------------------------------------------

    def finish_with(self, error: LayaError, frames: bytes) -> None:
        """These APIs have an event that ends a stream with an error: after it the stream itself ends as it should."""
        connection = self.connection
        self._end(outcome_of(error))
        if connection.write(frames):
            connection.finish()

    def fail(self, error: LayaError, outcome: str | None = None) -> None:
        if self.state is STREAMING:
            self._cut_off(error)
        else:
            super().fail(error, outcome)


def _decoded(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (ValueError, RecursionError) as exc:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise invalid_body(exc) from None
