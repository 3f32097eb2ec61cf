"""Publishes a client's requests to the queues without waiting, and repeats them until the server has answered.

If the client's share of a lane is full, the publisher holds further requests back until there is room.

Invariant: each publish gets exactly one result, unless it is removed before.

If a write of nats-server fails, usually because its disk is full, the stream stores nothing until the server restarts,
even after space was freed. It answers reads as before, and does not answer publications at all. Probes find that out.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, Generic, TypeVar

import msgspec

from ...schemas.errors import BusBroken, ErrorCode, LocalProtocolError, PermissionDenied
from ...schemas.request import Lane
from ..auth.credentials import Role
from ..auth.permissions import REQUESTERS
from ..nats.connection import Connection, publish, subscribe
from ..nats.jetstream import ApiError, ask
from ..nats.library import Msg
from ..nats.library import errors as nats_errors
from ..protocol.queue.pull_plan import HeldBack
from ..subjects import Subjects
from ..thread_calls import is_set_within
from .streams import LOOK_S, PROBE_HEADER, STREAM_LANES, stream_name

logger = logging.getLogger(__name__)

PROBE_BYTES: Final = 8192
"""Bytes of a probe: more than the rest of a disk block, in which a message may still have room on a full disk."""
PROBE_S: Final = 2.0
"""Seconds for the server to confirm a probe, which takes milliseconds. A busy server takes a second."""
STREAM_FULL: Final = 10077
"""JetStream's error if a stream rejects a message: because of its limits, or because of a failed write."""
FULL: Final = frozenset({STREAM_FULL, 10023, 10047, 10002})
"""JetStream's errors for a stream, a server, a disk or an account that can store no more."""
LIMIT: Final = "exceeded"
"""Part of the server's message for a stream at one of its limits."""
SHARE_FULL: Final = "maximum messages per subject exceeded"
"""The server's message for a client whose share of a lane is full. The code is that of a full stream."""
RESTART_ADVICE: Final = "free space on the disk of nats-server, then restart nats-server"
LIMIT_ADVICE: Final = "start workers that empty the queue, or raise its limits with `rollbus make-queue`"
SPACE_ADVICE: Final = "raise max_file_store in the configuration of nats-server, or delete data that nobody needs"
IF_THIS_LASTS: Final = f"if this lasts, {RESTART_ADVICE}"
STORES_NOTHING: Final = (
    "confirms no request, although the server answers: its disk is full or was full since its start, or it is "
    f"overloaded; {IF_THIS_LASTS}"
)
REPEAT_S: Final = 2.0
"""Seconds until a publish is repeated. The server answers within milliseconds, and within less than this when busy."""
TICK_S: Final = 0.25
"""Seconds between checks of unanswered publishes."""
MAX_REPEATS: Final = 1000
"""Maximum repeats at a time, because more would increase the load of a slow server."""
MAX_UNANSWERED: Final = 65_536
"""Maximum publishes without an answer: a second of work for the server, a day of work for a trainer."""
MAX_SUBJECTS: Final = 256
"""Subjects that are kept: the lanes of some models."""
_TOO_LARGE: Final = 10054
_NOT_NOW: Final = frozenset({429, 503})
"""Temporary error codes: more than 10,000 publishes that are not on disk yet; no leader."""
_IN_PROCESS: Final = 10158
"""JetStream's error for a repeated publish before the servers of a cluster agreed on the first one."""
_NO_RESPONDERS: Final = "503"


K = TypeVar("K", bound=Hashable)


class _AnswerError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} (JetStream error {self.err_code})"


class PublishAck(msgspec.Struct):
    """The server's answer to a publication."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _AnswerError | None = None


decode_publish_ack: Final = msgspec.json.Decoder(PublishAck).decode


async def why_unstored(nats: Connection, subjects: Subjects, model: str, lane: Lane) -> str:
    """Return why the server confirms no publication to a lane, phrased to follow the name of the queue.

    The remedy follows the last semicolon.
    """
    try:
        await ask(nats, f"CONSUMER.INFO.{stream_name(subjects, model, lane)}.{lane}", timeout_s=LOOK_S)
    except (ApiError, BusBroken) as error:
        return f"does not answer: {error}; {IF_THIS_LASTS}"
    return STORES_NOTHING


class QueueProbes:
    """Publishes messages, which workers remove, to find out whether queues store requests."""

    def __init__(self, nats: Connection, subjects: Subjects) -> None:
        self._nats = nats
        self._subjects = subjects
        self._is_denied = False

    async def problems(self, client: str, models: Sequence[str]) -> dict[str, str]:
        """Publish a probe to each stream of these queues. Return by model why one is not stored.

        The remedy follows the last semicolon. Return nothing if this user may not publish probes, because then nothing
        is known.
        """
        user = self._nats.user
        if not models or (user is not None and user.role not in REQUESTERS | {Role.ADMIN}):
            return {}  # the server would log violations
        pairs = [(model, lanes[0]) for model in models for lanes in STREAM_LANES]
        # A server that was configured by an earlier release denies admins the first one. It then gets no others.
        found = [await self._probe(client, *pairs[0])]
        async with asyncio.TaskGroup() as tasks:
            probes = [tasks.create_task(self._probe(client, *pair)) for pair in pairs[1:]]
        found += [probe.result() for probe in probes]
        return {model: one for (model, _), one in reversed(list(zip(pairs, found, strict=True))) if one is not None}

    async def _probe(self, client: str, model: str, lane: Lane) -> str | None:
        if self._is_denied:
            return None
        subject = self._subjects.request(client, model, lane)
        if self._nats.user is not None and self._nats.user.role is Role.ADMIN:
            subject = self._subjects.probe(model, lane)
        try:
            # After a second without a worker, the server removes it.
            headers = {"Nats-TTL": "1", PROBE_HEADER: "1"}
            answer = await self._nats.request(subject, bytes(PROBE_BYTES), timeout=PROBE_S, headers=headers)
            return _why_rejected(decode_publish_ack(answer.data).error)
        except PermissionDenied:
            self._is_denied = True
        except nats_errors.NoRespondersError:
            return None
        except nats_errors.TimeoutError:
            return await why_unstored(self._nats, self._subjects, model, lane)
        except (nats_errors.Error, msgspec.MsgspecError) as error:
            logger.warning("queue.probe_failed model=%s error=%s", model, error)
        return None


def _why_rejected(error: _AnswerError | None) -> str | None:
    """Return the problem that JetStream's answer to a probe shows. A client's full share is none of the queue."""
    if error is None or error.err_code not in FULL or SHARE_FULL in error.description:
        return None
    advice = SPACE_ADVICE
    if error.err_code == STREAM_FULL:
        advice = LIMIT_ADVICE if LIMIT in error.description else RESTART_ADVICE
    return f"rejects requests: {error}; {advice}"


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one publish."""

    ok: bool
    """True if the request is in the queue."""
    stream: str = ""
    seq: int = 0
    """Its sequence number in `stream`."""
    is_duplicate: bool = False
    """True if the request was stored already: an earlier publish with the same `msg_id` had arrived."""
    code: ErrorCode | None = None
    """The error: QUEUE_FULL, NO_WORKERS (no worker has created the queue yet), TOO_LARGE; UNKNOWN: see `message`."""
    message: str = ""
    """The server's message."""


@dataclass(slots=True)
class PublisherStats:
    """Counters since the start."""

    publishes: int = 0
    repeats: int = 0
    """Publishes that were repeated because no answer arrived."""
    late_answers: int = 0
    """Answers to publishes that had been removed, or answered before."""
    bad_answers: int = 0
    """Answers that did not decode."""
    kept_back: int = 0
    """Requests that the queue rejected because this client's share of a lane was full."""


class _UnansweredPublish(msgspec.Struct, Generic[K]):
    token: K
    model: str
    lane: Lane
    subject: str
    data: bytes
    msg_id: str
    deadline_s: float
    published_at: float = 0.0


class QueuePublisher(Generic[K]):
    """Publishes requests to the queues of a fleet's models.

    Args:
        client: the client's name in the subjects.
        on_result: called with the token and the result of its publish; must not block or raise.
    """

    def __init__(
        self, nats: Connection, subjects: Subjects, client: str, on_result: Callable[[K, PublishResult], None]
    ) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client = client
        self._subject = lru_cache(maxsize=MAX_SUBJECTS)(partial(subjects.request, client))
        self._on_result = on_result
        self._inbox = ""
        self._numbers = itertools.count()
        # Oldest first, by the number in their reply subject.
        self._unanswered: dict[int, _UnansweredPublish[K]] = {}
        self._number_of: dict[K, int] = {}
        self._has_unanswered = asyncio.Event()
        # By subject with unanswered publishes: the rounds of repeats since its last answer, and the reason.
        self._silences: dict[str, tuple[int, str]] = {}
        # By number: publishes that wait for room, and not for an answer.
        self._kept: dict[int, _UnansweredPublish[K]] = {}
        self._held_back = HeldBack()
        self._has_kept, self._has_room = asyncio.Event(), asyncio.Event()
        self.stats = PublisherStats()

    def debug_state(self) -> dict[str, int]:
        """Return counts of the requests without a result, for tests. The names are not stable."""
        counts = {"published": len(self._number_of), "unanswered": len(self._unanswered)}
        return counts | {"kept_back": len(self._kept)}

    @property
    def is_full(self) -> bool:
        """True if another request would be rejected: too many wait for the server's answer or for room."""
        return len(self._unanswered) + len(self._kept) >= MAX_UNANSWERED

    async def start(self) -> None:
        """Subscribe to answers. Call this before the first publish. The subscription ends with the connection.

        Raises:
            BusClosed: the connection is closed.
        """
        self._inbox = self._nats.new_inbox()
        await subscribe(self._nats, f"{self._inbox}.*", self._receive_ack)

    async def run(self) -> None:
        """Repeat publishes without an answer until cancelled: after `REPEAT_S`, and after a lost connection.

        Requests that were held back are published when there is room.

        Raises:
            BusClosed: the connection was closed locally.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_repeats())
            tasks.create_task(self._run_held_back())

    @property
    def needs_room(self) -> bool:
        """True if requests may be held back, so that `add_room` has an effect."""
        return not self._held_back.is_idle

    def add_room(self, model: str, lane: Lane) -> None:
        """Record that a request of this client has left the queue."""
        self._add_room(self._subject(model, lane))

    def _add_room(self, subject: str) -> None:
        if self._held_back.holds(subject):
            self._held_back.add_room(subject)
            self._has_room.set()

    async def _run_held_back(self) -> None:
        """Publish held-back requests when there is room, and one of each lane every `TICK_S`."""
        while True:
            await self._has_kept.wait()
            if not await is_set_within(self._has_room, TICK_S):
                self._held_back.add_room_everywhere()
            self._has_room.clear()
            for number in self._held_back.pop_due():
                kept = self._kept.pop(number, None)
                if kept is not None:  # not removed meanwhile
                    await self._send_again(number, kept)
            if not self._kept:
                self._has_kept.clear()

    async def _run_repeats(self) -> None:
        reconnects = self._nats.counters().reconnects
        while True:
            await self._has_unanswered.wait()
            await asyncio.sleep(TICK_S)
            if self._nats.is_connected:
                now = time.monotonic()
                is_new = self._nats.counters().reconnects != reconnects
                reconnects = self._nats.counters().reconnects
                repeated = await self._repeat(now if is_new else now - REPEAT_S)
                await self._note_silences(() if is_new else repeated)
            if not self._unanswered:
                self._has_unanswered.clear()
                self._silences.clear()

    async def _note_silences(self, repeated: Iterable[_UnansweredPublish[K]]) -> None:
        """Count the rounds of repeats of each subject. Log round 1, 2, 4, 8 ... with the reason."""
        for subject, each in {each.subject: each for each in repeated}.items():
            rounds, reason = self._silences.get(subject, (0, ""))
            rounds += 1
            if rounds.bit_count() == 1:
                reason = (
                    f"the queue of {each.model} {await why_unstored(self._nats, self._subjects, each.model, each.lane)}"
                )
                logger.warning(
                    "queue.unanswered client=%s lane=%s rounds=%s reason=%s", self._client, each.lane, rounds, reason
                )
            if any(other.subject == subject for other in self._unanswered.values()):  # not answered meanwhile
                self._silences[subject] = rounds, reason

    def problem(self, model: str, lane: Lane) -> str:
        """Return why the queue has not confirmed publications to a lane, or an empty string if it has."""
        return self._silences.get(self._subject(model, lane), (0, ""))[1]

    async def publish(self, *, token: K, model: str, lane: Lane, data: bytes, msg_id: str, ttl_s: float) -> None:
        """Publish one request. `on_result` receives the result. Wait only while too much data is unsent.

        Args:
            token: value that `on_result` receives. If it still waits for a result, the earlier publish is removed
                first.
            msg_id: the server stores no second message with it.
            ttl_s: the request leaves the queue after this time, in whole seconds, rounded up.

        Cancellation: the request may have been published, and is not published again.

        Raises:
            LocalProtocolError: `data`, with its headers, is larger than the server's `max_payload`.
            BusBroken: the connection is down and its buffer is full, or it was lost permanently.
            BusClosed: the connection was closed locally.
        """
        if token in self._number_of:
            self.remove(token)
        if self.is_full:
            message = f"{MAX_UNANSWERED} requests of this client wait for the server's answer, or for room in the queue"
            self._on_result(token, PublishResult(ok=False, code=ErrorCode.QUEUE_FULL, message=message))
            return
        subject = self._subject(model, lane)
        number = next(self._numbers)
        unanswered = _UnansweredPublish(token, model, lane, subject, data, msg_id, time.monotonic() + ttl_s)
        self._number_of[token] = number
        self.stats.publishes += 1
        if self._held_back.holds(subject):
            self._keep_back(number, unanswered)
            return
        self._unanswered[number] = unanswered
        if len(self._unanswered) == 1:
            self._has_unanswered.set()
        is_published = False
        try:
            await self._send(number, unanswered)
            is_published = True
        finally:
            if not is_published:
                self.remove(token)

    def __contains__(self, token: K) -> bool:
        """Return True if the publish of `token` has no result yet."""
        return token in self._number_of

    def remove(self, token: K) -> bool:
        """Remove `token`: expect no result and repeat nothing. The request may be in the queue.

        Returns:
            False if the publish has its result, or was removed before.
        """
        number = self._number_of.pop(token, None)
        if number is not None and self._unanswered.pop(number, None) is None:
            del self._kept[number]
            self._held_back.discard(number)
        return number is not None

    async def _send(self, number: int, unanswered: _UnansweredPublish[K]) -> None:
        now = time.monotonic()
        unanswered.published_at = now
        ttl_s = max(1, math.ceil(unanswered.deadline_s - now))
        # As `encode_headers` would encode them: the id is one of this client, and needs no check.
        headers = b"NATS/1.0\r\nNats-Msg-Id: %b\r\nNats-TTL: %d\r\n\r\n" % (unanswered.msg_id.encode(), ttl_s)
        await publish(self._nats, unanswered.subject, unanswered.data, reply=f"{self._inbox}.{number}", headers=headers)

    async def _repeat(self, before: float) -> list[_UnansweredPublish[K]]:
        """Repeat the publishes that were made before that time. Return those that were repeated."""
        repeated: list[_UnansweredPublish[K]] = []
        due: list[int] = []
        for number, unanswered in self._unanswered.items():
            if unanswered.published_at > before or len(due) == MAX_REPEATS:
                break
            due.append(number)
        for number in due:
            again = self._unanswered.pop(number, None)
            if again is None:  # answered or removed meanwhile
                continue
            self.stats.repeats += 1
            if not await self._send_again(number, again):
                return []
            repeated.append(again)
        if due:
            logger.info("queue.repeated client=%s publishes=%s", self._client, len(due))
        return repeated

    async def _send_again(self, number: int, unanswered: _UnansweredPublish[K]) -> bool:
        """Publish a request again, as the newest one. Return False if the connection accepts no more."""
        self._unanswered[number] = unanswered
        self._has_unanswered.set()
        try:
            await self._send(number, unanswered)
        except LocalProtocolError as error:  # the server after the reconnect has a lower limit than before
            self.remove(unanswered.token)
            self._on_result(unanswered.token, PublishResult(ok=False, code=ErrorCode.TOO_LARGE, message=str(error)))
        except BusBroken as error:
            logger.warning("queue.repeat_failed client=%s error=%s", self._client, error)
            return False
        return True

    def _keep_back(self, number: int, unanswered: _UnansweredPublish[K]) -> None:
        """Hold the request back until this client's share of the lane has room."""
        self._unanswered.pop(number, None)
        self._kept[number] = unanswered
        self._held_back.add(unanswered.subject, number)
        self._has_kept.set()

    def _receive_ack(self, message: Msg) -> None:
        digits = message.subject.rpartition(".")[2]
        # Without users, any program may send to this inbox. A forged number is that of no publish.
        number = int(digits) if digits.isdecimal() and len(digits) < 20 else -1
        unanswered = self._unanswered.get(number)
        if unanswered is None:
            self.stats.late_answers += 1
            return
        try:
            result = _result_of(message)
        except msgspec.MsgspecError as error:
            self.stats.bad_answers += 1
            logger.warning("queue.publish_ack_rejected client=%s error=%s", self._client, error)
            return
        if result is None:
            return
        if self._silences:
            self._silences.pop(unanswered.subject, None)
        if result.code is ErrorCode.QUEUE_FULL and SHARE_FULL in result.message:
            self.stats.kept_back += 1
            self._keep_back(number, unanswered)
            return
        self.remove(unanswered.token)
        if self.needs_room:
            self._add_room(unanswered.subject)
        self._on_result(unanswered.token, result)


def _result_of(message: Msg) -> PublishResult | None:
    """Decode the answer to a publish; None: a temporary error, so the publish is repeated later."""
    if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
        return PublishResult(ok=False, code=ErrorCode.NO_WORKERS, message="no worker has created a queue for the model")
    answer = decode_publish_ack(message.data)
    error = answer.error
    if error is None:
        return PublishResult(ok=True, stream=answer.stream, seq=answer.seq, is_duplicate=answer.duplicate)
    if error.err_code in FULL:
        code = ErrorCode.QUEUE_FULL
    elif error.err_code == _TOO_LARGE:
        code = ErrorCode.TOO_LARGE
    elif error.code in _NOT_NOW or error.err_code == _IN_PROCESS:
        return None
    else:
        code = ErrorCode.UNKNOWN
    return PublishResult(ok=False, stream=answer.stream, code=code, message=str(error))
