"""Run the real Claude Code CLI against Laya and see that it works: tools, parallel calls, tool search, a long conversation.

    npm install --prefix /tmp/claude @anthropic-ai/claude-code@2.1.332
    python tools/claude_run.py --claude /tmp/claude/node_modules/.bin/claude

A scripted backend with nothing but chat completions plays the model. Exits 1 when something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from client_run import Call, ChatModel, Step, check, laya, run_client
from scripted_upstream import ScriptedUpstream

STEPS = [
    Step("I look.", (
        Call("call_a", "Bash", {"command": "echo hello-from-the-shell", "description": "Say hello"}),
        Call("call_b", "Bash", {"command": "echo beside-it", "description": "Say it"}),
    )),
    Step("", (Call("call_c", "Bash", {"command": "echo second-step", "description": "Again"}),)),
    Step("All done: 42."),
]  # fmt: skip
SEARCH_STEPS = [
    Step("", (Call("call_s", "ToolSearch", {"query": "select:WebFetch", "max_results": 1}),)),
    Step("Found the tool."),
]
QUIET = {
    name: "1"
    for name in (
        "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    )
}  # fmt: skip


def claude(binary: str, url: str, folder: Path, prompt: str, seconds: float = 120) -> tuple[int, dict, str]:
    """(exit code, the result's JSON, standard error)"""
    env = {**QUIET, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "dummy", "CLAUDE_CODE_MAX_RETRIES": "2"}
    command = [binary, "-p", "--output-format", "json", "--model", "local-model", "--allowedTools", "Bash", "--", prompt]
    done = run_client(command, folder, env, seconds)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = {}
    result = told if isinstance(told, dict) else next((e for e in told if e.get("type") == "result"), {})
    return done.returncode, result, done.stderr or done.stdout[:2000]


def play(binary: str, steps: list[Step], prompt: str) -> tuple[ChatModel, int, dict, str]:
    model = ChatModel(steps)
    with tempfile.TemporaryDirectory() as name, ScriptedUpstream(model) as upstream:
        folder = Path(name)
        backend = {"up": {"url": upstream.url, "health": None}}
        with laya({"backends": backend, "routes": [{"name": "all", "match": "*", "to": "up"}]}, folder, "router") as url:
            return model, *claude(binary, url, folder, prompt)


def tools(binary: str) -> bool:
    model, code, result, errors = play(binary, STEPS, "Do it.")
    results = model.results() if model.asked else []
    first = [m["role"] for m in model.asked[0]["messages"]] if model.asked else []
    system = str(model.asked[0]["messages"][0]["content"]) if model.asked else ""
    grown = all(_begins_with(a["messages"], b["messages"]) for a, b in zip(model.asked, model.asked[1:], strict=False))
    return all([
        check("the run succeeds", code == 0 and result.get("subtype") == "success", errors[-2000:] or result),
        check("three steps, no retries", len(model.asked) == 3, len(model.asked)),
        check("both tools of one step ran", {"hello-from-the-shell", "beside-it"} <= set(results), results),
        check("the second step's tool ran", "second-step" in results, results),
        check("the final text is shown", "All done: 42." in result.get("result", ""), result),
        check("one system text in front, then the user", first == ["system", "user"], first),
        check("the billing line is dropped", "x-anthropic-billing-header" not in system and len(system) > 100),
        check("each step's prompt begins with the one before", grown),
        check("usage is told", (result.get("usage") or {}).get("cache_read_input_tokens", 0) == 3 * 64, result.get("usage")),
    ])  # fmt: skip


def tool_search(binary: str) -> bool:
    """Tools that wait for a search are not shown before it, and are shown after it."""
    model, code, result, errors = play(binary, SEARCH_STEPS, "Find the tool that fetches pages.")
    shown = [{tool["function"]["name"] for tool in request.get("tools", ())} for request in model.asked]
    return all([
        check("the search run succeeds", code == 0 and "Found the tool" in result.get("result", ""), errors[-2000:] or result),
        check("a deferred tool is hidden first", bool(shown) and "WebFetch" not in shown[0], shown[:1]),
        check("and shown once it was found", len(shown) > 1 and "WebFetch" in shown[1], shown[1:]),
    ])


def too_long(binary: str) -> bool:
    model, code, result, errors = play(binary, [], "Do it.")
    told = str(result) + errors
    return all([
        check("a prompt that is too long ends the run", code == 1 and result.get("is_error") is True, result),
        check("after one attempt", len(model.asked) == 1, len(model.asked)),
        check("and is known as such", "rompt is too long" in told, told[-1500:]),
    ])  # fmt: skip


def _begins_with(shorter: list, longer: list) -> bool:
    return longer[: len(shorter)] == shorter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claude", default=shutil.which("claude"), help="path of the claude command")
    arguments = parser.parse_args()
    if not arguments.claude:
        sys.exit("claude is not there: npm install --prefix DIR @anthropic-ai/claude-code, then --claude DIR/.../claude")
    version = subprocess.run([arguments.claude, "--version"], capture_output=True, text=True, timeout=60, check=False)
    print(version.stdout.strip())
    good = [run(arguments.claude) for run in (tools, tool_search, too_long)]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
