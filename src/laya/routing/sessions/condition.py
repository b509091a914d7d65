"""How a store beside this process is doing, in the words of /ready. Any thread; pure."""

from __future__ import annotations

from typing import Any


def condition(state: str, unwritten: int, reason: str, errors: dict[str, int], given_up: int) -> dict[str, Any]:
    """`unwritten` are writes that it has not taken yet; what is empty or zero of the rest is left out."""
    told: dict[str, Any] = {"state": state, "unwritten": unwritten}
    if reason:
        told["reason"] = reason
    if errors:
        told["errors"] = dict(errors)
    if given_up:
        told["given_up"] = given_up
    return told
