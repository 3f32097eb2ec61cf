"""One side of the fleet that `bench.scale` measures: a process with many workers, or with many clients.

    python -m bench.scale_sides workers URL PREFIX COUNT ENGINE_ARGS
    python -m bench.scale_sides clients URL PREFIX COUNT

It is a way of `bench.ways`: each answer is `Counts`. Clients understand three commands. `run REQUESTS TOKENS
MAX_IN_FLIGHT` starts requests with whole results. `stream` with the same arguments reads token by token. `wait` answers
when the requests of the last command have ended. Any other command is answered immediately.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import uvloop

import rollbus
from bench.many_workers import many_workers
from bench.ways import answer
from rollbus.schemas.errors import RequestError
from rollbus.workers.engines.synthetic.config import SyntheticConfig

FLEET = "bench"
PROMPT_TOKENS = 64
"""Tokens of a prompt. They are few, as in later turns, because the bench does not measure prompts."""
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the clients of a process so far."""

    process: int = 0
    """Process id. 0: counts of several processes."""
    done: int = 0
    """Number of requests that have ended."""
    failed: int = 0
    """Number of requests that have ended with an error. stderr has the errors."""
    frames: int = 0
    """Number of received frames, including heartbeats."""


class Load:
    """Runs the load of the clients of one process, and counts.

    Args:
        clients: connected clients.
        tasks: task group in which the load runs.
    """

    def __init__(self, clients: list[rollbus.Client], tasks: asyncio.TaskGroup) -> None:
        self._clients = clients
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self._done = self._failed = 0

    async def answer(self, arguments: list[str]) -> object:
        """Start a load, wait for its end, or only count. Return the counts."""
        match arguments:
            case ["run", requests, tokens, max_in_flight]:
                self._running = [
                    self._tasks.create_task(self._complete(rb, int(requests), int(tokens), int(max_in_flight)))
                    for rb in self._clients
                ]
            case ["stream", requests, tokens, max_in_flight]:
                sources = [(rb, _requests(int(requests), int(tokens))) for rb in self._clients]
                self._running = [
                    self._tasks.create_task(self._stream(rb, source))
                    for rb, source in sources
                    for _ in range(int(max_in_flight))
                ]
            case ["wait"]:
                await asyncio.wait(self._running)
        return asdict(Counts(os.getpid(), self._done, self._failed, sum(rb.stats().frames for rb in self._clients)))

    async def _complete(self, rb: rollbus.Client, num_requests: int, num_tokens: int, max_in_flight: int) -> None:
        results = rb.complete_many(_requests(num_requests, num_tokens), max_in_flight=max_in_flight)
        async for generation in results:
            self._done += 1
            if generation.error is not None:
                self._failed += 1
                sys.stderr.write(f"{generation.error}\n")

    async def _stream(self, rb: rollbus.Client, source: Iterator[rollbus.GenerateRequest]) -> None:
        """Run the requests of `source` one after the other, and read each token as it arrives."""
        for request in source:
            try:
                async for _ in rb.generate(request):
                    pass
            except RequestError as error:
                self._failed += 1
                sys.stderr.write(f"{error}\n")
            self._done += 1


def _requests(num_requests: int, num_tokens: int) -> Iterator[rollbus.GenerateRequest]:
    sampling = rollbus.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for i in range(num_requests):
        prompt = [(i + j) % 1000 + 10 for j in range(PROMPT_TOKENS)]
        yield rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)


async def run_workers(url: str, prefix: str, count: int, config: SyntheticConfig) -> None:
    """Run workers."""

    async def no_answer(_words: list[str]) -> object:
        return asdict(Counts(os.getpid()))

    async with many_workers(url, FLEET, prefix, count, config):
        await answer(no_answer)


async def run_clients(url: str, prefix: str, count: int) -> None:
    """Run clients. Each has its own connection and thread, as in separate programs."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(rollbus.connect(url, fleet=FLEET, client=f"{prefix}{i}"))
            for i in range(count)
        ]
        await clients[-1].fleet.wait_for_workers(1, timeout_s=START_TIMEOUT_S)
        async with asyncio.TaskGroup() as tasks:
            await answer(Load(clients, tasks).answer)


def main() -> None:
    """Run the side that the command line names."""
    side, url, prefix, count, *engine_args = sys.argv[1:]
    if side == "workers":
        config = SyntheticConfig.from_args(json.loads(engine_args[0]))
        uvloop.run(run_workers(url, prefix, int(count), config))
    else:
        uvloop.run(run_clients(url, prefix, int(count)))


if __name__ == "__main__":
    main()
