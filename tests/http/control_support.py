"""Fleets of synthetic workers with the HTTP service, and checkpoints and adapters for them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx

from rollbus import Chunk
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.control.support import write_adapter, write_checkpoint
from tests.http.support import Http, http_before
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_state
from tests.support.requests import greedy
from tests.support.streams import start_stream

T = TypeVar("T")
STEP_S = 0.002
PING_WAIT_S = 0.15


@dataclass
class ControlHttp:
    """A service, and its workers `w0`, `w1` ..."""

    http: Http
    engines: list[SyntheticEngine]
    root: Path
    """The folder with the checkpoints `one` (loaded at start) and `two`, and with `adapter`."""

    async def post(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send a JSON body, or none. Return status and JSON of the response."""
        answer = await self.http.client.post(path, json=body)
        return answer.status_code, answer.json()

    async def told(self, path: str, state: WorkerState) -> httpx.Response:
        """Return the response after the service has received presence of all workers in a state.

        Acks and presence arrive on different subjects, so a worker's presence may be older than its ack.
        """
        await until_state(self.http.own, lambda fleet: {worker.state for worker in fleet.workers} == {state})
        return await self.http.client.get(path)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a response."""
        answer = await self.http.client.get(path)
        return answer.status_code, answer.json()


async def together(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Run these calls concurrently, because a command to a fleet takes half a second."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(call) for call in calls]
    return [task.result() for task in running]


@contextlib.asynccontextmanager
async def control_http(
    nats_url: str,
    fleet: str,
    tmp_path: Path,
    count: int = 1,
    settings: Settings | None = None,
    *,
    models: tuple[str, ...] = (),
) -> AsyncIterator[ControlHttp]:
    """Serve synthetic workers at version 1: `count` workers of model `synthetic`, or one for each of `models`."""
    root = tmp_path / "root"
    one = write_checkpoint(root / "one", seed=1)
    write_checkpoint(root / "two", seed=2)
    write_adapter(root / "adapter")
    config = SyntheticConfig(step_s=STEP_S, prefix_cache=True)
    async with contextlib.AsyncExitStack() as stack:
        # The tests ping workers of this process often, so a short wait suffices.
        stack.enter_context(mock.patch("rollbus.bus.client.presence.PING_WAIT_S", PING_WAIT_S))
        engines = []
        for i, model in enumerate(models or ("synthetic",) * count):
            fields: dict[str, Any] = {
                "worker_id": f"w{i}",
                "model_path": str(one),
                "weight_roots": (str(root),),
                "weight_version": 1,
                "cache_dir": str(tmp_path / "cache"),
            }
            worker = synthetic_worker(nats_url, fleet, config=config, model=model, **fields)
            engines.append((await stack.enter_async_context(worker))[1])
        http = await stack.enter_async_context(http_before(nats_url, fleet, settings))
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers(len(engines))
        yield ControlHttp(http, engines, root)


@contextlib.asynccontextmanager
async def in_flight(http: Http, max_tokens: int = 60_000) -> AsyncIterator[list[Chunk]]:
    """Run a request that would last for minutes. Yield its chunks, and abort the request at the end."""
    async with asyncio.TaskGroup() as tasks:
        stream = await start_stream(tasks, http.rb, greedy(1, max_tokens))
        yield stream.chunks
        stream.reading.cancel()
