"""Counters in the presence of a worker."""

from typing import Annotated

import msgspec
from msgspec import Meta

from . import limits

__all__ = ["NotNegative", "NotNegativeSeconds", "WorkerCounters"]

NotNegative = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
NotNegativeSeconds = Annotated[float, Meta(ge=0)]


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of a worker since its process started.

    A counter never decreases until another process uses the worker's name.
    """

    requests: NotNegative = 0
    """Requests that the worker has offered to clients; each attempt of each sample counts once."""
    rejected: NotNegative = 0
    """Requests that the worker has rejected, for example because its engine does not support them."""
    ended: NotNegative = 0
    """Requests that the engine has ended."""
    failed: NotNegative = 0
    """Requests that the worker ended with an error, including those over budget and those of lost clients."""
    aborted: NotNegative = 0
    """Requests that clients have aborted."""
    over_budget: NotNegative = 0
    """Requests that the worker has ended because it buffered too many unread results."""
    returned: NotNegative = 0
    """Requests that the worker has returned to the queue, for other workers or for a later time."""
    given_up: NotNegative = 0
    """Requests that the worker has ended because its own lease expired."""
    prompt_tokens: NotNegative = 0
    """Prompt tokens of the offered requests, including earlier generated tokens in resumed attempts."""
    generated_tokens: NotNegative = 0
    """Tokens that the engine has generated for the offered requests, whether or not clients received them."""
    routing_bytes: NotNegative = 0
    """Bytes of routed experts that the engine has computed for the offered requests."""
    first_tokens: NotNegative = 0
    """Requests for which the engine has generated at least one token."""
    first_tokens_s: NotNegativeSeconds = 0.0
    """Sum of the seconds from offer to first token. Divide by `first_tokens` for the mean."""
    next_tokens: NotNegative = 0
    """Tokens of all steps except each request's first step with tokens."""
    next_tokens_s: NotNegativeSeconds = 0.0
    """Sum of the seconds between those steps and the steps before them. Divide by `next_tokens` for the time of one
    token."""
    credit_stalls: NotNegative = 0
    """Number of times that chunks for a client had to wait and were merged because its credit was used up."""
    frames: NotNegative = 0
    """Published frames, including frames that were sent again."""
    frames_resent: NotNegative = 0
    """Frames that the worker has sent again because a client did not receive them."""
    frames_lost: NotNegative = 0
    """Frames that the worker could not publish. On a link, the worker sends them again."""
    links_broken: NotNegative = 0
    """Links that the worker has replaced by new links because the client could not continue the old link."""
    clients_lost: NotNegative = 0
    """Client incarnations that ended: closed, lease expired, or replaced by a newer incarnation."""
    requests_of_lost_clients: NotNegative = 0
    """Requests of lost clients; also counted as `failed` if an error was sent in case the client returns."""
    fences: NotNegative = 0
    """Number of times that the worker has fenced itself."""
    dropped_msgs: NotNegative = 0
    """Messages that the worker's connection has dropped unread."""
    weights_fetched_bytes: NotNegative = 0
    """Bytes of weights and adapters that the worker has fetched from the object store."""
    weights_staged: NotNegative = 0
    """Completed stagings of weights and adapters."""
    weights_stagings_failed: NotNegative = 0
    """Failed stagings."""
    weights_stagings_cancelled: NotNegative = 0
    """Cancelled stagings: the source was no longer needed, or another source had priority."""
    weights_staging_s: NotNegativeSeconds = 0.0
    """Seconds of all stagings, including failed and cancelled stagings."""
    weights_paused_s: NotNegativeSeconds = 0.0
    """Seconds in which the engine ran no step for requests because of a replacement of weights."""
    placed: NotNegative = 0
    """Offered requests that clients have placed directly at this worker instead of the queue."""
    placements_refused: NotNegative = 0
    """Placed requests rejected because the worker had no room. Their clients publish them to the queue."""
    cached_prompt_tokens: NotNegative = 0
    """Prompt tokens, of requests with a first token, that the engine took from its prefix cache or fetched."""
    recomputed_prompt_tokens: NotNegative = 0
    """All other prompt tokens of requests with a first token: the engine computed them. Other workers may have had
    them."""
    placed_prefix: NotNegative = 0
    """Placed requests, because the worker has a prefix of their prompt."""
    placed_group: NotNegative = 0
    """Placed requests, because the worker computes the prompt of their group."""
    placed_session: NotNegative = 0
    """Placed requests, because of their session."""
    placed_able: NotNegative = 0
    """Placed requests, because the worker can serve them and other workers cannot."""
