"""From prompts to token ids: the window's edges, clamps, bytes, odd input; the worker."""

from __future__ import annotations

import threading

import msgspec
import pytest

from laya.engine.prepare import Job, PreparationWorker, PromptLimits, encode, longest_token_bytes, prepare
from laya.errors import ContextLengthExceeded, InternalError, InvalidRequest, RateLimited, Unavailable
from laya.schema.generation import ChatPrompt, GenerationRequest, SamplingParams

from .fake_runner import VOCAB, FakeTokenizer

TOKENIZER = FakeTokenizer()


def limits(window: int = 100, cap: int | None = None) -> PromptLimits:
    return PromptLimits(window=window, max_prompt_tokens=cap, longest_token_bytes=longest_token_bytes(TOKENIZER), vocab_size=1 << 20)


def prepared(prompt, *, window: int = 100, cap: int | None = None, key_cap: int | None = None, tokenizer=TOKENIZER, **sampling):
    request = GenerationRequest(id="r", prompt=prompt, sampling=SamplingParams(**sampling), max_prompt_tokens=key_cap)
    return prepare(request, tokenizer, limits(window, cap))


@pytest.mark.parametrize(("length", "room"), [(98, 2), (99, 1)])
def test_a_prompt_below_the_window_leaves_the_room(length, room):
    """(case 52)"""
    assert prepared("x" * length).max_new_tokens == room


@pytest.mark.parametrize("length", [100, 101, 150])
def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers(length):
    """(case 26) (case 28) (case 52)"""
    with pytest.raises(ContextLengthExceeded) as refused:
        prepared("x" * length)
    assert f"maximum context length is 100 tokens, however the prompt is {length} tokens" in refused.value.message
    assert refused.value.code == "context_length_exceeded" and refused.value.status == 400 and refused.value.param == "prompt"


def test_max_tokens_is_clamped_to_the_room():
    """(case 26)"""
    assert prepared("x" * 60, max_tokens=65535).max_new_tokens == 40
    assert prepared("x" * 60, max_tokens=40).max_new_tokens == 40
    assert prepared("x" * 60, max_tokens=7).max_new_tokens == 7
    assert prepared("x" * 60).max_new_tokens == 40
    assert prepared("x" * 60, max_tokens=0).max_new_tokens == 0


def test_a_prompt_too_large_by_its_bytes_is_refused_before_it_is_tokenised():
    """(case 28)"""

    class Untouched(FakeTokenizer):
        def encode(self, text, *, add_special=True):
            raise AssertionError("tokenised")

    size = 100 * longest_token_bytes(TOKENIZER)
    for prompt in ("x" * size, ChatPrompt(messages=({"role": "user", "content": "你" * (size // 3 + 1)},))):
        with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 100 tokens.*at least \d+ tokens"):
            prepared(prompt, tokenizer=Untouched())


def test_the_longest_token_bounds_any_text_from_below():
    assert longest_token_bytes(TOKENIZER) == 64  # special tokens may stand for that much
    assert all(len(TOKENIZER.token_bytes(i)) <= 64 for i in range(VOCAB))


def test_caps_on_input_are_the_lower_of_the_engines_and_the_keys():
    for caps in ({"cap": 10}, {"key_cap": 10}, {"cap": 10, "key_cap": 50}, {"cap": 50, "key_cap": 10}):
        assert prepared("x" * 10, **caps).prompt_ids
        with pytest.raises(ContextLengthExceeded, match="limited to 10 tokens here, however the prompt is 11 tokens"):
            prepared("x" * 11, **caps)


def test_an_empty_prompt_becomes_the_start_token_where_there_is_one():
    """(case 30)"""
    assert prepared("").prompt_ids == prepared([]).prompt_ids == [256]
    without = FakeTokenizer()
    without.bos_token_id = None
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        prepared("", tokenizer=without)


def test_a_chat_goes_through_the_template_and_needs_one():
    chat = ChatPrompt(messages=({"role": "user", "content": "hi"},))
    made = prepared(chat)
    assert TOKENIZER.decode(made.prompt_ids) == "<user>hi<assistant>" and made.prompt_text is None
    without = FakeTokenizer()
    without.has_chat_template = False
    with pytest.raises(InvalidRequest, match="no chat template"):
        prepared(chat, tokenizer=without)
    with pytest.raises(InvalidRequest, match="`tools` cannot be"):
        prepared(ChatPrompt(messages=(), template_args={"tools": []}))


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [1, True], [1, 2.0], [1, "2"], [10**30]])
def test_token_ids_that_are_none_are_refused(ids):
    """(case 30)"""
    with pytest.raises(InvalidRequest) as refused:
        prepared(ids)
    assert refused.value.param == f"prompt[{len(ids) - 1}]"


def test_texts_for_echo_are_kept_or_decoded():
    assert prepared("abc").prompt_text == "abc"
    assert prepared(TOKENIZER.encode("abc")).prompt_text == "abc"


def test_a_lone_surrogate_is_the_clients_mistake():
    """(case 23)"""
    for prompt in ("x \ud83d", ChatPrompt(messages=({"role": "user", "content": "x \ud83d"},))):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            prepared(prompt)


def test_biases_for_tokens_that_do_not_exist_and_grammars_are_refused():
    """(case 30)"""
    assert prepared("x", logit_bias={0: 1.0, VOCAB - 1: -1.0}).prompt_ids
    with pytest.raises(InvalidRequest, match=f"{VOCAB} is not a token"):
        prepared("x", logit_bias={VOCAB: 1.0})
    assert prepared("x", stop_token_ids=(0, VOCAB - 1)).prompt_ids
    for token in (VOCAB, -1):
        with pytest.raises(InvalidRequest, match=f"{token} is not a token") as refused:
            prepared("x", stop_token_ids=(7, token))
        assert refused.value.param == "stop_token_ids"
    request = GenerationRequest(id="r", prompt="x", sampling=SamplingParams(), grammar=("regex", "a+"))
    with pytest.raises(InvalidRequest, match="structured output"):
        prepare(request, TOKENIZER, limits())


def test_counting_an_empty_text_gives_no_tokens():
    assert encode("", TOKENIZER, limits()) == []


class Worker:
    """A worker whose posts are collected, and whose jobs wait until the gate opens."""

    def __init__(self, limit: int) -> None:
        self.gate = threading.Event()
        self.started = threading.Event()
        self.results: list = []
        self.arrived = threading.Semaphore(0)
        self.worker = PreparationWorker("test", limit, self._post)
        self.worker.start()

    def _post(self, call) -> None:
        call()
        self.arrived.release()

    def submit(self, work, skip=lambda: False) -> None:
        self.worker.submit(Job(work, self.results.append, skip))

    def block(self) -> None:
        def wait():
            self.started.set()
            assert self.gate.wait(10)

        self.submit(wait)
        assert self.started.wait(10)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=10)

    def end(self) -> None:
        self.gate.set()
        self.worker.close()
        self.worker.thread.join(10)
        assert not self.worker.thread.is_alive()


def test_the_worker_is_bounded_skips_the_cancelled_and_survives_any_failure():
    """(case 51)"""
    box = Worker(limit=3)
    box.block()

    def broken():
        raise KeyError("secret prompt")

    def refused():
        raise InvalidRequest("no")

    box.submit(broken)
    box.submit(refused)
    box.submit(lambda: 1 / 0, skip=lambda: True)
    with pytest.raises(RateLimited):
        box.submit(lambda: None)
    box.gate.set()
    box.wait_for(3)
    assert box.results[0] is None
    assert isinstance(box.results[1], InternalError) and "secret" not in box.results[1].message
    assert isinstance(box.results[2], InvalidRequest)
    box.submit(lambda: 42)
    box.wait_for(1)
    assert box.results[3] == 42
    box.end()


def test_a_closed_worker_answers_what_is_queued():
    box = Worker(limit=3)
    box.block()
    box.submit(lambda: 42)
    box.worker.close()
    box.end()
    assert isinstance(box.results[1], Unavailable)
    with pytest.raises(Unavailable):
        box.submit(lambda: None)


@pytest.mark.parametrize("prompt", ["x" * 5, [7, VOCAB - 1]])
def test_a_token_that_the_models_table_lacks_is_refused_before_it_fails_a_step_for_everybody(prompt):
    """Tokenizers with more words than the model has rows: a word was added and the model left as it was."""
    smaller = msgspec.structs.replace(limits(), vocab_size=min(TOKENIZER.encode("x")[0], VOCAB - 1))
    request = GenerationRequest(id="r", prompt=prompt, sampling=SamplingParams())
    with pytest.raises(InvalidRequest, match=str(smaller.vocab_size - isinstance(prompt, list))):
        prepare(request, TOKENIZER, smaller)
