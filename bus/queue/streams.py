"""A model's queue of requests: its streams and consumers in JetStream, and what waits in them.

Two streams for each model. One holds the lanes `high`, `normal` and `low`; the lane `resume` has one of its own, so
that new requests can never fill the queue for those that were already running. In each lane one durable consumer is
shared by all workers of the model. A request leaves its stream when a worker acks it, or at its deadline.
"""

import hashlib
import logging
from typing import Any, Final, get_args

import msgspec
from nats.aio.client import Client

from bus.jetstream import NO_CONSUMER, NO_STORAGE, NO_STREAM, ApiError, ask, create_stream, nanoseconds
from bus.subjects import Subjects, encode_token
from schemas.errors import BusBroken, PermissionDenied
from schemas.request import Lane

__all__ = [
    "LANES",
    "QueueDepth",
    "QueueLimits",
    "Stored",
    "ensure_queue",
    "queue_depths",
    "stored_in",
    "stream_name",
]

logger = logging.getLogger(__name__)

LANES: Final[tuple[Lane, ...]] = get_args(Lane)
"""In the order in which workers empty them."""
DUPLICATE_WINDOW_S: Final = 120.0
"""For how long the server knows what it has stored: far longer than anyone repeats a publish that was not answered."""
MAX_WAITING: Final = 65_536
"""Pulls that may wait on one lane; each worker has one."""
MAX_NAME_CHARS: Final = 240
"""The server allows 255, file systems 255 bytes."""

_STREAMS: Final[tuple[tuple[Lane, ...], ...]] = (("resume",), ("high", "normal", "low"))
"""The lanes of each stream."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one model's queue. Workers set them; the last one to start wins."""

    max_msgs: int = 65_536
    """Requests that wait in the lanes high, normal and low: minutes of work for hundreds of GPUs."""
    max_bytes: int = 1024**3
    """Their total size: as many requests with prompts of 4,000 tokens. Set aside on the server's disk where it can."""
    resume_max_msgs: int = 1_000_000
    """Resumed requests: more than a fleet can have in flight."""
    resume_max_bytes: int = 4 * 1024**3
    """Their total size."""
    ack_wait_s: float = 5.0
    """After this long without a word from its worker a request goes to another."""


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """How full one lane of a model's queue is."""

    model: str
    lane: Lane
    waiting: int
    """Requests that no worker has been handed."""
    in_hand: int
    """Requests that a worker was handed and has not acked yet."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Which sequence numbers one lane of a queue may hold, waiting or in a worker's hand, at one moment."""

    first_seq: int = 1
    """Of its stream, with those of the other lanes there."""
    last_seq: int = 0
    delivered_seq: int = 0
    """The last that was handed to a worker."""
    acked_seq: int = 0
    """The last that was acked together with all before it."""
    has_waiting: bool = False

    def may_hold(self, seq: int) -> bool:
        """Whether the request with this number may be there; it was stored before the moment.

        False is certain. True may last until what was handed out before it has been acked.
        """
        if not self.first_seq <= seq <= self.last_seq:
            return False
        return self.has_waiting if seq > self.delivered_seq else seq > self.acked_seq


def stream_name(subjects: Subjects, model: str, lane: Lane) -> str:
    """Name the stream of a lane: `rb~<fleet>~<model>`, and for `resume` the same with `~resume`.

    The model's name is encoded as in subjects; where that would be too long its hash stands after a second `~`. As no
    fleet and no encoded name has a `~`, no two models share a stream.
    """
    token = encode_token(model)
    ending = "~resume" if lane == "resume" else ""
    name = f"rb~{subjects.fleet}~{token}{ending}"
    if len(name) > MAX_NAME_CHARS:
        name = f"rb~{subjects.fleet}~~{hashlib.sha256(model.encode()).hexdigest()}{ending}"
    return name


async def ensure_queue(nats: Client, subjects: Subjects, model: str, limits: QueueLimits | None = None) -> None:
    """Make the streams and consumers of `model`, or bring them to `limits` where they differ; safe to repeat.

    What waits in them stays. Where all is as it should be, it takes no right to change anything.

    Raises:
        BusBroken: JetStream does not answer or refuses, quoting it.
    """
    limits = limits or QueueLimits()
    try:
        for lanes in _STREAMS:
            config = _stream_config(subjects, model, lanes, limits)
            await _ensure_stream(nats, config)
            for lane in lanes:
                await _ensure_consumer(nats, subjects, model, lane, config["max_msgs"], limits.ack_wait_s)
    except ApiError as error:
        raise BusBroken(f"the queue of {model!r} cannot be made: {error}") from error
    except PermissionDenied as error:
        raise BusBroken(
            f"the queue of {model!r} is not there as needed, and {error}; an admin makes it: rollbus make-queue {model}"
        ) from error


async def queue_depths(nats: Client, subjects: Subjects, models: tuple[str, ...]) -> tuple[QueueDepth, ...]:
    """Say how full the lanes of `models` are, in the order of `LANES`; a model without a queue has no rows.

    Raises:
        BusBroken: JetStream does not answer.
    """
    depths = []
    for model in models:
        for lane in LANES:
            try:
                info = await ask(nats, f"CONSUMER.INFO.{stream_name(subjects, model, lane)}.{lane}")
            except ApiError as error:
                if error.code in {NO_STREAM, NO_CONSUMER}:
                    continue
                raise BusBroken(f"the queue of {model!r} cannot be read: {error}") from error
            depths.append(
                QueueDepth(model=model, lane=lane, waiting=info["num_pending"], in_hand=info["num_ack_pending"])
            )
    return tuple(depths)


async def stored_in(nats: Client, subjects: Subjects, model: str, lane: Lane) -> Stored:
    """What a lane of the queue of `model` may hold now; nothing where there is no queue.

    Who asks needs no right to read the queue, which would be that to read others' requests.

    Raises:
        BusBroken: JetStream does not answer.
    """
    stream = stream_name(subjects, model, lane)
    try:
        state = (await ask(nats, f"STREAM.INFO.{stream}"))["state"]
        consumer = await ask(nats, f"CONSUMER.INFO.{stream}.{lane}")
    except ApiError as error:
        if error.code in {NO_STREAM, NO_CONSUMER}:
            return Stored()
        raise BusBroken(f"the queue of {model!r} cannot be read: {error}") from error
    return Stored(
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        delivered_seq=consumer["delivered"]["stream_seq"],
        acked_seq=consumer["ack_floor"]["stream_seq"],
        has_waiting=consumer["num_pending"] > 0,
    )


def _stream_config(subjects: Subjects, model: str, lanes: tuple[Lane, ...], limits: QueueLimits) -> dict[str, Any]:
    is_resume = "resume" in lanes
    return {
        "name": stream_name(subjects, model, lanes[0]),
        "subjects": [subjects.requests_in(model, lane) for lane in lanes],
        "metadata": {"fleet": subjects.fleet, "model": model},
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "max_msgs": limits.resume_max_msgs if is_resume else limits.max_msgs,
        "max_bytes": limits.resume_max_bytes if is_resume else limits.max_bytes,
        "allow_msg_ttl": True,
        "duplicate_window": nanoseconds(DUPLICATE_WINDOW_S),
    }


async def _ensure_stream(nats: Client, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        present = (await ask(nats, f"STREAM.INFO.{name}"))["config"]
    except ApiError as error:
        if error.code != NO_STREAM:
            raise
        await create_stream(nats, config)
        return
    if _is_within(config, present):
        return
    try:
        # Over what is there, so that an operator's replicas and placement stay.
        await ask(nats, f"STREAM.UPDATE.{name}", {**present, **config})
    except ApiError as error:
        if error.code != NO_STORAGE:
            raise
        logger.warning("jetstream.not_set_aside stream=%s max_bytes=%s error=%s", name, config["max_bytes"], error)


async def _ensure_consumer(
    nats: Client, subjects: Subjects, model: str, lane: Lane, max_msgs: int, ack_wait_s: float
) -> None:
    name = stream_name(subjects, model, lane)
    config = {
        "durable_name": lane,
        "filter_subject": subjects.requests_in(model, lane),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": max_msgs,  # all of them: a lane never stalls because workers hold much
        "max_waiting": MAX_WAITING,
    }
    try:
        if _is_within(config, (await ask(nats, f"CONSUMER.INFO.{name}.{lane}"))["config"]):
            return
    except ApiError as error:
        if error.code != NO_CONSUMER:
            raise
    await ask(nats, f"CONSUMER.CREATE.{name}.{lane}", {"stream_name": name, "config": config, "action": ""})


def _is_within(wanted: object, present: object) -> bool:
    """Whether `present` has all that is `wanted`; servers add fields of their own."""
    if isinstance(wanted, dict) and isinstance(present, dict):
        return all(_is_within(value, present.get(name)) for name, value in wanted.items())
    return wanted == present
