"""A model's queue of requests: its streams and consumers in JetStream, their limits and their contents.

Each model has two streams. One has the lanes `high`, `normal` and `low`. The lane `resume` has its own stream, so that
new requests can never fill the queue for requests that were already running. In each lane, all workers of the model
share one durable consumer. A request leaves its stream when a worker acks it, or at its deadline.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from ...schemas.errors import BusBroken, InvalidRequest, PermissionDenied
from ...schemas.request import Lane
from ..nats.client import PatchedNatsClient
from ..nats.jetstream import NO_CONSUMER, NO_STREAM, ApiError, ask, create_stream, find, nanoseconds, parse_stream
from ..nats.library import Client
from ..subjects import LANES, Subjects, encode_token

RESUME_SHARE: Final = 4
"""Resumed requests that a client may have in the queue, for each new one. A lost worker may have had that many."""
DUPLICATE_WINDOW_S: Final = 120.0
"""Seconds for which the server detects duplicates: far longer than any client repeats an unanswered publish."""
MAX_WAITING: Final = 65_536
"""Pulls that may wait on one lane. Each worker has one."""
REMADE_MARGIN_S: Final = 5.0
"""Seconds of tolerance: a stream accepts requests some milliseconds before its consumers exist, and clocks differ."""
LOOK_S: Final = 2.0
"""Seconds for the server to confirm that a queue exists. While a cluster elects a leader, no server does, and workers
ask again."""
PROBE_HEADER: Final = "Rollbus-Probe"
"""Header of a message that is no request: it tests whether the queue stores messages, and workers remove it."""
MAX_NAME_CHARS: Final = 240
"""The server allows 255 characters, file systems 255 bytes."""
STREAM_LANES: Final[tuple[tuple[Lane, ...], ...]] = (("resume",), ("high", "normal", "low"))
"""The lanes of each stream."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one model's queue.

    They apply when its streams are created, and later through `rollbus make-queue`.
    """

    max_msgs: int = 65_536
    """Requests that wait in the lanes high, normal and low: minutes of work for hundreds of GPUs."""
    max_bytes: int = 1024**3
    """Their total bytes: as many requests with prompts of 4,000 tokens. The server reserves them on its disk if it can.
    """
    max_per_client: int = 1024
    """Requests of one client in one of these lanes. The client holds further requests back and publishes them when
    there is room. In a first-in, first-out lane, equal limits give equal shares of requests. Workers that accept a
    thousand requests at once leave room for the next thousand within a round trip."""
    resume_max_msgs: int = 1_000_000
    """Resumed requests: more than a fleet can have in flight."""
    resume_max_bytes: int = 4 * 1024**3
    """Their total bytes."""
    ack_wait_s: float = 5.0
    """Seconds without an ack or in-progress from its worker after which a request goes to another worker."""


def bounds_of_stream(lane: Lane, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of the stream with `lane`, by JetStream's names.

    Args:
        limits: the limits, by the field names of `QueueLimits`. A missing name sets no limit.
    """
    prefix, share = ("resume_", RESUME_SHARE) if lane == "resume" else ("", 1)
    bounds = {name: limits[prefix + name] for name in ("max_msgs", "max_bytes") if prefix + name in limits}
    if "max_per_client" in limits:
        # The subject has client, model and lane.
        bounds |= {"max_msgs_per_subject": limits["max_per_client"] * share, "discard_new_per_subject": True}
    return bounds


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """The number of requests in one lane of a model's queue."""

    model: str
    """Name of the model."""
    lane: Lane
    """The lane."""
    waiting: int
    """Requests that were not delivered to a worker yet."""
    in_hand: int
    """Requests that were delivered to a worker and not acked yet."""
    leader: str = ""
    """The server of a cluster that delivers them; empty: there is no cluster."""
    replicas: int = 1
    """Servers that store the state of the lane, including the leader."""
    behind: tuple[str, ...] = ()
    """Of these servers, those that are down or not current."""


class StoredRange(msgspec.Struct, frozen=True, kw_only=True):
    """The sequence numbers that one lane of a queue may contain at one moment, waiting or at a worker.

    They come from the lane's consumer alone: `STREAM.INFO` would also list the clients of waiting requests.
    """

    delivered_seq: int = 0
    """The last number that was delivered to a worker."""
    acked_seq: int = 0
    """The last number that was acked together with all before it."""
    has_waiting: bool = False
    age_s: float = 0.0
    """Seconds since the consumer was created."""

    def may_hold(self, seq: int, stored_for_s: float) -> bool:
        """Return True if the request with this number may be in the queue.

        False is certain. True may last until the requests that were delivered before it have been acked.

        Args:
            seq: the sequence number of a request that the queue has confirmed.
            stored_for_s: seconds since the confirmation. If the consumer is younger, the queue was created again.
        """
        if self.age_s + REMADE_MARGIN_S < stored_for_s:
            return False
        return self.has_waiting if seq > self.delivered_seq else seq > self.acked_seq


def stream_name(subjects: Subjects, model: str, lane: Lane) -> str:
    """Return the stream name of a lane: `rb~<fleet>~<model>`, and for `resume` the same with `~resume`.

    The model name is encoded as in subjects. If this is too long, its hash follows a second `~`. No fleet and no
    encoded name has a `~`, so no two models share a stream.
    """
    token = encode_token(model)
    ending = "~resume" if lane == "resume" else ""
    name = f"rb~{subjects.fleet}~{token}{ending}"
    if len(name) > MAX_NAME_CHARS:
        name = f"rb~{subjects.fleet}~~{hashlib.sha256(model.encode()).hexdigest()}{ending}"
    return name


async def ensure_queue(
    nats: PatchedNatsClient, subjects: Subjects, model: str, limits: QueueLimits | None = None
) -> None:
    """Create the streams and consumers of `model` that are missing. Safe to repeat.

    Existing streams and consumers stay unchanged, including their limits: a lower limit would delete waiting requests.
    If nothing is missing, the caller needs no permission to change anything.

    Raises:
        BusBroken: JetStream does not answer, or refuses; the message quotes it.
    """
    limits = limits or QueueLimits()
    try:
        for lanes in STREAM_LANES:
            for lane in lanes:
                await _ensure_lane(nats, subjects, model, lane, limits)
    except ApiError as error:
        raise BusBroken(f"the queue of {model!r} cannot be created: {error}") from error
    except PermissionDenied as error:
        raise BusBroken(
            f"the queue of {model!r} does not exist, and {error}; an admin can create it: rollbus make-queue {model}"
        ) from error


async def _ensure_lane(
    nats: PatchedNatsClient, subjects: Subjects, model: str, lane: Lane, limits: QueueLimits
) -> None:
    name = stream_name(subjects, model, lane)
    try:
        await ask(nats, f"CONSUMER.INFO.{name}.{lane}", timeout_s=LOOK_S)
        return
    except ApiError as error:
        if error.code not in {NO_STREAM, NO_CONSUMER}:
            raise
        has_stream = error.code == NO_CONSUMER
    if not has_stream:
        lanes = next(lanes for lanes in STREAM_LANES if lane in lanes)
        bounds = bounds_of_stream(lane, msgspec.structs.asdict(limits))
        await create_stream(nats, _stream_config(subjects, model, lanes) | bounds)
    consumer = {
        "durable_name": lane,
        "filter_subject": subjects.requests_in(model, lane),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(limits.ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": -1,  # a lane never stalls, regardless of the requests at workers
        "max_waiting": MAX_WAITING,
    }
    await ask(nats, f"CONSUMER.CREATE.{name}.{lane}", {"stream_name": name, "config": consumer, "action": ""})


async def delete_queue(nats: Client, subjects: Subjects, model: str) -> None:
    """Delete the streams of `model` with all their requests. Safe to repeat.

    Raises:
        PermissionDenied: this user has no permission.
        BusBroken: JetStream does not answer, or refuses; the message quotes it.
    """
    for lanes in STREAM_LANES:
        operation = f"STREAM.DELETE.{stream_name(subjects, model, lanes[0])}"
        await find(nats, operation, absent={NO_STREAM}, failing=f"the queue of {model!r} cannot be deleted")


async def queue_depths(nats: Client, subjects: Subjects, models: tuple[str, ...]) -> tuple[QueueDepth, ...]:
    """Return the number of requests in the lanes of `models`, in the order of `LANES`. A missing queue has no rows.

    Raises:
        BusBroken: JetStream does not answer.
    """
    depths = []
    for model in models:
        for lane in LANES:
            info = await _find_consumer(nats, subjects, model, lane)
            if info is None:
                continue
            cluster = parse_stream(info)
            depths.append(
                QueueDepth(
                    model=model,
                    lane=lane,
                    waiting=info["num_pending"],
                    in_hand=info["num_ack_pending"],
                    leader=cluster.leader,
                    replicas=cluster.others + 1,
                    behind=cluster.behind,
                )
            )
    return tuple(depths)


async def queue_clients(nats: Client, subjects: Subjects, model: str) -> dict[tuple[Lane, str], int]:
    """Count the requests of each client in the queue of `model`, waiting or at a worker, by lane and client.

    Raises:
        PermissionDenied: this user has no permission.
        BusBroken: JetStream does not answer.
    """
    found: dict[tuple[Lane, str], int] = {}
    for lanes in STREAM_LANES:
        operation = f"STREAM.INFO.{stream_name(subjects, model, lanes[0])}"
        failing = f"the queue of {model!r} cannot be read"
        info = await find(nats, operation, {"subjects_filter": ">"}, absent={NO_STREAM}, failing=failing)
        if info is None:
            continue
        for subject, count in (info["state"].get("subjects") or {}).items():
            *_, client, _model, lane = subject.split(".")
            if lane in lanes:
                found[lane, client] = count
    return found


async def stored_in(nats: Client, subjects: Subjects, model: str, lane: Lane) -> StoredRange:
    """Return the range that a lane of the queue of `model` may contain now; an empty range without a queue.

    Raises:
        BusBroken: JetStream does not answer.
    """
    consumer = await _find_consumer(nats, subjects, model, lane)
    if consumer is None:
        return StoredRange()
    return StoredRange(
        delivered_seq=consumer["delivered"]["stream_seq"],
        acked_seq=consumer["ack_floor"]["stream_seq"],
        has_waiting=consumer["num_pending"] > 0,
        age_s=_age_s(consumer),
    )


async def _find_consumer(nats: Client, subjects: Subjects, model: str, lane: Lane) -> dict[str, Any] | None:
    operation = f"CONSUMER.INFO.{stream_name(subjects, model, lane)}.{lane}"
    failing = f"the queue of {model!r} cannot be read"
    return await find(nats, operation, absent={NO_STREAM, NO_CONSUMER}, failing=failing)


def _age_s(consumer: dict[str, Any]) -> float:
    """Return the seconds since a consumer was created, by the server's clock alone."""
    now, created = (datetime.fromisoformat(consumer[name]) for name in ("ts", "created"))
    return (now - created).total_seconds()


def _stream_config(subjects: Subjects, model: str, lanes: tuple[Lane, ...]) -> dict[str, Any]:
    return {
        "name": stream_name(subjects, model, lanes[0]),
        "subjects": [subjects.requests_in(model, lane) for lane in lanes],
        "metadata": {"fleet": subjects.fleet, "model": model},
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "allow_msg_ttl": True,
        "duplicate_window": nanoseconds(DUPLICATE_WINDOW_S),
    }


async def set_limits(nats: Client, subjects: Subjects, model: str, limits: Mapping[str, int]) -> None:
    """Set these limits for the existing streams of `model`. Other limits stay.

    If a server receives a lower limit than the contents of a stream, it deletes the oldest messages without an error.
    Therefore the limits are first compared with the contents, and workers never change limits.

    Args:
        limits: the limits, by the field names of `QueueLimits`.

    Raises:
        InvalidRequest: a stream holds more than a limit, which the error names; this stream is not changed.
        BusBroken: JetStream does not answer, or refuses; the message quotes it.
    """
    try:
        for lanes in STREAM_LANES:
            name = stream_name(subjects, model, lanes[0])
            info = await ask(nats, f"STREAM.INFO.{name}", {"subjects_filter": ">"})
            bounds = bounds_of_stream(lanes[0], limits)
            _check_held(name, info["state"], bounds)
            # Keep the other settings: an operator's replicas and placement stay.
            await ask(nats, f"STREAM.UPDATE.{name}", {**info["config"], **bounds})
    except ApiError as error:
        raise BusBroken(f"the limits of the queue of {model!r} cannot be set: {error}") from error


def _check_held(stream: str, state: dict[str, Any], bounds: dict[str, Any]) -> None:
    """Check that no limit is below the contents of the stream."""
    of_clients = state.get("subjects") or {}
    held = {
        "max_msgs": state["messages"],
        "max_bytes": state["bytes"],
        "max_msgs_per_subject": max(of_clients.values(), default=0),
    }
    for bound, now in held.items():
        if now > bounds.get(bound, now):
            raise InvalidRequest(
                bound, f"is {bounds[bound]}, and {stream} holds {now}", f"{now} or more, until workers have pulled some"
            )
