"""Forwards engine steps to the outbounds with their weight versions, and batches tokens of unstreamed requests."""

import logging
from collections.abc import Iterable

from ...bus.protocol.states import WorkerRequestEvent
from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...bus.protocol.stream.token_batcher import TokenBatcher
from ...schemas.chunk import FinishReason
from ...schemas.errors import ErrorCode, LocalProtocolError, RequestError
from ...schemas.limits import MAX_KV_PARAMS_BYTES
from .expert_counter import ExpertCounter
from .link_stats import WorkerLinkStats
from .outbound import OutboundRegistry
from .terminator import RequestTerminator
from .versions import Versions
from .worker_requests import Instructions, WorkerRequest, WorkerRequestTable

__all__ = ["StepDispatcher"]

logger = logging.getLogger(__name__)


class StepDispatcher:
    """Forwards steps to the outbounds of their requests. Plain state, no I/O.

    Invariant: an outbound gets each token once, in order, and with the version of the weights that sampled it.
    """

    def __init__(
        self,
        requests: WorkerRequestTable,
        outbound: OutboundRegistry,
        versions: Versions,
        terminator: RequestTerminator,
        stats: WorkerLinkStats,
    ) -> None:
        self._requests = requests
        self._outbound = outbound
        self._versions = versions
        self._terminator = terminator
        self._stats = stats
        self._gathering = TokenBatcher()
        self.experts = ExpertCounter()
        """Counts the experts that the model's routers chose for the tokens."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<StepDispatcher {self._gathering!r}>"

    @property
    def is_gathering(self) -> bool:
        """True if there are batched tokens that no outbound has yet."""
        return len(self._gathering) > 0

    def add_steps(self, steps: Iterable[RequestStep | TokenBatch], now: float, instructions: Instructions) -> None:
        """Add the output of one engine step. Fail and abort requests with invalid output."""
        for step in steps:
            if isinstance(step, TokenBatch):
                self._add_batch(step, now, instructions)
            else:
                self._add_step(step, now, instructions)

    def _add_step(self, step: RequestStep, now: float, instructions: Instructions) -> None:
        request = self._requests.open(step.key)
        if request is None:
            self._stats.late_steps += 1
            return
        if step.kv_params is not None and len(step.kv_params) > min(MAX_KV_PARAMS_BYTES, self._outbound.max_part_bytes):
            self._stats.kv_too_large += 1
            step.kv_params = None
        if not request.has_token and not len(step.token_ids) and step.finish_reason is None:
            # Hold the step until the first token, because until then new weights may restart the request.
            request.early_steps.append(step)
            return
        had_token = request.has_token
        if not self._forward_early(request, step, now, instructions):
            return
        if not self._flush_request(request, instructions) or not self._forward(
            request, step, self._versions.weight_version, instructions
        ):
            return
        self.experts.add_step(step, request, self._versions.weight_version, now)
        self._stats.count(step, request, now)
        if request.has_token and not had_token:
            request.timeline.add("first_token")
        request.awaits_kv = request.awaits_kv and not len(step.token_ids)
        if step.finish_reason is not None:
            self._stats.ended += 1
            was_stopped = step.finish_reason is FinishReason.ABORT
            event = WorkerRequestEvent.STOPPED if was_stopped else WorkerRequestEvent.FINISHED
            reason = step.finish_reason if step.error is None else step.error_code
            self._requests.end(request, event, reason.value)

    def _add_batch(self, batch: TokenBatch, now: float, instructions: Instructions) -> None:
        """Batch the tokens of unstreamed requests. Forward the other tokens immediately."""
        found = [self._requests.open(key) for key in batch.keys]
        gathered = [request for request in found if request is not None and request.gathers]
        if len(gathered) < len(found):
            for step in batch.pick(
                [i for i, request in enumerate(found) if request is None or not request.gathers]
            ).split():
                self._add_step(step, now, instructions)
            batch = batch.pick([i for i, request in enumerate(found) if request is not None and request.gathers])
        if not gathered:
            return
        if not self._gathering.takes(batch, self._versions.weight_version):
            self.flush(instructions)
        try:
            full = self._gathering.add(batch, self._versions.weight_version)
        except LocalProtocolError as exc:
            for request in gathered:
                self._fail_invalid_output(request, exc, instructions)
            return
        self.experts.add_batch(batch, self._versions.weight_version, now)
        self._stats.count_batch(batch, gathered, now)
        for name in full:
            held_in_full = self._requests.open(name)
            if held_in_full is not None:
                self._flush_request(held_in_full, instructions)

    def flush(self, instructions: Instructions) -> None:
        """Add all batched tokens to the outbounds."""
        for name in self._gathering.keys:
            request = self._requests.open(name)
            if request is None:
                # The worker or the client ended the request in the meantime.
                self._gathering.drop(name)
            else:
                self._flush_request(request, instructions)

    def _flush_request(self, request: WorkerRequest, instructions: Instructions) -> bool:
        """Forward the batched tokens of an open request. Return False if that failed the request."""
        run = self._gathering.pop(request.name)
        return run is None or self._forward(request, run, self._gathering.weight_version, instructions)

    def _forward_early(self, request: WorkerRequest, step: RequestStep, now: float, instructions: Instructions) -> bool:
        """Forward the early steps before `step`, which has the first token. Return False if that failed the request.

        Early steps of a request that ends without a token are discarded, because its result has no rows.
        """
        ahead, request.early_steps = request.early_steps, []
        if not len(step.token_ids):
            return True
        if not request.has_token:
            request.cached_tokens = sum(one.cached_tokens or 0 for one in (*ahead, step))
            self._stats.count_prompt(request)
            request.timeline.add("prefilled", tokens=request.prompt_len, cached_tokens=request.cached_tokens)
        for early in ahead:
            if not self._forward(request, early, self._versions.weight_version, instructions):
                return False
            self.experts.add_step(early, request, self._versions.weight_version, now)
        return True

    def _forward(
        self, request: WorkerRequest, step: RequestStep, weight_version: int, instructions: Instructions
    ) -> bool:
        """Forward a step of an open request. Return False if that failed the request."""
        if weight_version != request.timeline.weight_version and len(step.token_ids):
            request.timeline.begin_version(weight_version, request.writer.taken_tokens)
        lora_version = None if request.lora is None else self._versions.loras.get(request.lora)
        try:
            request.outbound.sender.add_step(request.origin.key, step, weight_version, lora_version)
        except LocalProtocolError as exc:
            self._fail_invalid_output(request, exc, instructions)
            return False
        self._outbound.touch(request.outbound)
        return True

    def _fail_invalid_output(self, request: WorkerRequest, exc: LocalProtocolError, instructions: Instructions) -> None:
        """Fail and abort a request with invalid engine output."""
        logger.error("request.output_rejected name=%s error=%s", request.name, exc)
        self._terminator.fail(request, RequestError(code=ErrorCode.PROTOCOL_ERROR, message=str(exc)))
        instructions.abort.append(request.name)

    def clear(self) -> None:
        """Remove all batched tokens."""
        self._gathering.clear()
