"""The requests that a worker has accepted: those in its engine, and those with an unsettled queue message."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from ...bus.protocol.states import WORKER_REQUEST, WorkerRequestEvent, WorkerRequestState
from ...bus.protocol.stream.chunk_writer import ChunkWriter
from ...bus.protocol.stream.engine_step import RequestStep
from ...bus.protocol.telemetry.timeline import RETURNED, OpenTimeline, TimelineBook
from ...bus.queue.puller import QueuedRequest
from ...schemas.errors import ErrorCode
from ...schemas.messages import RequestKey
from .outbound import Outbound

__all__ = ["Instructions", "RequestOrigin", "WorkerRequest", "WorkerRequestTable"]


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The client and the key of a request."""

    client: str
    incarnation: str
    """Of the client; empty in plain mode."""
    key: RequestKey
    message: QueuedRequest | None = None
    """Of the queue; None for a direct request."""
    reply_to: str | None = None
    """Plain mode: where frames go."""


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """One request."""

    name: str
    """Inside the engine, which never sees the same name twice."""
    origin: RequestOrigin
    """Without the message."""
    outbound: Outbound
    message: QueuedRequest | None
    """The queue keeps it for another worker until it is acked; None if there is none any more."""
    writer: ChunkWriter
    """Of its chunks."""
    timeline: OpenTimeline
    deadline: float | None = None
    """When this worker ends the request; None: its client does."""
    lora: str | None = None
    """The adapter that it uses."""
    prompt_len: int = 0
    """Tokens of its prompt."""
    cached_tokens: int = 0
    """Of these, the tokens that its engine did not compute; known with its first token."""
    gathers: bool = False
    """Its client does not stream: tokens may be gathered for a moment."""
    awaits_kv: bool = False
    """A prefill or decode phase without a token yet."""
    last_at: float = 0.0
    """Time of its last token, or of the offer if it has none."""
    has_token: bool = False
    """Its engine has sampled a token."""
    early_steps: list[RequestStep] = field(default_factory=list)
    """Steps before its first token, which leave with that token; at most the rows of a prompt."""
    state: WorkerRequestState = WORKER_REQUEST.initial

    def transition(self, event: WorkerRequestEvent) -> None:
        """Change the state."""
        self.state = WORKER_REQUEST.next(self.state, event)


@dataclass(slots=True)
class Instructions:
    """What follows from an event, for the worker to execute."""

    abort: list[str] = field(default_factory=list)
    """Engine names of requests to abort."""
    ack: list[QueuedRequest] = field(default_factory=list)
    """Messages that may leave the queue."""
    nak: list[tuple[QueuedRequest, float]] = field(default_factory=list)
    """Messages for another worker, each after so many seconds."""

    @classmethod
    def acking(cls, message: QueuedRequest | None) -> "Instructions":
        """Remove a message that no client waits for from the queue, if there is one."""
        return cls(ack=[] if message is None else [message])


class WorkerRequestTable:
    """Requests that are open in the engine or unsettled in the queue, by engine name and by client and key."""

    def __init__(self) -> None:
        self.timelines = TimelineBook()
        """Of all requests that came here, also of those that were refused or given back."""
        self._by_name: dict[str, WorkerRequest] = {}
        # By client and its incarnation, which is empty in plain mode; only those with a request.
        self._by_client: dict[tuple[str, str], dict[RequestKey, WorkerRequest]] = {}
        self._serial = 0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<WorkerRequestTable open={len(self)} held={sum(map(len, self._by_client.values()))}>"

    def __len__(self) -> int:
        """Number of open requests: neither the engine nor the worker has ended them."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[WorkerRequest]:
        """All open or unsettled requests; a copy, so that requests may be ended meanwhile."""
        return iter([request for client in self._by_client.values() for request in client.values()])

    @property
    def names(self) -> list[str]:
        """Of the open requests."""
        return list(self._by_name)

    @property
    def messages(self) -> list[QueuedRequest]:
        """Queue messages to answer as in progress: without an answer, the queue gives them to another worker."""
        return [request.message for request in self if request.message is not None]

    def add(
        self,
        origin: RequestOrigin,
        outbound: Outbound,
        writer: ChunkWriter,
        deadline: float | None = None,
        lora: str | None = None,
    ) -> WorkerRequest:
        """Add an accepted request, which must not be here already."""
        self._serial += 1
        key = origin.key
        name = f"{origin.client}/{key.request_id}/{key.attempt}/{key.child}/{self._serial}"
        # The message is not kept in the origin too: it would keep the prompt in memory until the end.
        timeline = self._begin_timeline(origin)
        request = WorkerRequest(
            name, replace(origin, message=None), outbound, origin.message, writer, timeline, deadline, lora
        )
        self._by_name[name] = request
        self._by_client.setdefault((origin.client, origin.incarnation), {})[key] = request
        return request

    def _begin_timeline(self, origin: RequestOrigin) -> OpenTimeline:
        message = origin.message
        lane, published_at = (None, None) if message is None else (message.lane, message.published_at)
        return self.timelines.begin(origin.client, origin.key, lane=lane, published_at=published_at)

    def note_refused(self, origin: RequestOrigin, reason: str = RETURNED) -> None:
        """Have a timeline of a request that is not here: it was refused for `reason`, or given back to the queue.

        A redelivery of a request that runs here has no second timeline.
        """
        if self.find(origin.client, origin.incarnation, origin.key) is not None:
            return
        self.timelines.end(self._begin_timeline(origin), reason, 0)

    def note_started(self, name: str) -> None:
        """Note that the engine gets an open request now."""
        request = self.open(name)
        if request is not None:
            request.timeline.add("started")

    def open(self, name: str) -> WorkerRequest | None:
        """The open request of this engine name."""
        return self._by_name.get(name)

    def names_using(self, lora: str | None) -> list[str]:
        """Names of the open requests that use this adapter; None: of all."""
        return [request.name for request in self._using(lora)]

    def names_awaiting_kv(self, lora: str | None) -> list[str]:
        """Of these, prefill and decode phases without a token: their KV is of the present weights alone."""
        return [request.name for request in self._using(lora) if request.awaits_kv]

    def restart_unbegun(self, lora: str | None) -> list[str]:
        """Discard the early steps of those without a token, and return their names in the order of their arrival."""
        unbegun = [request for request in self._using(lora) if not request.has_token]
        for request in unbegun:
            request.early_steps.clear()
        return [request.name for request in unbegun]

    def _using(self, lora: str | None) -> list[WorkerRequest]:
        return [request for request in self._by_name.values() if lora is None or request.lora == lora]

    def names_by_id(self, request_ids: Collection[str]) -> dict[str, list[str]]:
        """Names of the open requests of any client, by these ids; an id without one is left out."""
        names: dict[str, list[str]] = {}
        for request in self._by_name.values():
            if request.origin.key.request_id in request_ids:
                names.setdefault(request.origin.key.request_id, []).append(request.name)
        return names

    def find(self, client: str, incarnation: str, key: RequestKey) -> WorkerRequest | None:
        """The request that a client calls `key`; in plain mode `incarnation` is empty."""
        return self._by_client.get((client, incarnation), {}).get(key)

    def of_client(self, client: str, incarnation: str) -> list[WorkerRequest]:
        """All requests of one incarnation of a client."""
        return list(self._by_client.get((client, incarnation), {}).values())

    def find_by_message(self, message: QueuedRequest) -> WorkerRequest | None:
        """The request with this queue message."""
        return next((request for request in self if request.message is message), None)

    def is_open(self, request: WorkerRequest) -> bool:
        """True if it was not ended."""
        return request.name in self._by_name

    def hold(self, reason: str) -> None:
        """Note that the open requests stand still, and for what."""
        for request in self._by_name.values():
            request.timeline.hold(reason, request.writer.taken_tokens)

    def resume(self) -> None:
        """Note that the open requests go on."""
        for request in self._by_name.values():
            request.timeline.resume()

    def end(self, request: WorkerRequest, event: WorkerRequestEvent, reason: str) -> None:
        """End an open request; it stays here until its queue message is settled.

        Args:
            reason: of the end, as `TimelineBook.end`.
        """
        del self._by_name[request.name]
        self.timelines.end(request.timeline, reason, request.writer.taken_tokens)
        request.transition(event)
        if request.message is None:
            self._remove(request.origin)

    def pop_message(self, request: WorkerRequest) -> QueuedRequest | None:
        """Remove and return the queue message of a request, to be acked or nakked; None if there is none."""
        message, request.message = request.message, None
        if not self.is_open(request):
            self._remove(request.origin)
        return message

    def _remove(self, origin: RequestOrigin) -> None:
        client = origin.client, origin.incarnation
        requests = self._by_client.get(client, {})
        requests.pop(origin.key, None)
        if not requests:
            self._by_client.pop(client, None)

    def clear(self) -> list[str]:
        """Remove everything, as this worker has lost its lease; return the engine names of the open requests."""
        names = self.names
        for request in self._by_name.values():
            self.timelines.end(request.timeline, ErrorCode.WORKER_FENCED.value, request.writer.taken_tokens)
        self._by_name.clear()
        self._by_client.clear()
        return names
