"""What a worker says to the queue, and when it falls silent."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.states import WorkerEvent
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import WorkerPresence
from rollbus.workers.config import WorkerConfig
from rollbus.workers.lifecycle.lifecycle import WorkerLifecycle
from rollbus.workers.requests.publisher import OutboundPublisher
from rollbus.workers.requests.worker_requests import RequestOrigin
from tests.support.connections import opened
from tests.workers.links_support import NOW, capabilities, make_links, queued, request_of, step

pytestmark = pytest.mark.slow

REPLY_TO = "rb.v1.f.plain.alice.x"


def describe() -> WorkerPresence:
    """Nothing is announced here."""
    raise NotImplementedError


def make_life(nats: Connection) -> WorkerLifecycle:
    """Of a worker that serves."""
    config = WorkerConfig(nats_url="", model="m")
    life = WorkerLifecycle(config, nats, describe=describe, on_fenced=lambda: None, on_changed=lambda: None)
    life.transition(WorkerEvent.READY)
    return life


async def test_a_fence_in_the_middle_of_a_round_ends_it(nats_url: str) -> None:
    """A worker that is fenced while it speaks for its messages says nothing of the rest, though it serves again."""
    spoken = []

    class Message:
        """One for which speaking takes so long that the worker was fenced and came back."""

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
    """A connection that calls `on_frame` while it sends a frame, and keeps the subjects of what was published."""

    max_payload = 1024**2
    pending_data_size = 0

    def __init__(self) -> None:
        self.is_connected = True
        self.published: list[str] = []
        self.on_frame: Callable[[], None] = lambda: None
        self.was_sent = asyncio.Event()

    async def publish(self, subject: str, *_: object) -> None:
        """Take a message."""
        self.published.append(subject)
        if subject == REPLY_TO:
            self.on_frame()
            self.was_sent.set()


@pytest.mark.parametrize("event", ["nothing", "fence", "outage"])
async def test_a_plain_request_is_acked_right_behind_its_last_frame(event: str) -> None:
    """The queue forgets a plain request behind its end, unless the worker was fenced or cut off between the two."""
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
        # An outage ends; whatever was not said by now comes too late.
        wire.is_connected = True
        sending.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        for task in background:
            task.cancel()

    acks = [subject for subject in wire.published if subject.startswith("$JS.ACK")]
    assert len(acks) == (event == "nothing")
