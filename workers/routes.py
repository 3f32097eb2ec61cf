"""The ways from a worker to those who asked: a link to each life of a client, or frames for one plain request."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bus.protocol.chunking import PART_BYTES, ChunkWriter
from bus.protocol.link_sender import LinkSender
from bus.protocol.plain_sender import PlainSender
from bus.protocol.step import RequestStep
from bus.queue.puller import QueuedRequest
from bus.subjects import Subjects
from schemas.chunk import ChunkError
from schemas.messages import RequestKey

__all__ = ["ClientLink", "Outgoing", "PlainRoute", "Route", "Routes"]

MAX_FRAME_BYTES = 512 * 1024
"""Larger messages are no faster, and hold up what comes behind them."""
FRAME_MARGIN_BYTES = 4096
"""Left below that for what a frame holds besides its chunks, and again for what a chunk holds besides its parts."""


class Outgoing(NamedTuple):
    """One frame to be published."""

    subject: str
    data: bytes
    message: QueuedRequest | None = None
    """Of the queue, to be acked once the frame was published."""


class ClientLink:
    """The link to one life of one client, and what it needs besides its frames.

    Args:
        subject: where its frames go.
    """

    def __init__(self, client: str, subject: str, sender: LinkSender) -> None:
        self.client = client
        self.incarnation = sender.client_incarnation
        """Of the client."""
        self.subject = subject
        self.sender = sender
        self.wants_heartbeat = False
        """A heartbeat is due, behind the frames that are."""
        self.lost_at: float | None = None
        """Since when the client counts as dead; None while it lives. Until it returns or is forgotten, what it missed
        is kept."""
        self.resting_bytes = 0
        """For `Routes`, which counts it in its sum."""
        self._resends: deque[bytes] = deque()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<ClientLink {self.client} lost_at={self.lost_at} resends={len(self._resends)} {self.sender!r}>"

    @property
    def held_bytes(self) -> int:
        """Of what the client has not taken."""
        return self.sender.held_bytes

    def take(self, key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None) -> None:
        """Take what an engine step added to an open request; the versions are of what sampled it."""
        self.sender.take(key, step, weight_version, lora_version)

    def fail(self, key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """End an open request with `error`."""
        self.sender.fail(key, error, weight_version)

    def resend(self, frames: list[bytes]) -> None:
        """Send these frames again, before all new ones; they replace what was to be sent again."""
        self._resends = deque(frames)

    def next_frame(self) -> Outgoing | None:
        """What to publish now; None when there is nothing, for want of content or of credit."""
        data = self._resends.popleft() if self._resends else self.sender.seal()
        if data is None and self.wants_heartbeat:
            self.wants_heartbeat = False
            data = self.sender.heartbeat()
        return None if data is None else Outgoing(self.subject, data)


class PlainRoute:
    """The frames for one request of a program that keeps no link.

    Args:
        subject: where they go.
        message: the request's in the queue.
    """

    def __init__(self, subject: str, writer: ChunkWriter, sender: PlainSender, message: QueuedRequest) -> None:
        self.subject = subject
        self.message = message
        """Acked behind the terminal chunk; another one after it was delivered again."""
        self.resting_bytes = 0
        """For `Routes`, which counts it in its sum."""
        self._writer = writer
        self._sender = sender
        self._frames: deque[bytes] = deque()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PlainRoute {self.subject} frames={len(self._frames)} {self._sender!r}>"

    @property
    def held_bytes(self) -> int:
        """Of what is not published yet."""
        return self._writer.unsent_bytes + sum(map(len, self._frames))

    def take(self, _key: RequestKey, step: RequestStep, weight_version: int, lora_version: int | None) -> None:
        """Take what an engine step added to the request; the versions are of what sampled it."""
        self._sender.take(step, weight_version, lora_version)

    def fail(self, _key: RequestKey, error: ChunkError, weight_version: int) -> None:
        """End the request with `error`."""
        self._sender.fail(error, weight_version)

    def next_frame(self) -> Outgoing | None:
        """What to publish now; None when there is nothing. The last frame comes with the queue's message."""
        if not self._frames:
            self._frames.extend(self._sender.frames())
        if not self._frames:
            return None
        data = self._frames.popleft()
        is_last = self._sender.has_left and not self._frames
        return Outgoing(self.subject, data, self.message if is_last else None)


Route = ClientLink | PlainRoute


class Routes:
    """All routes of a worker, and which of them may have something to publish.

    Args:
        worker_id: whose they are.
        incarnation: of the worker.
        max_payload: of the NATS server, in bytes; no frame exceeds it.
    """

    def __init__(self, worker_id: str, subjects: Subjects, incarnation: str, *, max_payload: int) -> None:
        self._worker_id = worker_id
        self._subjects = subjects
        # By client and incarnation: two lives of a client may overlap until the later one announces itself.
        self._links: dict[str, dict[str, ClientLink]] = {}
        self._plain: set[PlainRoute] = set()
        # Few of all that there are, and the only ones that change: what the others hold is summed up.
        self._touched: dict[Route, None] = {}
        self._resting_bytes = 0
        self._past_stalls = 0
        self._begin(incarnation, max_payload)

    def _begin(self, incarnation: str, max_payload: int) -> None:
        self.incarnation = incarnation
        self._num_links = 0
        margin = min(FRAME_MARGIN_BYTES, max_payload // 4)
        self._max_frame_bytes = min(max_payload, MAX_FRAME_BYTES) - margin
        self.max_part_bytes = self._max_frame_bytes - margin
        """A row that takes more fits no frame."""
        self.part_bytes = min(PART_BYTES, self.max_part_bytes)
        """For the writers of chunks that are to fit."""

    def __repr__(self) -> str:
        """One line with counts."""
        links = sum(map(len, self._links.values()))
        return f"<Routes {self.incarnation} links={links} plain={len(self._plain)} touched={len(self._touched)}>"

    @property
    def held_bytes(self) -> int:
        """Of what clients have not taken, and plain programs were not sent."""
        return self._resting_bytes + sum(route.held_bytes for route in self._touched)

    @property
    def credit_stalls(self) -> int:
        """How often chunks for a client had to wait for want of its credit, over all links that there were."""
        return self._past_stalls + sum(link.sender.credit_stalls for link in self.links())

    @property
    def is_settled(self) -> bool:
        """Everyone who lives has all that there is for them."""
        return not self._plain and all(link.sender.is_idle for link in self.links() if link.lost_at is None)

    def links(self) -> Iterator[ClientLink]:
        """All links; none may be opened or dropped meanwhile."""
        for lives in self._links.values():
            yield from lives.values()

    def frame_counts(self) -> dict[str, int]:
        """Frames numbered so far on each link, by `<client>/<incarnation>`."""
        return {f"{link.client}/{link.incarnation}": link.sender.num_frames for link in self.links()}

    def lives_of(self, client: str) -> Mapping[str, ClientLink]:
        """A client's links by its incarnations."""
        return self._links.get(client, {})

    def find(self, client: str, incarnation: str) -> ClientLink | None:
        """The link to this life of a client, if there is one."""
        return self.lives_of(client).get(incarnation)

    def link(self, client: str, incarnation: str) -> ClientLink:
        """The link to this life of a client; the next one is opened where there is none."""
        link = self.find(client, incarnation)
        if link is None:
            sender = LinkSender(
                incarnation=self.incarnation,
                link=self._num_links,
                client_incarnation=incarnation,
                max_frame_bytes=self._max_frame_bytes,
            )
            link = ClientLink(client, self._subjects.frame(client, self._worker_id), sender)
            self._links.setdefault(client, {})[incarnation] = link
            # Counted over all clients: a client that was forgotten must find a later number than it remembers.
            self._num_links += 1
        return link

    def open_plain(self, key: RequestKey, subject: str, writer: ChunkWriter, message: QueuedRequest) -> PlainRoute:
        """A route for one plain request, until its last frame was handed out."""
        sender = PlainSender(key, writer, incarnation=self.incarnation, max_frame_bytes=self._max_frame_bytes)
        route = PlainRoute(subject, writer, sender, message)
        self._plain.add(route)
        return route

    def drop(self, link: ClientLink) -> None:
        """Forget a link and all that it holds."""
        self._past_stalls += link.sender.credit_stalls
        lives = self._links[link.client]
        del lives[link.incarnation]
        if not lives:
            del self._links[link.client]
        self.touch(link)
        del self._touched[link]

    def restart(self, incarnation: str, *, max_payload: int) -> None:
        """Forget everything and go on as another incarnation."""
        self._past_stalls = self.credit_stalls
        self._links.clear()
        self._plain.clear()
        self._touched.clear()
        self._resting_bytes = 0
        self._begin(incarnation, max_payload)

    def beat(self) -> None:
        """Have a heartbeat sent on every link whose client may wait for something."""
        for link in self.links():
            if link.lost_at is None and link.sender.needs_heartbeat:
                self.tell(link)

    def tell(self, link: ClientLink) -> None:
        """Have a heartbeat sent, which says which link this is and how far it has come."""
        link.wants_heartbeat = True
        self.touch(link)

    def touch(self, route: Route) -> None:
        """It changes: there may be something to publish."""
        self._resting_bytes -= route.resting_bytes
        route.resting_bytes = 0
        self._touched[route] = None

    def _rest(self, route: Route) -> None:
        """It has nothing to publish until it is touched."""
        del self._touched[route]
        route.resting_bytes = route.held_bytes
        self._resting_bytes += route.resting_bytes

    def sendable(self) -> list[Route]:
        """Routes that may have something to publish; take one frame of each in turn."""
        return list(self._touched)

    def next_frame(self, route: Route) -> Outgoing | None:
        """The next frame of a route; None when there is none now, or the route is no more."""
        if route not in self._touched:
            return None
        outgoing = route.next_frame()
        if outgoing is None:
            self._rest(route)
        elif isinstance(route, PlainRoute) and outgoing.message is not None:
            del self._touched[route]
            self._plain.discard(route)
        return outgoing
