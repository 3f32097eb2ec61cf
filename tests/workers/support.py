"""Workers with a hand-made client and controller, and helpers that read their frames."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from rollbus.schemas.chunk import Chunk
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import HandClient, hand_client
from tests.support.hand_control import HandController, hand_controller

SLOW = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
"""Slow enough that a command arrives in the middle of a stream."""


class ReceivedCommand(NamedTuple):
    """A worker, and a client that has received its presence as serving."""

    client: HandClient
    worker: Worker
    engine: SyntheticEngine


class Controlled(NamedTuple):
    """A worker and a client, with a controller."""

    client: HandClient
    boss: HandController
    worker: Worker
    engine: SyntheticEngine


StartHeard = Callable[..., contextlib.AbstractAsyncContextManager[ReceivedCommand]]
"""Takes the arguments of `heard_worker` after the fleet."""
StartControlled = Callable[..., contextlib.AbstractAsyncContextManager[Controlled]]
"""Takes the arguments of `controlled_worker` after the fleet."""


@contextlib.asynccontextmanager
async def heard_worker(
    url: str,
    fleet: str,
    *,
    config: SyntheticConfig = SLOW,
    worker_id: str = "w",
    answers: bool = True,
    **fields: object,
) -> AsyncIterator[ReceivedCommand]:
    """Run a worker and a client, which acknowledges frames if `answers` is set. `fields` are those of the worker."""
    async with (
        hand_client(url, fleet, answers=answers) as client,
        synthetic_worker(url, fleet, config=config, worker_id=worker_id, **fields) as (worker, engine),  # type: ignore[arg-type]
    ):
        await client.until_serving(worker_id)
        yield ReceivedCommand(client, worker, engine)


@contextlib.asynccontextmanager
async def controlled_worker(url: str, fleet: str, **fields: object) -> AsyncIterator[Controlled]:
    """Run `heard_worker` with a controller that subscribed before the worker started."""
    async with (
        hand_controller(url, fleet) as boss,
        heard_worker(url, fleet, **fields) as heard,  # type: ignore[arg-type]
    ):
        yield Controlled(heard.client, boss, heard.worker, heard.engine)


def stream_of(chunks: list[Chunk]) -> tuple[bytes, bytes, int]:
    """Return a stream's tokens, routed experts and number of rows, and assert chunk numbers without a gap."""
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    routing = [chunk.routed_experts for chunk in chunks if chunk.routed_experts is not None]
    return (
        b"".join(chunk.token_ids_data for chunk in chunks),
        b"".join(part.data for part in routing),
        sum(part.shape[0] for part in routing),
    )
