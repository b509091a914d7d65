"""The exchange's table: what it allows, and that the picture in the docs shows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from laya.gateway.exchange import TRANSITIONS, Exchange, State

DOCS = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def drawn() -> str:
    lines = [f"    {State(i).name} --> {to.name}" for i, allowed in enumerate(TRANSITIONS) for to in sorted(allowed)]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```"


def test_the_picture_in_the_docs_is_the_table():
    text = DOCS.read_text()
    assert text.split("<!-- states:begin -->\n")[1].split("\n<!-- states:end -->")[0] == drawn()


@pytest.mark.parametrize("state", State)
def test_only_what_the_table_allows_is_done(state):
    for to in State:
        exchange = Exchange.__new__(Exchange)
        exchange.state = state
        if to in TRANSITIONS[state]:
            exchange.move(to)
            assert exchange.state is to
        else:
            with pytest.raises(RuntimeError):
                exchange.move(to)


def test_an_exchange_ends_once():
    exchange = Exchange.__new__(Exchange)
    exchange.gateway = type("Counter", (), {"finished": lambda self, exchange, outcome: None})()
    exchange._end("ok")
    assert exchange.state is State.DONE
    with pytest.raises(RuntimeError):
        exchange._end("ok")
    exchange.cancel()  # a client that leaves after the end changes nothing


def test_the_exchange_after_the_wait_for_a_worker_keeps_the_requests_id_and_all_of_its_time():
    ids = iter([b"req-1", b"req-2"])
    gateway = SimpleNamespace(new_request_id=lambda: next(ids))
    connection, plan = SimpleNamespace(exchange=None), SimpleNamespace(request_id=None)
    waiting = connection.exchange = Exchange(gateway, connection, None, b"", plan)
    taken_up = Exchange(gateway, connection, None, b"", plan)
    assert (taken_up.request_id, taken_up.began) == (b"req-1", waiting.began)
    connection.exchange = None
    assert Exchange(gateway, connection, None, b"", plan).request_id == b"req-2"
