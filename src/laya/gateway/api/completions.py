"""`POST /v1/completions` for an in-process engine: text or token ids in, text out.

Several prompts make several generations; choice numbers run on over them, as OpenAI's do.
"""

from __future__ import annotations

from laya.errors import InvalidRequest, LayaError
from laya.gateway.api.sampling import COMMENT_FRAME, DONE_FRAME, frame, new_id, now, sampling_of, usage_of
from laya.gateway.api.structured import grammar_of
from laya.schema.codec import encode_json
from laya.schema.generation import Delta, Finished, GenerationRequest, ModelCard, Started, TokenLogprob
from laya.schema.openai import CompletionRequest, decode_completion

name = "completions"
MAX_PROMPTS = 128  # each is a request of its own to the engine
DEFAULT_MAX_TOKENS = 16  # OpenAI's

decode = decode_completion


def generations_of(request: CompletionRequest, request_id: str, client: str, card: ModelCard) -> list[GenerationRequest]:
    """One for each prompt. Raises InvalidRequest naming the member at fault."""
    if request.suffix:
        raise InvalidRequest("`suffix` is not supported by the in-process engine.", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("`best_of` is not supported by the in-process engine.", param="best_of")
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if limit == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` 0 is allowed only together with `echo`.", param="max_tokens")
    sampling = sampling_of(
        request, max_tokens=limit, logprobs=request.logprobs, prompt_logprobs=request.logprobs if request.echo else None
    )
    salt, grammar = request.cache_salt or "", grammar_of(request)
    return [
        GenerationRequest(id=f"{request_id}-{i}", prompt=prompt, sampling=sampling, client=client, salt=salt, grammar=grammar)
        for i, prompt in enumerate(prompts_of(request.prompt))
    ]  # fmt: skip


def prompts_of(prompt: str | list | None) -> list[str | list[int]]:
    if prompt is None:
        raise InvalidRequest("`prompt` is required.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be an empty list.", param="prompt")
    if all(type(item) is int for item in prompt):
        return [_ids(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"At most {MAX_PROMPTS} prompts are allowed in one request.", param="prompt")
    result: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        if isinstance(item, list):
            result.append(_ids(item, f"prompt[{i}]"))
        elif isinstance(item, str):
            result.append(item)
        else:
            raise InvalidRequest("A prompt must be text or a list of token ids.", param=f"prompt[{i}]")
    return result


def _ids(ids: list, where: str) -> list[int]:
    if not ids or not all(type(item) is int and item >= 0 for item in ids):
        raise InvalidRequest("Token ids must be whole numbers from 0, at least one.", param=where)
    return ids


class CompletionWriter:
    """Builds the answer to one request; see `gateway.local.Writer`."""

    def __init__(self, request: CompletionRequest, model: str, prompts: int, card: ModelCard) -> None:
        self.stream = bool(request.stream)
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._want = request.logprobs is not None
        self._echo = bool(request.echo)
        self._n = request.n or 1
        self._id = new_id("cmpl-")
        self._model = model
        self._created = now()
        count = self._n * prompts
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[dict] = [_empty_logprobs() for _ in range(count)]
        self._lengths = [0] * count
        self._reasons: list[str | None] = [None] * count

    def _answer(self, choices: list[dict], usage: dict | None, stream: bool) -> dict:
        answer = {
            "id": self._id, "object": "text_completion", "created": self._created, "model": self._model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        if self._usage or not stream:
            answer["usage"] = usage
        return answer

    def _piece(self, index: int, text: str, entries, reason: str | None) -> bytes:
        """New text of a choice: a frame, or kept for the plain body."""
        added = _empty_logprobs()
        for entry in entries if self._want else ():
            _append_logprob(added, entry, self._lengths[index])
            self._lengths[index] += len(entry.token) if entry is not None else 0
        if self.stream:
            logprobs = added if self._want and entries else None
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            return frame(self._answer([choice], None, True))
        self._texts[index].append(text)
        for key, values in added.items():
            self._logprobs[index][key].extend(values)
        self._reasons[index] = reason or self._reasons[index]
        return b""

    def head(self) -> bytes:
        return b""

    def started(self, event: Started, first: int = 0) -> bytes:
        if not self._echo:
            return b""
        entries = event.prompt_logprobs or ()
        text = event.prompt_text or ""
        return b"".join(self._piece(first + i, text, entries, None) for i in range(self._n))

    def delta(self, event: Delta) -> bytes:
        if not event.text and not event.logprobs and not event.finish_reason:
            return b""
        return self._piece(event.index, event.text, event.logprobs, event.finish_reason)

    def end(self, event: Finished) -> bytes:
        if self.stream:
            return (frame(self._answer([], usage_of(event), True)) if self._usage else b"") + DONE_FRAME
        choices = [
            {
                "index": i,
                "text": "".join(text),
                "logprobs": self._logprobs[i] if self._want else None,
                "finish_reason": self._reasons[i],
            }
            for i, text in enumerate(self._texts)
        ]
        return encode_json(self._answer(choices, usage_of(event), False))

    def error(self, error: LayaError) -> bytes:
        return frame(error.body())

    def keep_alive(self) -> bytes:
        return COMMENT_FRAME


def _empty_logprobs() -> dict[str, list]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _append_logprob(target: dict[str, list], entry: TokenLogprob | None, offset: int) -> None:
    """OpenAI's legacy form; the first prompt token has no probability."""
    target["text_offset"].append(offset)
    if entry is None:
        target["tokens"].append("")
        target["token_logprobs"].append(None)
        target["top_logprobs"].append(None)
        return
    target["tokens"].append(entry.token)
    target["token_logprobs"].append(entry.logprob)
    target["top_logprobs"].append({text: value for _, text, _, value in entry.top} or {entry.token: entry.logprob})


writer_of = CompletionWriter
