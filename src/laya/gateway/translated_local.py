"""A Responses or Messages request that an in-process engine answers.

In: the body; it becomes a chat request. Out: the engine's events through the API's answer. Loop thread only.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest, LayaError
from laya.gateway.api import chat
from laya.gateway.api.answer import EngineWriter
from laya.gateway.api.chat_form import ChatForm
from laya.gateway.api.toolcalls import ToolCallParser
from laya.gateway.local import LocalExchange
from laya.gateway.translation import Translating, Translation
from laya.schema.generation import GenerationRequest, Queued

Prepared = tuple[list[GenerationRequest], ToolCallParser]


class TranslatedLocal(Translating, LocalExchange):
    _form: ChatForm | None = None

    def start(self) -> None:
        self.read()

    def prepared(self, translation: Translation) -> Prepared:
        form, card = translation.form, self.engine.card
        try:
            request = form.in_process()
            generations = chat.generations_of(request, self.request_id.decode("latin-1"), self.client_name(), card)
            return generations, chat.parser_of(request, card)
        except InvalidRequest as error:
            raise form.own_words(error) from None

    def translated(self, translation: Translation, made: Prepared) -> None:
        generations, parser = made
        self._form = translation.form
        if self.counts():
            self.engine.tokenize(generations[0].prompt, lambda ids: self.guarded(self._counted, ids))
        else:
            self.begin(generations, EngineWriter(translation.answer(self.model, self.keeper()), parser))

    def _counted(self, ids: Any) -> None:
        if isinstance(ids, LayaError):
            raise ids
        self.answer_count(len(ids))

    def on_queued(self, event: Queued) -> None:
        self.writer.prompt_tokens = event.prompt_tokens
        super().on_queued(event)

    def on_failed(self, error: LayaError) -> None:
        super().on_failed(self._form.own_words(error))

    def _cut_off(self, error: LayaError) -> None:
        self.finish_with(error, self._error_frame(error))
