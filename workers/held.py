"""The requests in a worker's hands: those inside its engine, and those whose message the queue still keeps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from bus.protocol.states import HELD, HeldEvent, HeldState
from bus.queue.puller import QueuedRequest
from schemas.messages import RequestKey
from workers.routes import Route

__all__ = ["Held", "HeldRequests", "Instructions", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from, and so where its chunks go."""

    client: str
    incarnation: str
    """Of the client; empty in plain mode."""
    key: RequestKey
    message: QueuedRequest | None = None
    """Of the queue; None for a request that was handed over directly."""
    reply_to: str | None = None
    """Plain mode: where frames go."""


@dataclass(slots=True, eq=False)
class Held:
    """One request."""

    name: str
    """Inside the engine, which never sees the same name twice."""
    origin: Origin
    """Without the message."""
    route: Route
    message: QueuedRequest | None
    """The queue keeps it for another worker until it is acked; None where there is none or no longer."""
    deadline: float | None = None
    """When this worker ends the request; None where its client does."""
    lora: str | None = None
    """The adapter that it uses."""
    gathers: bool = False
    """Its client takes the result whole: tokens may be gathered for a moment."""
    awaits_kv: bool = False
    """A prefill or decode leg that has no token yet."""
    last_at: float = 0.0
    """When its last token came, or, without one, when it was offered."""
    has_token: bool = False
    """Its engine has made one."""
    state: HeldState = HELD.initial

    def advance(self, event: HeldEvent) -> None:
        """Change the state."""
        self.state = HELD.next(self.state, event)


@dataclass(slots=True)
class Instructions:
    """What an event calls for outside."""

    abort: list[str] = field(default_factory=list)
    """Engine names of requests to stop."""
    ack: list[QueuedRequest] = field(default_factory=list)
    """Messages that may leave the queue."""
    nak: list[tuple[QueuedRequest, float]] = field(default_factory=list)
    """Messages for another worker, each after so many seconds."""


class HeldRequests:
    """What is open in the engine or unsettled in the queue, by engine name and by what the client calls it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Held] = {}
        # By client and its incarnation, which is empty in plain mode; no life is there without a request.
        self._by_life: dict[tuple[str, str], dict[RequestKey, Held]] = {}
        self._serial = 0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<HeldRequests open={len(self)} held={sum(map(len, self._by_life.values()))}>"

    def __len__(self) -> int:
        """Open requests: not ended by the engine or by the worker."""
        return len(self._by_name)

    def __iter__(self) -> Iterator[Held]:
        """All that is open or unsettled; a copy, so that what is ended meanwhile does no harm."""
        return iter([held for life in self._by_life.values() for held in life.values()])

    @property
    def names(self) -> list[str]:
        """Of the open requests."""
        return list(self._by_name)

    @property
    def open_requests(self) -> Iterable[Held]:
        """Those that neither the engine nor the worker has ended; none may be opened or ended meanwhile."""
        return self._by_name.values()

    @property
    def messages(self) -> list[QueuedRequest]:
        """What the queue keeps for another worker as long as this one says that it is at work."""
        return [held.message for held in self if held.message is not None]

    def add(self, origin: Origin, route: Route, deadline: float | None = None, lora: str | None = None) -> Held:
        """Take a request in hand, which must not be in hand already."""
        self._serial += 1
        key = origin.key
        name = f"{origin.client}/{key.request_id}/{key.attempt}/{key.child}/{self._serial}"
        # Without its message in the origin too, which would keep the prompt here until the end.
        held = Held(name, replace(origin, message=None), route, origin.message, deadline, lora)
        self._by_name[name] = held
        self._by_life.setdefault((origin.client, origin.incarnation), {})[key] = held
        return held

    def open(self, name: str) -> Held | None:
        """The open request of this engine name."""
        return self._by_name.get(name)

    def find(self, client: str, incarnation: str, key: RequestKey) -> Held | None:
        """What a client calls `key`; in plain mode the client's incarnation is empty."""
        return self._by_life.get((client, incarnation), {}).get(key)

    def of(self, client: str, incarnation: str) -> list[Held]:
        """All of one life of a client."""
        return list(self._by_life.get((client, incarnation), {}).values())

    def holding(self, message: QueuedRequest) -> Held | None:
        """Whose message this is."""
        return next((held for held in self if held.message is message), None)

    def is_open(self, held: Held) -> bool:
        """It was not ended."""
        return held.name in self._by_name

    def end(self, held: Held, event: HeldEvent) -> None:
        """Close an open request; it stays in hand until its message is settled."""
        del self._by_name[held.name]
        held.advance(event)
        if held.message is None:
            self._remove(held.origin)

    def settle(self, held: Held) -> QueuedRequest | None:
        """Take the message of a request, to be acked; None where there is none."""
        message, held.message = held.message, None
        if not self.is_open(held):
            self._remove(held.origin)
        return message

    def _remove(self, origin: Origin) -> None:
        life = origin.client, origin.incarnation
        requests = self._by_life.get(life, {})
        requests.pop(origin.key, None)
        if not requests:
            self._by_life.pop(life, None)

    def clear(self) -> list[str]:
        """Let go of everything; returns the engine names of what was open."""
        names = self.names
        self._by_name.clear()
        self._by_life.clear()
        return names
