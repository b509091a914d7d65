"""Model name -> route: precedence, names as they come, engines, defaults, and the explanation."""

from __future__ import annotations

import random

import pytest

from laya.config import LOCAL, loads
from laya.errors import ConfigError
from laya.routing import table as table_module
from laya.routing.classify import RequestFacts
from laya.routing.table import MAX_NAME_CHARS, RouteTable

CASE_34 = [("gpt-4o", "a"), ("gpt-4*", "b"), ("*", "c"), ("openai/*", "d"), ("openai/gpt-4o", "e")]


def table(routes: str, head: str = "inference: {model: models/m.gguf}\n", **kwargs) -> RouteTable:
    return RouteTable.compile(loads(f"{head}routes:\n{routes}"), **kwargs)


def rules(*pairs: tuple[str, str]) -> str:
    return "".join(f"- {{name: {name}, match: '{text}', to: local}}\n" for text, name in pairs)


def routed(compiled: RouteTable, name: str) -> str | None:
    route = compiled.match(name)
    return route and route.name


@pytest.mark.parametrize("seed", range(5))
def test_exact_beats_the_most_specific_pattern_beats_the_star_in_any_order(seed):
    """(case 34)"""
    order = list(CASE_34)
    random.Random(seed).shuffle(order)
    compiled = table(rules(*order))
    expected = {"gpt-4o": "a", "gpt-4o-mini": "b", "gpt-3": "c", "openai/x": "d", "openai/gpt-4o": "e", "openai": "c"}
    assert {name: routed(compiled, name) for name in expected} == expected
    for name, route in expected.items():  # the explanation is the matcher's own answer
        assert compiled.explain(name)["route"] == route


def test_more_literal_characters_win_then_the_longer_prefix():
    compiled = table(rules(("abc*", "short"), ("ab*defg", "long"), ("a*xyz", "early"), ("ab*yz", "late")))
    assert routed(compiled, "abc-defg") == "long"
    assert routed(compiled, "abc-xyz") == "late"


def test_patterns_are_never_listed_and_the_asked_name_is_what_is_matched():
    """(case 35)"""
    compiled = table(rules(("qwen/*", "q"), ("gpt-4o", "g"), ("模型", "m")))
    assert compiled.names() == ["gpt-4o", "模型", "m", "local"]
    assert not any("*" in name for name in compiled.names())
    answer = compiled.explain("qwen/a")
    assert answer["model"] == "qwen/a" and answer["targets"][0]["model"] is None


NAMES = ["unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL", "hf.co/a/b:latest", "模型", "e\u0301", "é", "trailing ", "UPPER",
         "../../etc", "a%2Fb", "gpt", "gpt-4", "gpt-4o", "😀"]  # fmt: skip


def test_names_are_compared_as_they_are_written():
    """(case 36)"""
    compiled = table("".join(f"- {{name: r{i}, match: \"{name}\", to: local}}\n" for i, name in enumerate(NAMES)))
    for i, name in enumerate(NAMES):
        assert routed(compiled, name) == f"r{i}"
    for other in ["upper", "trailing", "gpt-", "模", "a/b", "", " gpt", "gpt-4o\n"]:
        assert compiled.match(other) is None


def test_a_very_long_name_is_nobodys_and_costs_nothing():
    """(case 36)"""
    compiled = table(rules(("*", "all")))
    assert compiled.match("x" * MAX_NAME_CHARS).name == "all"
    assert compiled.match("x" * 10_240) is None
    assert compiled.explain("x" * 10_240)["kind"] == "none"


def test_names_that_clients_invent_are_remembered_within_a_bound(monkeypatch):
    """(case 36)"""
    monkeypatch.setattr(table_module, "_MET_NAMES", 8)
    compiled = table(rules(("a*", "a"), ("b*", "b")))
    for i in range(100):
        assert routed(compiled, f"a{i}") == routed(compiled, f"a{i}") == "a" and routed(compiled, f"b{i}") == "b"
        assert compiled.match(f"c{i}") is None
        assert len(compiled._met) <= 8


def test_an_empty_name_is_nobodys():
    """(case 36)"""
    assert table(rules(("*", "all"))).match("") is None


def test_without_routes_everything_goes_to_the_engine():
    compiled = RouteTable.compile(loads(""))
    assert compiled.match("anything").targets[0].backend == LOCAL
    assert compiled.default_model == "SmolLM2-135M-Instruct.Q4_1" and compiled.default_route.implicit


def test_engines_are_routable_by_id_and_by_name_and_a_rule_for_the_same_name_wins():
    head = "inference: {engines: {small: {model: s.gguf}, large: {model: l.gguf}}}\nbackends: {b: {url: 'http://h:1'}}\n"
    compiled = table("- {name: mine, match: large, to: b}\n", head)
    assert compiled.names() == ["large", "s", "l", "small"]
    assert routed(compiled, "large") == "mine" and compiled.match("large").targets[0].backend == "b"
    assert compiled.match("l").targets[0].backend == "large" and compiled.match("small").targets[0].backend == "small"
    assert compiled.default_model == "s"


def test_a_rule_for_an_engines_public_id_wins():
    compiled = table("- {name: mine, match: m, to: b}\n", "backends: {b: {url: 'http://h:1'}}\ninference: {model: m.gguf}\n")
    assert compiled.match("m").targets[0].backend == "b" and compiled.match("local").targets[0].backend == "local"


def test_ids_that_the_engines_report_replace_those_of_the_files():
    config = loads("inference: {engines: {small: {model: s.gguf}, large: {model: l.gguf}}}\n")
    compiled = RouteTable.compile(config, {"Small-1B": "small", "Large-8B": "large"})
    assert compiled.match("Large-8B").targets[0].backend == "large" and compiled.names()[:2] == ["Small-1B", "Large-8B"]
    assert RouteTable.compile(loads(""), ["smol"]).match("smol").targets[0].backend == LOCAL


def test_local_means_the_first_of_several_engines():
    compiled = table("- {match: x, to: local}\n", "inference: {engines: {small: {model: s.gguf}, large: {model: l.gguf}}}\n")
    assert compiled.match("x").targets[0].backend == "small"


def test_the_default_model_is_the_wish_else_the_first_engine_else_the_only_name():
    head = "backends: {b: {url: 'http://h:1'}}\n"
    assert table("- {match: a, to: b}\n", head).default_model == "a"
    assert table("- {match: [a, c], to: b}\n", head).default_model is None
    assert table("- {match: '*', to: b}\n", head).default_route is None
    assert table("- {match: 'q*', to: b}\n", head + "router: {default_model: q1}\n").default_route.name == "route-1"
    with pytest.raises(ConfigError, match='laya.yaml: router.default_model: found "z", which no rule takes'):
        table("- {match: a, to: b}\n", head + "router: {default_model: z}\n")


def test_a_name_that_two_routes_claim_is_refused_naming_both():
    with pytest.raises(ConfigError, match='the name "x" is matched by route a and by route b'):
        table(rules(("x", "a"), ("x", "b")))


def test_two_patterns_of_equal_strength_are_refused_naming_both():
    with pytest.raises(ConfigError, match=r'laya.yaml: routes: the patterns "x\*y" \(route [ab]\) and "x\*y" \(route [ab]\)'):
        table(rules(("x*y", "a"), ("x*y", "b")))


def test_a_route_carries_its_settings_and_those_of_the_stages():
    head = "stages: {redact: {enabled: true}}\nbackends: {b: {url: 'http://h:1', weight: 3}, c: {url: 'http://h:2'}}\n"
    compiled = table(
        "- {name: one, match: a, to: [b, {backend: c, weight: 2, model: m}], policy: weighted, cache: true, redact: false,"
        " max_prompt_tokens: 9, fallback: [three]}\n- {name: two, match: z, to: c}\n- {name: three, match: y, to: c, redact: false}\n",
        head,
    )
    one, two = compiled.match("a"), compiled.match("z")
    assert [(t.backend, t.model, t.weight) for t in one.targets] == [("b", None, 3.0), ("c", "m", 2.0)]
    assert (one.policy, one.redact, one.cache, one.max_prompt_tokens, one.fallback) == ("weighted", False, True, 9, ("three",))
    assert (two.policy, two.redact, two.cache, two.state) == ("least_busy", True, False, None)
    assert compiled.routes == {"one": one, "two": two, "three": compiled.match("y")}


def test_routes_without_a_name_get_one_that_fits_a_header():
    compiled = table("- {match: gpt-4o, to: local}\n- {match: 模型, to: local}\n- {match: 'a/*', to: local}\n")
    assert [routed(compiled, n) for n in ("gpt-4o", "模型", "a/b")] == ["gpt-4o", "route-2", "route-3"]


def test_the_explanation_names_the_losers_and_why():
    answer = table(rules(("*", "all"), ("gpt-*", "gpt"), ("gpt-4*", "four"))).explain("gpt-4o")
    assert (answer["route"], answer["kind"], answer["rule"]) == ("four", "pattern", "gpt-4*")
    losers = {c["rule"]: c["lost_because"] for c in answer["candidates"] if not c["wins"]}
    assert losers == {"gpt-*": "4 literal characters are fewer than 5", "*": "0 literal characters are fewer than 5"}


def test_the_explanation_of_a_miss_has_the_nearest_name():
    assert "did you mean gpt-4o?" in table(rules(("gpt-4o", "a"))).explain("gpt-4")["why"]


def test_ten_thousand_routes_load_and_match():
    text = "".join(f"- {{match: ['m-{i:05d}', 'org-{i:05d}/*'], to: local}}\n" for i in range(5_000))
    compiled = table(text)
    assert routed(compiled, "m-04999") == "m-04999" and routed(compiled, "org-00123/x") == "m-00123"
    assert compiled.match("org-99999/x") is None


def test_the_explanation_shows_the_classes_and_what_they_decide():
    text = (
        "backends: {big: {url: 'http://h'}}\ninference: {}\nroutes:\n- match: auto\n  classify:\n"
        "  - {to: local, when: {any_words: [extract], max_prompt_tokens: 800}}\n  - {to: [{backend: big, model: x}]}\n"
    )
    compiled = RouteTable.compile(loads(text))
    shown = compiled.explain("auto")
    assert [(rule["rule"], rule["when"]) for rule in shown["classify"]] == [
        (1, {"max_prompt_tokens": 800, "any_words": ["extract"]}), (2, {}),
    ]  # fmt: skip
    assert shown["decision"] is None and shown["classify"][1]["targets"] == [{"backend": "big", "model": "x", "weight": 1.0}]
    decided = compiled.explain("auto", "please extract", RequestFacts(prompt_tokens=4))["decision"]
    assert (decided["rule"], decided["why"], decided["targets"][0]["backend"]) == (1, "prompt_tokens=4, word extract", "local")
    assert compiled.explain("auto", "please", RequestFacts(prompt_tokens=4))["decision"]["rule"] == 2


def test_a_fallback_never_leads_around_redaction():
    rules = "- {name: open, match: a, to: local, fallback: [safe]}\n- {name: safe, match: b, to: local, redact: true}\n"
    with pytest.raises(ConfigError, match="open does not redact and falls back to safe"):
        table(rules)
    table(rules.replace("fallback: [safe]", "fallback: [safe], redact: true"))
