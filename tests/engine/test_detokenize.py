"""The incremental detokeniser: nothing of a stop string leaks, nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.engine.detokenize import Detokenizer


class Pieces:
    """A tokenizer whose token i spells the i-th piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def stream(pieces: list[bytes], stop: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[list[str], str | None]:
    """What goes out after each token and at the end, and the stop string."""
    text = Detokenizer(Pieces(pieces), stop)
    out = []
    for i in range(len(pieces)):
        out.append(text.push(i, i + 1 >= min_tokens))
        if text.stopped_by is not None:
            return out, text.stopped_by
    out.append(text.finish())
    return out, text.stopped_by


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: cut before the stop string that ends first, of those that end together the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    end, minus_length, s = min(ends)
    return text[: end + minus_length], s


def test_a_character_spread_over_tokens_comes_whole():
    """(case 12)"""
    rocket = "🚀".encode()
    assert stream([rocket[:1], rocket[1:3], rocket[3:] + b"!"])[0] == ["", "", "🚀!", ""]


def test_bytes_that_are_no_character_become_replacement_characters_only_when_certain():
    """(case 12)"""
    out, _ = stream([b"a\xe4", b"\xbd", b"b\xff", b"\xf0\x9f"])
    assert out == ["a", "", "\ufffdb\ufffd", "", "\ufffd"]


def test_a_stop_string_spread_over_tokens_never_leaks():
    """(case 24)"""
    out, stopped = stream([b"ABC", b"DE", b"FGH", b"IJ", b"K"], ("DEFGHIJ",))
    assert out == ["ABC", "", "", ""] and stopped == "DEFGHIJ"


def test_text_that_only_began_like_a_stop_string_is_sent_when_the_match_fails():
    """(case 24)"""
    assert stream([b"ABC", b"DE", b"FX", b"D"], ("DEFGHIJ",)) == (["ABC", "", "DEFX", "", "D"], None)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "matched"),
    [
        ([b"x", b"abc"], ("ab", "abc"), "x", "ab"),
        ([b"xa", b"b", b"c"], ("abc", "ab"), "x", "ab"),
        ([b"aaa"], ("aa",), "", "aa"),
        ([b"a", b"ba", b"aa"], ("aa",), "ab", "aa"),
        ([b"say abcd now"], ("cd", "abcd"), "say ", "abcd"),
        ([b"abab", b"abac"], ("abac",), "abab", "abac"),
        ([b"aaab"], ("aab",), "a", "aab"),
        ([b"ab", b"aba", b"bac"], ("ababac",), "ab", "ababac"),
        ([b"aabaaabaa", b"ab"], ("aabaaab",), "", "aabaaab"),
        ([b"aabaab", b"aaab"], ("aabaaa",), "aab", "aabaaa"),
        ([b"aabaaab", b"aaac"], ("aabaaac",), "aaba", "aabaaac"),
        ([b"e\xcc", b"\x81f"], ("e\u0301",), "", "e\u0301"),
        ([b"go\xf0\x9f", b"\x9a\x80on"], ("🚀",), "go", "🚀"),
        ([b"one stop two"], ("stop",), "one ", "stop"),
        ([b"a<", b"/think", b">b"], ("</think>",), "a", "</think>"),
    ],
)
def test_overlapping_and_odd_stop_strings(pieces, stop, text, matched):
    """(case 25)"""
    out, stopped = stream(pieces, stop)
    assert ("".join(out), stopped) == (text, matched)


def test_a_stop_string_completed_by_the_flush_of_an_unfinished_character():
    assert stream([b"a", b"\xf0"], ("\ufffd",)) == (["a", "", ""], "\ufffd")


def test_min_tokens_passes_over_matches_that_end_too_early():
    assert stream([b"ab", b"ab"], ("ab",), min_tokens=2) == (["ab", ""], "ab")
    assert stream([b"ab", b"c"], ("ab",), min_tokens=2) == (["ab", "c", ""], None)


def test_text_is_held_back_no_longer_than_the_longest_stop_string():
    """(case 25)"""
    text = Detokenizer(Pieces([b"ab" * 3]), ("ababababab",))
    for _ in range(50):
        text.push(0)
        if text.stopped_by:
            break
        assert text.num_decoded - text.num_emitted < 10
    assert text.stopped_by == "ababababab"


@given(st.lists(st.binary(max_size=5), max_size=30))
def test_the_stream_is_the_whole_text_for_any_bytes(pieces):
    """(case 12)"""
    assert "".join(stream(pieces)[0]) == b"".join(pieces).decode("utf-8", "replace")


_letters = st.text(alphabet="ab你", max_size=12)


@given(
    text=_letters,
    stop=st.lists(st.text(alphabet="ab你", min_size=1, max_size=5), max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
def test_any_cutting_into_tokens_gives_the_text_before_the_first_stop(text, stop, cuts):
    """(case 24)"""
    data = text.encode()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    out, stopped = stream(pieces, stop)
    assert ("".join(out), stopped) == naive(text, stop)
