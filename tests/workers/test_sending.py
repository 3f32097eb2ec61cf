"""What a worker says to the queue, and when it falls silent."""

import pytest

from bus.protocol.states import WorkerEvent
from schemas.presence import WorkerPresence
from tests.support.connections import opened
from tests.workers.links_support import make_links, queued
from workers.config import WorkerConfig
from workers.life import Life
from workers.sending import Sending

pytestmark = pytest.mark.slow


def describe() -> WorkerPresence:
    """Nothing is announced here."""
    raise NotImplementedError


async def test_a_fence_in_the_middle_of_a_round_ends_it(nats_url: str, fleet: str) -> None:
    """A worker that is fenced while it speaks for its messages says nothing of the rest, though it serves again."""
    config = WorkerConfig(nats_url=nats_url, fleet=fleet, model="m")
    spoken = []

    class Message:
        """One for which speaking takes so long that the worker was fenced and came back."""

        async def in_progress(self) -> None:
            spoken.append(self)
            life.fence("test")
            life.advance(WorkerEvent.CONFIRMED)

        nak = in_progress

    async with opened(nats_url) as nats:
        life = Life(config, nats, describe=describe, on_fenced=lambda: None, on_serving=lambda: None)
        sending = Sending(nats, life, make_links(), on_broken=lambda _route: None)
        life.advance(WorkerEvent.READY)
        for speak in (sending.keep, sending.give_back):
            spoken.clear()
            await speak([Message(), Message(), queued()])  # type: ignore[list-item]

            assert len(spoken) == 1
            assert life.may_speak()
