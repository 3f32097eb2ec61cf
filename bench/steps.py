"""Compares the steps of a trainer with `over` with steps that wait for all answers.

    python -m bench.steps [--over 1.25 1.5 2] [--steps 6] [--need 8] [--samples 4] [--rounds 3] [--json FILE]

The fleet has two real vLLM workers. The lengths of answers have a heavy tail. The ways take turns. Each takes the same
number of steps of `rb.groups` from the same prompts, with empty prefix caches. A way with `over` 1 waits for all
answers. All answers of a group have the same length, drawn from the lognormal distribution of `bench.placement_traces`.
`step_s` is the median time of a step. `tokens_per_s` is the number of tokens of the taken groups divided by the time of
all steps. `times_all` is this figure divided by that of `over` 1 in the same round. The first step starts without open
groups, and the groups that the last step carries over are lost; both effects are included. `taken_tokens` is the mean
length of the taken answers. `drawn_tokens` is the mean length of the same number of prompts in their given order. If
`taken_tokens` is smaller, longer answers were left for later. `carried_percent` is the share of taken groups that were
generated during several steps.
"""

import argparse
import asyncio
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

import rollbus
from bench.placement_traces import LENGTH_SIGMA, MAX_TIMES
from bench.processes import START_S, worker_process
from bench.report import TINY_MOE, Report, program
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.cli.tables import Spread, spreads
from rollbus.schemas.options import arg
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

NUM_WORKERS: Final = 2
ENGINE_ARGS: Final = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 28,
}
PROMPT_TOKENS: Final = 64
VOCAB_SIZE: Final = 500


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a trainer."""

    steps: int
    need: int
    """Groups in a step."""
    samples: int
    """Answers in a group."""
    mean_tokens: int
    """Mean tokens of an answer."""


def prompts_of(load: Load, seed: int) -> Iterator[rollbus.GenerateRequest]:
    """Yield endless requests. `max_tokens` of each is the length of its answers."""
    random = np.random.default_rng(seed)
    for _ in itertools.count():
        drawn = random.lognormal(math.log(load.mean_tokens) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
        max_tokens = int(min(max(drawn, 1), load.mean_tokens * MAX_TIMES))
        yield rollbus.GenerateRequest(
            prompt_token_ids=random.integers(10, VOCAB_SIZE, PROMPT_TOKENS, np.int32),
            sampling=rollbus.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )


async def take_steps(rb: rollbus.Client, load: Load, over: float, seed: int) -> dict[str, float]:
    """Take all steps of one way. Return its figures.

    Raises:
        RuntimeError: a group failed.
    """
    await rb.fleet.flush_cache()
    begun_at = time.perf_counter()
    async with rb.groups(prompts_of(load, seed), n=load.samples, need=load.need, over=over) as groups:
        steps = [await groups.step() for _ in range(load.steps)]
    seconds = time.perf_counter() - begun_at
    if failed := [group for step in steps for group in step.failed]:
        raise RuntimeError(f"{len(failed)} groups failed: {failed[0].error}")
    taken = [group for step in steps for group in step.groups]
    tokens = sum(int(step.stats.taken.sum()) for step in steps)
    drawn = [one.sampling.max_tokens or 0 for one in itertools.islice(prompts_of(load, seed), len(taken))]
    return {
        "step_s": float(np.median([step.stats.seconds for step in steps])),
        "longest_step_s": max(step.stats.seconds for step in steps),
        "tokens_per_s": tokens / seconds,
        "taken_tokens": tokens / (len(taken) * load.samples),
        "drawn_tokens": float(np.mean(drawn)),
        "carried_percent": 100 * sum(group.steps > 1 for group in taken) / len(taken),
    }


@asynccontextmanager
async def fleet() -> AsyncIterator[rollbus.Client]:
    """Run a server, the workers and a client."""
    model = make_tiny_moe(TINY_MOE)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer())
        for number in range(NUM_WORKERS):
            args = ("--model", str(model), "--engine-args", json.dumps(ENGINE_ARGS), "--worker-id", f"w{number}")
            await stack.enter_async_context(worker_process(server.url, *args))
        rb = await stack.enter_async_context(rollbus.connect(server.url))
        await rb.fleet.wait_for_workers(NUM_WORKERS, timeout_s=START_S)
        yield rb


async def measure(report: Report, load: Load, overs: Sequence[float], rounds: int) -> None:
    """Measure all ways in turns. Each round begins with a different way."""
    ways = [1.0, *overs]
    found = defaultdict[float, list[dict[str, float]]](list)
    async with fleet() as rb:
        # Warm up the engines, because their first steps of each size are slower.
        await take_steps(rb, Load(1, load.need, load.samples, 16), 1.0, seed=99)
        for number in range(rounds):
            first = number % len(ways)
            for over in [*ways[first:], *ways[:first]]:
                found[over].append(await take_steps(rb, load, over, seed=number))
    for over in ways:
        ratios = [
            own["tokens_per_s"] / waiting["tokens_per_s"] for own, waiting in zip(found[over], found[1.0], strict=True)
        ]
        report.add(over=over, **spreads(found[over]), times_all=Spread.of(ratios))


def _run(args: argparse.Namespace, report: Report) -> None:
    load = Load(args.steps, args.need, args.samples, args.mean_tokens)
    asyncio.run(measure(report, load, args.over, args.rounds))


if __name__ == "__main__":
    program(
        "steps",
        "Measure steps of a trainer.",
        _run,
        arg("--over", None, "values besides 1 (default: %(default)s)", nargs="+", type=float, default=[1.25, 1.5, 2.0]),
        arg("--steps", None, "steps in each round (default: %(default)s)", type=int, default=6),
        arg("--need", None, "groups in a step (default: %(default)s)", type=int, default=8),
        arg("--samples", None, "answers in a group (default: %(default)s)", type=int, default=4),
        arg("--mean-tokens", None, "mean tokens of an answer (default: %(default)s)", type=int, default=64),
        rounds=3,
    )
