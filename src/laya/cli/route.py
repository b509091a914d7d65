"""`laya route NAME`: the matcher's own answer, explained."""

from __future__ import annotations

import argparse
import json
from typing import Any

from laya.cli import exits
from laya.config import load
from laya.routing.table import RouteTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the model name a client would send")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run(arguments: argparse.Namespace) -> int:
    table = RouteTable.compile(load(arguments.config))
    answer = table.explain(arguments.name)
    if arguments.json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(answer)))
    return exits.OK if answer["route"] is not None else exits.FAILED


def _lines(answer: dict[str, Any]) -> list[str]:
    if answer["route"] is None:
        return [f"{answer['model']}: {answer['why']} -> 404 model_not_found"]
    lines = [f"{answer['model']} -> route {answer['route']} ({answer['policy']})", f"  rule {answer['rule']}: {answer['why']}"]
    for target in answer["targets"]:
        sent = f", sent as {target['model']}" if target["model"] else ""
        lines.append(f"  target {target['backend']}{sent}, weight {target['weight']:g}")
    if answer["fallback"]:
        lines.append("  fallback " + ", ".join(answer["fallback"]))
    for other in answer["candidates"]:
        if not other["wins"]:
            lines.append(f"  not {other['rule']} (route {other['route']}): {other['lost_because']}")
    return lines
