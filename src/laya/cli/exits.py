"""Exit codes, after sysexits.h where it has one. docs/configuration.md shows this table."""

from __future__ import annotations

OK = 0
FAILED = 1  # the command ran and the answer is no
USAGE = 2  # a wrong command line; argparse's own
NO_NETWORK = 69  # EX_UNAVAILABLE
ENGINE_DIED = 70  # EX_SOFTWARE
DEVICE_LOST = 75  # EX_TEMPFAIL
CONFIG = 78  # EX_CONFIG
INTERRUPTED = 130  # 128 + SIGINT

MEANINGS = {
    OK: "done; for serve and router: stopped in order",
    FAILED: "the command ran and the answer is no (route: no rule takes the name; plan: it does not fit; pull: the download is "
    "not what it should be; doctor: something must be mended; bench: no request succeeded)",
    USAGE: "the command line is wrong",
    NO_NETWORK: "pull: nothing could be downloaded; top and bench: no server answers",
    ENGINE_DIED: "the engine ended by itself and nothing else in the process could serve",
    DEVICE_LOST: "the GPU is lost: the driver says so, or every call to it fails; a new process is needed",
    CONFIG: "a setting, a package or the model file keeps it from starting; one line says which",
    INTERRUPTED: "interrupted by the keyboard",
}


class CommandFailed(Exception):
    """A command ends with one line and a code of its own."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
