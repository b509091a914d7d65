"""From a request to token ids: chat template, tokenising, and every check that needs the length of the prompt.

In (loop thread): jobs for the one preparation worker of an engine, whose queue is bounded. Out: each result is posted back to
the loop. Tokenising runs at about 2 MB/s, so none of it may run on the loop; a prompt too large for the window by its
bytes alone is refused before it is tokenised.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laya.engine.grammar import Grammar, GrammarCompiler
from laya.engine.options import OptionPaths
from laya.engine.step import Tokenizer
from laya.errors import ContextLengthExceeded, InternalError, InvalidRequest, LayaError, RateLimited, Unavailable
from laya.schema.generation import ChatPrompt, GenerationRequest

log = logging.getLogger("laya.engine")

# Special tokens spell b"" yet stand for text of their own; the longest known ones ("<|start_header_id|>" and the like) are
# well under this many bytes.
_LONGEST_SPECIAL_BYTES = 64


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a prompt of one model. Tokens, but for `longest_token_bytes`."""

    window: int
    max_prompt_tokens: int | None
    longest_token_bytes: int
    vocab_size: int  # of the model; its tokenizer may know more words, which it cannot read


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that fits. `max_new_tokens` is what was asked for, clamped to the room left in the window."""

    request: GenerationRequest
    prompt_ids: list[int]
    max_new_tokens: int
    prompt_text: str | None  # as given, or decoded from given ids; None for a chat
    grammar: Grammar | None = None  # each choice takes a fork
    options: OptionPaths | None = None  # then each choice is one of its runs, and nothing is generated

    @property
    def choices(self) -> int:
        return self.request.sampling.n if self.options is None else len(self.options.paths)

    @property
    def tail(self) -> int:
        """Tokens that a choice may have behind the prompt from the start."""
        return self.options.longest if self.options is not None else 0


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """A text of b bytes has at least b / this many tokens, for tokenizers that drop no text. Reads the whole vocabulary."""
    spelled = max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)), default=1)
    return max(spelled, _LONGEST_SPECIAL_BYTES)


def prepare(
    request: GenerationRequest, tokenizer: Tokenizer, limits: PromptLimits, grammars: GrammarCompiler | None = None
) -> Prepared:  # fmt: skip
    """Tokenise, compile and check. Raises InvalidRequest, ContextLengthExceeded among them, with the message for the client."""
    sampling = request.sampling
    if request.grammar is not None and grammars is None:
        raise InvalidRequest("This engine does not offer structured output.", param="response_format")
    outside = next((key for key in sampling.logit_bias or () if not 0 <= key < tokenizer.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{outside} is not a token of this model.", param="logit_bias")
    outside = next((token for token in sampling.stop_token_ids if not 0 <= token < tokenizer.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{outside} is not a token of this model.", param="stop_token_ids")
    param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    prompt_ids = encode(request.prompt, tokenizer, limits) or _stand_in(tokenizer, param)
    _insist_on_rows(prompt_ids, tokenizer, limits, param)
    count = len(prompt_ids)
    if count >= limits.window:
        raise _too_long(limits.window, f"{count} tokens", param)
    caps = [cap for cap in (limits.max_prompt_tokens, request.max_prompt_tokens) if cap is not None]
    if caps and count > min(caps):
        raise ContextLengthExceeded(
            f"Prompts are limited to {min(caps)} tokens here, however the prompt is {count} tokens.", param=param
        )
    options = _option_paths(request, tokenizer, limits, limits.window - count, param) if request.options else None
    room = limits.window - count if options is None else 0
    text = request.prompt if isinstance(request.prompt, str) else None
    if isinstance(request.prompt, list):
        text = tokenizer.decode(prompt_ids)
    return Prepared(
        request=request,
        prompt_ids=prompt_ids,
        max_new_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        prompt_text=text,
        grammar=grammars.compile(*request.grammar) if request.grammar is not None else None,
        options=options,
    )


def _insist_on_rows(ids: list[int], tokenizer: Tokenizer, limits: PromptLimits, param: str) -> None:
    """A token that the model's table lacks would fail the step, and everybody's requests in it."""
    if tokenizer.vocab_size <= limits.vocab_size:
        return
    last, size = max(ids, default=0), limits.vocab_size
    if last >= size:
        raise InvalidRequest(f"The prompt holds token {last}, and this model knows those below {size}.", param=param)


def _option_paths(
    request: GenerationRequest, tokenizer: Tokenizer, limits: PromptLimits, room: int, param: str
) -> OptionPaths:  # fmt: skip
    ids = [tokenizer.encode(option, add_special=False) for option in request.options]
    for option in ids:
        _insist_on_rows(option, tokenizer, limits, param)
    paths = OptionPaths(ids, min(tokenizer.eos_token_ids, default=None))
    if paths.longest >= room:
        raise ContextLengthExceeded(
            f"The prompt leaves room for {room - 1} tokens, however the longest option needs {paths.longest}.", param=param
        )
    return paths


def encode(
    prompt: ChatPrompt | str | list[int], tokenizer: Tokenizer, limits: PromptLimits, add_special: bool = True
) -> list[int]:  # fmt: skip
    """Token ids of a prompt, or the given ones checked. Raises InvalidRequest."""
    if isinstance(prompt, list):
        size = min(tokenizer.vocab_size, limits.vocab_size)
        for i, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < size:
                raise InvalidRequest(f"Token ids of this model are integers from 0 to {size - 1}.", param=f"prompt[{i}]")
        return prompt
    _check_bytes(prompt, limits)
    try:
        return _encode_text(prompt, tokenizer, add_special)
    except UnicodeError:
        raise InvalidRequest("The prompt is not valid Unicode.", param="prompt") from None


def _stand_in(tokenizer: Tokenizer, param: str) -> list[int]:
    """What an empty prompt becomes: a model needs one token to start from."""
    if tokenizer.bos_token_id is None:
        raise InvalidRequest("The prompt is empty, and this model has no token that could stand for its start.", param=param)
    return [tokenizer.bos_token_id]


def _encode_text(prompt: ChatPrompt | str, tokenizer: Tokenizer, add_special: bool) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special=add_special)
    if not tokenizer.has_chat_template:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    taken = {"messages", "tools", "add_generation_prompt"}.intersection(prompt.template_args)
    if taken:
        raise InvalidRequest(f"`{min(taken)}` cannot be a template argument.", param="chat_template_kwargs")
    return tokenizer.encode_chat(
        list(prompt.messages), list(prompt.tools) or None, prompt.add_generation_prompt, **prompt.template_args
    )


def _check_bytes(prompt: ChatPrompt | str, limits: PromptLimits) -> None:
    """A lower bound of the token count, from the message texts alone."""
    chat = isinstance(prompt, ChatPrompt)
    texts = [message.get("content") for message in prompt.messages] if chat else [prompt]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str))
    fewest = -(-size // limits.longest_token_bytes)
    if fewest >= limits.window:
        raise _too_long(limits.window, f"{size} bytes, which is at least {fewest} tokens", "messages" if chat else "prompt")


def _too_long(window: int, found: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {window} tokens, however the prompt is {found}. "
        "At least one token must be left for the answer.",
        param=param,
    )


class Job:
    """`work` runs on the worker unless `skip()` says that nobody waits any more; `done` gets its value or a LayaError."""

    __slots__ = ("work", "done", "skip")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any], None], skip: Callable[[], bool]) -> None:
        self.work = work
        self.done = done
        self.skip = skip


class PreparationWorker:
    """One thread and its queue. `submit` and `close` are for the loop thread; `post` brings calls back to it."""

    def __init__(self, name: str, limit: int, post: Callable[[Callable[[], None]], None]) -> None:
        self._limit = limit
        self._post = post
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # bounded by `submit`, its only writer
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"laya-prepare-{name}", daemon=True)

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RateLimited when the queue is full, Unavailable after `close`."""
        if self._closed:
            raise Unavailable("The engine is shutting down.")
        if self._jobs.qsize() >= self._limit:
            raise RateLimited(f"{self._limit} requests are being prepared already.", retry_after=1.0)
        self._jobs.put(job)

    def close(self) -> None:
        """Refuse what is queued and end the thread. Returns at once."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.skip():
                self._post(partial(job.done, self._result(job)))

    def _result(self, job: Job) -> Any:
        if self._closed:
            return Unavailable("The engine is shutting down.")
        try:
            return job.work()
        except LayaError as error:
            return error
        except Exception:
            log.exception("preparing a request failed")
            return InternalError("The prompt could not be prepared.")
