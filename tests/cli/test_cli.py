"""The command line as its user meets it: output, one line of error, exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laya import __version__
from laya.cli.main import COMMANDS, main, parse

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
backends: {b: {url: "http://127.0.0.1:9/v1"}}
routes:
  - {name: gpt, match: ["gpt-4o", "gpt-*"], to: [{backend: b, model: real}], fallback: [rest]}
  - {name: rest, match: "*", to: b}
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("LAYA_")]:
        monkeypatch.delenv(name)
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


def laya(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """A process of its own, as a shell starts it."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LAYA_")}
    path = os.pathsep.join([*([env.pop("FIRST")] if env and "FIRST" in env else []), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "laya", *argv], cwd=cwd, env={**environ, "PYTHONPATH": path, **(env or {})}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def one_line(text: str) -> str:
    assert text.startswith("laya: ") and text.endswith("\n") and text.count("\n") == 1, text
    return text


def test_help_names_every_command_and_no_other(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for name in COMMANDS:
        assert f"    {name} " in text
        assert (ROOT / "src/laya/cli" / f"{name}.py").exists()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0 and f"usage: laya {name}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"laya {__version__}\n"


@pytest.mark.parametrize("argv", [["frob"], ["route"], ["check", "--frob"], ["pull"]])
def test_a_wrong_command_line_is_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and "usage: laya" in capsys.readouterr().err


def test_check_says_what_would_run(place, capsys):
    assert main(["check", "--config", "good.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("good.yaml: OK\n") and "backend b: at its url, weight 1" in out and "3 rules in 2 routes" in out


def test_check_without_a_file_names_the_missing_model_and_what_brings_it(place, capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "built-in defaults: OK" in out and "bring it with: laya pull default" in out


def test_check_refuses_a_model_that_serve_would_refuse(place, capsys):
    """From its header, as `plan` does: nothing is loaded."""
    (place / "m.gguf").write_bytes(b"no model")
    (place / "bad.yaml").write_text("inference: {model: m.gguf}")
    assert main(["check", "--config", "bad.yaml"]) == 78
    told = capsys.readouterr()
    assert "m.gguf: not a GGUF file" in told.err and not told.out


def test_check_reads_the_header_of_a_model_that_can_be_run(place, model_path, capsys):
    (place / "fine.yaml").write_text(f"inference: {{model: {model_path}}}")
    assert main(["check", "--config", "fine.yaml"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_check_tells_that_it_could_not_look_at_a_model(place, model_path, capsys, monkeypatch):
    """Where only the router's packages are installed."""
    monkeypatch.setitem(sys.modules, "laya.model.describe", None)
    (place / "fine.yaml").write_text(f"inference: {{model: {model_path}}}")
    assert main(["check", "--config", "fine.yaml"]) == 0
    assert "warning: no model was looked at" in capsys.readouterr().out


def test_config_may_stand_before_or_after_the_command(place, capsys):
    assert main(["--config", "good.yaml", "check"]) == main(["check", "--config=good.yaml"]) == 0
    assert main(["--config", "good.yaml", "route", "gpt-4o"]) == 0


TIE = "backends: {b: {url: 'http://h:1'}}\nroutes:\n- {match: 'a*', to: b}\n- {match: 'a*', to: b}"


@pytest.mark.parametrize("argv", [["check"], ["serve"], ["router"], ["route", "x"]])
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("server: {port: x}", 'bad.yaml:1: server.port: found "x"'),
        ("a: 1\na: 2", "found the key twice"),
        (TIE, 'bad.yaml: routes: the patterns "a*" (route route-1) and "a*" (route route-2) are equally specific'),
    ],
)
def test_a_bad_file_is_one_line_and_code_78(place, text, part, argv):
    (place / "bad.yaml").write_text(text)
    done = laya(*argv, "--config", "bad.yaml", cwd=place)
    assert done.returncode == 78 and part in one_line(done.stderr)


def test_a_router_with_nothing_to_send_to_says_so(place, capsys):
    assert main(["router"]) == 78
    assert "there is nothing to send to" in (said := one_line(capsys.readouterr().err)) and "name a file with --config" in said


def test_a_router_whose_routes_all_lead_to_an_engine_without_an_address_says_so(place, capsys):
    text = "backends: {b: {url: 'http://127.0.0.1:9/v1'}}\ninference: {model: m.gguf}\nroutes: [{match: small, to: local}]\n"
    (place / "laya.yaml").write_text(text)
    assert main(["router"]) == 78
    assert "no route to a backend, and no listen address for local" in one_line(capsys.readouterr().err)


def test_a_fallback_to_what_a_route_matches_is_told_to_name_it(place, capsys):
    (place / "laya.yaml").write_text(
        "backends: {b: {url: 'http://127.0.0.1:9/v1'}}\nroutes: [{match: small, to: b}, {match: big, to: b, fallback: [small]}]\n"
    )
    assert main(["check"]) == 78
    assert "small, which routes[0] matches but is not named" in (said := one_line(capsys.readouterr().err)) and "name: small" in said


def test_the_executable_without_an_engine_serves_as_a_router(monkeypatch):
    import sys

    from laya.cli import onefile

    monkeypatch.setattr(sys, "_MEIPASS", "/unpacked", raising=False)
    monkeypatch.setattr(onefile.importlib.util, "find_spec", lambda name: None)
    assert parse([]).command == "router" and parse(["check"]).command == "check"


def test_a_bad_variable_is_one_line_and_code_78(place, capsys, monkeypatch):
    monkeypatch.setenv("LAYA_SERVER__PORT", "http")
    assert main(["check"]) == 78
    assert "LAYA_SERVER__PORT: server.port" in one_line(capsys.readouterr().err)


def test_no_command_means_serve(place, capsys):
    """Told by the error, which only a command that reads the file gives."""
    assert main(["--config", "nowhere.yaml"]) == 78
    assert "nowhere.yaml: cannot be read" in one_line(capsys.readouterr().err)


def test_route_explains_in_words_and_as_json(place, capsys):
    assert main(["route", "gpt-4", "--config", "good.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "gpt-4 -> route gpt (least_busy)"
    assert "target b, sent as real, weight 1" in out and "fallback rest" in out
    assert "not * (route rest): 0 literal characters are fewer than 4" in out
    assert main(["route", "gpt-4", "--json", "--config", "good.yaml"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["route"], answer["rule"], answer["kind"]) == ("gpt", "gpt-*", "pattern")


def test_route_of_a_name_that_nobody_takes_is_code_1(place, capsys):
    (place / "few.yaml").write_text(GOOD.replace('"*"', '"other"'))
    assert main(["route", "nothing", "--config", "few.yaml"]) == 1
    assert "404 model_not_found" in capsys.readouterr().out


def test_python_m_laya_runs_the_same(place):
    done = laya("check", "--config", "good.yaml", cwd=place)
    assert done.returncode == 0 and done.stdout.startswith("good.yaml: OK") and done.stderr == ""


def test_a_closed_pipe_is_no_traceback(place):
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = f"'{sys.executable}' -m laya route gpt-4 --json --config good.yaml | true"
    done = subprocess.run(["bash", "-c", command], cwd=place, env=environ, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["uvloop", "yaml", "ahocorasick", "msgspec"])
def test_a_package_that_breaks_at_import_is_one_line_and_code_78(place, package):
    planted = place / "planted" / package
    planted.mkdir(parents=True)
    (planted / "__init__.py").write_text("raise AttributeError('module has no attribute frobnicate')")
    done = laya("serve", "--config", "good.yaml", cwd=place, env={"FIRST": str(place / "planted")})
    assert done.returncode == 78, done.stderr
    line = one_line(done.stderr)
    assert "fails at import: AttributeError: module has no attribute frobnicate" in line and "tested: " in line
