"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ClientError, wait_s

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

Headers = list[tuple[bytes, bytes]]

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}

to_json = msgspec.json.Encoder().encode
"""Compact JSON, of dataclasses too. What JSON has no number for becomes null."""


def error_body(error: PdserveError) -> bytes:
    """`{"error": {message, type, param, code}}`; `param` is null where no field is at fault. A
    refusal has its `reason` beside them."""
    default = "invalid_request_error" if isinstance(error, ClientError) else "server_error"
    return error_json(
        error.message,
        kind=_TYPES.get(error.http_status, default),
        param=error.field or None,
        code=error.code,
        reason=error.reason,
    )


def error_json(message: str, *, kind: str, param: str | None, code: str, reason: str = "") -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return to_json({"error": {**error, "reason": reason} if reason else error})


def error_headers(error: PdserveError) -> Headers:
    """`Retry-After`, in whole seconds, where trying again makes sense; and what was missing where a
    key was."""
    if error.http_status == 401:
        return [(b"www-authenticate", b"Bearer")]
    again_s = wait_s(error)
    return [(b"retry-after", str(math.ceil(again_s)).encode())] if again_s else []
