"""Errors in System One's form: validation as 422 with a list of details, all else with one. Pure."""

from __future__ import annotations

from typing import Any

from laya.errors import ContextLengthExceeded, InvalidRequest, LayaError


def error_status(error: LayaError) -> int:
    """A body that cannot be read is 422 here, not 400; one that does not fit the window 413."""
    if isinstance(error, ContextLengthExceeded):
        return 413
    return 422 if error.status == 400 else error.status


def error_body(error: LayaError) -> dict[str, Any]:
    if error_status(error) != 422:
        return {"detail": {"error_type": error.type, "message": error.message}}
    loc = getattr(error, "loc", None)
    if loc is None:
        loc = tuple(error.param.split(".")) if error.param else ()
    kind = "value_error" if isinstance(error, InvalidRequest) and loc else "json_invalid"
    return {"detail": [{"loc": ["body", *loc], "msg": error.message, "type": kind}]}
