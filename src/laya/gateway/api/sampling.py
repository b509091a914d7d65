"""What chat and completions share: sampling members to `SamplingParams`, ids and logprobs of the answer."""

from __future__ import annotations

import itertools
import os
import time

from laya.errors import InvalidRequest
from laya.schema.codec import encode_json
from laya.schema.generation import Finished, SamplingParams, TokenLogprob
from laya.schema.openai import Sampling

DONE_FRAME = b"data: [DONE]\n\n"
COMMENT_FRAME = b": keep-alive\n\n"
MAX_STOPS = 16  # OpenAI allows 4; local users pass more; the scan over them is linear in their number

# Unique for ever: a random part drawn once a process, and a count.
_run = os.urandom(9).hex()
_count = itertools.count(1)


def new_id(prefix: str) -> str:
    return f"{prefix}{_run}{next(_count):08x}"


def now() -> int:
    return int(time.time())


def frame(value: object) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"At most {MAX_STOPS} stop strings are allowed.", param="stop")
    if "" in stops:
        raise InvalidRequest("A stop string must not be empty.", param="stop")
    return stops


def bias_of(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    result = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:  # no vocabulary has a billion tokens
            raise InvalidRequest("The keys of `logit_bias` must be token ids.", param="logit_bias")
        result[int(key)] = value
    return result


def sampling_of(
    request: Sampling, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:  # fmt: skip
    """`max_tokens` None means the room left; a `top_k` of -1 means off, as in vLLM."""

    def given(value, default):
        return default if value is None else value

    return SamplingParams(
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(0, given(request.top_k, 0)),
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        logit_bias=bias_of(request.logit_bias),
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=given(request.min_tokens, 0),
        stop=stops_of(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=given(request.n, 1),
    )


def usage_of(event: Finished) -> dict:
    return {
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.completion_tokens,
        "total_tokens": event.prompt_tokens + event.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
    }


def chat_logprob(entry: TokenLogprob) -> dict:
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.bytes),
        "top_logprobs": [
            {"token": text, "logprob": value, "bytes": list(raw)} for _, text, raw, value in entry.top
        ],
    }  # fmt: skip
