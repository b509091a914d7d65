"""One choice's end and what it shows: finish reasons, stop tokens, log-probabilities beside held text."""

from __future__ import annotations

from laya.engine.answer import Answer
from laya.engine.sequence import Sequence
from laya.engine.step import Sampled
from laya.schema.generation import SamplingParams

EOS = 0
PIECES = {EOS: b"", 1: b"AB", 2: b"CD", 3: b"E", 4: b"\xf0\x9f", 5: b"\x9a\x80"}


class Pieces:
    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


def run(tokens: list[int], max_new: int = 100, **sampling):
    sequence = Sequence(1, [9], SamplingParams(**sampling))
    answer = Answer(sequence, Pieces(), frozenset({EOS}), max_new)
    deltas = []
    for token in tokens:
        sequence.token_ids.append(token)
        deltas.append(answer.accept(sequence, Sampled(token, -1.0, [(token, -1.0)])))
        if answer.finish_reason:
            break
    return deltas


def test_eos_ends_with_stop_and_shows_no_text():
    *_, last = run([1, EOS])
    assert (last.text, last.finish_reason, last.stop_match, last.token_ids) == ("", "stop", None, (EOS,))


def test_ignore_eos_goes_on_to_the_length():
    deltas = run([1, EOS, 2], max_new=3, ignore_eos=True)
    assert deltas[1] is None and deltas[2].text == "CD" and deltas[2].token_ids == (EOS, 2)
    assert deltas[2].finish_reason == "length"


def test_a_stop_token_is_named_and_its_text_is_left_out():
    *_, last = run([1, 3], stop_token_ids=(3,))
    assert (last.text, last.finish_reason, last.stop_match) == ("", "stop", 3)


def test_eos_before_min_tokens_does_not_end_the_answer():
    deltas = run([EOS, EOS, EOS], min_tokens=2)
    assert deltas[:2] == [None, None] and deltas[2].finish_reason == "stop"


def test_eos_as_the_last_allowed_token_is_a_stop():
    assert run([1, EOS], max_new=2)[-1].finish_reason == "stop"


def test_the_length_flushes_what_was_held():
    """(case 24)"""
    deltas = run([1, 4], max_new=2, stop=("ABX",))
    assert deltas[0] is None
    assert (deltas[1].text, deltas[1].finish_reason) == ("AB\ufffd", "length")


def test_tokens_and_logprobs_of_a_stop_string_stay_with_its_text():
    """(case 24)"""
    deltas = run([1, 2, 3], stop=("CDE",), logprobs=1)
    assert [d and (d.text, d.token_ids, len(d.logprobs)) for d in deltas] == [("AB", (1,), 1), None, ("", (), 0)]
    assert deltas[-1].stop_match == "CDE"


def test_logprobs_come_with_every_token_once_its_text_is_certain():
    deltas = run([4, 5, 2, 3], max_new=4, stop=("CDX",), logprobs=1)
    assert deltas[0] is None and deltas[1].text == "🚀" and deltas[1].token_ids == (4, 5)
    assert [entry.bytes for entry in deltas[1].logprobs] == [b"\xf0\x9f", b"\x9a\x80"]
    assert deltas[2] is None and deltas[3].token_ids == (2, 3) and deltas[3].logprobs[0].top[0][1] == "CD"
