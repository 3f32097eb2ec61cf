"""Measures updates of weights in real engines: deltas, whole checkpoints, and vLLM's own server.

    python -m bench.weights [--workers 2] [--steps 10] [--rates 1e-6 3e-6] [--rounds 3] [--link MBYTES_PER_S]
                            [--small] [--json FILE]

Whole checkpoints go through the store or come from a folder. The model is a random checkpoint in bfloat16 with the
shape of Qwen3-0.6B (1.19 GB), created once below ~/.cache/rollbus, and AdamW changes it: `bench.weights_trainer`.
Workers, NATS and the trainer share this machine, and the workers share its folder of weights. Each engine always has
requests in flight. Each version is updated in mode `keep`.

`changed` is the share of changed elements. `measured` is the share that a real model had at that step. Percents of
bytes refer to the whole checkpoint. `fetched_percent` is for all workers of the machine. `second_percent` is for the
worker that fetched least. `all_serve_s` is the time from the call to the last worker's ack. `publish_s` is the part
before the first worker's ack of staging, in which the trainer compares and uploads. `paused_s` is the time from the
first pause of requests to the last resume. `load_s` is the longest load in one engine. `serving` is tokens per second
from the first ack of staging to the first pause, divided by those of the quiet times just before and after the update.
NATS, which usually has its own machine, uses cores of this machine during that time. `publish_serving` is the same for
`publish_s`, in which the trainer uses cores of this machine. Both are omitted for less than two seconds. `trainer_s` is
CPU time of the trainer's process for each GB that it compares. `compare_s` is the seconds of the thread that compares.
`stored alone` has no fleet; an `anchor` among its steps has its delta too.

`--link 50` puts 50 MB/s between the server and the trainer, and between the server and the workers' machine, in each
direction. Then the bench measures only ways through the link. `--small` uses a tiny MoE, for a trial of the bench.

vLLM's own server updates its weights from a disk over HTTP. `/update_weights` of vLLM 0.30 receives weights only
through NCCL and CUDA memory. `reload_weights` by `/collective_rpc`, between `/pause` and `/resume`, loads a folder. It
compares no data, computes no canary, and reports no version. On a CPU it keeps the old output projection of models with
tied embeddings, which rollbus packs again.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import tempfile
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch

import rollbus
from bench.processes import START_S, Way, own_process, worker_process
from bench.report import Report, cpu_s, program
from bench.ways import PATH, PROMPT_TOKENS, stream_body, vllm_server
from bench.weights_trainer import MEASURED, Trainer, make_checkpoint, model_bytes
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import Spread, in_turns, spreads
from rollbus.schemas.acks import Ack
from rollbus.schemas.options import arg, flag

MAX_TOKENS = 400


class Peer:
    """One server with requests in flight.

    Args:
        url: address of the server.
    """

    def __init__(self, url: str) -> None:
        # Use a new connection for each request. The server may close an idle connection just when a request reuses it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None))
        self._serials = itertools.count()

    async def update(self, folder: Path) -> float:
        """Load a folder while requests wait. Return the seconds for which they waited."""
        started = time.monotonic()
        await self._post("/pause?mode=keep")
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self._post("/resume")
        return time.monotonic() - started

    async def stream(self) -> None:
        """Stream one request after the other until cancelled."""
        while True:
            body = stream_body([next(self._serials) % 500] * PROMPT_TOKENS, MAX_TOKENS)
            async with self.session.post(PATH, json=body) as response:
                response.raise_for_status()
                async for _ in response.content:
                    pass

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        async with self.session.post(path, json=body) as response:
            response.raise_for_status()
            await response.read()


@asynccontextmanager
async def peers(model: Path, engine_args: Mapping[str, Any], count: int, num_streams: int) -> AsyncIterator[list[Peer]]:
    """Run servers on this machine while the body runs, each with `num_streams` requests in flight."""
    found: list[Peer] = []
    async with AsyncExitStack() as stack:
        for number in range(count):
            env = own_cores(number, count) | {"VLLM_SERVER_DEV_MODE": "1"}
            peer = Peer(
                await stack.enter_async_context(vllm_server(str(model), {**engine_args, "tokens_only": True}, env))
            )
            await stack.enter_async_context(peer.session)
            found.append(peer)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(peer.stream()) for peer in found for _ in range(num_streams)]
            yield found
            for stream in streams:
                stream.cancel()


def own_cores(number: int, count: int) -> dict[str, str]:
    """Return the environment of one of several engines: separate cores, with some left for other processes."""
    share = (os.cpu_count() or 1) // (count + 1)
    cores = range(number * share, (number + 1) * share)
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}


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


Window = tuple[float, float]
"""Begin and end on `time.monotonic`."""


def seconds(window: Window) -> float:
    """Return the seconds of a window."""
    return window[1] - window[0]


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
        update = (began, time.monotonic())
        trainer_s = cpu_s(os.getpid()) - cpu_before
        quiet.append(await self._rest())

        publishing = (began, self._staging_at or update[1])
        staging = (publishing[1], self._stopped_at or update[1])
        undisturbed = sum([await self._rate(window) for window in quiet]) / len(quiet)
        rates = {"publish_serving": publishing, "serving": staging}
        found: dict[str, float] = {}
        if isinstance(result, rollbus.PublishedWeights):
            found["stored_percent"] = 100 * result.stored_bytes / self.model_bytes
            found["trainer_s"] = trainer_s / (self.model_bytes / 1e9)
        found |= {"all_serve_s": seconds(update), "publish_s": seconds(publishing)}
        found |= self._ledger_figures(result)
        for name, window in rates.items():
            if seconds(window) >= MIN_WINDOW_S:
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
        return begin, time.monotonic()

    async def _rate(self, window: Window) -> float:
        answer = await self._load.ask(*window)
        return float(answer["tokens"]) / seconds(window)


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
        load = await stack.enter_async_context(own_process("load", "weights_link:load", *arguments))
        yield Fleet(rb, load, model_bytes(model))


async def _linked(stack: AsyncExitStack, url: str, link: int | None) -> str:
    """Return the URL of a new link to the server, or without a limit the URL of the server."""
    if link is None:
        return url
    way = await stack.enter_async_context(own_process("link", "weights_link:link", url, link))
    answer = await way.ask("url")
    return str(answer["url"])


CACHE: Final = Path.home() / ".cache" / "rollbus" / "bench"


async def measure_deltas(fleet: Fleet, model: Path, args: argparse.Namespace, report: Report) -> Trainer:
    """Add the rows of an anchor, of each step, and of all steps at one rate. Return the last trainer."""
    async with rollbus.WeightPublisher(fleet.rb, model=MODEL, checkpoint=model) as weights:
        for number, rate in enumerate(args.rates):
            trainer = Trainer(model, rate=rate)
            # The first rate publishes an anchor. Each later rate starts from the checkpoint again, so its first version
            # undoes all changes.
            first = await fleet.update(partial(weights.publish, trainer.tensors))
            if number == 0:
                report.add(way="anchor", **first)
            rows = []
            for step in range(1, args.steps + 1):
                share = trainer.step()
                update = await fleet.update(partial(weights.publish, trainer.tensors))
                measured = MEASURED[rate].get(step)
                rows.append({"changed": share, **update})
                shown = {} if measured is None else {"measured": measured}
                report.add(way="delta", rate=f"{rate:g}", step=step, **shown, **rows[-1])
            report.add(way="delta", rate=f"{rate:g}", step=f"1 to {args.steps}", **spreads(rows))
    return trainer


async def measure_full(fleet: Fleet, trainer: Trainer, folders: Path, args: argparse.Namespace, report: Report) -> None:
    """Add the rows of whole checkpoints: through the store, and from a folder that the workers can read."""
    rows: dict[str, list[dict[str, float]]] = {"full, store": []}
    if args.link is None:
        rows["full, folder"] = []
    for number, (way, found) in enumerate(in_turns(args.rounds, rows.items())):
        trainer.step()
        folder = trainer.save(folders / f"step-{number}")
        found.append(await fleet.update(partial(fleet.rb.fleet.update_weights, folder, upload=way == "full, store")))
        shutil.rmtree(folder)
    for way, found in rows.items():
        report.add(way=way, **spreads(found))


async def measure_peer(model: Path, trainer: Trainer, folders: Path, args: argparse.Namespace, report: Report) -> None:
    """Add the row of vLLM's own servers. Their number is that of the workers."""
    paused = []
    async with peers(model, ENGINE_ARGS, args.workers, STREAMS) as servers:
        # The first update does not count, because it takes several times as long.
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
    """Add the rows of the versions that the trainer stores without a fleet."""
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
        if args.link is None:
            await measure_publications(model, args, report)
        if not args.workers:
            return
        async with started(model, folders, args.workers, args.link) as fleet:
            trainer = await measure_deltas(fleet, model, args, report)
            await measure_full(fleet, trainer, folders, args, report)
        if args.link is None:
            await measure_peer(model, trainer, folders, args, report)


def _run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    asyncio.run(run(args, report))


if __name__ == "__main__":
    program(
        "weights",
        "Measure updates of weights.",
        _run,
        arg("--workers", None, "number of workers; 0: only the store (default: %(default)s)", type=int, default=2),
        arg("--steps", None, "published optimizer steps (default: %(default)s)", type=int, default=10),
        arg("--rates", None, "", type=float, nargs="+", choices=list(MEASURED), default=list(MEASURED)),
        arg("--link", "MBYTES_PER_S", "link of each machine (default: no limit)", type=int),
        flag("--small", "use a tiny MoE for a trial"),
        rounds=3,
    )
