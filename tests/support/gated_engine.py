"""An engine that waits at gates until the test opens them, and a worker with this engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.patience import UNHURRIED_LEASE_S


class GatedEngine(SyntheticEngine):
    """Waits at a gate before it starts, steps, adds a request or closes; `reached` shows which gate it waits at."""

    def __init__(self, *closed: str, config: SyntheticConfig | None = None) -> None:
        super().__init__(config)
        self.gates = {name: asyncio.Event() for name in ("start", "steps", "add", "close")}
        self.reached = {name: asyncio.Event() for name in self.gates}
        for name in self.gates.keys() - set(closed):
            self.gates[name].set()

    async def _pass(self, name: str) -> None:
        self.reached[name].set()
        await self.gates[name].wait()

    async def start(self) -> None:
        """Wait at the gate, then start."""
        await self._pass("start")
        await super().start()

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Wait at the gate, then yield all steps."""
        await self._pass("steps")
        async for steps in super().steps():
            yield steps

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Wait at the gate, then add the request."""
        await self._pass("add")
        await super().add(key, request, kv)

    async def close(self) -> None:
        """Wait at the gate, then close."""
        await self._pass("close")
        await super().close()


@contextlib.asynccontextmanager
async def running(
    nats_url: str, fleet: str, engine: SyntheticEngine, **fields: object
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """Run a worker `w` on `engine`; cancel it at the end of the block if it still runs."""
    fields = {"worker_id": "w", "model": "synthetic", "lease_s": UNHURRIED_LEASE_S, "listen_s": 0.0, **fields}
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, **fields), engine)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.run(), name="worker")
        try:
            yield worker, task
        finally:
            task.cancel()
