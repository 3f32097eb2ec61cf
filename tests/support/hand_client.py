"""A client whose messages the test writes, for behavior that a real client never shows."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.protocol.fleet import leases
from rollbus.bus.protocol.stream.link_receiver import FollowedLinks, FrameVerdict, LinkReceiver
from rollbus.bus.queue.streams import ensure_queue, queue_depths
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestKey,
    RequestMessage,
    decode_frame,
    decode_presence,
    encode,
    encode_json,
)
from rollbus.schemas.presence import ClientPresence, ClientState, WorkerPresence, WorkerState
from rollbus.schemas.request import GenerateRequest, Lane
from tests.support.nats_server import opened
from tests.support.waits import UNHURRIED_LEASE_S

MODEL = "synthetic"
WINDOW_BYTES = 8 * 1024 * 1024


class HandClient:
    """One incarnation of one client; `hand_client` creates it.

    Args:
        answers: acknowledge each frame immediately and grant credit; if False, the test does this.
    """

    def __init__(self, nats: Connection, fleet: str, *, name: str, incarnation: str, answers: bool) -> None:
        self.nats = nats
        self.subjects = Subjects(fleet)
        self.name = name
        self.incarnation = incarnation
        self.answers = answers
        self.receivers: dict[str, LinkReceiver] = {}
        """The receiver for the latest incarnation of each worker."""
        self._links: dict[str, FollowedLinks] = {}
        self.frames: list[tuple[str, Frame]] = []
        """All received frames, accepted or not, each with its worker."""
        self.sizes: list[int] = []
        """The sizes of these frames in bytes."""
        self.offers: list[tuple[str, RequestKey]] = []
        """The accepted offers in order, each with its worker."""
        self.chunks: dict[str, list[Chunk]] = defaultdict(list)
        """The accepted chunks, by request id."""
        self.presences: dict[str, WorkerPresence] = {}
        """The latest presence of each worker."""
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Subscribe to frames and presence, create the queue and ping the workers."""
        await subscribe(self.nats, self.subjects.frames_to(self.name), self._receive_frame)
        await subscribe(self.nats, self.subjects.presences, self._receive_presence)
        await ensure_queue(self.nats, self.subjects, MODEL)
        await publish(self.nats, self.subjects.ping, b"")

    async def _receive_frame(self, message: Msg) -> None:
        worker = message.subject.rpartition(".")[2]
        frame = decode_frame(message.data)
        self.frames.append((worker, frame))
        self.sizes.append(len(message.data))
        links = self._links.setdefault(worker, FollowedLinks(self.incarnation))
        receiver, _ended = links.receiver_of(frame, {frame.incarnation})
        self._changed.set()
        if receiver is None:
            return
        self.receivers[worker] = receiver
        if receiver.receive(frame, len(message.data), time.monotonic()) is FrameVerdict.ACCEPTED:
            self.offers += [(worker, key) for key in frame.admitted]
            for chunk in frame.chunks:
                self.chunks[chunk.request_id].append(chunk)
        if self.answers:
            await self.answer(worker)

    async def _receive_presence(self, message: Msg) -> None:
        presence = decode_presence(message.data)
        self.presences[presence.worker] = presence
        self._changed.set()

    async def until(self, is_met: Callable[[], object]) -> None:
        """Wait until `is_met` returns true; check it after each received message."""
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    async def until_serving(self, *workers: str) -> None:
        """Wait until the presence of all these workers has the state `serving`."""
        await self.until(
            lambda: all(
                worker in self.presences and self.presences[worker].state is WorkerState.SERVING for worker in workers
            )
        )

    async def until_state(self, worker: str, state: WorkerState) -> None:
        """Wait until the presence of a worker has this state."""
        await self.until(lambda: worker in self.presences and self.presences[worker].state is state)

    async def left_in_queue(self) -> int:
        """Return the number of requests without a queue ack."""
        depths = await queue_depths(self.nats, self.subjects, (MODEL,))
        return sum(depth.waiting + depth.in_hand for depth in depths)

    async def until_left(self, count: int) -> None:
        """Wait until the queue has this number of requests; each poll is a round trip."""
        while await self.left_in_queue() != count:
            pass

    async def until_ended(self, *request_ids: str) -> None:
        """Wait for the terminal chunks of these requests."""
        await self.until(lambda: all(self.ended(request_id) for request_id in request_ids))

    def ended(self, request_id: str) -> bool:
        """Return True if the client accepted the terminal chunk of the request."""
        return any(chunk.is_terminal for chunk in self.chunks[request_id])

    def error_of(self, request_id: str) -> str | None:
        """Return the error code in the last chunk of a request."""
        error = self.chunks[request_id][-1].error
        return None if error is None else error.code

    def message(self, request: GenerateRequest, **fields: Any) -> bytes:
        """Return the encoded message of a request."""
        fields = {"client": self.name, "incarnation": self.incarnation, **fields}
        return encode(RequestMessage(request=msgspec.Raw(encode(request)), **fields))

    async def enqueue(self, request: GenerateRequest, *, lane: Lane = "normal", **fields: Any) -> None:
        """Publish a request to the queue; return after the queue has stored it."""
        subject = self.subjects.request(self.name, MODEL, lane)
        await self.nats.jetstream().publish(subject, self.message(request, **fields))

    async def begin(self, request: GenerateRequest, **fields: Any) -> None:
        """Publish a request to the queue, and wait for its first chunk."""
        await self.enqueue(request, **fields)
        await self.until(lambda: self.chunks[request.request_id])

    async def complete(self, request: GenerateRequest, **fields: Any) -> None:
        """Publish a request to the queue, and wait for its terminal chunk."""
        await self.enqueue(request, **fields)
        await self.until_ended(request.request_id)

    async def hand_over(self, request: GenerateRequest, worker: str, **fields: Any) -> None:
        """Publish a request directly to one worker."""
        await publish(self.nats, self.subjects.direct(self.name, worker), self.message(request, **fields))

    async def answer(self, worker: str, abort: Sequence[RequestKey] = ()) -> None:
        """Acknowledge all accepted frames of `worker` and grant credit."""
        receiver = self.receivers.setdefault(worker, LinkReceiver(self.incarnation))
        await self.say(worker, receiver.message(window=WINDOW_BYTES, now=time.monotonic(), abort=abort))

    async def say(self, worker: str, message: LinkMessage) -> None:
        """Publish a link message."""
        await publish(self.nats, self.subjects.link(self.name, worker), encode(message))

    async def abort(self, worker: str, *keys: RequestKey) -> None:
        """Publish a link message that only aborts requests."""
        await self.say(worker, LinkMessage(WIRE_VERSION, list(keys), self.incarnation))

    async def announce(self, state: ClientState = ClientState.LIVE, *, lease_s: float = 5.0) -> None:
        """Publish the presence of this incarnation."""
        presence = ClientPresence(client=self.name, incarnation=self.incarnation, state=state, lease_s=lease_s)
        await publish(self.nats, self.subjects.client(self.name), encode_json(presence))


@contextlib.asynccontextmanager
async def hand_client(
    url: str, fleet: str, *, name: str = "hand", incarnation: str = "h1", answers: bool = True
) -> AsyncIterator[HandClient]:
    """Run a client of the model `synthetic` and close its connection at the end.

    It publishes no presence by itself. Workers of this process therefore use a default lease that outlasts every test.
    """
    async with opened(url) as nats:
        client = HandClient(nats, fleet, name=name, incarnation=incarnation, answers=answers)
        await client.open()
        with patch.object(leases, "DEFAULT_LEASE_S", UNHURRIED_LEASE_S):
            yield client
