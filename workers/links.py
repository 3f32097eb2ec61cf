"""All that a worker has for its clients: their links, their leases and the requests in its hands. Plain state, no I/O.

Every event is a method; what it calls for outside is returned as `Instructions`. What is to be published waits in
`routes`.

Invariants: a request that was offered or rejected gets exactly one terminal chunk, behind its other chunks. Its message
leaves the queue only once somebody else answers for it: its client, who confirmed the offer or does not want it, or
nobody, because that client is gone.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from bus.protocol.chunking import ChunkWriter
from bus.protocol.lease import ClientLeases, Ended
from bus.protocol.states import HeldEvent, HeldState
from bus.protocol.step import RequestStep, TokenBatch
from bus.queue.puller import QueuedRequest
from bus.subjects import Subjects
from schemas.chunk import ChunkError
from schemas.errors import ErrorCode, RemoteProtocolError, RequestError
from schemas.limits import DEFAULT_TIMEOUT_S
from schemas.messages import KvHandover, LinkMessage, RequestKey
from schemas.presence import Capabilities, ClientPresence, ClientState
from schemas.request import GenerateRequest
from workers.config import LEASE_MARGIN_S, WorkerConfig
from workers.endings import Endings
from workers.held import Held, HeldRequests, Instructions, Origin
from workers.link_stats import LinkStats
from workers.outputs import Outputs
from workers.routes import ClientLink, Outgoing, PlainRoute, Route, Routes
from workers.versions import Versions

__all__ = ["Links"]

logger = logging.getLogger(__name__)

REMEMBER_S = 60.0
"""How long what a lost client missed is kept for its return."""
DEFAULT_LEASE_S = 5.0
"""Of a client that was heard by its link before it announced itself."""


class Links:
    """The links, leases and requests of one worker.

    Args:
        incarnation: of the worker.
        max_payload: of the NATS server, in bytes; no frame exceeds it.
    """

    def __init__(self, config: WorkerConfig, incarnation: str, *, max_payload: int) -> None:
        self.versions = Versions(config.weight_version, config.weight_version)
        self._max_held_bytes = config.max_held_bytes
        self._leases = ClientLeases(LEASE_MARGIN_S)
        self._held = HeldRequests()
        self.routes = Routes(config.worker_id, Subjects(config.fleet), incarnation, max_payload=max_payload)
        self.stats = LinkStats()
        self._endings = Endings(self._held, self.routes, self.versions, self.stats)
        self._outputs = Outputs(self._held, self.routes, self.versions, self._endings, self.stats)

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Links {self.routes!r} {self._held!r}>"

    def __len__(self) -> int:
        """Open requests."""
        return len(self._held)

    @property
    def is_gathering(self) -> bool:
        """There are tokens that no route has been given yet; `hand_over` gives them."""
        return self._outputs.is_gathering

    @property
    def names(self) -> list[str]:
        """Engine names of the open requests."""
        return self._held.names

    def using(self, is_meant: Callable[[str | None], bool]) -> list[str]:
        """Engine names of open requests, by the adapter that they use; it is None where they use none."""
        return [held.name for held in self._held.open_requests if is_meant(held.lora)]

    def handing_over(self, is_meant: Callable[[str | None], bool]) -> list[str]:
        """Engine names, as of `using`, of open legs without a token yet: their KV is of the present weights alone."""
        return [held.name for held in self._held.open_requests if held.awaits_kv and is_meant(held.lora)]

    def called(self, request_ids: Collection[str]) -> dict[str, list[str]]:
        """Engine names of open requests, of any client, by these ids; an id that none has is left out."""
        names: dict[str, list[str]] = {}
        for held in self._held.open_requests:
            if held.origin.key.request_id in request_ids:
                names.setdefault(held.origin.key.request_id, []).append(held.name)
        return names

    @property
    def messages(self) -> list[QueuedRequest]:
        """What is not settled: the queue keeps it for another worker as long as this one says that it is at work."""
        return self._held.messages

    # Requests

    def is_gone(self, origin: Origin) -> bool:
        """Nobody waits for this request any more: its client is dead."""
        return bool(origin.incarnation) and self._leases.is_dead(origin.client, origin.incarnation)

    def repeated(self, origin: Origin) -> Instructions | None:
        """Take note of another delivery of a request that is here already; None where it is not."""
        held = self._find(origin)
        message = origin.message
        if held is None:
            link = self.routes.find(origin.client, origin.incarnation)
            if link is None or origin.key not in link.sender.keys:
                return None
            # Ended and confirmed: only its chunks are still to be sent.
        self.stats.repeated += 1
        if message is None:
            return Instructions()
        if held is None or held.message is None:
            return Instructions(ack=[message])
        held.message = message
        if isinstance(held.route, PlainRoute):
            held.route.message = message
        return Instructions()

    def _find(self, origin: Origin) -> Held | None:
        if origin.message is None or origin.reply_to is None:
            return self._held.find(origin.client, origin.incarnation, origin.key)
        # In plain mode the attempt counts deliveries: look for all earlier ones.
        request_id, attempt, child = origin.key.request_id, origin.key.attempt, origin.key.child
        for earlier in range(max(attempt - origin.message.num_delivered + 1, 0), attempt + 1):
            held = self._held.find(origin.client, "", RequestKey(request_id, earlier, child))
            if held is not None:
                return held
        return None

    def offer(
        self,
        origin: Origin,
        request: GenerateRequest,
        capabilities: Capabilities,
        now: float,
        *,
        kv: KvHandover | None = None,
        gathers: bool = False,
    ) -> str:
        """Take a request in hand and offer it to its client; returns its engine name. It must not be here already.

        Args:
            kv: which the engine is given with it.
            gathers: its tokens may be gathered for a moment.
        """
        routing = None if request.return_routed_experts is False else capabilities.routed_experts
        writer = ChunkWriter(
            origin.key,
            prompt_len=request.prompt_len,
            routing=routing,
            start=request.routed_experts_prompt_start,
            part_bytes=self.routes.part_bytes,
            traceparent=request.traceparent,
        )
        deadline = None
        if origin.reply_to is not None:
            deadline = now + (DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s)
        self.stats.offered += 1
        self.stats.prompt_tokens += request.prompt_len
        held = self._take_in_hand(origin, writer, now, deadline, request.lora)
        held.awaits_kv, held.last_at = kv is not None, now
        # An adapter may change while other weights stay: such tokens go on at once, with the version that holds.
        held.gathers = gathers and request.lora is None
        return held.name

    def _take_in_hand(
        self, origin: Origin, writer: ChunkWriter, now: float, deadline: float | None = None, lora: str | None = None
    ) -> Held:
        route: Route
        if origin.reply_to is not None and origin.message is not None:
            route = self.routes.open_plain(origin.key, origin.reply_to, writer, origin.message)
        else:
            notice = self._leases.hear if origin.message is None else self._leases.meet
            notice(origin.client, origin.incarnation, now)
            route = self.routes.link(origin.client, origin.incarnation)
            route.sender.open(origin.key, writer)
        self.routes.touch(route)
        return self._held.add(origin, route, deadline, lora)

    def reject(self, origin: Origin, error: RequestError, now: float) -> None:
        """Answer a request that is not here with its terminal chunk."""
        self.stats.rejected += 1
        if origin.message is None:
            self._leases.hear(origin.client, origin.incarnation, now)
            link = self.routes.link(origin.client, origin.incarnation)
            link.sender.reject(origin.key, ChunkError.of(error), self.versions.weight_version)
            self.routes.touch(link)
            return
        # Offered, so that the client's acknowledgement settles the message: until then another worker may answer.
        writer = ChunkWriter(origin.key, prompt_len=0, routing=None, start=0, part_bytes=self.routes.part_bytes)
        self._endings.fail(self._take_in_hand(origin, writer, now), error)

    def take(self, steps: Iterable[RequestStep | TokenBatch], now: float) -> Instructions:
        """Take what the engine made; requests whose output makes no sense are failed and aborted."""
        todo = Instructions()
        self._outputs.take(steps, now, todo)
        self._endings.keep_within(2 * self._max_held_bytes, todo)
        return todo

    def hand_over(self) -> Instructions:
        """Give the routes all that was gathered."""
        todo = Instructions()
        self._outputs.hand_over(todo)
        return todo

    def fail(self, name: str, error: RequestError) -> None:
        """End an open request with `error`; one that has ended is left alone."""
        held = self._held.open(name)
        if held is not None:
            self.stats.failed += 1
            self._endings.fail(held, error)

    def fail_all(self, code: ErrorCode, message: str) -> Instructions:
        """End every open request with an error."""
        names = self._held.names
        for name in names:
            self.fail(name, RequestError(code=code, message=message))
        return Instructions(abort=names)

    # Clients

    def on_link_message(self, client: str, message: LinkMessage, now: float) -> Instructions:
        """Take what a client says."""
        todo = Instructions()
        incarnation = message.client_incarnation
        if incarnation:
            self._hear(client, incarnation, now, todo)
            if self._leases.is_dead(client, incarnation):
                self.stats.late_messages += 1
                return todo
        for key in message.abort:
            self._endings.stop(client, incarnation, key, todo)
        if incarnation and message.incarnation == self.routes.incarnation:
            self._follow(client, message, todo)
        return todo

    def _hear(self, client: str, incarnation: str, now: float, todo: Instructions) -> None:
        self._leases.hear(client, incarnation, now)
        lives = self.routes.lives_of(client)
        if any(other != incarnation for other in lives) and not self._leases.is_dead(client, incarnation):
            # Only a life that goes on speaks of links: it is the later one, though its announcement may be on its way.
            announced = ClientPresence(
                client=client, incarnation=incarnation, state=ClientState.LIVE, lease_s=DEFAULT_LEASE_S
            )
            self._end_lives(self._leases.renew(announced, now), todo)
        self._welcome(client, incarnation)

    def _welcome(self, client: str, incarnation: str) -> None:
        """A client that may have counted as lost is there."""
        link = self.routes.find(client, incarnation)
        if link is not None:
            link.lost_at = None

    def _follow(self, client: str, message: LinkMessage, todo: Instructions) -> None:
        """Take acknowledgements and credit; a client that follows another link is told of the present one."""
        link = self.routes.link(client, message.client_incarnation)
        self.routes.touch(link)
        if message.link != link.sender.link:
            self.routes.tell(link)
            return
        try:
            progress = link.sender.receive(message)
        except RemoteProtocolError as exc:
            self.stats.bad_messages += 1
            logger.warning("link.bad_message client=%s error=%s", client, exc)
            return
        if progress.is_forgotten:
            self.break_link(link, todo)
            return
        for key in progress.confirmed:
            self.stats.confirmed += 1
            held = self._held.find(client, message.client_incarnation, key)
            if held is not None:
                if held.state is HeldState.OFFERED:
                    held.advance(HeldEvent.CONFIRMED)
                self._endings.settle(held, todo)
        if progress.resend:
            self.stats.frames_resent += len(progress.resend)
            link.resend(progress.resend)

    def break_link(self, link: ClientLink, todo: Instructions) -> None:
        """Give up a link, with the requests on it, for a new one.

        When it hears, its client asks again for those that it had confirmed; the others go back to the queue.
        """
        self.stats.links_broken += 1
        self._endings.drop(link, todo, is_wanted=True)
        self.routes.tell(self.routes.link(link.client, link.incarnation))

    def on_presence(self, presence: ClientPresence, now: float) -> Instructions:
        """Take a client's announcement."""
        todo = Instructions()
        self._end_lives(self._leases.renew(presence, now), todo)
        self._welcome(presence.client, presence.incarnation)
        return todo

    def _end_lives(self, lives: list[Ended], todo: Instructions) -> None:
        """Forget lives of clients that are over for good."""
        for ended in lives:
            logger.info("client.gone client=%s incarnation=%s reason=%s", ended.client, ended.incarnation, ended.reason)
            self.stats.clients_gone += 1
            link = self.routes.find(ended.client, ended.incarnation)
            if link is not None:
                self.stats.requests_of_gone += self._endings.drop(link, todo)

    # Time

    def expire(self, now: float) -> Instructions:
        """End what is late: clients that went silent or read nothing, plain requests past their deadline."""
        todo = Instructions()
        for link in [link for link in self.routes.links() if link.sender.is_overrun]:
            self.break_link(link, todo)
        for ended in self._leases.expire(now):
            self._lose(ended, now, todo)
        lost = [(link.lost_at, link) for link in self.routes.links() if link.lost_at is not None]
        excess = self.routes.held_bytes - self._max_held_bytes
        for lost_at, link in sorted(lost, key=lambda item: item[0]):
            # What dead clients missed must not keep the living from being served.
            if now - lost_at > REMEMBER_S or excess > 0:
                excess -= link.held_bytes
                self._endings.drop(link, todo)
        for held in self._held:
            if held.deadline is not None and now > held.deadline and self._held.is_open(held):
                self.stats.failed += 1
                self._endings.fail(held, RequestError(code=ErrorCode.TIMEOUT, message="its timeout_s passed"))
                todo.abort.append(held.name)
        return todo

    def _lose(self, ended: Ended, now: float, todo: Instructions) -> None:
        """End the requests of a client that went silent; it is told if it comes back soon."""
        logger.warning("client.lost client=%s incarnation=%s", ended.client, ended.incarnation)
        self.stats.clients_gone += 1
        link = self.routes.find(ended.client, ended.incarnation)
        if link is None:
            return
        link.lost_at = now
        error = RequestError(code=ErrorCode.CLIENT_LOST, message="this client was silent for longer than its lease")
        for key in list(link.sender.keys):
            self.stats.requests_of_gone += 1
            self._endings.fail_at(link, key, error, todo)
        for held in self._held.of(link.client, link.incarnation):
            self._endings.settle(held, todo)

    def renew_leases(self, now: float) -> None:
        """Start every client's lease anew: for a while nobody could be heard."""
        self._leases.renew_all(now)

    def fence(self, incarnation: str, now: float, *, max_payload: int) -> Instructions:
        """Give up everything and go on as another incarnation; nothing is acked."""
        names = self._held.clear()
        self._outputs.clear()
        self.stats.fenced += len(names)
        self.routes.restart(incarnation, max_payload=max_payload)
        self._leases.renew_all(now)
        return Instructions(abort=names)

    def next_frame(self, route: Route) -> Outgoing | None:
        """The next frame of one of `routes.sendable`; None when there is none now."""
        outgoing = self.routes.next_frame(route)
        if outgoing is not None and outgoing.message is not None:
            held = self._held.holding(outgoing.message)
            if held is not None:
                self._held.settle(held)
        return outgoing
