"""JetStream's API as rollbus uses it: one request, one answer, errors as exceptions with the server's numbers."""

import json
import logging
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Client

from ...schemas.errors import BusBroken

__all__ = [
    "API",
    "API_TIMEOUT_S",
    "NAME_IN_USE",
    "NO_CONSUMER",
    "NO_MESSAGE",
    "NO_STORAGE",
    "NO_STREAM",
    "ApiError",
    "ask",
    "create_stream",
    "nanoseconds",
    "put",
]

logger = logging.getLogger(__name__)

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 5.0
"""For the server to answer; it takes milliseconds, and on a slow disk or in an election a second or two."""
NO_STREAM: Final = 10059
NO_CONSUMER: Final = 10014
NO_MESSAGE: Final = 10037
NAME_IN_USE: Final = 10058
NO_STORAGE: Final = 10047


class ApiError(Exception):
    """JetStream refused an operation.

    Attributes:
        code: the server's `err_code`.
    """

    def __init__(self, code: int, description: str) -> None:
        self.code = code
        super().__init__(f"{description} (JetStream error {code})")


class _ConnectionLost(BusBroken):
    """It may have been carried out; nobody will say."""


async def ask(nats: Client, operation: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call JetStream's API; where the connection is lost meanwhile, once more over the next one.

    Args:
        operation: the subject behind `$JS.API.`; one that may be carried out twice.

    Raises:
        ApiError: it refused.
        BusBroken: it does not answer.
    """
    payload = b"" if body is None else json.dumps(body).encode()
    try:
        try:
            return await _request(nats, f"{API}.{operation}", payload)
        except _ConnectionLost:
            return await _request(nats, f"{API}.{operation}", payload)
    except nats_errors.NoRespondersError as error:
        raise BusBroken("the NATS server has no JetStream, which rollbus needs") from error


async def put(nats: Client, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
    """Store a message in the stream that has `subject`, on the conditions in `headers`; returns its sequence number.

    Raises:
        ApiError: the server refused; NO_STREAM: no stream has the subject, or there is no JetStream.
        BusBroken: it does not answer; the message may have been stored all the same.
    """
    try:
        answer = await _request(nats, subject, data, headers)
    except nats_errors.NoRespondersError as error:
        raise ApiError(NO_STREAM, f"no stream has {subject}") from error
    sequence: int = answer["seq"]
    return sequence


async def _request(nats: Client, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    try:
        message = await nats.request(subject, payload, timeout=API_TIMEOUT_S, headers=headers)
    except nats_errors.NoRespondersError:
        raise
    except nats_errors.TimeoutError as error:
        # A server drops what a user may not publish, and tells only the log.
        raise BusBroken(
            f"JetStream did not answer on {subject} within {API_TIMEOUT_S:g} s: it is overloaded, or this user may not "
            "publish there"
        ) from error
    except nats_errors.ConnectionReconnectingError as error:
        raise _ConnectionLost(f"the connection was lost before JetStream answered on {subject}") from error
    except nats_errors.Error as error:
        raise BusBroken(f"JetStream cannot be reached: {error}") from error
    answer: dict[str, Any] = json.loads(message.data)
    if "error" in answer:
        raise ApiError(answer["error"].get("err_code", 0), answer["error"].get("description", ""))
    return answer


async def create_stream(nats: Client, config: dict[str, Any]) -> None:
    """Create a stream, unless another program does so at the same time.

    The server sets `max_bytes` aside. Where it cannot, the stream shares what the server has, which is bounded too.

    Raises:
        ApiError: the server refused.
        BusBroken: it does not answer.
    """
    name = config["name"]
    try:
        await ask(nats, f"STREAM.CREATE.{name}", config)
    except ApiError as error:
        if error.code == NAME_IN_USE:  # another program with other limits was faster
            return
        if error.code != NO_STORAGE:
            raise
        logger.warning("jetstream.not_set_aside stream=%s max_bytes=%s error=%s", name, config["max_bytes"], error)
        await ask(nats, f"STREAM.CREATE.{name}", {**config, "max_bytes": -1})


def nanoseconds(seconds: float) -> int:
    """Return `seconds` as JetStream takes them."""
    return int(seconds * 1e9)
