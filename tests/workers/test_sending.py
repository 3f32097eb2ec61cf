"""The acks that a worker sends to the queue, and the moment when it stops sending."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.states import WorkerEvent
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import WorkerPresence
from rollbus.workers.config import WorkerConfig
from rollbus.workers.lifecycle import WorkerLifecycle
from rollbus.workers.requests.publisher import OutboundPublisher
from rollbus.workers.requests.table import RequestOrigin
from tests.support.connections import opened
from tests.workers.links_support import NOW, capabilities, make_links, queued, request_of, step

pytestmark = pytest.mark.slow

REPLY_TO = "rb.v1.f.plain.alice.x"


def describe() -> WorkerPresence:
    """Fail, because these tests publish no presence."""
    raise NotImplementedError


def make_life(nats: Connection) -> WorkerLifecycle:
    """Return the lifecycle of a worker that serves."""
    config = WorkerConfig(nats_url="", model="m")
    life = WorkerLifecycle(
        config,
        nats,
        describe=describe,
        on_fenced=lambda: None,
        on_changed=lambda: None,
        on_duplicate=lambda _error: None,
    )
    life.transition(WorkerEvent.READY)
    return life


async def test_a_fence_during_a_round_of_acks_skips_the_remaining_acks(nats_url: str) -> None:
    """A worker that is fenced while it sends acks skips the remaining acks, although it serves again."""
    spoken = []

    class Message:
        """A message whose ack takes so long that the worker is fenced and returns meanwhile."""

        async def in_progress(self) -> None:
            spoken.append(self)
            life.fence("test")
            life.transition(WorkerEvent.CONFIRMED)

        nak = in_progress

    async with opened(nats_url) as nats:
        life = make_life(nats)
        sending = OutboundPublisher(nats, life, make_links(), on_broken=lambda _route: None)
        for answer in ("in_progress", "nak"):
            spoken.clear()
            await sending.publish_all([getattr(message, answer) for message in (Message(), Message(), queued())])

            assert len(spoken) == 1
            assert life.may_publish()


class Wire:
    """A connection that calls `on_frame` while it sends a frame, and stores the published subjects."""

    max_payload = 1024**2
    pending_data_size = 0

    def __init__(self) -> None:
        self.is_connected = True
        self.published: list[str] = []
        self.on_frame: Callable[[], None] = lambda: None
        self.was_sent = asyncio.Event()

    async def publish(self, subject: str, *_: object) -> None:
        """Store the subject of a message."""
        self.published.append(subject)
        if subject == REPLY_TO:
            self.on_frame()
            self.was_sent.set()


@pytest.mark.parametrize("event", ["nothing", "fence", "outage"])
async def test_a_plain_request_is_acked_directly_after_its_last_frame(event: str) -> None:
    """The queue removes a plain request after its last frame, unless the worker is fenced or disconnected before."""
    wire = Wire()
    nats = cast(Connection, wire)
    life = make_life(nats)
    links = make_links()
    sending = OutboundPublisher(nats, life, links, on_broken=lambda _route: None)

    def fence() -> None:
        life.fence("test")
        life.transition(WorkerEvent.CONFIRMED)

    def lose_connection() -> None:
        wire.is_connected = False

    wire.on_frame = {"nothing": lambda: None, "fence": fence, "outage": lose_connection}[event]
    message = queued(nats=nats)
    origin = RequestOrigin("alice", "", RequestKey("r"), message, REPLY_TO)
    name = links.offer(origin, request_of(), capabilities(routing=False), NOW)
    links.add_steps([step(name, end=True)], NOW)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(sending.publish_frames()), tasks.create_task(sending.publish_acks())]
        sending.wake()
        await wire.was_sent.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        # The outage ends here, after which an unsent ack is too late.
        wire.is_connected = True
        sending.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        for task in background:
            task.cancel()

    acks = [subject for subject in wire.published if subject.startswith("$JS.ACK")]
    assert len(acks) == (event == "nothing")
