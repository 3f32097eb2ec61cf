"""The counters of a worker."""

from dataclasses import dataclass

from ..bus.nats.connection import ConnectionStats
from ..bus.queue.puller import PullerStats
from ..schemas.counters import WorkerCounters
from .control.staging import StagerStats
from .requests.intake_stats import IntakeStats
from .requests.link_stats import WorkerLinkStats

__all__ = ["WorkerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counters since the start. Every message that a worker drops is counted."""

    intake: IntakeStats
    links: WorkerLinkStats
    puller: PullerStats
    frames: int
    """Published frames, including repeated ones."""
    frames_lost: int
    """Frames that could not be published. A link sends them again."""
    bad_messages: int
    """Messages of clients that could not be decoded."""
    bad_commands: int
    """Commands that could not be decoded and had no usable id or controller to answer, and refused desired states."""
    times_fenced: int
    connection: ConnectionStats
    """Messages that were dropped before the worker received them, and messages whose handling failed."""
    credit_stalls: int
    """Number of times that chunks waited for credit of the client."""
    stagings: StagerStats

    def counters(self) -> WorkerCounters:
        """Return the counters that presence contains."""
        links = self.links
        return WorkerCounters(
            requests=links.offered,
            rejected=links.rejected,
            ended=links.ended,
            failed=links.failed,
            aborted=links.stopped,
            over_budget=links.over_budget,
            returned=self.intake.returned + self.intake.too_new + self.puller.given_back,
            given_up=links.fenced,
            prompt_tokens=links.prompt_tokens,
            generated_tokens=links.generated_tokens,
            routing_bytes=links.routing_bytes,
            first_tokens=links.first_tokens,
            first_tokens_s=round(links.first_tokens_s, 6),
            next_tokens=links.next_tokens,
            next_tokens_s=round(links.next_tokens_s, 6),
            credit_stalls=self.credit_stalls,
            frames=self.frames,
            frames_resent=links.frames_resent,
            frames_lost=self.frames_lost,
            links_broken=links.links_broken,
            clients_lost=links.clients_gone,
            requests_of_lost_clients=links.requests_of_gone,
            fences=self.times_fenced,
            dropped_msgs=self.connection.dropped_msgs,
            weights_fetched_bytes=self.stagings.fetched_bytes,
            weights_staged=self.stagings.staged,
            weights_stagings_failed=self.stagings.failed,
            weights_stagings_cancelled=self.stagings.cancelled,
            weights_staging_s=round(self.stagings.seconds, 3),
            weights_paused_s=round(self.stagings.paused_s, 3),
            placed=self.intake.placed,
            placements_refused=self.intake.refused,
            cached_prompt_tokens=links.cached_prompt_tokens,
            recomputed_prompt_tokens=links.recomputed_prompt_tokens,
            **self.intake.placed_for,
        )
