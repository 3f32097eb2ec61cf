"""A fleet of prefill and decode workers inside the test's own process."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

import bus
from schemas.messages import KvHandover
from schemas.presence import Role, WorkerState
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams
from tests.support.fleet import synthetic_worker
from tests.support.invariants import Observer, observing
from workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from workers.worker import Worker

__all__ = ["SHAPES", "Disaggregated", "disaggregated", "long", "shaped", "until_paired"]

SHAPES = {"one": ("w",), "disaggregated": ("p", "d")}
"""Fleets of one worker, and of one for prefill and one for decode, by name."""


@dataclass
class Disaggregated:
    """The parts of such a fleet, and a client of it."""

    rb: bus.Client
    observer: Observer
    workers: dict[str, Worker] = field(default_factory=dict)
    engines: dict[str, SyntheticEngine] = field(default_factory=dict)
    given: dict[str, list[tuple[GenerateRequest, KvHandover | None]]] = field(default_factory=dict)
    """What each engine was given, by worker."""

    def fallbacks(self) -> dict[str, int]:
        """Requests that a decode worker was given alone, by reason; those that are none are left out."""
        return {reason: count for reason, count in self.rb.stats().prefill_fallbacks.items() if count}

    def spy(self, worker: str) -> None:
        """Note what an engine is given."""
        engine, given = self.engines[worker], self.given.setdefault(worker, [])
        add = engine.add

        async def noting(key: str, request: GenerateRequest, kv: KvHandover | None = None) -> None:
            given.append((request, kv))
            await add(key, request, kv)

        engine.add = noting  # type: ignore[method-assign]


async def until_paired(rb: bus.Client, *workers: str) -> None:
    """Wait until all of these are known to serve; the test's own time limit ends the wait."""
    while {worker.worker for worker in rb.fleet.workers if worker.state is WorkerState.SERVING} < set(workers):
        await rb.fleet.state()


@contextlib.asynccontextmanager
async def disaggregated(
    nats_url: str,
    fleet: str,
    *,
    prefill: SyntheticConfig | None = None,
    decode: SyntheticConfig | None = None,
    workers: Sequence[str] = ("p", "d"),
    **fields: Any,
) -> AsyncIterator[Disaggregated]:
    """Run prefill workers, whose names begin with p, and decode workers, d; in the end the invariants hold.

    Args:
        prefill: the engines of those, whatever role it names; likewise `decode`.
        fields: of the configuration of all workers.
    """
    configs = {
        "p": replace(prefill or SyntheticConfig(), role="prefill"),
        "d": replace(decode or SyntheticConfig(), role="decode"),
    }
    async with (
        observing(nats_url, fleet) as observer,
        contextlib.AsyncExitStack() as stack,
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        found = Disaggregated(rb, observer)
        for name in workers:
            worker, engine = await stack.enter_async_context(
                synthetic_worker(nats_url, fleet, config=configs[name[0]], worker_id=name, **fields)
            )
            found.workers[name], found.engines[name] = worker, engine
            found.spy(name)
        await until_paired(rb, *workers)
        yield found
        await observer.check_at_rest()


def long(request_id: str, prompt_len: int = 100, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request of exactly `max_tokens`, whose prompt is long enough for two legs and like no other's."""
    prompt = [sum(request_id.encode()), *range(1, prompt_len)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(**{"prompt_token_ids": prompt, "sampling": sampling, "request_id": request_id, **fields})


@contextlib.asynccontextmanager
async def shaped(nats_url: str, fleet: str, shape: str, config: SyntheticConfig) -> AsyncIterator[dict[str, Worker]]:
    """Run the workers of one of `SHAPES`; they have their names from there."""
    roles: dict[str, Role] = {"w": "both", "p": "prefill", "d": "decode"}
    async with contextlib.AsyncExitStack() as stack:
        workers = {}
        for name in SHAPES[shape]:
            own = replace(config, role=roles[name])
            worker, _ = await stack.enter_async_context(synthetic_worker(nats_url, fleet, config=own, worker_id=name))
            workers[name] = worker
        yield workers
