"""Workers under load for `bench.weights`, and the figures of an update of their weights."""

import json
import os
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import rollbus
from bench.cpu import cpu_s
from bench.on_the_bus import START_S, worker_process
from bench.ways import Way, running
from bench.weights_peer import own_cores
from bench.weights_trainer import model_bytes
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.acks import Ack

MODEL: Final = "model"
ENGINE_ARGS: Final = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
}
STREAMS: Final = 4
"""Requests in flight in each engine."""
QUIET_S: Final = 5.0
"""Seconds of the quiet times before and after each update. Only the engines work then, and their tokens per second are
counted."""
SETTLE_S: Final = 1.0
"""Seconds before a quiet time in which paused requests continue."""
MIN_WINDOW_S: Final = 2.0
"""Minimum seconds of a window. A shorter window has too few engine steps for a rate."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time window on `time.monotonic`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds of the window."""
        return self.end - self.begin


class Fleet:
    """Workers on their own bus, a client, and a load of endless requests.

    Args:
        model_bytes: bytes of all tensors.
    """

    def __init__(self, rb: rollbus.Client, load: Way, model_bytes: int) -> None:
        self.rb = rb
        self.model_bytes = model_bytes
        self._load = load
        self._version = 0
        self._staging_at = self._stopped_at = 0.0

    async def update(
        self, call: Callable[..., Awaitable[rollbus.CommandResult | rollbus.PublishedWeights]]
    ) -> dict[str, float]:
        """Let `call` update the weights to the `version` in its arguments. Return the figures of the update."""
        quiet = [await self._rest()]
        self._version += 1
        self._staging_at = self._stopped_at = 0.0
        cpu_before, began = cpu_s(os.getpid()), time.monotonic()
        result = await call(version=self._version, on_ack=self._take)
        update = Window(began, time.monotonic())
        trainer_s = cpu_s(os.getpid()) - cpu_before
        quiet.append(await self._rest())

        publishing = Window(began, self._staging_at or update.end)
        staging = Window(publishing.end, self._stopped_at or update.end)
        undisturbed = sum([await self._rate(window) for window in quiet]) / len(quiet)
        rates = {"publish_serving": publishing, "serving": staging}
        found: dict[str, float] = {}
        if isinstance(result, rollbus.PublishedWeights):
            found["stored_percent"] = 100 * result.stored_bytes / self.model_bytes
            found["trainer_s"] = trainer_s / (self.model_bytes / 1e9)
        found |= {"all_serve_s": update.seconds, "publish_s": publishing.seconds}
        found |= self._ledger_figures(result)
        for name, window in rates.items():
            if window.seconds >= MIN_WINDOW_S:
                found[name] = await self._rate(window) / undisturbed
        return found

    def _ledger_figures(self, result: rollbus.CommandResult | rollbus.PublishedWeights) -> dict[str, float]:
        ledger = result.ledger if isinstance(result, rollbus.PublishedWeights) else result
        if ledger is None:
            raise RuntimeError("the version was only stored")
        timings = [ack.timing for ack in ledger.applied.values() if ack.timing is not None]
        fetched = [timing.fetched_bytes for timing in timings]
        return {
            "fetched_percent": 100 * sum(fetched) / self.model_bytes,
            "second_percent": 100 * min(fetched) / self.model_bytes,
            "staged_s": max(timing.staged_s for timing in timings),
            "paused_s": ledger.paused_s or 0.0,
            "load_s": max(timing.loaded_s for timing in timings),
            "canary_s": max(timing.canary_s for timing in timings),
        }

    def _take(self, ack: Ack) -> None:
        now = time.monotonic()
        self._staging_at = self._staging_at or now
        if ack.stage == "pausing":
            self._stopped_at = self._stopped_at or now

    async def _rest(self) -> Window:
        await sleep(SETTLE_S)
        begin = time.monotonic()
        await sleep(QUIET_S)
        return Window(begin, time.monotonic())

    async def _rate(self, window: Window) -> float:
        answer = await self._load.ask(window.begin, window.end)
        return float(answer["tokens"]) / window.seconds


@asynccontextmanager
async def started(model: Path, folders: Path, num_workers: int, link: int | None) -> AsyncIterator[Fleet]:
    """Start a server, workers, a client, and the load on the workers.

    Args:
        link: MB per second between the server and the trainer, and between the server and all workers. None: no limit.
    """
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        urls = [await _linked(stack, server.url, link) for _ in range(2)]
        options = ["--model", str(model), "--served-model-name", MODEL, "--engine-args", json.dumps(ENGINE_ARGS)]
        options += ["--weight-root", str(folders), "--cache-dir", str(folders / "cache")]
        rb = await stack.enter_async_context(rollbus.connect(urls[0]))
        for number in range(num_workers):
            own = own_cores(number, num_workers)
            await stack.enter_async_context(worker_process(urls[1], *options, env=own))
        await rb.fleet.wait_for_workers(num_workers, timeout_s=START_S)
        [capabilities, *_] = [worker.capabilities for worker in rb.fleet.workers]
        vocab_size = 0 if capabilities is None else capabilities.vocab_size
        arguments = (server.url, vocab_size, STREAMS * num_workers)
        load = await stack.enter_async_context(running("load", "bench.weights_load", *arguments))
        yield Fleet(rb, load, model_bytes(model))


async def _linked(stack: AsyncExitStack, url: str, link: int | None) -> str:
    """Return the URL of a new link to the server, or without a limit the URL of the server."""
    if link is None:
        return url
    way = await stack.enter_async_context(running("link", "bench.weights_link", url, link))
    answer = await way.ask("url")
    return str(answer["url"])
