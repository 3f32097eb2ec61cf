"""Workers that only publish presence: more workers than one machine can run, and texts that no rollbus worker sends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from nats.aio.msg import Msg

from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerPresence
from tests.support.nats_server import opened

AGAIN_S = 1.0


@contextlib.asynccontextmanager
async def announced(
    nats_url: str, fleet: str, say: Callable[[int], Iterable[WorkerPresence]], *, again_s: float = AGAIN_S
) -> AsyncIterator[None]:
    """Publish the presence that `say` returns for 0, and every `again_s` seconds for 1, 2, 3 and so on.

    A ping is answered with the presence that was published last. The presence is not signed.
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
