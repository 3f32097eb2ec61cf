"""JetStream's API as rollbus uses it: one request, one answer, and exceptions with the server's error codes."""

import base64
import json
import logging
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Client

from ...schemas.errors import BusBroken
from .patched_client import PatchedNatsClient

__all__ = [
    "API",
    "API_TIMEOUT_S",
    "DEFAULT_REPLICAS",
    "NAME_IN_USE",
    "NO_CONSUMER",
    "NO_MESSAGE",
    "NO_PEERS",
    "NO_STORAGE",
    "NO_STREAM",
    "WRONG_LAST_SEQUENCE",
    "ApiError",
    "Unanswered",
    "ask",
    "create_stream",
    "headers_of",
    "nanoseconds",
    "put",
]

logger = logging.getLogger(__name__)

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 5.0
"""Seconds for the server to answer. An answer takes milliseconds, and a second or two on a slow disk or in an
election."""
NO_STREAM: Final = 10059
NO_CONSUMER: Final = 10014
NO_MESSAGE: Final = 10037
NAME_IN_USE: Final = 10058
NO_STORAGE: Final = 10047
NO_PEERS: Final = 10005
"""Error code: fewer servers of the cluster have room than the stream has replicas."""
DEFAULT_REPLICAS: Final = 3
"""Replicas of a stream in a cluster: one of three servers may fail."""
WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
"""Error codes of a failed compare-and-set: another write came first. A cluster has two codes for it."""
_NOT_NOW: Final = frozenset({10008, 10009, 10163})
"""JetStream's errors while a cluster elects a leader, or agrees on a write before this one."""


class ApiError(Exception):
    """JetStream rejected an operation.

    Attributes:
        code: the server's `err_code`.
    """

    def __init__(self, code: int, description: str) -> None:
        self.code = code
        super().__init__(f"{description} (JetStream error {code})")


class Unanswered(BusBroken):
    """The server does not answer or has no leader now. The call may have taken effect; read the state to find out."""


class _ConnectionLost(Unanswered):
    """The answer was lost with the connection. The server may answer over the next connection."""


async def ask(
    nats: Client, operation: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
) -> dict[str, Any]:
    """Call JetStream's API. If the connection is lost meanwhile, call once more over the next connection.

    Args:
        operation: subject after `$JS.API.`; the server may execute the operation twice.
        timeout_s: seconds for the server to answer; None: `API_TIMEOUT_S`.

    Raises:
        ApiError: the server rejected the call.
        Unanswered: the server does not answer, or is electing a leader.
        BusBroken: the server has no JetStream, or there is no connection.
    """
    timeout_s = API_TIMEOUT_S if timeout_s is None else timeout_s
    payload = b"" if body is None else json.dumps(body).encode()
    try:
        try:
            return await _request(nats, f"{API}.{operation}", payload, timeout_s)
        except _ConnectionLost:
            return await _request(nats, f"{API}.{operation}", payload, timeout_s)
    except nats_errors.NoRespondersError as error:
        raise BusBroken("the NATS server has no JetStream, which rollbus needs") from error


async def put(
    nats: Client,
    subject: str,
    data: bytes,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> int:
    """Store a message in the stream that has `subject`, on the conditions in `headers`. Return its sequence number.

    Args:
        timeout_s: seconds for the server to answer; None: `API_TIMEOUT_S`.

    Raises:
        ApiError: the server rejected the message; NO_STREAM: no stream has the subject, its stream has no leader, or
            the server has no JetStream.
        Unanswered: the server does not answer; the message may have been stored.
        BusBroken: there is no connection.
    """
    timeout_s = API_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        answer = await _request(nats, subject, data, timeout_s, headers)
    except nats_errors.NoRespondersError as error:
        raise ApiError(NO_STREAM, f"no stream has {subject}") from error
    sequence: int = answer["seq"]
    return sequence


async def _request(
    nats: Client, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    try:
        message = await nats.request(subject, payload, timeout=timeout_s, headers=headers)
    except nats_errors.NoRespondersError:
        raise
    except nats_errors.TimeoutError as error:
        # A server drops a message that the user may not publish, and reports this only in its log.
        raise Unanswered(
            f"JetStream did not answer on {subject} within {timeout_s:g} s: it is overloaded, the stream has no leader "
            "now, or this user may not publish there"
        ) from error
    except nats_errors.ConnectionReconnectingError as error:
        raise _ConnectionLost(f"the connection was lost before JetStream answered on {subject}") from error
    except nats_errors.Error as error:
        raise BusBroken(f"JetStream cannot be reached: {error}") from error
    answer: dict[str, Any] = json.loads(message.data)
    if "error" in answer:
        code, description = answer["error"].get("err_code", 0), answer["error"].get("description", "")
        if code in _NOT_NOW:
            raise Unanswered(f"JetStream has no leader now, or no majority: {description} (JetStream error {code})")
        raise ApiError(code, description)
    return answer


async def create_stream(nats: PatchedNatsClient, config: dict[str, Any]) -> None:
    """Create a stream, unless another program does so at the same time.

    The stream has as many replicas as the program requests, or else three in a cluster with room for them, or else one.
    The server reserves `max_bytes`. If it cannot, the stream shares the server's storage, which is bounded too.

    Raises:
        ApiError: the server rejected the stream.
        BusBroken: the server does not answer.
    """
    name = config["name"]
    config = {**config, "num_replicas": nats.replicas or (DEFAULT_REPLICAS if nats.is_in_cluster else 1)}
    while True:
        try:
            await ask(nats, f"STREAM.CREATE.{name}", config)
        except ApiError as error:
            if error.code == NAME_IN_USE:  # another program created it with other limits
                return
            config = _lesser(nats, config, error)
        else:
            return


def _lesser(nats: PatchedNatsClient, config: dict[str, Any], error: ApiError) -> dict[str, Any]:
    """Return a configuration with lower requirements. Raise `error` if there is none."""
    name, replicas = config["name"], config["num_replicas"]
    is_full = error.code == NO_STORAGE or (error.code == NO_PEERS and "storage" in str(error))
    if is_full and config.get("max_bytes", -1) != -1:
        logger.warning(
            "jetstream.reservation_skipped stream=%s max_bytes=%s error=%s", name, config["max_bytes"], error
        )
        return {**config, "max_bytes": -1}
    if error.code == NO_PEERS and nats.replicas is None and replicas > 1:
        logger.warning("jetstream.replicas_reduced stream=%s wanted=%s error=%s", name, replicas, error)
        return {**config, "num_replicas": 1}
    raise error


def headers_of(message: dict[str, Any]) -> dict[str, str]:
    """Return the headers of a message from `STREAM.MSG.GET`: base64 of lines, after one line of the protocol."""
    lines = base64.b64decode(message.get("hdrs", "")).decode(errors="replace").split("\r\n")[1:]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def nanoseconds(seconds: float) -> int:
    """Return `seconds` in nanoseconds, as JetStream expects them."""
    return int(seconds * 1e9)
