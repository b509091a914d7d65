"""laya.yaml -> Config: what is accepted, what it becomes, and how each mistake is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laya.config import LOCAL, InferenceConfig, load, loads, served_name
from laya.config.notices import notices
from laya.errors import ConfigError

FIRST = """
server: {host: 0.0.0.0, port: 8000, log_level: info}
router: {mode: memory, cache_size: 4096, timeout_ms: 50}
inference: {engine: auto, model: /models/m.gguf, max_seq_len: 4096, gpu_memory_utilization: 0.85}
"""
SECOND = """
inference:
  engine: nano-vllm
  model: /models/m
  max_seq_len: 2048
  max_num_seqs: 2
  gpu_memory_utilization: 0.75
  enforce_eager: true
  swap_space: 1
"""
DESIGN = """
server:
  host: 127.0.0.1
  max_head_bytes: 32KiB
auth:
  keys:
    - {name: ci, key: "${CI_KEY}", routes: [qwen], rpm: 600, tpm: 200000, max_concurrent: 8, max_prompt_tokens: null}
backends:
  gpu-box: {url: "http://127.0.0.1:8001/v1", key: null, weight: 1, max_inflight: 64, health: /health,
            connect_timeout_s: 2, first_byte_timeout_s: 300, idle_timeout_s: 120, headers: {}}
  sock:    {url: "unix:/run/x.sock", base: /v1}
  coder:   {command: "llama-server -m coder.gguf --port {port}", health: /health, start_timeout_s: 120, memory: 6GiB}
routes:
  - {name: openai, match: ["gpt-4o", "gpt-4o-*"], to: local}
  - name: qwen
    match: "qwen/*"
    to: [{backend: gpu-box, model: qwen3-8b}, {backend: coder, weight: 1}]
    policy: prefix
    redact: true
    fallback: [openai]
  - name: auto
    match: auto
    classify:
      - {to: local, when: {max_prompt_tokens: 800, any_words: [keywords, 提取], no_code: true}}
      - {to: gpu-box}
inference:
  model: models/small.gguf
"""


def refused(text: str | bytes, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, environ)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 78
    return message


def test_the_two_files_people_have_load_as_they_are():
    first, second = loads(FIRST), loads(SECOND)
    assert (first.server.host, first.router.timeout_ms, first.inference.max_seq_len) == ("0.0.0.0", 50.0, 4096)
    assert second.inference.engine == "nano-vllm" and second.inference.enforce_eager is True
    assert second.inference.swap_space == 1 << 30 and second.inference.gpu_memory_utilization == 0.75


def test_the_design_file_loads_and_is_normalised():
    config = loads(DESIGN, {"CI_KEY": "s3cret"})
    assert config.auth.keys[0].key == "s3cret" and config.server.max_head_bytes == 32768
    openai, qwen, auto = config.routes
    assert openai.match == ("gpt-4o", "gpt-4o-*") and openai.to[0].backend == LOCAL
    assert qwen.match == ("qwen/*",) and [t.model for t in qwen.to] == ["qwen3-8b", None] and qwen.redact is True
    assert auto.classify[0].when.any_words == ("keywords", "提取") and auto.classify[1].when is None
    assert config.backends["coder"].memory == 6 << 30
    assert config.backends["sock"].max_inflight == 64


def test_the_configuration_cannot_be_changed():
    config = loads(FIRST)
    with pytest.raises(AttributeError):
        config.server.port = 1


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "server:\nrouter:\n", "\ufeffserver: {}\n"])
def test_an_empty_file_gives_the_defaults_and_the_embedded_model(text):
    """(case 64)"""
    config = loads(text)
    assert config.server.port == 8000 and config.inference == InferenceConfig()
    assert config.engines_by_name() == {LOCAL: InferenceConfig()}


def test_backends_alone_make_a_router_without_an_engine():
    config = loads("backends: {a: {url: 'http://h:1/v1'}}\nroutes: [{match: '*', to: a}]")
    assert config.inference is None and config.engines_by_name() == {}


def test_without_a_file_the_defaults_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(None, {}).source is None
    (tmp_path / "laya.yaml").write_text("server: {port: 81}")
    config = load(None, {})
    assert config.source == "laya.yaml" and config.server.port == 81
    assert config.path_of("models/x.gguf") == str(tmp_path / "models/x.gguf")


def test_relative_paths_start_at_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    config = load(str(tmp_path / "a.yaml"), {})
    assert config.path_of("m.gguf") == str(tmp_path / "m.gguf") and config.path_of("/m.gguf") == "/m.gguf"


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read: No such file"):
        load("nowhere.yaml", {})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("backend: {}", ["laya.yaml:1: backend: unknown key (did you mean backends?)", "server, auth"]),
        ("server:\n  prot: 1", ["laya.yaml:2: server.prot: unknown key (did you mean port?)"]),
        ("server:\n  port: eight", ["laya.yaml:2: server.port: found \"eight\"", "a whole number from 0 to 65535"]),
        ("server:\n  port: 70000", ["laya.yaml:2: server.port: found 70000", "from 0 to 65535"]),
        ("server:\n  port: true", ["server.port: found true"]),
        ("server:\n  port: 80.0", ["server.port: found 80.0"]),
        ("server:\n\n  host: 12", ["laya.yaml:3: server.host: found 12 (put it in quotes)"]),
        ("server: []", ["laya.yaml:1: server: found a list; allowed: a map with the keys host"]),
        ("server:\n  log_level: inf", ["one of debug, error, info, warning", "did you mean info?"]),
        ("server:\n  max_body_bytes: 32M", ["server.max_body_bytes: found \"32M\"", "a size (16MiB, or bytes)"]),
        ("server:\n  header_timeout_s: 0", ["header_timeout_s: found 0; allowed: a number above 0 up to 86400"]),
        ("server:\n  port: null", ["server.port: found nothing (null)"]),
        ("server: {host: ''}", ['server.host: found ""; allowed: text']),
        ("inference: {gpu_memory_utilization: 1.5}", ["inference.gpu_memory_utilization: found 1.5", "above 0 up to 1"]),
        ("inference: {swap_space: 1073741824}", ["inference.swap_space: found 1073741824", "GiB", "to 16TiB"]),
        ("inference: {watchdog: {soft: 0.98}}", ["inference.watchdog.soft: found 0.98, not below hard"]),
        ("inference:\n  model: m.gguf\n  engines: {a: {}}", ["laya.yaml:2: inference.model: found model beside engines"]),
        ("inference:\n  engines:\n    a: {watchdog: {soft: 0.99}}", ["laya.yaml:3: inference.engines.a.watchdog.soft"]),
        ("engines:\n  a: {}", ["laya.yaml:1: engines: unknown key"]),
        ("backends:\n  b: {url: 'ftp://x'}", ["laya.yaml:2: backends.b.url: found a value that is not shown", "http://"]),
        ("backends:\n  b: {}", ["laya.yaml:2: backends.b: found neither url nor command"]),
        ("backends:\n  b: {url: 'http://h:99999/'}", ["backends.b.url: found a port that is none"]),
        ("backends:\n  b: {command: 'x --port 1'}", ["backends.b.command: found a command without {port}"]),
        ("backends:\n  local: {url: 'http://h/'}", ["backends.local: found a backend called local"]),
        ("backends:\n  'a b': {url: 'http://h/'}", ["laya.yaml:2: backends.a b: found \"a b\"; allowed: a name"]),
        ("routes:\n- {match: x}", ["laya.yaml:2: routes[0]: found no target for every request"]),
        ("routes:\n- {to: local}", ["laya.yaml:2: routes[0]: found no key match"]),
        ("routes:\n- {match: x, to: []}", ["routes[0].to: found an empty list"]),
        ("routes:\n- match: x\n  to:\n  - local\n  - gpu", ["laya.yaml:5: routes[0].to[1]: found the unknown backend or en"]),
        ("routes:\n- {match: x, to: locl}", ["routes[0].to[0]: found the unknown", "locl (did you mean local?)"]),
        ("routes:\n- {name: a, match: x, to: local, fallback: [b]}", ["routes[0].fallback[0]: found the unknown route b"]),
        ("routes:\n- {name: a, match: x, to: local}\n- {name: a, match: y, to: local}", ["laya.yaml:3: routes[1].name: found"]),
        ("routes:\n- {match: x, classify: [{to: local, when: {}}]}", ["found no target for every request"]),
        ("routes:\n- {match: x, classify: [{to: local}, {to: local}]}", ["classify[0]: found a rule without when before"]),
        ("auth: {keys: [{name: a, key: ''}]}", ["auth.keys[0].key: found an empty string", "never empty"]),
        ("auth: {keys: [{name: a, key: x, routes: [b]}]}", ["auth.keys[0].routes[0]: found the unknown route b"]),
        ("server: {tls: {key: a}}", ["server.tls: found only one of certificate and key"]),
        ("router: {mode: shared}", ["router.mode: found shared without router.redis"]),
        ("stages: {redact: {kinds: [phone, fax]}}", ["stages.redact.kinds[1]: found \"fax\""]),
        ("stages: {custom: [nocolon]}", ["stages.custom[0]"]),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_place_key_and_what_is_allowed(text, parts):
    message = refused(text)
    for part in parts:
        assert part in message


def test_backends_without_routes_say_what_is_missing():
    assert "found no routes and no engine" in refused("backends: {a: {url: 'http://h:1/v1'}}")


def test_a_key_is_never_shown_in_an_error():
    assert "hunter two" not in refused("auth: {keys: [{name: a, key: 'hunter two'}]}")
    assert "u:pw" not in refused("backends: {b: {url: 'http://u:pw@h:0/'}}")


def test_two_names_for_one_key_are_refused_and_two_keys_of_one_name():
    assert "that another name has" in refused("auth: {keys: [{name: a, key: x}, {name: b, key: x}]}")
    assert "the name a twice" in refused("auth: {keys: [{name: a, key: x}, {name: a, key: y}]}")


def test_engines_are_targets_and_local_means_the_first():
    engines = "inference:\n  engines:\n    small: {model: s.gguf}\n    large: {model: l.gguf, name: big}\n"
    config = loads(engines + "routes: [{match: x, to: local}]")
    assert list(config.engines_by_name()) == ["small", "large"]
    assert config.engine_target(LOCAL) == "small" and config.engine_target("large") == "large"
    assert config.engine_target("other") is None
    assert [served_name(e) for e in config.engines_by_name().values()] == ["s", "big"]


def test_an_open_address_without_keys_is_noticed():
    assert any("anybody may call" in line for line in notices(loads(FIRST)))
    assert notices(loads("")) == []


def test_importing_the_configuration_loads_nothing_heavy():
    code = (
        "import sys, laya.config; heavy = {'torch', 'transformers', 'asyncio', 'uvloop', 'difflib', 'urllib.request'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
