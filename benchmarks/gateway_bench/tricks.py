"""Each trick of the forwarding path, with the way to do without it: what it saves is measured, not believed.

A trick is a context manager that switches it off on a `Path`; inside, the path must still answer the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

from gateway_bench.inprocess import Path
from laya.net import connection, lane
from laya.telemetry import Histogram
from laya.wire import fast, recall
from laya.wire.inbound import Inbound
from laya.wire.outbound import Outbound

Switch = Callable[[Path], AbstractContextManager]


class _Nothing(dict):
    """A memo that forgets."""

    def __setitem__(self, key, value) -> None: ...


class _NoLines:
    """A response's memo that forgets the rendered lines."""

    plan = None

    @property
    def lines(self) -> None:
        return None

    @lines.setter
    def lines(self, value) -> None: ...


@contextlib.contextmanager
def no_lane(path: Path) -> Iterator[None]:
    """Every request goes the long way, from one room's function to the next's."""
    with mock.patch.object(connection, "ask", lambda connection, data: False):
        yield


@contextlib.contextmanager
def lane_in_python(path: Path) -> Iterator[None]:
    """The lane's steps as they are without a C compiler."""
    with mock.patch.object(connection, "ask", lane.ask_in_python):
        yield


@contextlib.contextmanager
def no_whole_messages(path: Path) -> Iterator[None]:
    """Every message goes through buffer, phases and events, though its head is remembered."""
    with (
        no_lane(path),
        mock.patch.object(Inbound, "take_whole", lambda self, data: None),
        mock.patch.object(Outbound, "take_whole", lambda self, data: None),
    ):
        yield


@contextlib.contextmanager
def no_head_recall(path: Path) -> Iterator[None]:
    """Each head is parsed, planned and rendered anew; its lines are still remembered one by one."""
    with (
        no_whole_messages(path),
        mock.patch.object(recall, "read_request", fast.read_request),
        mock.patch.object(recall, "read_response", fast.read_response),
    ):
        yield


@contextlib.contextmanager
def no_line_memo(path: Path) -> Iterator[None]:
    """No head and no line of one is remembered."""
    with no_head_recall(path), contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(fast, "MEMO_LINE_BYTES", -1))
        fast.forget()
        yield


@contextlib.contextmanager
def h11_only(path: Path) -> Iterator[None]:
    """h11 reads every message, as it does those that the fast parser leaves to it."""
    parsers = (path.client.inbound, path.backend.outbound)
    for parser in parsers:
        parser.fast = parser.tries_fast = False
    try:
        yield
    finally:
        for parser in parsers:
            parser.fast = parser.tries_fast = True


@contextlib.contextmanager
def no_upstream_head(path: Path) -> Iterator[None]:
    """The head for the backend is put together for each request."""
    plans = [known.memo.plan for known in path.server.limits.request_heads.values() if known.memo.plan is not None]
    kept = [plan.upstream_heads for plan in plans]
    for plan in plans:
        plan.upstream_heads = _Nothing()
    try:
        with no_lane(path):
            yield
    finally:
        for plan, heads in zip(plans, kept, strict=True):
            plan.upstream_heads = heads


@contextlib.contextmanager
def no_answer_lines(path: Path) -> Iterator[None]:
    """The backend's header lines are filtered and rendered for each answer."""
    known = list(path.pool.limits.response_heads.values())
    kept = [response.memo for response in known]
    for response in known:
        response.memo = _NoLines()
    try:
        with no_lane(path):
            yield
    finally:
        for response, memo in zip(known, kept, strict=True):
            response.memo = memo


@contextlib.contextmanager
def no_metrics(path: Path) -> Iterator[None]:
    """Nothing is counted or observed, by the lane in Python."""
    with (
        lane_in_python(path),
        mock.patch.object(type(path.gateway.telemetry), "count", lambda self, labels: None),
        mock.patch.object(Histogram, "observe", lambda self, seconds: None),
    ):
        yield


@contextlib.contextmanager
def no_access_log(path: Path) -> Iterator[None]:
    """As with `log_level: warning`."""
    log = path.gateway.log
    log.info_on = False
    try:
        yield
    finally:
        log.info_on = True


# name -> (off, against what: None is the path as it ships)
TRICKS: dict[str, tuple[Switch, Switch | None]] = {
    "the lane in C": (lane_in_python, None),
    "the lane": (no_lane, lane_in_python),
    "whole messages": (no_whole_messages, no_lane),
    "heads remembered": (no_head_recall, no_whole_messages),
    "lines remembered": (no_line_memo, no_head_recall),
    "fast parser": (h11_only, no_line_memo),
    "upstream head kept": (no_upstream_head, no_lane),
    "answer lines kept": (no_answer_lines, no_lane),
}
# What features cost: the same, read the other way round.
FEATURES: dict[str, tuple[Switch, Switch | None]] = {
    "metrics": (no_metrics, lane_in_python),
    "access log": (no_access_log, None),
}
