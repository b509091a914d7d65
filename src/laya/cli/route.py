"""`laya route NAME [--message TEXT]`: the matcher's own answer, explained."""

from __future__ import annotations

import argparse
import json
from typing import Any

from laya.cli import exits
from laya.config import load
from laya.gateway.facts import estimate_tokens
from laya.routing.classify import RequestFacts
from laya.routing.table import RouteTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the model name a client would send")
    parser.add_argument("--message", metavar="TEXT", help="the last user message: what `classify` decides for it")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="with --message: the request's own max_tokens")
    parser.add_argument("--tools", action="store_true", help="with --message: the request offers tools")
    parser.add_argument("--images", action="store_true", help="with --message: some message holds an image")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run(arguments: argparse.Namespace) -> int:
    table = RouteTable.compile(load(arguments.config))
    answer = table.explain(arguments.name, arguments.message, _facts(arguments))
    if arguments.json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(answer)))
    return exits.OK if answer["route"] is not None else exits.FAILED


def _facts(arguments: argparse.Namespace) -> RequestFacts | None:
    if arguments.message is None:
        return None
    return RequestFacts(
        prompt_tokens=estimate_tokens(arguments.message), max_tokens=arguments.max_tokens, has_tools=arguments.tools,
        has_images=arguments.images,
    )  # fmt: skip


def _target(target: dict[str, Any]) -> str:
    sent = f", sent as {target['model']}" if target["model"] else ""
    return f"  target {target['backend']}{sent}, weight {target['weight']:g}"


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(answer: dict[str, Any]) -> list[str]:
    if answer["route"] is None:
        return [f"{answer['model']}: {answer['why']} -> 404 model_not_found"]
    lines = [f"{answer['model']} -> route {answer['route']} ({answer['policy']})", f"  rule {answer['rule']}: {answer['why']}"]
    for rule in answer["classify"]:
        when = ", ".join(f"{key}: {_shown(value)}" for key, value in rule["when"].items()) or "always"
        lines.append(f"  classify {rule['rule']}: {when} -> {', '.join(target['backend'] for target in rule['targets'])}")
    if not answer["classify"]:
        lines += [_target(target) for target in answer["targets"]]
    if answer["decision"]:
        decided = answer["decision"]
        rule = f"rule {decided['rule']}" if decided["rule"] else "the route's own targets"
        lines.append(f"  this message: {rule} ({decided['why']}) -> {', '.join(t['backend'] for t in decided['targets'])}")
    if answer["fallback"]:
        lines.append("  fallback " + ", ".join(answer["fallback"]))
    for other in answer["candidates"]:
        if not other["wins"]:
            lines.append(f"  not {other['rule']} (route {other['route']}): {other['lost_because']}")
    return lines
