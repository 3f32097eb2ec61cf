"""The links, leases and requests that a worker has for its clients. Plain state, no I/O.

Each event is a method that returns `Instructions`. Unpublished chunks and frames wait in `outbound`.

Invariants: an offered or rejected request gets exactly one terminal chunk, after its other chunks. Its message leaves
the queue only after the client has acknowledged the offer, has aborted the request, or has ended.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from ...bus.logs import RejectionCount
from ...bus.protocol.fleet.leases import LEASE_MARGIN_S, MAX_INCARNATIONS, ClientLeases, EndedIncarnation
from ...bus.protocol.states import WorkerRequestEvent, WorkerRequestState
from ...bus.protocol.stream.chunk_writer import ChunkWriter
from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...bus.protocol.telemetry.requests import RETURNED
from ...bus.queue.puller import QueuedRequest
from ...bus.subjects import Subjects
from ...schemas.chunk import ChunkError, FinishReason
from ...schemas.errors import ErrorCode, RemoteProtocolError, RequestError
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.messages import KvTransfer, LinkMessage, RequestKey
from ...schemas.options import DEFAULT_LEASE_S
from ...schemas.presence import Capabilities, ClientPresence, ClientState
from ...schemas.request import GenerateRequest
from ..config import WorkerConfig
from ..engines.engine import Engine
from .admission import Versions
from .incoming import IncomingRequest
from .outbound import Outbound, OutboundLink, OutboundRegistry, OutgoingFrame, PlainOutbound
from .steps import StepDispatcher, WorkerLinkStats
from .table import Instructions, RequestOrigin, WorkerRequest, WorkerRequestTable

logger = logging.getLogger(__name__)

REMEMBER_S = 60.0
"""Seconds for which the worker keeps the frames of a lost client, in case the client returns."""


class WorkerLinks:
    """The links, leases and requests of one worker.

    Args:
        incarnation: incarnation of the worker.
        max_payload: limit of the NATS server in bytes. No frame is larger.
    """

    def __init__(self, config: WorkerConfig, incarnation: str, *, max_payload: int) -> None:
        self.versions = Versions(config.weight_version, config.weight_version, model=config.model)
        self._max_held_bytes = config.max_held_bytes
        self.leases = ClientLeases(LEASE_MARGIN_S)
        self.requests = WorkerRequestTable()
        self.outbound = OutboundRegistry(config.worker_id, Subjects(config.fleet), incarnation, max_payload=max_payload)
        self.stats = WorkerLinkStats()
        self._rejected = RejectionCount()
        self.reports_kv = False
        """True if the engine reports KV that it computes again. Set before requests are offered."""
        self.dispatcher = StepDispatcher(self.requests, self.outbound, self.versions, self.stats, self._fail)

    def __repr__(self) -> str:
        """One line with counts."""
        num_links, open_requests = sum(1 for _ in self.outbound.links()), len(self.requests)
        return f"<WorkerLinks links={num_links} open={open_requests} held_bytes={self.outbound.held_bytes}>"

    def begin(self, engine: Engine, now: float) -> None:
        """Store the capabilities of an engine that has started."""
        self.reports_kv = engine.reports_recomputed_kv
        self.dispatcher.experts.begin(engine.capabilities.routed_experts, now)

    # Requests

    def is_client_dead(self, origin: RequestOrigin) -> bool:
        """Return True if the client of this request is dead."""
        return bool(origin.incarnation) and self.leases.is_dead(origin.client, origin.incarnation)

    def add_redelivery(self, origin: RequestOrigin) -> Instructions | None:
        """Add another delivery of a request that this worker has. Return None if the worker does not have it."""
        request = self._find(origin)
        message = origin.message
        if request is None:
            link = self.outbound.find(origin.client, origin.incarnation)
            if link is None or origin.key not in link.sender.keys:
                return None
            # The request has ended, its offer is acknowledged, and only chunks remain to be sent.
        self.stats.repeated += 1
        if message is None:
            return Instructions()
        if request is None or request.message is None:
            return Instructions(ack=[message])
        request.message = message
        if isinstance(request.outbound, PlainOutbound):
            request.outbound.message = message
        return Instructions()

    def _find(self, origin: RequestOrigin) -> WorkerRequest | None:
        if origin.message is None or origin.reply_to is None:
            return self.requests.find(origin.client, origin.incarnation, origin.key)
        # In plain mode the attempt number counts deliveries, so search all earlier deliveries.
        request_id, attempt, child = origin.key.request_id, origin.key.attempt, origin.key.child
        for earlier in range(max(attempt - origin.message.num_delivered + 1, 0), attempt + 1):
            request = self.requests.find(origin.client, "", RequestKey(request_id, earlier, child))
            if request is not None:
                return request
        return None

    def offer(
        self,
        origin: RequestOrigin,
        request: GenerateRequest,
        capabilities: Capabilities,
        now: float,
        *,
        kv: KvTransfer | None = None,
        gathers: bool = False,
    ) -> str:
        """Accept a request that this worker does not have, and offer it to its client. Return its engine name.

        Args:
            kv: KV transfer for the engine.
            gathers: True if the worker may batch the tokens.
        """
        routing = None if request.return_routed_experts is False else capabilities.routed_experts
        prompt_len = request.prompt_len
        writer = ChunkWriter(
            origin.key,
            prompt_len=prompt_len,
            routing=routing,
            start=request.routed_experts_prompt_start,
            segment_bytes=self.outbound.segment_bytes,
            traceparent=request.traceparent,
        )
        writer.max_mask_bytes = self.outbound.segment_bytes
        writer.reports_kv = self.reports_kv
        self.stats.requests += 1
        self.stats.prompt_tokens += prompt_len
        worker_request = self._accept(origin, writer, now)
        worker_request.lora = request.lora
        if origin.reply_to is not None:
            worker_request.deadline = now + (DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s)
        worker_request.timeline.offer(self.versions.weight_version, prompt_len, request.traceparent, request.lora)
        worker_request.awaits_kv, worker_request.last_at = kv is not None, now
        worker_request.prompt_len = prompt_len
        # An adapter may change while the base weights stay, so its tokens are forwarded immediately with the current
        # version.
        worker_request.gathers = gathers and request.lora is None
        return worker_request.name

    def offer_again(self, names: Iterable[str]) -> None:
        """Offer waiting requests again, because they enter the engine now."""
        for request in filter(None, map(self.requests.open, names)):
            if isinstance(request.outbound, OutboundLink):
                request.outbound.sender.offer_again(request.origin.key)
                self.outbound.touch(request.outbound)

    def _accept(self, origin: RequestOrigin, writer: ChunkWriter, now: float) -> WorkerRequest:
        outbound: Outbound
        if origin.reply_to is not None and origin.message is not None:
            outbound = self.outbound.open_plain(origin.key, origin.reply_to, writer, origin.message)
        else:
            notice = self.leases.renew_lease if origin.message is None else self.leases.start_lease
            notice(origin.client, origin.incarnation, now)
            outbound = self.outbound.link(origin.client, origin.incarnation)
            outbound.sender.open(origin.key, writer)
        self.outbound.touch(outbound)
        return self.requests.add(origin, outbound, writer)

    def reject(self, origin: RequestOrigin, error: RequestError, now: float) -> None:
        """Answer a request that this worker does not have with its terminal chunk."""
        self.stats.rejected += 1
        if origin.message is None:
            self.leases.renew_lease(origin.client, origin.incarnation, now)
            link = self.outbound.link(origin.client, origin.incarnation)
            link.sender.reject(origin.key, ChunkError.of(error), self.versions.weight_version)
            self.outbound.touch(link)
            self.requests.note_refused(origin, error.code.value)
            return
        # Offer the rejection: the message then leaves the queue only with the client's ack, and until then another
        # worker may answer.
        writer = ChunkWriter(origin.key, prompt_len=0, routing=None, start=0, segment_bytes=self.outbound.segment_bytes)
        self._fail(self._accept(origin, writer, now), error)

    def note_returned(self, messages: Iterable[QueuedRequest]) -> None:
        """Write timelines of requests that return to the queue without an offer."""
        for message in messages:
            for origin in IncomingRequest.origins_in(message):
                self.requests.note_refused(origin)

    def add_steps(self, steps: Iterable[RequestStep | TokenBatch], now: float) -> Instructions:
        """Add the output of one engine step. Fail and abort requests with invalid output."""
        instructions = Instructions()
        self.dispatcher.add_steps(steps, now, instructions)
        self._keep_within_limit(instructions)
        return instructions

    def flush(self) -> Instructions:
        """Add all batched tokens to the outbounds."""
        instructions = Instructions()
        self.dispatcher.flush(instructions)
        return instructions

    def fail(self, names: Sequence[str], error: RequestError) -> Instructions:
        """End open requests with `error`. Ended requests are ignored."""
        for request in filter(None, map(self.requests.open, names)):
            self.stats.failed += 1
            self._fail(request, error)
        return Instructions(abort=list(names))

    def refuse(self, names: Sequence[str], error: RequestError) -> None:
        """Reject offered requests that are not in the engine. Their clients put them into the queue."""
        for request in filter(None, map(self.requests.open, names)):
            self.stats.rejected += 1
            self._fail(request, error)

    # Clients

    def on_link_message(self, client: str, message: LinkMessage, now: float) -> Instructions:
        """Handle the aborts, acks and credit of a client."""
        instructions = Instructions()
        incarnation = message.client_incarnation
        if incarnation:
            self._renew_lease(client, incarnation, now, instructions)
            if self.leases.is_dead(client, incarnation):
                self.stats.late_messages += 1
                return instructions
        for key in message.abort:
            self._abort(client, incarnation, key, instructions)
        if incarnation and message.incarnation == self.outbound.incarnation:
            self._apply_link_state(client, message, instructions)
        return instructions

    def _renew_lease(self, client: str, incarnation: str, now: float, instructions: Instructions) -> None:
        self.leases.renew_lease(client, incarnation, now)
        incarnations = self.outbound.incarnations_of(client)
        if any(other != incarnation for other in incarnations) and not self.leases.is_dead(client, incarnation):
            # Only a live incarnation sends link messages, so this is the latest one even if its presence has not
            # arrived yet.
            announced = ClientPresence(
                client=client, incarnation=incarnation, state=ClientState.LIVE, lease_s=DEFAULT_LEASE_S
            )
            self._remove_ended(self.leases.renew(announced, now), instructions)
        self._clear_lost(client, incarnation)

    def _clear_lost(self, client: str, incarnation: str) -> None:
        """Keep the link of a client, which may have been marked lost."""
        link = self.outbound.find(client, incarnation)
        if link is not None:
            link.lost_at = None

    def _apply_link_state(self, client: str, message: LinkMessage, instructions: Instructions) -> None:
        """Apply acks and credit. A client that still uses an old link gets a heartbeat of the current link."""
        link = self.outbound.link(client, message.client_incarnation)
        self.outbound.touch(link)
        if message.link != link.sender.link:
            self.outbound.request_heartbeat(link)
            return
        try:
            progress = link.sender.receive(message)
        except RemoteProtocolError as exc:
            self.stats.bad_messages += 1
            self._rejected.warn(logger, "link.message_rejected client=%s so_far=%s error=%s", client, exc)
            return
        if progress.needs_new_link:
            self.break_link(link, instructions)
            return
        for key in progress.confirmed:
            request = self.requests.find(client, message.client_incarnation, key)
            self.stats.confirmed += request is None or request.state is WorkerRequestState.OFFERED
            if request is not None:
                if request.state is WorkerRequestState.OFFERED:
                    request.transition(WorkerRequestEvent.CONFIRMED)
                self._ack(request, instructions)
        if progress.resend:
            self.stats.frames_resent += len(progress.resend)
            link.resend(progress.resend)

    def break_link(self, link: OutboundLink, instructions: Instructions) -> None:
        """Replace a link by a new link without requests.

        The client then publishes its acknowledged requests again. The other requests go back to the queue.
        """
        self.stats.links_broken += 1
        self._remove_link(link, instructions, to_other_workers=True)
        self.outbound.request_heartbeat(self.outbound.link(link.client, link.incarnation))

    def on_presence(self, presence: ClientPresence, now: float) -> Instructions:
        """Handle the presence of a client."""
        instructions = Instructions()
        self._remove_ended(self.leases.renew(presence, now), instructions)
        self._clear_lost(presence.client, presence.incarnation)
        return instructions

    def _remove_ended(self, incarnations: list[EndedIncarnation], instructions: Instructions) -> None:
        """Remove client incarnations that have ended for good."""
        for ended in incarnations:
            logger.info(
                "client.incarnation_ended client=%s incarnation=%s reason=%s",
                ended.client,
                ended.incarnation,
                ended.reason,
            )
            self.stats.clients_lost += 1
            link = self.outbound.find(ended.client, ended.incarnation)
            if link is not None:
                self.stats.requests_of_lost_clients += self._remove_link(link, instructions)

    # Time

    def expire(self, now: float) -> Instructions:
        """End silent clients, links whose clients read nothing, and plain requests past their deadline."""
        instructions = Instructions()
        for link in [link for link in self.outbound.links() if link.sender.is_overrun]:
            self.break_link(link, instructions)
        for ended in self.leases.expire(now):
            self._mark_lost(ended.client, ended.incarnation, now, instructions)
        for link in [link for link in self.outbound.links() if link.lost_at is None]:
            if not self.leases.is_live(link.client, link.incarnation):
                # There are too many leases. Without one, the link would never end.
                self._mark_lost(link.client, link.incarnation, now, instructions)
        lost = [(link.lost_at, link) for link in self.outbound.links() if link.lost_at is not None]
        excess = self.outbound.held_bytes - self._max_held_bytes
        left = Counter(link.client for _, link in lost)
        for lost_at, link in sorted(lost, key=lambda item: item[0]):
            left[link.client] -= 1
            # Frames of dead clients must not block live clients, and a client may invent incarnations.
            if now - lost_at > REMEMBER_S or excess > 0 or left[link.client] >= MAX_INCARNATIONS:
                excess -= link.held_bytes
                self._remove_link(link, instructions)
        for request in self.requests:
            if request.deadline is not None and now > request.deadline and self.requests.is_open(request):
                self.stats.failed += 1
                self._fail(request, RequestError(code=ErrorCode.TIMEOUT, message="the request exceeded its timeout_s"))
                instructions.abort.append(request.name)
        return instructions

    def _mark_lost(self, client: str, incarnation: str, now: float, instructions: Instructions) -> None:
        """Fail the requests of a silent client. If the client returns within `REMEMBER_S`, it receives the errors."""
        logger.warning("client.lost client=%s incarnation=%s", client, incarnation)
        self.stats.clients_lost += 1
        link = self.outbound.find(client, incarnation)
        if link is None:
            return
        link.lost_at = now
        error = RequestError(code=ErrorCode.CLIENT_LOST, message="this client was silent for longer than its lease")
        for key in list(link.sender.keys):
            self.stats.requests_of_lost_clients += 1
            self._fail_at(link, key, error, instructions)
        for request in self.requests.of_client(link.client, link.incarnation):
            self._ack(request, instructions)

    def fence(self, incarnation: str, now: float, *, max_payload: int) -> Instructions:
        """Remove everything without acks, and continue as another incarnation."""
        names = self.requests.clear()
        self.dispatcher.clear()
        self.dispatcher.experts.restart(now)
        self.stats.given_up += len(names)
        self.outbound.restart(incarnation, max_payload=max_payload)
        self.leases.restart_leases(now)
        return Instructions(abort=names)

    def next_frame(self, outbound: Outbound) -> OutgoingFrame | None:
        """Return the next frame of one of `outbound.sendable`, or None if it has no frame now."""
        outgoing = self.outbound.next_frame(outbound)
        if outgoing is not None and outgoing.message is not None:
            found = next((each for each in self.requests if each.message is outgoing.message), None)
            if found is not None:
                self.requests.pop_message(found)
        return outgoing

    # Ends of requests

    def _fail(self, request: WorkerRequest, error: RequestError) -> None:
        """End an open request with `error`."""
        request.outbound.sender.fail(request.origin.key, ChunkError.of(error), self.versions.weight_version)
        self.outbound.touch(request.outbound)
        self.requests.end(request, WorkerRequestEvent.FINISHED, error.code.value)

    def _fail_at(self, link: OutboundLink, key: RequestKey, error: RequestError, instructions: Instructions) -> None:
        """End a request with `error` if its terminal chunk is not sent yet. The engine need not have the request."""
        request = self.requests.find(link.client, link.incarnation, key)
        if request is not None and self.requests.is_open(request):
            self._fail(request, error)
            instructions.abort.append(request.name)
        else:
            link.sender.fail(key, ChunkError.of(error), self.versions.weight_version)
            self.outbound.touch(link)
        self.stats.failed += 1

    def _abort(self, client: str, incarnation: str, key: RequestKey, instructions: Instructions) -> None:
        """Abort a request for its client, and remove its message from the queue."""
        request = self.requests.find(client, incarnation, key)
        is_open = request is not None and self.requests.is_open(request)
        if request is not None and is_open:
            instructions.abort.append(request.name)
            # A sample that its client cuts off goes on elsewhere with the tokens that it has.
            is_open = self.dispatcher.flush_request(request, instructions)
        link = self.outbound.find(client, incarnation)
        if link is None:
            # In plain mode the engine ends the request, and the worker delivers all tokens until then.
            return
        if key in link.sender.keys:
            self.stats.aborted += 1
            link.sender.abort(key, self.versions.weight_version)
            self.outbound.touch(link)
        if request is not None:
            if is_open:
                self.requests.end(request, WorkerRequestEvent.STOPPED, FinishReason.ABORT.value)
            self._ack(request, instructions)

    def _ack(self, request: WorkerRequest, instructions: Instructions) -> None:
        """Ack the queue message of a request, if there is one."""
        message = self.requests.pop_message(request)
        if message is not None:
            instructions.ack.append(message)

    def _remove_link(self, link: OutboundLink, instructions: Instructions, *, to_other_workers: bool = False) -> int:
        """Remove a link and its requests. Return the number of requests.

        Args:
            to_other_workers: True to nak the queue messages, so that other workers receive them. False to ack them.
        """
        requests = self.requests.of_client(link.client, link.incarnation)
        reason = RETURNED if to_other_workers else ErrorCode.CLIENT_LOST.value
        for request in requests:
            if self.requests.is_open(request):
                instructions.abort.append(request.name)
                self.requests.end(request, WorkerRequestEvent.STOPPED, reason)
            message = self.requests.pop_message(request)
            if message is not None and to_other_workers:
                instructions.nak.append((message, 0.0))
            elif message is not None:
                instructions.ack.append(message)
        self.outbound.remove(link)
        return len(requests)

    def _keep_within_limit(self, instructions: Instructions) -> None:
        """Fail the requests with the most unacknowledged bytes until at most twice the limit of pulling remain."""
        max_held_bytes = 2 * self._max_held_bytes
        excess = self.outbound.held_bytes - max_held_bytes
        if excess <= 0:
            return
        unsent = [
            (link.sender.unsent_bytes(key), key, link) for link in self.outbound.links() for key in link.sender.keys
        ]
        error = RequestError(
            code=ErrorCode.OVER_BUDGET,
            message=f"this worker holds more than {max_held_bytes} unacknowledged bytes",
        )
        for num_bytes, key, link in sorted(unsent, key=lambda item: item[0], reverse=True):
            if excess <= 0 or not num_bytes:
                break
            excess -= num_bytes
            self.stats.over_budget += 1
            self._fail_at(link, key, error, instructions)
