"""Workers that only announce themselves: as many as no machine runs, and with words that no worker of ours says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from nats.aio.msg import Msg

from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerPresence
from tests.support.connections import opened

__all__ = ["announced"]

AGAIN_S = 1.0


@contextlib.asynccontextmanager
async def announced(
    nats_url: str, fleet: str, say: Callable[[int], Iterable[WorkerPresence]], *, again_s: float = AGAIN_S
) -> AsyncIterator[None]:
    """Publish what `say` returns for 0, and then again and again for 1, 2, 3 ...

    Pings are answered with what was said last. Nothing is signed.
    """
    subjects = Subjects(fleet)
    last: dict[str, WorkerPresence] = {}

    async with opened(nats_url) as nats:

        async def publish_all(workers: Iterable[WorkerPresence]) -> None:
            for worker in workers:
                last[worker.worker] = worker
                await publish(nats, subjects.presence(worker.worker), encode_json(worker))

        async def answer(_: Msg) -> None:
            await publish_all(list(last.values()))

        async def go_on() -> None:
            number = 0
            while True:
                await asyncio.sleep(again_s)
                number += 1
                await publish_all(say(number))

        await subscribe(nats, subjects.ping, answer)
        await publish_all(say(0))
        await nats.flush()
        async with asyncio.TaskGroup() as tasks:
            going_on = tasks.create_task(go_on())
            yield
            going_on.cancel()
