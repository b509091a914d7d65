"""The log's writer (`laya.log`): every line once and in order, and a reader that stands still stops nobody."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from laya.log import BATCH, MAX_PIECES, Log


def read_all(fd: int) -> bytes:
    found = b""
    while data := os.read(fd, 1 << 20):
        found += data
    return found


def test_lines_of_many_threads_come_once_and_each_threads_in_order():
    out, into = os.pipe()
    log = Log("info", fd=into)
    log.start()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_all(out)))
    reader.start()

    def write(name: int) -> None:
        for number in range(20_000):
            log.line(b"%d %d %s\n" % (name, number, b"x" * 100))
            if number % 1000 == 0:
                time.sleep(0.01)  # the writer comes in between

    threads = [threading.Thread(target=write, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.stop()
    os.close(into)
    reader.join()
    os.close(out)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for line in found[0].splitlines():
        name, number, _ = line.split()
        heard[int(name)].append(int(number))
    assert log.dropped == 0 and all(numbers == list(range(20_000)) for numbers in heard.values())


def test_a_reader_that_stands_still_costs_lines_beyond_the_bound_and_no_time():
    out, into = os.pipe()
    log = Log("info", fd=into)
    log.start()
    count = 2 * BATCH * MAX_PIECES
    for number in range(count):
        log.line(b"%07d\n" % number)
    assert 0 < log.dropped < count
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_all(out)))
    reader.start()
    log.stop()
    os.close(into)
    reader.join()
    os.close(out)
    lines = found[0].splitlines()
    assert len(lines) == count - log.dropped and lines == sorted(lines) and lines[0] == b"0000000"


def test_a_reader_that_has_gone_costs_lines_and_nothing_else():
    out, into = os.pipe()
    os.close(out)
    log = Log("info", fd=into)
    for number in range(BATCH + 3):
        log.line(b"%07d\n" % number)
    log.stop()
    os.close(into)
    assert log.dropped == BATCH + 3


def test_a_reader_that_stands_still_for_good_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr("laya.log.STOP_S", 0.2, raising=False)
    out, into = os.pipe()
    log = Log("info", fd=into)
    log.start()
    for number in range(100_000):  # more than a pipe holds
        log.line(b"%07d\n" % number)
    stopping = threading.Thread(target=log.stop, daemon=True)
    stopping.start()
    stopping.join(10.0)
    assert not stopping.is_alive()
    os.close(out)  # which ends the writer
    log._thread.join(10.0)
    os.close(into)


def test_a_line_that_arises_while_others_are_joined_waits_for_nobody():
    """As one of a finalizer does, in the very thread that joins: it may not wait for itself."""
    read, write = os.pipe()
    log = Log(fd=write)

    class Interrupted(deque):
        def popleft(self) -> bytes:
            if len(log.lines) == BATCH - 2:
                for _ in range(BATCH):
                    log.line(b"amidst\n")
            return super().popleft()

    log.lines = Interrupted()
    done = threading.Thread(target=lambda: [log.line(b"line\n") for _ in range(BATCH)], daemon=True)
    done.start()
    done.join(5)
    assert not done.is_alive()
    log.stop()
    os.close(write)
    assert sorted(read_all(read).splitlines()) == [b"amidst"] * BATCH + [b"line"] * BATCH and not log.dropped
