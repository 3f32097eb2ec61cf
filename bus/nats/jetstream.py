"""JetStream's API as rollbus uses it: one request, one answer, and exceptions with the server's error codes."""

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections.abc import Container, Iterator
from typing import Any, Final

import msgspec

from ...schemas.errors import BusBroken, ControlCode, ControlError, PermissionDenied
from .client import PatchedNatsClient
from .library import Client
from .library import errors as nats_errors

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
TRY_S: Final = 2.0
"""Seconds to wait for one answer, which usually takes milliseconds. A leader election drops earlier requests, so they
must be repeated."""
ELECTION_S: Final = 15.0
"""Seconds from the first missing answer. nats-server waits up to 9 s before it elects another leader."""
AGAIN_S: Final = 0.25
"""Seconds between a "not now" answer and the next request."""
STEP_BYTES: Final = 1024**2
"""Precision of the answer in bytes."""
_NAME: Final = "doctor"
_NOT_VALID: Final = "a..b"
"""Subject that no stream can have."""
_ACCOUNT_FULL: Final = 10002
_NOT_CREATED: Final = 10049
"""The server's code for a stream that failed behind the check of its size."""


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
    payload = b"" if body is None else json.dumps(body).encode()
    try:
        try:
            return await _request(nats, f"{API}.{operation}", payload, timeout_s)
        except _ConnectionLost:
            return await _request(nats, f"{API}.{operation}", payload, timeout_s)
    except nats_errors.NoRespondersError as error:
        raise BusBroken("the NATS server has no JetStream, which rollbus needs") from error


async def find(
    nats: Client,
    operation: str,
    body: dict[str, Any] | None = None,
    *,
    absent: Container[int],
    failing: str = "",
    timeout_s: float | None = None,
) -> dict[str, Any] | None:
    """Call JetStream's API as `ask` does. Return None if the server answers with an error code in `absent`.

    Args:
        failing: beginning of the message for other error codes, which then raise `BusBroken`; empty: raise `ApiError`.
    """
    try:
        return await ask(nats, operation, body, timeout_s=timeout_s)
    except ApiError as error:
        if error.code in absent:
            return None
        if failing:
            raise BusBroken(f"{failing}: {error}") from error
        raise


@contextlib.contextmanager
def storage_errors(failing: str) -> Iterator[None]:
    """Raise `ControlError` with `storage` and a message that begins with `failing` for each `ApiError` of the block."""
    try:
        yield
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"{failing}: {error}") from error


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
    try:
        answer = await _request(nats, subject, data, timeout_s, headers)
    except nats_errors.NoRespondersError as error:
        raise ApiError(NO_STREAM, f"no stream has {subject}") from error
    return int(answer["seq"])


async def _request(
    nats: Client, subject: str, payload: bytes, timeout_s: float | None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    timeout_s = API_TIMEOUT_S if timeout_s is None else timeout_s
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
    answer: dict[str, Any] = msgspec.json.decode(message.data)
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


class Retries:
    """The tries of one write, and when to stop."""

    def __init__(self) -> None:
        self._ends_at: float | None = None
        self._refused_at: int | None = None

    async def note_refusal(self, sequence: int) -> None:
        """Record that the server refused a write because another write came first.

        `sequence` is the number of the newest write that this program had read before its own write. If the server
        refuses again with the same number, wait, because the other write is not stored yet. A leader without a
        majority refuses writes immediately and repeatedly.

        Raises:
            Unanswered: the time for an election has passed.
        """
        is_again, self._refused_at = sequence == self._refused_at, sequence
        if is_again:
            await self.wait(Unanswered("another write is on its way through the servers of the cluster"))

    async def wait(self, error: Unanswered) -> None:
        """Wait before the next try.

        Raises:
            Unanswered: `error`, because the time for an election has passed.
        """
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + ELECTION_S
            logger.warning("desired.request_failed error=%s", error)
        if now >= self._ends_at:
            raise error
        await asyncio.sleep(AGAIN_S)


async def free_storage(nats: PatchedNatsClient, up_to: int) -> int | None:
    """Return the bytes that a server without a cluster can reserve, at most `up_to`.

    `$JS.API.INFO` has the limits of the account, not those of the server. This function therefore requests streams that
    cannot be created: the server first checks their size, and then rejects the subject of their source.

    Returns:
        The bytes; None: this user may not ask, or the answer does not show the server's storage.

    Raises:
        BusBroken: the server does not answer.
    """
    if nats.is_in_cluster:  # a server of a cluster proposes a stream to others before it checks the subject
        return None
    if (has_room := await _has_room(nats, up_to)) is not False:
        return up_to if has_room else None
    enough, too_much = 0, up_to
    while too_much - enough > STEP_BYTES:
        middle = (enough + too_much) // 2
        enough, too_much = (middle, too_much) if await _has_room(nats, middle) else (enough, middle)
    return enough


async def _has_room(nats: PatchedNatsClient, num_bytes: int) -> bool | None:
    stream: dict[str, Any] = {
        "name": _NAME,
        "storage": "file",
        "max_bytes": num_bytes,
        "sources": [{"name": f"{_NAME}-absent", "filter_subject": _NOT_VALID}],
    }
    try:
        await ask(nats, f"STREAM.CREATE.{_NAME}", stream)
    except PermissionDenied:
        return None
    except ApiError as error:
        return {_NOT_CREATED: True, NO_STORAGE: False, _ACCOUNT_FULL: False}.get(error.code)
    return None


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One stream at one moment."""

    name: str
    config: dict[str, Any]
    leader: str
    """Name of the stream's leader; empty: there is none, or the server is in no cluster."""
    replicas: int
    """Configured number of replicas, including the leader's."""
    others: int
    """Number of servers with a replica, without the leader."""
    behind: tuple[str, ...]
    """Other servers whose replica is incomplete or that are offline, as in `n1 (lags by 7)`."""

    @property
    def is_current(self) -> bool:
        """True if there is a leader and all replicas are complete."""
        return bool(self.leader) and not self.behind


async def list_streams(nats: PatchedNatsClient) -> tuple[tuple[StreamInfo, ...], tuple[str, ...]]:
    """Return all streams of this user's account by name, and the names of streams without a leader.

    Raises:
        ApiError: the server rejected the request.
        BusBroken: the server does not answer; `PermissionDenied`: this user is no admin.
    """
    found: dict[str, StreamInfo] = {}
    missing: set[str] = set()
    offset, total = 0, 1
    while offset < total:
        answer = await ask(nats, "STREAM.LIST", {"offset": offset})
        found |= {info["config"]["name"]: parse_stream(info) for info in answer.get("streams") or ()}
        missing.update(answer.get("missing") or ())
        total = answer["total"]
        offset += answer["limit"]
    return tuple(found[name] for name in sorted(found)), tuple(sorted(missing))


def parse_stream(info: dict[str, Any]) -> StreamInfo:
    """Parse the answer to `STREAM.INFO`, or one stream of a list. `CONSUMER.INFO` has the same form for its cluster."""
    config, cluster = info["config"], info.get("cluster") or {}
    return StreamInfo(
        name=config.get("name", ""),
        config=config,
        leader=cluster.get("leader", ""),
        replicas=config.get("num_replicas", 1),
        others=len(cluster.get("replicas") or ()),
        behind=tuple(_behind(one) for one in cluster.get("replicas") or () if _is_behind(one)),
    )


def _is_behind(replica: dict[str, Any]) -> bool:
    return bool(replica.get("offline") or not replica.get("current") or replica.get("lag"))


def _behind(replica: dict[str, Any]) -> str:
    if replica.get("offline"):
        return f"{replica['name']} (offline)"
    lag = replica.get("lag", 0)
    return f"{replica['name']} (lags by {lag})" if lag else f"{replica['name']} (not current)"
