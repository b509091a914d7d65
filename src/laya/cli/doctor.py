"""`laya doctor`: what keeps Laya from working here, each with the line that mends it. Ends with one real generation.

In: the configuration and this machine. Out: a line for each finding with its time, or one JSON object; exit code 0 when nothing
must be mended, else 1. Main thread; the generation runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import msgspec

from laya.cli import exits
from laya.cli.doctor_finding import FAIL, OK, SKIP, WARN, Finding

MARKS = {OK: "ok", WARN: "note", FAIL: "FAIL", SKIP: "-"}
Step = Callable[[], Iterator[Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="leave out the generation at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    found: list[Finding] = []
    for finding in examine(arguments.config, quick=arguments.quick):
        found.append(finding)
        if not arguments.json:
            print("\n".join(lines(finding)), flush=True)
    worst = any(finding.state == FAIL for finding in found)
    if arguments.json:
        print(json.dumps({"ok": not worst, "findings": [msgspec.structs.asdict(finding) for finding in found]}, indent=2))
    else:
        print("something must be mended" if worst else "Laya works here")
    return exits.FAILED if worst else exits.OK


def examine(path: str | None, *, quick: bool) -> Iterator[Finding]:
    """Every finding as it is made, with the seconds it took."""
    from laya.cli import doctor_machine, doctor_server

    config, configured = doctor_server.configuration(path)
    engine = config is not None and bool(config.engines_by_name())
    steps: list[Step] = [
        doctor_machine.python, lambda: doctor_machine.packages(engine=engine), doctor_machine.namesakes, doctor_machine.gpus,
        lambda: iter([configured]),
    ]  # fmt: skip
    if config is not None:
        steps += [
            lambda: doctor_machine.limits(config), lambda: doctor_machine.storage(config), lambda: doctor_server.models(config),
            lambda: doctor_server.plan(config), lambda: doctor_server.port(config),
        ]  # fmt: skip
    failed = False
    for step in steps:
        for finding in _timed(step):
            failed = failed or finding.state == FAIL
            yield finding
    if quick or failed:
        why = "left out: --quick" if quick else "left out until the rest is mended"
        yield Finding("generation", SKIP, why)
    else:
        yield from _timed(lambda: doctor_server.generation(config))


def _timed(step: Step) -> Iterator[Finding]:
    began = time.perf_counter()
    for finding in step():
        now = time.perf_counter()
        yield msgspec.structs.replace(finding, seconds=round(now - began, 3))
        began = now


def lines(finding: Finding) -> list[str]:
    text = f"{MARKS[finding.state]:<5}{finding.name:<20}{finding.text}"
    if finding.seconds >= 0.05:
        text += f"  ({finding.seconds:.1f} s)"
    return [text, f"{'':<25}mend it: {finding.mend}"] if finding.mend else [text]
