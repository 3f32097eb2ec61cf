"""What a worker counts."""

from dataclasses import dataclass

from bus.connection import ConnectionStats
from bus.queue.puller import PullerStats
from workers.intake import IntakeStats
from workers.link_stats import LinkStats

__all__ = ["WorkerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counters since the start: whatever is dropped anywhere in a worker is in one of them."""

    intake: IntakeStats
    links: LinkStats
    puller: PullerStats
    frames: int
    """Frames published, those sent again included."""
    frames_lost: int
    """Frames that could not be published; on a link they are sent again."""
    bad_messages: int
    """Messages of clients that did not decode."""
    bad_commands: int
    """Commands that did not decode, and of which nobody could be told so."""
    times_fenced: int
    connection: ConnectionStats
    """Messages dropped before they were heard, and those over which this side stumbled."""
