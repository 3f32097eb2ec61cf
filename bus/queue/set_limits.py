"""Changes the limits of an existing queue without losing a request.

If a server receives a lower limit than the contents of a stream, it deletes the oldest messages without an error.
Therefore the limits are first compared with the contents, and workers never change limits.
"""

from collections.abc import Mapping
from typing import Any

from nats.aio.client import Client

from ...schemas.errors import BusBroken, InvalidRequest
from ..nats.jetstream import ApiError, ask
from ..subjects import Subjects
from .limits import bounds_of_stream
from .streams import STREAM_LANES, stream_name

__all__ = ["set_limits"]


async def set_limits(nats: Client, subjects: Subjects, model: str, limits: Mapping[str, int]) -> None:
    """Set these limits for the existing streams of `model`. Other limits stay.

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
                field=bound,
                problem=f"is {bounds[bound]}, and {stream} holds {now}",
                allowed=f"{now} or more, until workers have pulled some",
            )
