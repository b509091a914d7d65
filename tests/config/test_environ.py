"""Overrides by variables and references to them: everywhere, typed, and refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.config import loads
from laya.config.environ import variable_names
from laya.config.shape import Fields, Items, Scalar, config_shape
from laya.config.units import format_size, parse_bool, parse_float, parse_int, parse_size
from laya.errors import ConfigError

BASE = "backends: {gpu-box: {url: 'http://h:1/v1'}}\ninference: {model: m.gguf}\n"


def refused(environ: dict[str, str], text: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1", True), ("true", True), ("TRUE", True), ("yes", True), ("On", True), ("0", False), ("False", False), ("no", False),
     ("OFF", False)],
)  # fmt: skip
def test_booleans_have_one_strict_parser(written, value):
    """(case 62)"""
    assert loads(BASE, {"LAYA_STAGES__REDACT__ENABLED": written}).stages.redact.enabled is value


@pytest.mark.parametrize("written", [" off", "off ", "", "2", "t", "enabled", "null"])
def test_a_boolean_that_is_none_names_the_variable(written):
    """(case 62)"""
    message = refused({"LAYA_STAGES__REDACT__ENABLED": written})
    assert message.startswith("LAYA_STAGES__REDACT__ENABLED: stages.redact.enabled: found ") and "true or false" in message


@pytest.mark.parametrize("written", ["0x50", "8_000", "8e3", " 80", "080", "80.0", "eighty", "99999"])
def test_a_number_that_is_none_names_the_variable(written):
    """(case 62)"""
    assert refused({"LAYA_SERVER__PORT": written}).startswith("LAYA_SERVER__PORT: server.port: found ")


def test_every_scalar_and_list_has_a_variable():
    names = variable_names(config_shape())
    assert {"LAYA_SERVER__TLS__CERTIFICATE", "LAYA_ROUTER__RESPONSES__TTL_S", "LAYA_AUTH__KEYS"} <= set(names)
    assert len(names) == len(set(names))
    for name in names:  # each is taken to its setting: a wrong value is refused there and nowhere else
        assert refused({name: "\x00"}).startswith(f"{name}: "), name


def test_overrides_reach_scalars_lists_maps_and_nested_sections():
    config = loads(
        BASE,
        {
            "LAYA_SERVER__PORT": "81",
            "LAYA_SERVER__MAX_HEAD_BYTES": "16KiB",
            "LAYA_SERVER__CORS_ORIGINS": '["http://a.example"]',
            "LAYA_INFERENCE__WATCHDOG__SOFT": "0.5",
            "LAYA_INFERENCE__SWAP_SPACE": "2",
            "LAYA_INFERENCE__KV_CACHE": "64MiB",
            "LAYA_INFERENCE__MAX_SEQ_LEN": "null",
            "LAYA_BACKENDS__GPU_BOX__WEIGHT": "3",
            "LAYA_BACKENDS__GPU_BOX__HEADERS": '{"x-team": "a"}',
            "LAYA_STAGES__REDACT": '{"mode": "block", "enabled": true}',
            "LAYA_STAGES__REDACT__ENABLED": "false",
        },
    )
    assert (config.server.port, config.server.max_head_bytes, config.server.cors_origins) == (81, 16384, ("http://a.example",))
    assert config.inference.watchdog.soft == 0.5 and config.inference.swap_space == 2 << 30
    assert config.inference.kv_cache == 64 << 20 and config.inference.max_seq_len is None
    assert config.backends["gpu-box"].weight == 3.0 and config.backends["gpu-box"].headers == {"x-team": "a"}
    assert config.stages.redact.mode == "block" and config.stages.redact.enabled is False


def test_whole_sections_come_as_json():
    config = loads(
        "",
        {
            "LAYA_BACKENDS": '{"b": {"url": "http://h:1"}}',
            "LAYA_ROUTES": '[{"match": "x*", "to": "b"}, {"match": ["y"], "to": [{"backend": "b", "model": "z"}]}]',
            "LAYA_BACKENDS__B__WEIGHT": "2",
        },
    )
    assert config.backends["b"].weight == 2.0 and config.routes[1].to[0].model == "z"


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("LAYA_SERVER__PROT", "1", "LAYA_SERVER__PROT: no such setting (did you mean LAYA_SERVER__PORT?)"),
        ("LAYA_SERVRE__PORT", "1", "LAYA_SERVRE__PORT: no such setting (did you mean LAYA_SERVER__PORT?)"),
        ("LAYA_SERVER__PORT__X", "1", "LAYA_SERVER__PORT__X: no such setting"),
        ("LAYA__X", "1", "LAYA__X: no such setting"),
        ("LAYA_ROUTES__0__TO", "x", "LAYA_ROUTES__0__TO: no such setting"),
        ("LAYA_BACKENDS__NEW__URL", "http://h", "no NEW in backends; allowed: gpu-box, or the whole map as JSON in LAYA_BAC"),
        ("LAYA_ROUTES", "[", "LAYA_ROUTES: routes: found text that is not JSON"),
        ("LAYA_ROUTES", '[{"match": "a", "match": "b", "to": "local"}]', "the key 'match' twice"),
        ("LAYA_ROUTES", '[{"match": "a", "to": "nope"}]', "LAYA_ROUTES: routes[0].to[0]: found the unknown backend"),
        ("LAYA_ROUTES", "[" * 100_000, "LAYA_ROUTES: routes: found text that is not JSON"),
        ("LAYA_SERVER__CORS_ORIGINS", "http://a", "LAYA_SERVER__CORS_ORIGINS: server.cors_origins: found text that"),
        ("LAYA_SERVER__CORS_ORIGINS", "[NaN]", "not JSON"),
        ("LAYA_ROUTER__MODE", "disk", "LAYA_ROUTER__MODE: router.mode: found \"disk\""),
        ("LAYA_ROUTER__DEFAULT_MODEL", "", "LAYA_ROUTER__DEFAULT_MODEL: router.default_model: found \"\""),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named_with_the_nearest_right_one(variable, value, part):
    """(case 62)"""
    assert part in refused({variable: value})


def test_variables_without_two_underscores_are_left_alone():
    assert loads(BASE, {"LAYA_PORT": "1", "LAYA_HOST": "x", "LAYA_SERVER": "{}", "PATH": "x__y"}).server.port == 8000


def test_two_backends_that_one_variable_could_mean_are_refused():
    text = "backends: {a-b: {url: 'http://h'}, a.b: {url: 'http://h'}}\ninference: {}"
    assert "A_B means a-b and a.b" in refused({"LAYA_BACKENDS__A_B__WEIGHT": "1"}, text)


TEXT_WITH_REFERENCES = """
server: {host: "${HOST}", port: "${PORT}", cors_origins: ["https://${DOMAIN:-a.example}"], log_level: "${LEVEL:-info}"}
auth: {keys: [{name: "${WHO}", key: "${KEY}"}]}
backends: {b: {url: "http://${HOST}:${PORT}/v1", headers: {x-a: "${KEY}"}, weight: "${W:-2}"}}
routes: [{match: ["${WHO}-*"], to: "${TO}"}]
stages: {cache: {enabled: "${CACHE:-yes}", max_bytes: "${SIZE:-2MiB}"}}
inference: {model: "/m/${WHO}.gguf"}
"""
VARIABLES = {"HOST": "h.example", "PORT": "81", "WHO": "ci", "KEY": "12345", "TO": "b"}


def test_references_work_in_every_string_and_are_read_by_the_wanted_type():
    """(case 63)"""
    config = loads(TEXT_WITH_REFERENCES, VARIABLES)
    assert (config.server.host, config.server.port, config.server.log_level) == ("h.example", 81, "info")
    assert config.server.cors_origins == ("https://a.example",)
    assert (config.auth.keys[0].name, config.auth.keys[0].key) == ("ci", "12345")
    assert config.backends["b"].url == "http://h.example:81/v1" and config.backends["b"].headers == {"x-a": "12345"}
    assert config.backends["b"].weight == 2.0 and config.stages.cache.enabled is True
    assert config.stages.cache.max_bytes == 2 << 20
    assert config.routes[0].match == ("ci-*",) and config.routes[0].to[0].backend == "b"
    assert config.inference.model == "/m/ci.gguf"


@pytest.mark.parametrize("missing", sorted(VARIABLES))
def test_a_reference_to_nothing_is_refused_with_its_place(missing):
    """(case 63)"""
    message = refused({k: v for k, v in VARIABLES.items() if k != missing}, TEXT_WITH_REFERENCES)
    assert message.startswith("laya.yaml:") and f"the variable {missing} is not set" in message


def test_a_default_stands_in_for_an_empty_variable():
    """(case 63)"""
    assert loads("server: {host: '${H:-a}'}", {"H": ""}).server.host == "a"
    assert loads("server: {host: '${H:-a}'}", {"H": "b"}).server.host == "b"


def test_a_reference_where_a_list_stands_is_json():
    """(case 63)"""
    keys = '[{"name": "a", "key": "${K}"}]'
    assert loads("auth: {keys: '${KEYS}'}", {"KEYS": keys}).auth.keys[0].key == "${K}"
    text = "backends: {a: {url: 'http://h'}, b: {url: 'http://h'}}\nroutes: [{match: x, to: '${TO}'}]"
    config = loads(text, {"TO": '["a", "b"]'})
    assert [target.backend for target in config.routes[0].to] == ["a", "b"]


def test_references_in_variables_work_too_and_their_values_are_not_read_again():
    """(case 63)"""
    config = loads(BASE, {"LAYA_SERVER__HOST": "${H}", "H": "${X}", "LAYA_INFERENCE__NAME": "$${H}"})
    assert config.server.host == "${X}" and config.inference.name == "${H}"


@pytest.mark.parametrize("written", ["${}", "${1A}", "${A", "${A-b}", "${A:b}"])
def test_half_a_reference_is_refused(written):
    assert "a ${ that is no reference" in refused({"A": "x"}, f"server: {{host: '{written}'}}")


def test_a_reference_in_a_key_is_refused():
    """(case 63)"""
    assert "a reference in a key" in refused({"A": "x"}, "backends: {'${A}': {url: 'http://h'}}")


def test_an_empty_key_from_the_environment_is_refused():
    assert "found an empty string" in refused({"K": ""}, "auth: {keys: [{name: a, key: '${K}'}]}")
    assert "found an empty string" in refused({}, "auth: {keys: [{name: a, key: '${K:-}'}]}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MiB", 16 << 20), ("1.5GiB", 3 << 29), ("10MB", 10_000_000), ("0", 0), ("7", 7), ("7B", 7), ("1 KiB", 1024),
     ("16M", None), ("16mib", None), ("-1", None), ("1e3", None), ("", None), ("MiB", None), ("1.5", None), ("0x1", None)],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


@given(st.integers(0, 1 << 50))
def test_a_size_survives_being_shown(count):
    assert parse_size(format_size(count)) == count


@given(st.text(max_size=12))
def test_text_parsers_agree_with_python_or_refuse(text):
    assert parse_bool(text) in (None, True, False)
    if (number := parse_int(text)) is not None:
        assert number == int(text)
    if (number := parse_float(text)) is not None:
        assert number == float(text)


def test_every_shape_is_of_a_kind_that_the_loader_knows():
    kinds = set()

    def walk(shape):
        if isinstance(shape, Fields):
            for field in shape.fields.values():
                assert field.shape.description, f"{shape.cls.__name__}.{field.name} does not say what it means"
                walk(field.shape)
        elif isinstance(shape, Scalar):
            kinds.add(shape.kind)
        else:
            walk(shape.item if isinstance(shape, Items) else shape.value)

    walk(config_shape())
    assert kinds == {"bool", "int", "float", "str", "size", ""}
