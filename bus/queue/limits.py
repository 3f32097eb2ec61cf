"""The bounds of a model's queue, of all clients together and of each."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...schemas.request import Lane

__all__ = ["QueueLimits", "bounds_of_stream"]

RESUME_SHARE: Final = 4
"""Resumed requests that a client may have in the queue, for each new one: a lost worker may have had that many."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one model's queue, set when its streams are made, and afterwards by `rollbus make-queue`."""

    max_msgs: int = 65_536
    """Requests that wait in the lanes high, normal and low: minutes of work for hundreds of GPUs."""
    max_bytes: int = 1024**3
    """Their total size: as many requests with prompts of 4,000 tokens. Set aside on the server's disk where it can."""
    max_per_client: int = 1024
    """Requests of one client in one of these lanes; the client keeps the rest and publishes it as room comes. Equal
    windows in a lane that is first in, first out are equal shares of requests. Workers that take a thousand requests at
    once leave room for the next thousand within a round trip."""
    resume_max_msgs: int = 1_000_000
    """Resumed requests: more than a fleet can have in flight."""
    resume_max_bytes: int = 4 * 1024**3
    """Their total size."""
    ack_wait_s: float = 5.0
    """After this long without an ack or in-progress from its worker, a request goes to another."""

    def of_stream(self, lane: Lane) -> dict[str, Any]:
        """Return the bounds of the stream that holds `lane`, in JetStream's words."""
        return bounds_of_stream(lane, msgspec.structs.asdict(self))


def bounds_of_stream(lane: Lane, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of the stream that holds `lane`, in JetStream's words.

    Args:
        limits: by the names of `QueueLimits`; what is missing gives no bound.
    """
    prefix, share = ("resume_", RESUME_SHARE) if lane == "resume" else ("", 1)
    bounds = {name: limits[prefix + name] for name in ("max_msgs", "max_bytes") if prefix + name in limits}
    if "max_per_client" in limits:
        # The subject holds client, model and lane.
        bounds |= {"max_msgs_per_subject": limits["max_per_client"] * share, "discard_new_per_subject": True}
    return bounds
