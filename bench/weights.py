"""New weights for real engines: deltas, whole checkpoints through the store and from a folder, and vLLM's own server.

    python -m bench.weights [--workers 2] [--steps 10] [--rates 1e-6 3e-6] [--rounds 3] [--small] [--json FILE]

A random checkpoint of the shape of Qwen3-0.6B in bfloat16 (1.19 GB), once below ~/.cache/rollbus, and AdamW on it:
`bench.weights_trainer`. Workers, NATS and the trainer share this machine, and the workers share its folder of weights.
Each engine has requests in flight all the time. Each version is updated in mode `keep`.

`changed` is the share of elements, `measured` what a real model gave at that step; percents of bytes are of the whole
checkpoint. `fetched` is what all workers of the machine fetched, and `second` what those did that fetched least.
`all_serve_s` is from the call to the last worker's word, `paused_s` from the first stop of requests to the last
resume, `load_s` the longest load in one engine. `serving` is tokens a second from the call to the first stop, over
those of a quiet time before; the trainer and NATS, which usually have machines of their own, take from it here.
`trainer_s` is CPU time of the trainer's process for each GB that it compares, `compare_s` the seconds of the thread
that does. `stored alone` has no fleet; an `anchor` among its steps has its delta too. `--small`: a tiny MoE, to try it.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

import rollbus
from bench.cpu import cpu_s
from bench.on_the_bus import START_S, worker_process
from bench.report import Report, Spread, add_arguments, in_turns, spreads
from bench.ways import Way, running
from bench.weights_peer import own_cores, peers
from bench.weights_trainer import MEASURED, Trainer, make_checkpoint, model_bytes
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.control import Ack

__all__: list[str] = []
CACHE: Final = Path.home() / ".cache" / "rollbus" / "bench"
MODEL: Final = "model"
ENGINE_ARGS: Final = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
}
STREAMS: Final = 4
"""In flight in each engine."""
QUIET_S: Final = 5.0
"""In which nothing but the engines works, before each way."""
SETTLE_S: Final = 1.0
"""Between updates, for requests that stood still."""


@dataclass(slots=True)
class Update:
    """How one update went."""

    result: rollbus.CommandResult | rollbus.PublishedWeights
    started_at: float
    """Like all times here on `time.monotonic`."""
    stopped_at: float
    """When the first worker began to stop requests."""
    ended_at: float
    cpu_s: float
    """Of this process."""


class Fleet:
    """Workers on a bus of their own, a client, and requests that never end.

    Args:
        model_bytes: of all tensors.
    """

    def __init__(self, rb: rollbus.Client, load: Way, model_bytes: int) -> None:
        self.rb = rb
        self.model_bytes = model_bytes
        self._load = load
        self._version = 0
        self._quiet = 0.0
        self._stops: list[float] = []

    async def rest(self) -> None:
        """Measure the tokens a second of a quiet time, with which those of updates are compared."""
        await asyncio.sleep(SETTLE_S)
        begin = time.monotonic()
        await asyncio.sleep(QUIET_S)
        self._quiet = await self._rate(begin, time.monotonic())

    async def update(self, call: Callable[..., Awaitable[rollbus.CommandResult | rollbus.PublishedWeights]]) -> Update:
        """Have `call` replace the weights by those of the `version` that it is given, and measure it."""
        await asyncio.sleep(SETTLE_S)
        self._version += 1
        self._stops.clear()
        cpu_before, started_at = cpu_s(os.getpid()), time.monotonic()
        result = await call(version=self._version, on_ack=self._take)
        ended_at = time.monotonic()
        stopped_at = min(self._stops, default=ended_at)
        return Update(result, started_at, stopped_at, ended_at, cpu_s(os.getpid()) - cpu_before)

    async def figures(self, update: Update) -> dict[str, float]:
        """Return what is to be said of an update."""
        result = update.result
        ledger = result.ledger if isinstance(result, rollbus.PublishedWeights) else result
        found: dict[str, float] = {}
        if isinstance(result, rollbus.PublishedWeights):
            found["stored_percent"] = 100 * result.stored_bytes / self.model_bytes
            found["trainer_s"] = update.cpu_s / (self.model_bytes / 1e9)
        timings = [] if ledger is None else [ack.timing for ack in ledger.applied.values() if ack.timing is not None]
        fetched = [timing.fetched_bytes for timing in timings]
        return found | {
            "fetched_percent": 100 * sum(fetched) / self.model_bytes,
            "second_percent": 100 * min(fetched) / self.model_bytes,
            "all_serve_s": update.ended_at - update.started_at,
            "staged_s": max(timing.staged_s for timing in timings),
            "paused_s": 0.0 if ledger is None else ledger.paused_s or 0.0,
            "load_s": max(timing.loaded_s for timing in timings),
            "canary_s": max(timing.canary_s for timing in timings),
            "serving": await self._rate(update.started_at, update.stopped_at) / self._quiet,
        }

    def _take(self, ack: Ack) -> None:
        if ack.stage == "pausing":
            self._stops.append(time.monotonic())

    async def _rate(self, begin: float, end: float) -> float:
        answer = await self._load.ask(begin, end)
        return float(answer["tokens"]) / (end - begin)


@asynccontextmanager
async def started(model: Path, folders: Path, num_workers: int) -> AsyncIterator[Fleet]:
    """Start a server, workers, a client, and the load on them."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        options = ["--model", str(model), "--served-model-name", MODEL, "--engine-args", json.dumps(ENGINE_ARGS)]
        options += ["--weight-root", str(folders), "--cache-dir", str(folders / "cache")]
        rb = await stack.enter_async_context(rollbus.connect(server.url))
        for number in range(num_workers):
            own = own_cores(number, num_workers)
            await stack.enter_async_context(worker_process(server.url, *options, env=own))
        await rb.fleet.wait_for_workers(num_workers, timeout_s=START_S)
        [capabilities, *_] = [worker.capabilities for worker in rb.fleet.workers]
        vocab_size = 0 if capabilities is None else capabilities.vocab_size
        arguments = (server.url, vocab_size, STREAMS * num_workers)
        load = await stack.enter_async_context(running("load", "bench.weights_load", *arguments))
        yield Fleet(rb, load, model_bytes(model))


async def measure_deltas(fleet: Fleet, model: Path, args: argparse.Namespace, report: Report) -> Trainer:
    """Add the rows of an anchor, of each step, and of all steps at one rate; returns the last trainer."""
    async with rollbus.WeightPublisher(fleet.rb, model=MODEL, checkpoint=model) as weights:
        for number, rate in enumerate(args.rates):
            trainer = Trainer(model, rate=rate)
            await fleet.rest()
            # At the first rate an anchor; at the next one all that has changed since is undone.
            first = await fleet.update(partial(weights.publish, trainer.tensors))
            if number == 0:
                report.add(way="anchor", **await fleet.figures(first))
            rows = []
            for step in range(1, args.steps + 1):
                share = trainer.step()
                update = await fleet.update(partial(weights.publish, trainer.tensors))
                measured = MEASURED[rate].get(step)
                rows.append({"changed": share, **await fleet.figures(update)})
                shown = {} if measured is None else {"measured": measured}
                report.add(way="delta", rate=f"{rate:g}", step=step, **shown, **rows[-1])
            report.add(way="delta", rate=f"{rate:g}", step=f"1 to {args.steps}", **spreads(rows))
    return trainer


async def measure_full(fleet: Fleet, trainer: Trainer, folders: Path, rounds: int, report: Report) -> None:
    """Add the rows of whole checkpoints: through the store, and from a folder that the workers reach."""
    rows: dict[str, list[dict[str, float]]] = {"full, store": [], "full, folder": []}
    await fleet.rest()
    for number, (way, found) in enumerate(in_turns(rounds, rows.items())):
        trainer.step()
        folder = trainer.save(folders / f"step-{number}")
        update = await fleet.update(partial(fleet.rb.fleet.update_weights, folder, upload=way == "full, store"))
        found.append(await fleet.figures(update))
        shutil.rmtree(folder)
    for way, found in rows.items():
        report.add(way=way, **spreads(found))


async def measure_peer(model: Path, trainer: Trainer, folders: Path, args: argparse.Namespace, report: Report) -> None:
    """Add the row of vLLM's own servers, as many as there were workers."""
    paused = []
    async with peers(model, ENGINE_ARGS, args.workers, STREAMS) as servers:
        # The first one takes several times as long.
        for number in range(args.rounds + 1):
            trainer.step()
            folder = trainer.save(folders / f"peer-{number}")
            await asyncio.sleep(SETTLE_S)
            async with asyncio.TaskGroup() as tasks:
                updates = [tasks.create_task(server.update(folder)) for server in servers]
            paused.append(max(update.result() for update in updates))
            shutil.rmtree(folder)
    report.add(way="vLLM over HTTP", paused_s=Spread.of(paused[1:]))


async def measure_publications(model: Path, args: argparse.Namespace, report: Report) -> None:
    """Add the rows of what the trainer stores, without a fleet."""
    async with EmbeddedServer() as server, rollbus.connect(server.url) as rb:
        for rate in args.rates:
            trainer = Trainer(model, rate=rate)
            async with rollbus.WeightPublisher(rb, model=f"rate-{rate:g}", checkpoint=model) as weights:
                await weights.publish(trainer.tensors, version=0, update=False)
                for step in range(1, args.steps + 1):
                    share = trainer.step()
                    before = cpu_s(os.getpid())
                    published = await weights.publish(trainer.tensors, version=step, update=False)
                    gigabytes = published.model_bytes / 1e9
                    measured = MEASURED[rate].get(step)
                    report.add(
                        way="stored alone",
                        rate=f"{rate:g}",
                        step=step,
                        changed=share,
                        **({} if measured is None else {"measured": measured}),
                        kind="anchor" if published.is_anchor else "delta",
                        stored_percent=100 * published.stored_bytes / published.model_bytes,
                        trainer_s=(cpu_s(os.getpid()) - before) / gigabytes,
                        compare_s=published.compare_s / gigabytes,
                        commit_s=published.seconds,
                    )


async def run(args: argparse.Namespace, report: Report) -> None:
    """Measure all ways."""
    with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as scratch:
        folders = Path(scratch)
        model = make_checkpoint(CACHE / ("weights-small" if args.small else "weights"), small=args.small)
        await measure_publications(model, args, report)
        if not args.workers:
            return
        async with started(model, folders, args.workers) as fleet:
            trainer = await measure_deltas(fleet, model, args, report)
            await measure_full(fleet, trainer, folders, args.rounds, report)
        await measure_peer(model, trainer, folders, args, report)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description="How long new weights take.")
    parser.add_argument("--workers", type=int, default=2, help="0: only what a trainer stores, without engines")
    parser.add_argument("--steps", type=int, default=10, help="of the optimizer, each published")
    parser.add_argument("--rates", type=float, nargs="+", choices=list(MEASURED), default=list(MEASURED))
    parser.add_argument("--small", action="store_true", help="a tiny MoE, to try it")
    add_arguments(parser, rounds=3)
    args = parser.parse_args()
    report = Report("weights")
    # As one core of a trainer's machine has it.
    torch.set_num_threads(1)
    asyncio.run(run(args, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
