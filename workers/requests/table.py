"""Worker requests: accepted requests that are in the engine, or whose queue message is not acked yet."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Literal

import msgspec
from msgspec.structs import replace

from ...bus.protocol.states import WORKER_REQUEST, WorkerRequestEvent, WorkerRequestState
from ...bus.protocol.stream.chunk_writer import ChunkWriter
from ...bus.protocol.stream.engine_step import RequestStep
from ...bus.protocol.telemetry.requests import RETURNED, OpenTimeline, TimelineBook
from ...bus.queue.puller import QueuedRequest
from ...schemas.control import ReadRequest
from ...schemas.errors import ErrorCode
from ...schemas.messages import RequestKey
from ...schemas.request import GenerateRequest
from ...schemas.telemetry import LostAttempt, RequestProgress, RequestTimeline
from .outbound import Outbound


class RequestOrigin(msgspec.Struct, frozen=True):
    """The client and the key of a request."""

    client: str
    incarnation: str
    """Incarnation of the client, or an empty string in plain mode."""
    key: RequestKey
    message: QueuedRequest | None = None
    """The queue message, or None for a direct request."""
    reply_to: str | None = None
    """Subject of the frames in plain mode, otherwise None."""
    phase: Literal["prefill", "decode"] | None = None
    """Phase of the attempt; None: this worker serves all of it."""
    lost: tuple[LostAttempt, ...] = ()
    """Attempts that the client has lost before."""
    given_id: str = ""
    """Id that the caller gave the request, or an empty string if it is that of the key."""


class WorkerRequest(msgspec.Struct, eq=False):
    """One accepted request."""

    name: str
    """Name in the engine, unique in this process."""
    origin: RequestOrigin
    """Origin without the message."""
    outbound: Outbound
    message: QueuedRequest | None
    """The queue message until it is acked or nakked, and None afterwards."""
    writer: ChunkWriter
    """Writer of its chunks."""
    timeline: OpenTimeline
    deadline: float | None = None
    """Monotonic time at which this worker ends the request, or None if the client ends it."""
    lora: str | None = None
    """Name of its adapter, or None without an adapter."""
    prompt_len: int = 0
    """Number of prompt tokens."""
    cached_tokens: int = 0
    """Number of prompt tokens from the engine's cache, known when the first token arrives."""
    gathers: bool = False
    """True if the client does not stream, so that the worker may batch tokens."""
    awaits_kv: bool = False
    """True for a prefill or decode phase without a token."""
    last_at: float = 0.0
    """Monotonic time of the last token, or of the offer before the first token."""
    has_token: bool = False
    """True if the engine has sampled a token."""
    waiting: GenerateRequest | None = None
    """The request while it waits for a slot as a follower; see `RequestIntake`."""
    early_steps: tuple[RequestStep, ...] = ()
    """Steps before the first token, which are forwarded with that token. They hold at most the rows of a prompt."""
    state: WorkerRequestState = WORKER_REQUEST.initial

    def transition(self, event: WorkerRequestEvent) -> None:
        """Change the state."""
        self.state = WORKER_REQUEST.next(self.state, event)


class Instructions(msgspec.Struct):
    """Side effects of an event, for the worker to execute."""

    abort: list[str] = []
    """Engine names of requests to abort."""
    ack: list[QueuedRequest] = []
    """Queue messages to ack."""
    nak: list[tuple[QueuedRequest, float]] = []
    """Queue messages to nak, each with the seconds until the next delivery."""

    @classmethod
    def acking(cls, message: QueuedRequest | None) -> "Instructions":
        """Return instructions to ack a message, if there is one."""
        return cls(ack=[] if message is None else [message])


class WorkerRequestTable:
    """The worker requests, by engine name and by client and key."""

    def __init__(self) -> None:
        self.timelines = TimelineBook()
        """Timelines of all received requests, including rejected and returned ones."""
        self._by_name: dict[str, WorkerRequest] = {}
        # By client and incarnation (empty in plain mode). Only clients with a request have an entry.
        self._by_client: dict[tuple[str, str], dict[RequestKey, WorkerRequest]] = {}
        self._serial = 0
        self.on_end: Callable[[str], None] = lambda _name: None
        """Called with the engine name of each open request that ends; must not block."""

    def __len__(self) -> int:
        """Number of open requests: neither the engine nor the worker has ended them."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[WorkerRequest]:
        """Iterate over a copy of all worker requests, so that the caller may end requests."""
        return iter([request for client in self._by_client.values() for request in client.values()])

    @property
    def names(self) -> list[str]:
        """Engine names of the open requests."""
        return list(self._by_name)

    @property
    def messages(self) -> list[QueuedRequest]:
        """Queue messages that are not acked yet. The worker sends in-progress acks for them."""
        return [request.message for request in self if request.message is not None]

    def add(self, origin: RequestOrigin, outbound: Outbound, writer: ChunkWriter) -> WorkerRequest:
        """Add an accepted request that is not in the table yet."""
        self._serial += 1
        key = origin.key
        name = f"{origin.client}/{key.request_id}/{key.attempt}/{key.child}/{self._serial}"
        # The origin does not keep the message, because that would keep the prompt in memory until the end.
        kept, timeline = replace(origin, message=None), self._begin_timeline(origin)
        request = WorkerRequest(name, kept, outbound, origin.message, writer, timeline)
        self._by_name[name] = request
        self._by_client.setdefault((origin.client, origin.incarnation), {})[key] = request
        return request

    def _begin_timeline(self, origin: RequestOrigin) -> OpenTimeline:
        message = origin.message
        lane, published_at = (None, None) if message is None else (message.lane, message.published_at)
        key = origin.key
        request = RequestTimeline(
            request_id=key.request_id,
            given_id=origin.given_id,
            client=origin.client,
            attempt=key.attempt,
            child=key.child,
            lane=lane,
            phase=origin.phase,
            lost=origin.lost,
        )
        return self.timelines.begin(request, published_at)

    def note_refused(self, origin: RequestOrigin, reason: str = RETURNED) -> None:
        """Write the timeline of a request that was rejected for `reason` or returned to the queue.

        The redelivery of a request that is in the table gets no second timeline.
        """
        if self.find(origin.client, origin.incarnation, origin.key) is not None:
            return
        self.timelines.end(self._begin_timeline(origin), reason, 0)

    def open(self, name: str) -> WorkerRequest | None:
        """Return the open request of this engine name, or None."""
        return self._by_name.get(name)

    def open_all(self, names: Iterable[str]) -> list[WorkerRequest | None]:
        """Return the open request of each of these engine names, or None."""
        return list(map(self._by_name.get, names))

    def names_using(self, lora: str | None) -> list[str]:
        """Return the engine names of the open requests that use this adapter, or of all if `lora` is None."""
        return [request.name for request in self._using(lora)]

    def names_without_adapter(self) -> list[str]:
        """Return the engine names of the open requests that use no adapter."""
        return [request.name for request in self._by_name.values() if request.lora is None]

    def names_awaiting_kv(self, lora: str | None) -> list[str]:
        """Return the engine names of prefill and decode phases without a token. `lora` is as in `names_using`."""
        return [request.name for request in self._using(lora) if request.awaits_kv]

    def restart_unbegun(self, lora: str | None) -> list[str]:
        """Discard the early steps of requests without a token. Return their names in the order of arrival."""
        unbegun = [request for request in self._using(lora) if not request.has_token]
        for request in unbegun:
            request.early_steps = ()
        return [request.name for request in unbegun]

    def _using(self, lora: str | None) -> list[WorkerRequest]:
        return [request for request in self._by_name.values() if lora is None or request.lora == lora]

    def names_by_id(self, request_ids: AbstractSet[str] | None) -> dict[str, list[str]]:
        """Return the engine names of the open requests with these ids, of any client. Omit ids without a request.

        Args:
            request_ids: None: the ids of all open requests.
        """
        names: dict[str, list[str]] = {}
        for request in self._by_name.values():
            own = request.timeline.ids
            for request_id in own[:1] if request_ids is None else request_ids & set(own):
                names.setdefault(request_id, []).append(request.name)
        return names

    def find(self, client: str, incarnation: str, key: RequestKey) -> WorkerRequest | None:
        """Return the request with this client and key, or None. In plain mode `incarnation` is empty."""
        return self._by_client.get((client, incarnation), {}).get(key)

    def of_client(self, client: str, incarnation: str) -> list[WorkerRequest]:
        """Return all requests of one incarnation of a client."""
        return list(self._by_client.get((client, incarnation), {}).values())

    def is_open(self, request: WorkerRequest) -> bool:
        """Return True if the request has not ended."""
        return request.name in self._by_name

    def hold(self, reason: str) -> None:
        """Record in the timelines of open requests that they are paused, and the reason."""
        for request in self._by_name.values():
            request.timeline.hold(reason, request.writer.taken_tokens)

    def resume(self) -> None:
        """Record in the timelines of open requests that they continue."""
        for request in self._by_name.values():
            request.timeline.resume()

    def end(self, request: WorkerRequest, event: WorkerRequestEvent, reason: str) -> None:
        """End an open request. It stays in the table until its queue message is acked or nakked.

        Args:
            reason: reason of the end, as in `TimelineBook.end`.
        """
        del self._by_name[request.name]
        self.on_end(request.name)
        self.timelines.end(request.timeline, reason, request.writer.taken_tokens)
        request.transition(event)
        if request.message is None:
            self._remove(request.origin)

    def pop_message(self, request: WorkerRequest) -> QueuedRequest | None:
        """Remove the queue message of a request, and return it for an ack or nak. Return None if there is none."""
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

    def read_timelines(self, command: ReadRequest, now: float) -> tuple[list[RequestTimeline], int]:
        """Return the timelines that a command asks for, and the number of those left out, as `TimelineBook` does."""
        requests = {request.timeline: request for request in self._by_name.values()}

        def progress_of(timeline: OpenTimeline) -> RequestProgress | None:
            request = requests.get(timeline)
            if request is None:
                return None
            idle_s = max(now - request.last_at, 0.0)
            return RequestProgress(seconds=timeline.seconds, idle_s=idle_s, tokens=request.writer.taken_tokens)

        if command.show is not None:
            return self.timelines.list_of(command.show, command.client, command.limit, progress_of)
        return self.timelines.find(command.request_id or "", command.client, progress_of)

    def clear(self) -> list[str]:
        """Remove all requests because this worker lost its lease. Return the engine names of the open requests."""
        names = self.names
        for request in self._by_name.values():
            self.timelines.end(request.timeline, ErrorCode.WORKER_FENCED.value, request.writer.taken_tokens)
        self._by_name.clear()
        self._by_client.clear()
        return names
