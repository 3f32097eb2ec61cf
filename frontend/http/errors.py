"""Conversion of errors to HTTP answers in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.responses import Response

from ...schemas.errors import (
    BusBroken,
    BusClosed,
    ControlCode,
    ControlError,
    ErrorCode,
    InvalidRequest,
    RequestError,
    RollbusError,
)
from ..sessions.tree import SessionError

RETRY_AFTER_S = 1
"""Seconds after which a client may retry a busy service."""


STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.DUPLICATE_REQUEST: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.NO_WORKERS: 503,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.WEIGHTS_TOO_OLD: 503,
    ErrorCode.TOO_STALE: 409,
    ErrorCode.CLIENT_CLOSED: 503,
}
"""HTTP status of a token request that failed. All other error codes are 502."""
ABSOLUTE_PATH: Final = re.compile(r"(?<![\w/.])/(?:[^\s/]+/)+")
"""The directories of an absolute path, which workers' errors have."""
SESSION_STATUS: Final = {
    "unknown_session": 404,
    "session_ended": 410,
    "session_limit": 400,
    "rows_missing": 409,
    "special_token_in_content": 400,
}
NO_RETRY: Final = {"X-Should-Retry": "false"}
"""Header of a permanent refusal. The clients of OpenAI and Anthropic retry any other status from 500 on."""

CONTROL_STATUS: Final[dict[ControlCode, int]] = {
    ControlCode.INVALID_COMMAND: 400,
    ControlCode.PATH_REFUSED: 403,
    ControlCode.BAD_SOURCE: 400,
    ControlCode.OLD_VERSION: 409,
    ControlCode.TIMEOUT: 504,
    ControlCode.STALE: 409,
    ControlCode.TRANSFER_HELD: 409,
    ControlCode.TRANSFER_EXPIRED: 409,
    ControlCode.TRANSFER_EMPTY: 409,
    ControlCode.NOT_FOUND: 404,
    ControlCode.NOT_SERVING: 409,
    ControlCode.OTHER_CONTENT: 409,
    ControlCode.UNSUPPORTED: 400,
    ControlCode.IS_ADAPTER: 400,
}
"""HTTP status of a command that was rejected before any worker received it. All other command errors are 502."""


class HttpError(Exception):
    """An error that becomes the answer to a request.

    Attributes:
        status: HTTP status of the answer.
        message: one sentence for people, without prompts or tokens.
        code: error code for programs.
        param: the invalid field, if there is one.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
        if status == 501 or code == ErrorCode.POISON_REQUEST:
            self.headers.update(NO_RETRY)
        super().__init__(f"{status} {code}: {message}")


def http_error(error: RollbusError, names: Mapping[str, str] | None = None) -> HttpError:
    """Convert an error of the bus to an HTTP error.

    Args:
        names: the route's names for fields of `GenerateRequest` and its `sampling`, if they differ.
    """
    if isinstance(error, InvalidRequest):
        field = (names or {}).get(error.field, error.field)
        message = f"{field} {error.problem}; allowed: {error.allowed}"
        return HttpError(400, message, code=ErrorCode.INVALID_REQUEST, param=field)
    if isinstance(error, RequestError):
        status = STATUS.get(error.code, 502)
        # The text of a 4xx is about the client's own values.
        message = error.message if status < 500 else without_paths(error.message)
        return HttpError(status, message, code=error.code)
    if isinstance(error, ControlError):
        return HttpError(CONTROL_STATUS.get(error.code, 502), error.message, code=error.code)
    if isinstance(error, SessionError):
        return HttpError(SESSION_STATUS[error.code], str(error), code=error.code, headers=NO_RETRY)
    if isinstance(error, BusBroken | BusClosed):
        return HttpError(503, str(error), code="bus_unavailable")
    return HttpError(502, str(error), code="bad_gateway")


def without_paths(message: str) -> str:
    """Return the message with absolute paths reduced to their last component: they are of a worker's machine."""
    return ABSOLUTE_PATH.sub("", message)


def invalid(field: str, problem: str, allowed: str) -> HttpError:
    """Return the error for an invalid field."""
    return HttpError(400, f"{field} {problem}; allowed: {allowed}", code=ErrorCode.INVALID_REQUEST, param=field)


def no_workers(message: str) -> HttpError:
    """Return the error for a request that no worker can serve now."""
    return HttpError(503, message, code=ErrorCode.NO_WORKERS)


def unsupported(field: str, reason: str, *, allowed: str = "null") -> HttpError:
    """Return the error for a known field that the service does not support, with the reason."""
    message = f"{field} is not supported: {reason}; allowed: {allowed}"
    return HttpError(400, message, code=ErrorCode.UNSUPPORTED, param=field)


def error_json(status: int, message: str, code: str, param: str | None = None) -> dict[str, str | None]:
    """Return the field `error` of an answer."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_body(error: HttpError) -> bytes:
    """Return the JSON body of the answer."""
    return msgspec.json.encode({"error": error_json(error.status, error.message, error.code, error.param)})


def error_response(error: HttpError) -> Response:
    """Return the answer for an error."""
    return Response(error_body(error), error.status, headers=error.headers, media_type="application/json")
