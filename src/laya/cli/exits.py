"""Exit codes, after sysexits.h where it has one. docs/configuration.md shows this table."""

from __future__ import annotations

OK = 0
FAILED = 1  # the command ran and the answer is no
USAGE = 2  # a wrong command line; argparse's own
NO_NETWORK = 69  # EX_UNAVAILABLE
CONFIG = 78  # EX_CONFIG
INTERRUPTED = 130  # 128 + SIGINT

MEANINGS = {
    OK: "done; for serve and router: stopped in order",
    FAILED: "the command ran and the answer is no (route: no rule takes the name; pull: the download is not what it should be)",
    USAGE: "the command line is wrong",
    NO_NETWORK: "pull: nothing could be downloaded",
    CONFIG: "a setting, a package or the model file keeps it from starting; one line says which",
    INTERRUPTED: "interrupted by the keyboard",
}


class CommandFailed(Exception):
    """A command ends with one line and a code of its own."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
