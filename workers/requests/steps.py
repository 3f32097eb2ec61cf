"""Forwards engine steps to their requests, and counts tokens and experts on the way. Plain state, no I/O."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from ...bus.protocol.states import WorkerRequestEvent
from ...bus.protocol.stream.engine_step import (
    MAX_RUN_BYTES,
    RequestStep,
    TokenBatch,
    TokenBatcher,
    check_batch,
    check_row_kind,
)
from ...bus.protocol.telemetry.experts import ExpertBook, Window, is_countable
from ...schemas.chunk import FinishReason
from ...schemas.errors import ControlCode, ControlError, ErrorCode, LocalProtocolError, RequestError
from ...schemas.limits import MAX_EXPERT_CELLS, MAX_KV_PARAMS_BYTES
from ...schemas.presence import RoutedExpertsInfo
from ...schemas.telemetry import ExpertLoad
from .admission import Versions
from .outbound import Outbound, OutboundLink, OutboundRegistry
from .table import Instructions, WorkerRequest, WorkerRequestTable

logger = logging.getLogger(__name__)


class ExpertCounter:
    """Counts the load of experts of one worker. Without routed experts it counts nothing.

    A position counts each time that the engine computes it: generated tokens, and prompt tokens behind the cached ones
    once the request has its first token. The engine never computes the last generated token of a request. After a
    preemption the engine computes all positions again without rows: these count as computed and not as seen. Requests
    of the worker itself and steps after the end of a request do not count.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._routing: RoutedExpertsInfo | None = None
        self._book: ExpertBook | None = None

    def begin(self, routing: RoutedExpertsInfo | None, now: float) -> None:
        """Start to count for an engine with these routed experts.

        Args:
            routing: None if the engine returns no routed experts.
        """
        self._has_begun = True
        self._routing = routing
        self.restart(now)

    def restart(self, now: float) -> None:
        """Remove all counts: the worker continues as another incarnation."""
        routing = self._routing
        self._book = None if routing is None or not is_countable(routing) else ExpertBook(routing, now, time.time())

    def load(self, since: int, window: Window, now: float) -> ExpertLoad | None:
        """Return the counts as `ExpertBook.load` does, or None if the engine returns no routed experts.

        Raises:
            ControlError: the engine has not started, or its model has too many experts.
        """
        if not self._has_begun:
            raise ControlError(ControlCode.NOT_SERVING, "the engine has not started")
        if self._routing is not None and self._book is None:
            shape = f"{self._routing.num_layers} layers x {self._routing.num_experts} experts"
            problem = f"the model has {shape}; allowed for counting: {MAX_EXPERT_CELLS} experts in all layers"
            raise ControlError(ControlCode.UNSUPPORTED, problem)
        return None if self._book is None else self._book.load(since, window, now)

    def check_rows(self, batch: TokenBatch) -> None:
        """Check that the rows of a batch are those of the engine's model.

        Raises:
            LocalProtocolError: they are of another model.
        """
        if batch.routed_experts is not None:
            check_row_kind(batch.routed_experts, self._routing)

    @property
    def is_behind(self) -> bool:
        """True if rows of long prompts wait for `count_some`."""
        return self._book is not None and bool(self._book.waiting)

    def count_some(self) -> None:
        """Count as `ExpertBook.count_some` does."""
        if self._book is not None:
            self._book.count_some()

    def add_batch(self, batch: TokenBatch, weight_version: int, now: float) -> None:
        """Count a batch of open requests, each of which already has its first token."""
        if self._book is not None:
            self._book.add_computed("generated", len(batch), weight_version, now)
            if batch.routed_experts is not None:
                self._book.add_rows("generated", batch.routed_experts, weight_version, now)

    def add_step(self, step: RequestStep, request: WorkerRequest, weight_version: int, now: float) -> None:
        """Count a step that was added to its open request.

        Steps before the first token are counted together with that token, in order, because only then
        `request.cached_tokens` is known.
        """
        book = self._book
        if book is None:
            return
        if num_tokens := len(step.token_ids):
            num_before, num_prompt, num_generated = request.writer.taken_tokens - num_tokens, 0, num_tokens
            if not num_before:
                num_prompt = max(request.prompt_len - request.cached_tokens, 0)
                num_generated -= 1
            elif step.kv_recomputed:
                num_prompt = request.prompt_len
                num_generated += num_before - 1
            if num_prompt:
                book.add_computed("prompt", num_prompt, weight_version, now)
            if num_generated:
                book.add_computed("generated", num_generated, weight_version, now)
        rows, start = step.routed_experts, step.routed_experts_start
        if rows is not None:
            first_computed = max(request.cached_tokens - start, 0)
            first_generated = max(request.prompt_len - start, 0)
            if first_computed < min(first_generated, len(rows)):
                book.add_rows("prompt", rows[first_computed:first_generated], weight_version, now)
            if first_generated < len(rows):
                book.add_rows("generated", rows[first_generated:], weight_version, now)


@dataclass(slots=True)
class WorkerLinkStats:
    """Counters since the start of the worker. Every discarded item is counted."""

    requests: int = 0
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
    aborted: int = 0
    """Requests aborted by their clients."""
    confirmed: int = 0
    """Offers that clients acknowledged."""
    late_steps: int = 0
    """Engine steps of requests that had ended."""
    repeated: int = 0
    """Requests that the queue redelivered while this worker had them."""
    given_up: int = 0
    """Requests removed because the worker's lease expired."""
    clients_lost: int = 0
    """Ended client incarnations: closed, expired or replaced by another."""
    requests_of_lost_clients: int = 0
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

    def count_batch(self, batch: TokenBatch, seconds: float) -> None:
        """Count a batch of requests that had their first tokens before it.

        Args:
            seconds: sum of the seconds between these tokens and those before them.
        """
        if batch.routed_experts is not None:
            self.routing_bytes += batch.routed_experts.nbytes
        self.generated_tokens += len(batch)
        self.next_tokens += len(batch)
        self.next_tokens_s += seconds


class StepDispatcher:
    """Forwards steps to the outbounds of their requests. Plain state, no I/O.

    Invariant: an outbound gets each token once, in order, and with the version of the weights that sampled it.

    Args:
        fail: ends an open request with an error.
    """

    def __init__(
        self,
        requests: WorkerRequestTable,
        outbound: OutboundRegistry,
        versions: Versions,
        stats: WorkerLinkStats,
        fail: Callable[[WorkerRequest, RequestError], None],
    ) -> None:
        self._requests = requests
        self._outbound = outbound
        self._versions = versions
        self._stats = stats
        self._fail = fail
        self._gathering = TokenBatcher()
        # Engine names of the requests whose first token waits for the next flush. Later output takes it along.
        self._held: dict[str, None] = {}
        requests.on_end = self._on_end
        self.experts = ExpertCounter()
        """Counts the experts that the model's routers chose for the tokens."""

    def _on_end(self, name: str) -> None:
        self._gathering.close(name)
        self._held.pop(name, None)

    @property
    def is_gathering(self) -> bool:
        """True if there are batched tokens that no outbound has yet."""
        return bool(self._held) or len(self._gathering) > 0

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
            request.early_steps += (step,)
            return
        had_token = request.has_token
        if not had_token:
            if not self._forward_early(request, step, now, instructions):
                return
        elif request.gathers:
            if not self.flush_request(request, instructions):
                return
            # The next batch counts its seconds from this step.
            self._gathering.close(request.name)
        if not self._forward(request, step, now, instructions):
            return
        self._stats.count(step, request, now)
        if request.has_token and not had_token:
            request.timeline.add("first_token")
            if request.gathers and step.finish_reason is None:
                self._hold_first(request)
        request.awaits_kv = request.awaits_kv and not len(step.token_ids)
        if step.finish_reason is not None:
            self._stats.ended += 1
            was_stopped = step.finish_reason is FinishReason.ABORT
            event = WorkerRequestEvent.STOPPED if was_stopped else WorkerRequestEvent.FINISHED
            reason = step.finish_reason if step.error is None else step.error_code
            self._requests.end(request, event, reason.value)

    def _hold_first(self, request: WorkerRequest) -> None:
        """Let a small first token of an unstreamed request wait for those behind it.

        That of a later attempt leaves at once: with it the client knows that the request has not killed this engine.
        """
        is_small = request.writer.unsent_bytes <= MAX_RUN_BYTES
        if is_small and not request.origin.key.attempt and isinstance(request.outbound, OutboundLink):
            request.outbound.sender.hold(request.origin.key)
            self._held[request.name] = None

    def _add_batch(self, batch: TokenBatch, now: float, instructions: Instructions) -> None:
        """Batch the tokens of unstreamed requests. Forward the other tokens immediately."""
        slots = self._gathering.find_slots(batch.keys)
        missing: list[int] = (slots < 0).nonzero()[0].tolist()
        if missing:
            found, others = self._requests.open_all([batch.keys[i] for i in missing]), list[int]()
            for i, request in zip(missing, found, strict=True):
                if request is None or not (request.gathers and request.has_token):
                    others.append(i)
                else:
                    slots[i] = self._gathering.open(request.name, request.last_at)
            if len(others) == len(batch):
                self._forward_batch(batch, found, now, instructions)
                return
            if others:
                rest, at = batch.pick(others), np.flatnonzero(slots >= 0)
                self._forward_batch(rest, self._requests.open_all(rest.keys), now, instructions)
                batch, slots = batch.pick(at.tolist()), slots[at]
        while not self._gathering.takes(batch, self._versions.weight_version):
            self.flush(instructions)
        try:
            self.experts.check_rows(batch)
            full, seconds = self._gathering.add(batch, slots, now)
        except LocalProtocolError as exc:
            for failed in filter(None, self._requests.open_all(batch.keys)):
                self._fail_invalid_output(failed, exc, instructions)
            return
        self.experts.add_batch(batch, self._versions.weight_version, now)
        self._stats.count_batch(batch, seconds)
        for held_in_full in filter(None, self._requests.open_all(full)):
            self.flush_request(held_in_full, instructions)

    def _forward_batch(
        self, batch: TokenBatch, found: Sequence[WorkerRequest | None], now: float, instructions: Instructions
    ) -> None:
        """Forward one token to each of these requests. The arrays are cut as bytes, once for all requests."""
        try:
            check_batch(batch)
            self.experts.check_rows(batch)
        except LocalProtocolError as exc:
            for failed in filter(None, found):
                self._fail_invalid_output(failed, exc, instructions)
            return
        version = self._versions.weight_version
        ids = batch.token_ids.astype("<i4", copy=False).view("V4").tolist()
        logprobs: Iterable[bytes | None] = repeat(None)
        if batch.logprobs is not None:
            logprobs = batch.logprobs.astype("<f4", copy=False).view("V4").tolist()
        rows, row_bytes, starts = None, 0, [0] * len(found)
        if batch.routed_experts is not None and batch.routed_experts_starts is not None:
            rows, starts = batch.routed_experts.tobytes(), batch.routed_experts_starts.tolist()
            row_bytes = len(rows) // max(len(batch), 1)
        outbounds = dict[Outbound, None]()
        others = set[int]()
        last_at = 0.0
        for i, (request, token, logprob) in enumerate(zip(found, ids, logprobs, strict=False)):
            if request is None or not request.has_token:
                self._add_step(batch.pick([i]).split()[0], now, instructions)
                others.add(i)
                continue
            row = None if rows is None else rows[row_bytes * i : row_bytes * (i + 1)]
            try:
                self._append(request, token, logprob, row, starts[i], version)
            except LocalProtocolError as exc:
                self._fail_invalid_output(request, exc, instructions)
                others.add(i)
                continue
            last_at += request.last_at
            request.last_at = now
            outbounds[request.outbound] = None
        for outbound in outbounds:
            self._outbound.touch(outbound)
        if others:
            batch = batch.pick([i for i in range(len(batch)) if i not in others])
        self.experts.add_batch(batch, version, now)
        self._stats.count_batch(batch, len(batch) * now - last_at)

    def _append(
        self,
        request: WorkerRequest,
        token_ids: bytes,
        logprobs: bytes | None,
        rows: bytes | None,
        start: int,
        weight_version: int,
    ) -> None:
        """Add tokens with nothing else to an open request.

        Raises:
            LocalProtocolError: as `ChunkWriter.append_tokens`; nothing was added.
        """
        writer, lora = request.writer, request.lora
        if request.timeline.weight_version != weight_version:
            request.timeline.begin_version(weight_version, writer.taken_tokens)
        lora_version = None if lora is None else self._versions.loras.get(lora)
        num_bytes = writer.append_tokens(token_ids, logprobs, rows, start, weight_version, lora_version)
        request.outbound.sender.touch(writer, num_bytes)

    def flush(self, instructions: Instructions) -> None:
        """Add all batched tokens to the outbounds, and send first tokens that wait for them."""
        held, self._held = self._held, {}
        for request in filter(None, self._requests.open_all([*held, *self._gathering.keys])):
            if self.flush_request(request, instructions):
                request.outbound.sender.touch(request.writer, 0)
                self._outbound.touch(request.outbound)

    def flush_request(self, request: WorkerRequest, instructions: Instructions) -> bool:
        """Forward the batched tokens of an open request. Return False if that failed the request."""
        run = self._gathering.pop(request.name)
        if run is None:
            return True
        request.last_at = run.last_at
        rows = None if run.rows is None else run.rows.tobytes()
        try:
            self._append(request, run.token_ids, run.logprobs, rows, run.start, self._gathering.weight_version)
        except LocalProtocolError as exc:
            self._fail_invalid_output(request, exc, instructions)
            return False
        self._outbound.touch(request.outbound)
        return True

    def _forward_early(self, request: WorkerRequest, step: RequestStep, now: float, instructions: Instructions) -> bool:
        """Forward the early steps before `step`, which has the first token. Return False if that failed the request.

        Early steps of a request that ends without a token are discarded, because its result has no rows.
        """
        ahead, request.early_steps = request.early_steps, ()
        if not len(step.token_ids):
            return True
        request.cached_tokens = sum([one.cached_tokens or 0 for one in ahead], step.cached_tokens or 0)
        self._stats.cached_prompt_tokens += request.cached_tokens
        self._stats.recomputed_prompt_tokens += max(request.prompt_len - request.cached_tokens, 0)
        request.timeline.add("prefilled", request.prompt_len, request.cached_tokens)
        return all(self._forward(request, early, now, instructions) for early in ahead)

    def _forward(self, request: WorkerRequest, step: RequestStep, now: float, instructions: Instructions) -> bool:
        """Forward a step of an open request, and count its experts. Return False if that failed the request."""
        weight_version = self._versions.weight_version
        if weight_version != request.timeline.weight_version and len(step.token_ids):
            request.timeline.begin_version(weight_version, request.writer.taken_tokens)
        lora_version = None if request.lora is None else self._versions.loras.get(request.lora)
        try:
            request.outbound.sender.encode_step(request.origin.key, step, weight_version, lora_version)
        except LocalProtocolError as exc:
            self._fail_invalid_output(request, exc, instructions)
            return False
        self._outbound.touch(request.outbound)
        self.experts.add_step(step, request, weight_version, now)
        return True

    def _fail_invalid_output(self, request: WorkerRequest, exc: LocalProtocolError, instructions: Instructions) -> None:
        """Fail and abort a request with invalid engine output."""
        logger.error("request.output_rejected name=%s error=%s", request.name, exc)
        self._fail(request, RequestError(code=ErrorCode.PROTOCOL_ERROR, message=str(exc)))
        instructions.abort.append(request.name)

    def clear(self) -> None:
        """Remove all batched tokens."""
        self._gathering.clear()
        self._held.clear()
