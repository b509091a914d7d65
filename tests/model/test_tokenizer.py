"""Text to ids and back: byte for byte, and as the model's own tokenizer elsewhere would have it."""

from __future__ import annotations

import unicodedata

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.model.chat_template import ChatTemplate
from laya.model.formats import open_checkpoint
from laya.model.pretokenizers import pre_tokenizer
from laya.model.spec import UnsupportedModel
from laya.model.tokenizer import build_tokenizer
from laya.model.tokenizer_source import read_source

from . import gguf_files

TEXTS = [
    "Hello, world!  Two  spaces,\ttabs\n\nand lines.", "It's 2024-11-30, isn't it? 1234567", "naïve café Straße",
    "你好，世界。こんにちは", "🚀🔥 👩‍👩‍👧‍👦 e\u0301", "def f(x):\n    return x**2  # square\n", "   leading", "trailing   ", "", "\x00\x7f",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return build_tokenizer(open_checkpoint(smollm2_path).tokenizer)


@pytest.fixture(scope="module")
def referee(smollm2_path):
    from pathlib import Path

    from transformers import AutoTokenizer

    path = Path(smollm2_path)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_round_trip_and_concatenate(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


# Bytes that no token of SmolLM2's vocabulary stands for: some control characters, and lead bytes of planes 4 and up.
NOT_IN_VOCABULARY = b"\x04\x06\x13\x14\x16\x1d\xf1\xf2"


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips_but_for_bytes_the_vocabulary_lacks(tokenizer, referee, text):
    ids = tokenizer.encode(text)
    kept = text.encode().translate(None, NOT_IN_VOCABULARY)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == kept
    # Read from GGUF, transformers forgets that SmolLM2 cuts numerals out one by one: its pairs may join a space and half of one.
    if not any(unicodedata.category(c) in ("Nd", "Nl", "No") and not c.isascii() for c in text):
        assert ids == referee(text).input_ids


@pytest.mark.parametrize("numeral", ["¼", "²", "٣", "Ⅷ", "𝟙"])
def test_numerals_of_all_scripts_are_cut_out_as_the_model_was_trained(tokenizer, numeral):
    assert tokenizer.encode(f"a {numeral}{numeral}") == [
        *tokenizer.encode("a "), *tokenizer.encode(numeral), *tokenizer.encode(numeral)
    ]  # fmt: skip


def test_digits_are_single_tokens_as_the_model_was_trained(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]


def test_chat_prompt_is_rendered_as_transformers_renders_it(tokenizer, referee):
    messages = [{"role": "user", "content": "Hi <b>&amp;"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "1"}]
    assert tokenizer.has_chat_template
    for prompt in (True, False):
        expected = referee.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert tokenizer.render_chat(messages, None, prompt) == expected
    ids = tokenizer.encode_chat(messages, None, True)
    assert ids[0] == tokenizer.encode("<|im_start|>")[0] and len(tokenizer.encode("<|im_start|>")) == 1
    assert ids == tokenizer.encode(tokenizer.render_chat(messages, None, True), add_special=False)


def test_special_tokens_have_no_bytes_and_ids_outside_none_either(tokenizer):
    end = tokenizer.encode("<|im_end|>")[0]
    assert end in tokenizer.eos_token_ids and tokenizer.token_bytes(end) == b""
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""
    assert tokenizer.decode([end, *tokenizer.encode("ok"), end]) == "ok"


def test_a_character_split_over_tokens_decodes_when_whole(tokenizer):
    ids = tokenizer.encode("𓀀")
    assert len(ids) > 1 and "\ufffd" in tokenizer.decode(ids[:1]) and tokenizer.decode(ids) == "𓀀"


def test_a_lone_surrogate_is_the_clients_error(tokenizer):
    """(case 23)"""
    with pytest.raises(InvalidRequest):
        tokenizer.encode("x \ud83d")
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat([{"role": "user", "content": "x \ud83d"}], None, True)


@pytest.mark.parametrize("content", [None, ["a"], 5])
def test_messages_that_do_not_fit_are_the_clients_error(tokenizer, content):
    """(case 20)"""
    with pytest.raises(InvalidRequest):
        tokenizer.render_chat([{"role": "user", "content": content}], None, True)


def test_the_templates_own_refusal_is_passed_on():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([], None, True)


def test_templates_are_sandboxed():
    for text in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(InvalidRequest):
            ChatTemplate(text, {}).render([], None, True)


def test_templates_have_what_hugging_face_gives_them():
    text = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        "{% generation %}|{% endgeneration %}{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ flag }}"
    )
    rendered = ChatTemplate(text, {"bos_token": "<s>"}).render(
        [{"content": "a<b"}, {"content": "c"}], [{"n": "é<"}], False, flag=True
    )
    assert rendered == '<s>a<b|[{"n": "é<"}]4True'


@pytest.mark.parametrize("name", ["self", "messages", "args", "a b", ""])
def test_an_argument_may_have_any_name(tokenizer, name):
    """They are a client's: none of them is a fault of ours."""
    plain = tokenizer.render_chat([{"role": "user", "content": "x"}], None, True)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}], None, True, **{name: 1}) == plain
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}], None, True, **{name: 1})


def test_a_template_that_cannot_be_compiled_stops_the_start():
    with pytest.raises(UnsupportedModel, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_a_second_template_serves_requests_with_tools(tmp_path):
    source = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools", **_vocabulary(tmp_path)}
    tokenizer = build_tokenizer({"gguf": source})
    assert tokenizer.render_chat([], None, True) == "plain"
    assert tokenizer.render_chat([], [{}], True) == "tools"


def test_a_model_without_template_says_so(tmp_path):
    tokenizer = build_tokenizer({"gguf": _vocabulary(tmp_path)})
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([], None, True)


def test_bos_is_added_where_the_model_says(tmp_path):
    fields = _vocabulary(tmp_path)
    assert build_tokenizer({"gguf": fields}).encode("a")[0] != 256
    with_bos = build_tokenizer({"gguf": fields | {"tokenizer.ggml.add_bos_token": True}})
    assert with_bos.encode("a")[0] == 256 and with_bos.encode("a", add_special=False)[0] != 256


def test_unknown_tokenizers_are_refused_by_name(tmp_path):
    fields = _vocabulary(tmp_path)
    with pytest.raises(UnsupportedModel, match="'rwkv'.*gpt2"):
        build_tokenizer({"gguf": fields | {"tokenizer.ggml.model": "rwkv"}})
    with pytest.raises(UnsupportedModel, match="'martian'.*llama-bpe"):
        build_tokenizer({"gguf": fields | {"tokenizer.ggml.pre": "martian"}})


@pytest.mark.parametrize("name, pieces", [
    ("default", ["I", "'", "m", " ", "123", "45", " é", ".", "\n"]),
    ("gpt-2", ["I", "'m", " 12345", " é", ".", "\n"]),
    ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", " é", ".", "\n"]),
    ("llama-bpe", ["I", "'m", " ", "123", "45", " é", ".\n"]),
    ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "5", " é", ".\n"]),
])  # fmt: skip
def test_text_is_cut_as_each_family_cuts_it(name, pieces):
    text = "I'm 12345 é.\n"
    assert [text[a:b] for _, (a, b) in pre_tokenizer(name).pre_tokenize_str(text)] == pieces


def _vocabulary(folder):
    from laya.model.formats.gguf_header import read_header

    writer = gguf.GGUFWriter(str(folder / "v.gguf"), "llama")
    gguf_files.write_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(str(folder / "v.gguf")).fields


def test_source_knows_special_words(smollm2_path):
    source = read_source(open_checkpoint(smollm2_path).tokenizer)
    assert source.special_words["eos_token"] == "<|im_end|>" and source.eos_token_ids == {2} and not source.add_bos
