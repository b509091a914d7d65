"""`POST /tokenize` and `/detokenize` at an in-process engine, in vLLM's form.

In: the request's body. Out: token ids of a text or of messages as the chat template renders them; the text of token ids. The
work is done by the engine's preparation worker. Loop thread only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.errors import InvalidRequest, LayaError
from laya.gateway.api.chat import messages_of
from laya.gateway.exchange import DONE, JSON_LINE, WAITING
from laya.gateway.local import LocalExchange
from laya.schema.codec import encode_json
from laya.schema.fields import invalid_body
from laya.schema.generation import ChatPrompt
from laya.schema.openai import Message


class TokenizeRequest(msgspec.Struct, frozen=True):
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: list[int]


_decode_text = msgspec.json.Decoder(TokenizeRequest).decode
_decode_ids = msgspec.json.Decoder(DetokenizeRequest).decode


class TokenExchange(LocalExchange):
    def start(self) -> None:
        self.move(WAITING)
        try:
            if self.plan.path == b"/detokenize":
                self.engine.detokenize(_decode_ids(self.body).tokens, lambda text: self._done(text, self._text_answer))
            else:
                request = _decode_text(self.body)
                self.engine.tokenize(
                    _prompt_of(request), lambda ids: self._done(ids, self._ids_answer), add_special=request.add_special_tokens
                )  # fmt: skip
        except (ValueError, RecursionError) as exc:
            raise invalid_body(exc) from None

    def _done(self, result: Any, answer) -> None:
        if self.state is DONE:
            return  # the client has left
        if isinstance(result, LayaError):
            if self.plan.path == b"/detokenize" and result.param is not None:
                result.param = result.param.replace("prompt", "tokens", 1)  # what the engine calls the ids of any request
            self.fail(result)
        else:
            self.answer(200, JSON_LINE, encode_json(answer(result)), "ok")

    def _ids_answer(self, ids: list[int]) -> dict:
        return {"count": len(ids), "max_model_len": self.engine.card.max_model_len, "tokens": ids, "token_strs": None}

    def _text_answer(self, text: str) -> dict:
        return {"prompt": text}


def _prompt_of(request: TokenizeRequest) -> ChatPrompt | str:
    if request.messages is not None:
        return ChatPrompt(
            messages=messages_of(request.messages), tools=tuple(request.tools or ()),
            add_generation_prompt=request.add_generation_prompt, template_args=request.chat_template_kwargs or {},
        )  # fmt: skip
    if request.prompt is None:
        raise InvalidRequest("`prompt` or `messages` is required.", param="prompt")
    return request.prompt
