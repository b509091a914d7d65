"""What a request looks like when it is redacted: every API, every way of writing a value, every mode."""

from __future__ import annotations

import json
import time

import pytest

from laya.config import RedactConfig
from laya.errors import InvalidRequest
from laya.stages.redact import Redactor
from redaction import CARD, EMAIL, IDENTITY, PHONE, REDACTOR, SECRET, chat, redact, restorer

VALUES = {"phone": PHONE, "email": EMAIL, "id": IDENTITY, "card": CARD, "secret": SECRET}


def content(found, index: int = 0):
    return json.loads(found.body)["messages"][index]["content"]


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_is_replaced_by_a_placeholder_of_its_name(kind):
    found = redact(chat(f"first {VALUES[kind]}, then {VALUES[kind]} again"))
    assert content(found) == f"first [{kind.upper()}_1], then [{kind.upper()}_1] again"
    assert found.counts == {kind: 2}


def test_a_body_without_values_is_given_back_as_it_is():
    body = chat("nothing here, 42 times", temperature=0.5)
    found = redact(body)
    assert found.body is body and found.counts == {} and found.vault is None


def test_all_but_the_values_keeps_its_bytes():
    body = b'{ "model":"m" ,"x":1.50e3,"big":123456789012345678901234567890,\n"messages":[{"role":"user","content":"at bob@example.com\\u0021"}] }'
    assert redact(body).body == body.replace(b"bob@example.com\\u0021", b"[EMAIL_1]!")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": [{"role": "system", "content": "V"}, {"role": "developer", "content": "V"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "V"}, {"type": "text", "text": "x"}]}]}),
        ("chat", {"messages": [{"role": "tool", "tool_call_id": "t", "content": "V"}]}),
        ("chat", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":"V"}'}}]}]}),
        ("chat", {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "description": "ask V"}}]}),
        ("chat", {"messages": [], "user": "V", "metadata": {"V": "V"}}),
        ("completions", {"prompt": "V"}),
        ("completions", {"prompt": ["x", "V"], "suffix": "V"}),
        ("responses", {"input": "V", "instructions": "V"}),
        ("responses", {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "V"}]}]}),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":"V"}'}, {"type": "function_call_output", "call_id": "c", "output": "V"}]}),
        ("messages", {"system": [{"type": "text", "text": "V"}], "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "V"}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"to": "V", "V": 1}}]}]}),
        ("embeddings", {"input": ["V", "x"]}),
        ("rerank", {"query": "V", "documents": ["V", {"text": "V"}]}),
        ("systemone", {"state": {"who": "V", "V": ["V"]}, "questions": {"q": {"type": "choice", "criteria": {"V": "V", "b": None}}}}),
    ],
)
@pytest.mark.parametrize("kind", VALUES)
def test_every_text_of_every_api_is_redacted_and_restored(api, body, kind):
    """(case 57)"""
    body = json.loads(json.dumps(body).replace("V", VALUES[kind]))
    found = redact(body, api)
    assert VALUES[kind] not in found.body.decode() and f"[{kind.upper()}_1]" in found.body.decode()
    assert json.loads(restorer(found, api).whole(found.body)) == body


def test_names_of_the_protocol_and_what_is_fetched_stay():
    body = {
        "model": EMAIL, "previous_response_id": PHONE, "prompt_cache_key": EMAIL,
        "messages": [{"role": "tool", "tool_call_id": PHONE, "content": [
            {"type": "image_url", "image_url": {"url": f"https://example.com/{PHONE}.png", "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA" * 30 + "+13800138000" * 3, "format": "wav"}},
        ]}], "seed": 13800138000,
    }  # fmt: skip
    assert redact(body).counts == {}


@pytest.mark.parametrize(
    "written",
    [
        '"bob\\u0040example.com"', '"\\u0062ob@example\\u002ecom"', '"\\uff11\\uff13\\uff18\\uff10\\uff10\\uff11\\uff13\\uff18\\uff10\\uff10\\uff10"',
        '"１３８００１３８０００"', '"bob＠example.com"', '"x\\n13800138000"', '"x\\t13800138000\\r\\n"', '"138\\u00a00013\\u00a08000"', '"\\\\n13800138000"',
        '"\\ud83d\\ude80 13800138000 \\ud83d"', '"https:\\/\\/x.example\\/?q=bob@example.com"', '"https://x.example/?q=bob%40example.com"',
        '"{\\"e\\":\\"bob\\\\u0040example.com\\"}"', '"say \\"13800138000\\""', '"C:\\\\13800138000"', '"(１３８－００１３－８０００)"', '"٠٠١ +٨٦ 13800138000"',
        '"\\u6211\\u7684\\u624b\\u673a13800138000"', '"我的手机13800138000。"',
    ],
)
def test_no_way_of_writing_a_value_hides_it(written):
    """Escapes, surrogate pairs, full-width digits, JSON inside a string. (case 57)"""
    body = b'{"messages":[{"role":"user","content":%b}]}' % written.encode()
    found = redact(body)
    assert sum(found.counts.values()) >= 1
    left = json.loads(found.body)["messages"][0]["content"]
    assert "3800138" not in left and "example.com" not in left and "１３８" not in left
    assert json.loads(restorer(found).whole(found.body)) == json.loads(body)


def test_values_inside_values_are_replaced_whole():
    """A phone inside an identity number, inside a URL, inside a secret. (case 57)"""
    text = f"id 110105138001380002 and https://u:{PHONE}x@h.example/?p={PHONE}&t=sk-{'a1B2' * 6}{PHONE} end"
    found = redact(chat(text))
    left = content(found)
    assert PHONE not in left.replace("110105138001380002", "") and "a1B2" not in left
    assert json.loads(restorer(found).whole(found.body)) == json.loads(chat(text))


def test_values_are_numbered_as_they_first_appear_so_a_longer_history_keeps_the_numbers():
    first = chat(f"a {PHONE} b {EMAIL}", "c 13900139000")
    longer = chat(f"a {PHONE} b {EMAIL}", "c 13900139000", "d 13700137000 and 13900139000", "carol@example.com")
    assert redact(longer).body.startswith(redact(first).body[:-2])
    assert content(redact(longer), 2) == "d [PHONE_3] and [PHONE_2]"


def test_placeholders_that_the_text_already_has_come_back_unharmed():
    text = f"template [PHONE_1] and [email 2] and [Phone\\_3]: {PHONE} {EMAIL} 13900139000 carol@example.com"
    found = redact(chat(text))
    assert "[PHONE_2]" in content(found) and "[PHONE_4]" in content(found) and "[EMAIL_3]" in content(found)
    assert restorer(found).whole(found.body) == chat(text)


def test_redacting_twice_changes_nothing_more():
    found = redact(chat(f"{PHONE} {EMAIL} {IDENTITY} {CARD} {SECRET} password={'Xk9#mQ2v'} api_key={'a1B2c3D4' * 3}"))
    again = redact(found.body)
    assert again.body == found.body and again.counts == {}


def test_a_secret_told_once_is_replaced_wherever_it_stands():
    found = redact(chat("password: Tr0ub4dor&3", "I typed Tr0ub4dor&3 twice", "\\u00e9 and Tr0ub4dor&3x"))
    assert "Tr0ub4dor" not in found.body.decode() and found.counts == {"secret": 3}
    assert content(found, 1) == "I typed [SECRET_1] twice"


def test_a_number_of_a_tools_arguments_is_replaced_by_a_string_so_that_they_stay_json():
    body = {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps(
        {"p": 13800138000, "list": [13900139000, 1], "text": "n:13700137000,"})}}]}]}
    arguments = json.loads(redact(body).body)["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"p": "[PHONE_1]", "list": ["[PHONE_2]", 1], "text": "n:[PHONE_3],"}
    state = redact({"state": {"phone": 13800138000, "count": 3}, "seed": 13800138000}, "systemone")
    assert json.loads(state.body) == {"state": {"phone": "[PHONE_1]", "count": 3}, "seed": 13800138000}


def test_block_refuses_and_names_the_kinds_but_no_value():
    redactor = Redactor(RedactConfig(mode="block"))
    with pytest.raises(InvalidRequest) as refused:
        redactor.redact(chat(f"{PHONE} {EMAIL}"), "chat")
    assert refused.value.code == "redaction_blocked" and refused.value.status == 400
    assert "email, phone" in refused.value.message and PHONE not in refused.value.message
    assert redactor.redact(chat("nothing"), "chat").vault is None


def test_report_counts_and_changes_nothing():
    body = chat(f"{PHONE} {EMAIL} {PHONE}")
    assert Redactor(RedactConfig(mode="report")).redact(body, "chat") == (body, {"phone": 2, "email": 1}, None)


def test_only_the_kinds_asked_for():
    found = redact(chat(f"{PHONE} {EMAIL}"), redactor=Redactor(RedactConfig(kinds=("email",))))
    assert content(found) == f"{PHONE} [EMAIL_1]"


def test_own_patterns_are_found_in_decoded_text_and_restored():
    redactor = Redactor(RedactConfig(patterns={"employee.no": r"EMP-\d{6}", "quoted": r'"[A-Z]{3}\n[A-Z]{3}"'}))
    body = chat(f'EMP-123456 and \u0045MP-654321, "ABC\nDEF" {PHONE}')
    found = redact(json.dumps(json.loads(body)).encode(), redactor=redactor)
    assert content(found) == "[EMPLOYEE_NO_1] and [EMPLOYEE_NO_2], [QUOTED_1] [PHONE_1]"
    assert json.loads(restorer(found).whole(found.body)) == json.loads(body)
    echo = {"choices": [{"message": {"tool_calls": [{"function": {"arguments": '{"a":"[QUOTED_1]"}'}}]}}]}
    restored = json.loads(restorer(found).whole(json.dumps(echo).encode()))["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(restored["function"]["arguments"]) == {"a": '"ABC\nDEF"'}


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", r"(?<=x)y", "a*", "(?=b)"])
def test_a_pattern_that_cannot_run_in_linear_time_is_refused_by_name(pattern):
    with pytest.raises(ValueError, match=r"stages\.redact\.patterns\.bad: "):
        Redactor(RedactConfig(patterns={"bad": pattern}))


def test_what_is_no_json_object_passes():
    for body in (b"", b"--boundary\r\nbob@example.com", b"[1]", b"\xff\xfe"):
        assert redact(body).body is body


@pytest.mark.parametrize(
    "unit",
    ["1", "+", "@", "sk-", "1 ", "12 345 ", "a@b.", "bob@example.com ", "13800138000 ", "(", "password=", "eyJ", "-----BEGIN ", "-----BEGIN RSA PRIVATE KEY-----\n|", "138-", "[PHONE_", "\\", '"', "１", "token: ", "/sk-", "0-00-00-00-", "%40", "00-000", "a1B2_", "电话"],
)
def test_time_is_linear_whatever_is_repeated(unit):
    """Ten times the text takes about ten times as long; a quadratic search would take a hundred. (case 58)"""

    def seconds(size: int) -> float:
        body = chat(unit * (size // len(unit)))
        began = time.thread_time()
        REDACTOR.redact(body, "chat")
        return time.thread_time() - began

    small = min(seconds(30_000) for _ in range(3))
    assert seconds(300_000) < 30 * small + 0.1


def test_own_patterns_run_in_linear_time_too():
    """(case 58)"""
    redactor = Redactor(RedactConfig(patterns={"evil": r"(a+)+$|(?:x+x+)+y"}))
    began = time.thread_time()
    redactor.redact(chat("a" * 100_000 + "!" + "x" * 100_000), "chat")
    assert time.thread_time() - began < 10  # Python's own engine would not come back at all


@pytest.mark.parametrize("ascii_only", [False, True])
def test_quotes_inside_the_texts_of_tool_arguments_leave_them_json(ascii_only):
    """A quote or backslash in a text, a full-width colon before a number, a number by itself. (case 57)"""
    given = {"a": 'say "x\\"', "l": ["\\\\ 座机：13900139000，传真：13700137000。"], "n": 13800138000, "o": ["\\", 13800138000, '"']}
    for text in (json.dumps(given, ensure_ascii=ascii_only), json.dumps({k: given[k] for k in ("a", "n", "o")})):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        found = redact({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
        masked = json.loads(json.loads(found.body)["messages"][0]["tool_calls"][0]["function"]["arguments"])
        assert masked["n"].startswith("[PHONE_") and masked["o"] == ["\\", masked["n"], '"'] and masked["a"] == given["a"]
        back = json.loads(restorer(found).whole(found.body))["messages"][0]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(back.replace('"13800138000"', "13800138000")) == json.loads(text)


@pytest.mark.parametrize("text", ["v13800138000", "13800138000x", "_13800138000", "x1.13800138000", "13800138000-beta", "ab13800138000"])
def test_digits_that_are_part_of_a_word_are_no_number(text):
    """(case 58)"""
    assert redact(chat(f"release {text} is out")).counts == {}
