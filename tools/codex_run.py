"""Run the real Codex CLI against Laya and see that it works: tools, namespace tools, parallel calls, the small model.

    npm install --prefix /tmp/codex @openai/codex
    python tools/codex_run.py --codex /tmp/codex/node_modules/.bin/codex

A scripted backend with nothing but chat completions plays the model; `--small` runs the in-process model in its place. Exits 1
when something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from client_run import ROOT, Call, ChatModel, Step, check, laya, run_client, wait_ready
from scripted_upstream import ScriptedUpstream

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_WINDOW = 8192  # tokens of the small model; Codex's own prompt has about 4,500 with few tools
# Without these Codex offers twenty tools: more tokens than a small window holds.
FEW_TOOLS = ["--disable", "goals", "--disable", "multi_agent", "-c", 'web_search="disabled"']

STEPS = [
    Step("I look.", (
        Call("call_a", "exec_command", {"cmd": "echo hello-from-the-shell"}),
        Call("call_b", "mcp__calc__add", {"a": 2, "b": 40}),
    )),
    Step("", (Call("call_c", "exec_command", {"cmd": "echo second-step"}),)),
    Step("All done: the sum is 42."),
]  # fmt: skip


def settings(url: str, name: str, folder: Path, *, tools: bool, more: str = "") -> None:
    """A config.toml of its own in `folder`."""
    text = (
        f'model = "{name}"\nmodel_provider = "local"\nmodel_context_window = {SMALL_WINDOW}\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nenv_key = "LOCAL_KEY"\nwire_api = "responses"\n'
        f"request_max_retries = 0\nstream_max_retries = 0\n{more}"
    )
    if tools:
        text += f'[mcp_servers.calc]\ncommand = "{sys.executable}"\nargs = ["{ROOT / "tools" / "calc_mcp.py"}"]\n'
    (folder / "config.toml").write_text(text)


def codex(binary: str, folder: Path, prompt: str, more: list[str], seconds: float) -> tuple[int, list[dict], str]:
    """(exit code, events, standard error)"""
    command = [
        binary, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", *more, prompt,
    ]  # fmt: skip
    done = run_client(command, folder, {"CODEX_HOME": str(folder), "LOCAL_KEY": "unused"}, seconds)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, events, done.stderr


def texts(events: list[dict]) -> list[str]:
    items = [event["item"] for event in events if event.get("type") == "item.completed"]
    return [item["text"] for item in items if item.get("type") == "agent_message"]


def play(binary: str, steps: list[Step], more: str = "") -> tuple[ChatModel, int, list[dict], str]:
    model = ChatModel(steps)
    with tempfile.TemporaryDirectory() as name, ScriptedUpstream(model) as upstream:
        folder = Path(name)
        backend = {"up": {"url": upstream.url, "health": None}}
        with laya({"backends": backend, "routes": [{"name": "all", "match": "*", "to": "up"}]}, folder, "router") as url:
            settings(url, "scripted", folder, tools=True, more=more)
            return model, *codex(binary, folder, "Do it.", [], 120)


def scripted(binary: str) -> bool:
    model, code, events, errors = play(binary, STEPS)
    results = model.results() if model.asked else []
    shown = texts(events)
    tools = {tool["function"]["name"] for tool in model.asked[0]["tools"]} if model.asked else set()
    return all([
        check("the turn is completed", code == 0 and any(e.get("type") == "turn.completed" for e in events), errors[-2000:]),
        check("namespace tools reach the model flattened", "mcp__calc__add" in tools, sorted(tools)),
        check("three steps, no retries", len(model.asked) == 3, len(model.asked)),
        check("the shell tool ran", any("hello-from-the-shell" in r for r in results), results),
        check("the namespace tool ran beside it", any("sum=42" in r for r in results), results),
        check("the second step's tool ran", any("second-step" in r for r in results), results),
        check("the final text is shown", bool(shown) and "the sum is 42" in shown[-1], shown),
        check("usage is told", any((e.get("usage") or {}).get("input_tokens") == 300 for e in events), events[-1:]),
    ])  # fmt: skip


def too_long(binary: str) -> bool:
    model, code, events, errors = play(binary, [])
    told = str(events) + errors
    return all([
        check("a prompt that is too long ends the turn", code == 1, code),
        check("after one attempt", len(model.asked) == 1, len(model.asked)),
        check("and is told in the client's own words", "ran out of room in the model's context window" in told, told[-1500:]),
    ])  # fmt: skip


def websocket(binary: str) -> bool:
    """A client that would rather have a websocket comes back with a POST at once."""
    model, code, events, errors = play(binary, [Step("By post.")], "supports_websockets = true\n")
    return all([
        check("a client that asks for a websocket is served", code == 0 and "By post." in str(texts(events)), errors[-1500:]),
        check("by one request", len(model.asked) == 1, len(model.asked)),
    ])  # fmt: skip


def small(binary: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = {"model": str(MODEL), "name": "smol", "max_seq_len": SMALL_WINDOW, "max_num_seqs": 1}
        with laya({"inference": engine}, folder, "serve") as url:
            wait_ready(url)
            settings(url, "smol", folder, tools=False)
            code, events, errors = codex(binary, folder, "Say hello in one short sentence.", FEW_TOOLS, 500)
    shown = texts(events)
    return all([
        check("the turn is completed by the small model", code == 0, errors[-2000:] or events[-2:]),
        check("its text is shown", bool(shown) and bool(shown[-1].strip()), shown),
        print(f"     it said: {shown[-1][:300]!r}" if shown else "     it said nothing") is None,
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codex", default=shutil.which("codex"), help="path of the codex command")
    parser.add_argument("--small", action="store_true", help="the in-process model answers")
    arguments = parser.parse_args()
    if not arguments.codex:
        sys.exit("codex is not there: npm install --prefix DIR @openai/codex, then --codex DIR/node_modules/.bin/codex")
    version = subprocess.run([arguments.codex, "--version"], capture_output=True, text=True, timeout=60, check=False)
    print(version.stdout.strip())
    runs = [small] if arguments.small else [scripted, too_long, websocket]
    good = [run(arguments.codex) for run in runs]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
