"""The limits of a model's queue, for all clients together and for each client."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...schemas.request import Lane

__all__ = ["QueueLimits", "bounds_of_stream"]

RESUME_SHARE: Final = 4
"""Resumed requests that a client may have in the queue, for each new one. A lost worker may have had that many."""


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

    def of_stream(self, lane: Lane) -> dict[str, Any]:
        """Return the limits of the stream with `lane`, by JetStream's names."""
        return bounds_of_stream(lane, msgspec.structs.asdict(self))


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
