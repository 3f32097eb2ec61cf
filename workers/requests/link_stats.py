"""Counters of the links of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from .worker_requests import WorkerRequest

__all__ = ["WorkerLinkStats"]


@dataclass(slots=True)
class WorkerLinkStats:
    """Counters since the start of the worker. Every discarded item is counted."""

    offered: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of offered requests."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that the engine found in its cache, of requests with a first token."""
    recomputed_prompt_tokens: int = 0
    """Prompt tokens that the engine computed, of the same requests."""
    generated_tokens: int = 0
    routing_bytes: int = 0
    """Bytes of rows of routed experts, as the engine returned them."""
    first_tokens: int = 0
    """Requests with a first token."""
    first_tokens_s: float = 0.0
    """Sum of the seconds from offer to first token."""
    next_tokens: int = 0
    """Tokens of all steps after the first token."""
    next_tokens_s: float = 0.0
    """Sum of the seconds between consecutive steps of these tokens."""
    ended: int = 0
    """Requests that the engine ended: stop, length, abort or error."""
    failed: int = 0
    """Requests that the worker ended with an error."""
    stopped: int = 0
    """Requests aborted by their clients. Their unsent chunks were discarded."""
    confirmed: int = 0
    """Offers that clients acknowledged."""
    late_steps: int = 0
    """Engine steps of requests that had ended."""
    repeated: int = 0
    """Requests that the queue redelivered while this worker had them."""
    fenced: int = 0
    """Requests removed because the worker's lease expired."""
    clients_gone: int = 0
    """Ended client incarnations: closed, expired or replaced by another."""
    requests_of_gone: int = 0
    """Removed requests of these incarnations."""
    over_budget: int = 0
    """Requests failed because their unacknowledged results were too large."""
    late_messages: int = 0
    """Messages of client incarnations that have ended for good."""
    bad_messages: int = 0
    """Messages that acknowledge frames which were never sent."""
    links_broken: int = 0
    """Links replaced by a new link, because the client had lost its position or a frame could not be published."""
    frames_resent: int = 0
    kv_too_large: int = 0
    """KV parameters too large for a frame. The decode phase then computes the prompt again."""

    def count_prompt(self, request: WorkerRequest) -> None:
        """Count the prompt of a request that has its first token."""
        self.cached_prompt_tokens += request.cached_tokens
        self.recomputed_prompt_tokens += max(request.prompt_len - request.cached_tokens, 0)

    def count(self, step: RequestStep, request: WorkerRequest, now: float) -> None:
        """Count a step that was added to a request."""
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
        """Count a batch that was added to these requests. Each of them had its first token before the batch."""
        if batch.routed_experts is not None:
            self.routing_bytes += batch.routed_experts.nbytes
        self.generated_tokens += len(gathered)
        self.next_tokens += len(gathered)
        self.next_tokens_s += len(gathered) * now - sum([request.last_at for request in gathered])
        for request in gathered:
            request.last_at = now
