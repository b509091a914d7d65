"""Every error a client or an operator can meet, as a class.

In: raised anywhere. Out: an HTTP status, an OpenAI-style body and retry hints, read by the gateway on the loop thread;
or, for `StartError`, one line on stderr and an exit code. No other room invents status codes or bodies.
"""

from __future__ import annotations

import math


class LayaError(Exception):
    """A failure of one request. Subclasses fix status, type and code; an instance adds the message.

    `retry_after` is in seconds (None: do not hint). `param` names the field at fault as clients expect it,
    for example ``messages[0].content``.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code

    def body(self) -> dict:
        """The OpenAI error body: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def hint_headers(self) -> list[tuple[bytes, bytes]]:
        """Retry hints: `retry-after` in whole seconds (rounded up) and `retry-after-ms`."""
        if self.retry_after is None:
            return []
        seconds = max(0.0, self.retry_after)
        return [(b"retry-after", b"%d" % max(1, math.ceil(seconds))), (b"retry-after-ms", b"%d" % (seconds * 1000))]


class InvalidRequest(LayaError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(LayaError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class SignIn(Unauthorized):
    """The same for what a person opens: the browser then asks for the key (as the password; the name does not matter)."""

    def hint_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"www-authenticate", b'Basic realm="laya", charset="UTF-8"')]


class Forbidden(LayaError):
    status = 403
    type = "permission_error"


class NotFound(InvalidRequest):
    status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405


class RequestTimeout(InvalidRequest):
    status = 408


class PayloadTooLarge(InvalidRequest):
    status = 413


class UriTooLong(InvalidRequest):
    status = 414


class UnsupportedMediaType(InvalidRequest):
    status = 415


class Misdirected(InvalidRequest):
    status = 421


class UpgradeRequired(InvalidRequest):
    status = 426


class Unprocessable(InvalidRequest):
    """A body of the right form with the wrong contents, where an API says so with 422. `loc` is the way to the fault."""

    status = 422

    def __init__(self, message: str, *, loc: tuple[str, ...] = (), **kw) -> None:
        super().__init__(message, **kw)
        self.loc = loc


class HeadTooLarge(InvalidRequest):
    status = 431


class RateLimited(LayaError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class InternalError(LayaError):
    """A fault of ours. The message never carries exception text."""


class EngineFailed(LayaError):
    """The in-process engine failed while it worked on this request."""

    code = "engine_error"


class UnsupportedCoding(LayaError):
    status = 501
    type = "invalid_request_error"


class BadUpstream(LayaError):
    status = 502
    code = "upstream_error"


class Unavailable(LayaError):
    """Nothing can serve the request now; always carries a retry hint."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0, **kw) -> None:
        super().__init__(message, retry_after=retry_after, **kw)


class UpstreamTimeout(LayaError):
    status = 504
    code = "upstream_timeout"


class StartError(Exception):
    """The process cannot start. Its text is one line (a table may follow); `exit_code` follows sysexits.h."""

    exit_code = 78  # EX_CONFIG


class ConfigError(StartError):
    """A setting is wrong: the text names file, line, key (or variable) and what is allowed."""


class DependencyError(StartError):
    """A package is missing, broken or of the wrong version: the text names it and the line that mends it."""


class EngineDied(StartError):
    """The engine ended by itself after it had served, and nothing else in the process can serve."""

    exit_code = 70  # EX_SOFTWARE


class DeviceGone(EngineDied):
    """The GPU is lost for good: only a new process, perhaps after a reset of the card, can use it again."""

    exit_code = 75  # EX_TEMPFAIL


_BY_STATUS = {
    cls.status: cls
    for cls in (
        InvalidRequest, Unauthorized, Forbidden, NotFound, MethodNotAllowed, RequestTimeout, PayloadTooLarge, UriTooLong,
        UnsupportedMediaType, Misdirected, RateLimited, HeadTooLarge, InternalError, UnsupportedCoding, BadUpstream,
        Unavailable, UpstreamTimeout,
    )
}  # fmt: skip


def by_status(status: int, message: str) -> LayaError:
    """The error class of an HTTP status; an unknown 4xx is an InvalidRequest, an unknown 5xx an InternalError."""
    cls = _BY_STATUS.get(status) or (InvalidRequest if 400 <= status < 500 else InternalError)
    return cls(message)
