"""What happened on the links of a worker, counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from .worker_requests import WorkerRequest

__all__ = ["WorkerLinkStats"]


@dataclass(slots=True)
class WorkerLinkStats:
    """Counters since the worker was started: whatever is dropped is counted."""

    offered: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    """Of what was offered."""
    cached_prompt_tokens: int = 0
    """Of the prompts of requests that have a token, those that the engine did not compute."""
    recomputed_prompt_tokens: int = 0
    """Of the same prompts, those that the engine computed."""
    generated_tokens: int = 0
    routing_bytes: int = 0
    """Rows of routed experts, as the engine gave them."""
    first_tokens: int = 0
    """Requests that have a token."""
    first_tokens_s: float = 0.0
    """Seconds from their offers to their first tokens, added up."""
    next_tokens: int = 0
    """Tokens of all later steps."""
    next_tokens_s: float = 0.0
    """Seconds from the steps before them to theirs, added up."""
    ended: int = 0
    """Ended by the engine: stopped, full, aborted or failed."""
    failed: int = 0
    """Ended by the worker with an error."""
    stopped: int = 0
    """Ended because their clients did not want them; what was unsent of them was dropped."""
    confirmed: int = 0
    """Offers that their clients took."""
    late_steps: int = 0
    """Engine output of requests that had ended."""
    repeated: int = 0
    """Requests that the queue delivered again although they were here."""
    fenced: int = 0
    """Requests given up because the worker's lease ran out."""
    clients_gone: int = 0
    """Lives of clients that ended: closed, expired or followed by another."""
    requests_of_gone: int = 0
    """Their requests that were dropped."""
    over_budget: int = 0
    """Requests ended because their unread results were too large."""
    late_messages: int = 0
    """Messages of lives of clients that are over for good."""
    bad_messages: int = 0
    """Messages that acknowledge what was never sent."""
    links_broken: int = 0
    """Links given up for a new one, since the client had lost its place or a frame could not be published."""
    frames_resent: int = 0
    kv_too_large: int = 0
    """KV parameters that fit no frame of this server: the decode leg computes the prompt anew."""

    def count_prompt(self, request: WorkerRequest) -> None:
        """Count the prompt of a request that has its first token."""
        self.cached_prompt_tokens += request.cached_tokens
        self.recomputed_prompt_tokens += max(request.prompt_len - request.cached_tokens, 0)

    def count(self, step: RequestStep, request: WorkerRequest, now: float) -> None:
        """Count what a step brought that was taken for a request."""
        if step.routed_experts is not None:
            self.routing_bytes += step.routed_experts.nbytes
        num_tokens = len(step.token_ids)
        if not num_tokens:
            return
        self.generated_tokens += num_tokens
        if request.has_token:
            self.next_tokens += num_tokens
            self.next_tokens_s += now - request.last_at
        else:
            self.first_tokens += 1
            self.first_tokens_s += now - request.last_at
        request.last_at, request.has_token = now, True

    def count_batch(self, batch: TokenBatch, gathered: Sequence[WorkerRequest], now: float) -> None:
        """Count a batch that was taken for these requests, of which none has its first token there."""
        if batch.routed_experts is not None:
            self.routing_bytes += batch.routed_experts.nbytes
        self.generated_tokens += len(gathered)
        self.next_tokens += len(gathered)
        self.next_tokens_s += len(gathered) * now - sum([request.last_at for request in gathered])
        for request in gathered:
            request.last_at = now
