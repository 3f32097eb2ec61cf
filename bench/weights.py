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
"""

import argparse
import asyncio
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import torch

import rollbus
from bench.cpu import cpu_s
from bench.report import Report, add_arguments
from bench.weights_fleet import ENGINE_ARGS, MODEL, SETTLE_S, STREAMS, Fleet, started
from bench.weights_peer import peers
from bench.weights_trainer import MEASURED, Trainer, make_checkpoint
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import Spread, in_turns, spreads

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


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description="Measure updates of weights.")
    parser.add_argument(
        "--workers", type=int, default=2, help="number of workers; 0: only the store (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="published optimizer steps (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", choices=list(MEASURED), default=list(MEASURED))
    parser.add_argument("--link", type=int, metavar="MBYTES_PER_S", help="link of each machine (default: no limit)")
    parser.add_argument("--small", action="store_true", help="use a tiny MoE for a trial")
    add_arguments(parser, rounds=3)
    args = parser.parse_args()
    report = Report("weights")
    # Use one thread, which stands for one core of a trainer's machine.
    torch.set_num_threads(1)
    asyncio.run(run(args, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
