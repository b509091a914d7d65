"""Sentencepiece vocabularies in GGUF, token for token as the sentencepiece package cuts the same text."""

from __future__ import annotations

import io
import struct

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laya.model.formats.gguf_header import read_header
from laya.model.spec import BrokenModel
from laya.model.tokenizer import ModelTokenizer, build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # token types, the same numbers in both worlds
CORPUS = [
    "The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x ** 2  # a square", "naïve café, Straße, Ärger",
    "aaaa aaaa aaa ababab abab banana bandana", "In 2024, 1234567 people read 89 books.", "你好，世界。今天天气很好。",
] * 20  # fmt: skip
TEXTS = [
    "Hello, world!  Two  spaces,\ttabs\n\nand lines.", "naïve café Straße", "你好，世界。", "🚀🔥 e\u0301", "   leading", "trailing   ", "",
    "aaaaaaa aaa", "abababab banana", "\x00\x7f",
]  # fmt: skip


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def processor(fields: dict) -> sentencepiece.SentencePieceProcessor:
    """The package's own model with the vocabulary of a GGUF file."""
    unknown = fields["tokenizer.ggml.unknown_token_id"]
    pieces = zip(*(fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True)
    model = bytearray()
    for i, (word, score, kind) in enumerate(pieces):
        spelled = word.replace(" ", "\u2581").encode()  # GGUF spells user-defined words with plain spaces
        model += field(1, field(1, spelled) + field(2, float(score)) + field(3, UNKNOWN if i == unknown else kind))
    model += field(2, field(3, 2) + field(35, 1) + field(40, unknown))  # byte pairs, with bytes to fall back to
    prefix = int(fields.get("tokenizer.ggml.add_space_prefix", True))
    model += field(3, field(1, b"identity") + field(3, prefix) + field(4, 0) + field(5, 1))
    return sentencepiece.SentencePieceProcessor(model_proto=bytes(model))


def trained() -> dict:
    """A small vocabulary as Llama's is: scores, byte words, a space before each text."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=480, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<think>"], minloglevel=2, num_threads=1,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.get_piece_size())

    def kind(i: int) -> int:
        if model.id_to_piece(i) == "<think>":
            return USER_DEFINED
        return CONTROL if model.is_control(i) else UNKNOWN if model.is_unknown(i) else BYTE if model.is_byte(i) else NORMAL

    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids], "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": model.unk_id(), "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }  # fmt: skip


@pytest.fixture(scope="module", params=["trained", "gemma"])
def pair(request) -> tuple[ModelTokenizer, sentencepiece.SentencePieceProcessor]:
    fields = trained() if request.param == "trained" else read_header(str(request.getfixturevalue("gemma_path"))).fields
    return build_tokenizer({"gguf": fields}), processor(fields)


@pytest.mark.parametrize("text", [*TEXTS, *CORPUS[:6]])
def test_ids_are_sentencepieces(pair, text):
    tokenizer, referee = pair
    assert tokenizer.encode(text, add_special=False) == referee.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Some letters often, so that pairs overlap, and any character at times. Sentencepiece's own sign for a space is read as one.
LETTERS = st.one_of(st.sampled_from("aabn het \n"), st.characters(codec="utf-8", exclude_characters="\u2581"))


@given(st.text(LETTERS, max_size=50))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_cut_as_sentencepiece_cuts_it_and_comes_back(pair, text):
    tokenizer, referee = pair
    ids = tokenizer.encode(text, add_special=False)
    assert ids == referee.encode(text)
    assert tokenizer.decode(ids) == text


def test_bos_comes_first_by_default():
    tokenizer = build_tokenizer({"gguf": trained()})
    ids = tokenizer.encode("the dog")
    assert ids[0] == tokenizer.bos_token_id and ids[1:] == tokenizer.encode("the dog", add_special=False)


def test_user_defined_words_stay_whole_and_have_text():
    tokenizer = build_tokenizer({"gguf": trained()})
    ids = tokenizer.encode("the<think>dog", add_special=False)
    assert "<think>" in [tokenizer.token_bytes(i).decode() for i in ids]


def test_scores_that_do_not_match_the_vocabulary_are_refused():
    fields = trained()
    with pytest.raises(BrokenModel, match="480 tokens and 479 scores"):
        build_tokenizer({"gguf": fields | {"tokenizer.ggml.scores": fields["tokenizer.ggml.scores"][:-1]}})
