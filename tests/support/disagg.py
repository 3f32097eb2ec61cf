"""A fleet of prefill and decode workers inside the test process."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

import rollbus
from rollbus import Generation
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import WorkerRole, WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.invariants import Observer, observing
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until_true

MakeFilter = Callable[[], Callable[[bytes], bytes]]
"""Returns a new filter of `tests.support.tcp_proxy` for each connection."""
SHAPES = {"one": ("w",), "disaggregated": ("p", "d")}
"""Worker names of two fleets: one worker for both phases, or one prefill worker and one decode worker."""


@dataclass
class Disaggregated:
    """The workers and engines of a disaggregated fleet, with a client and an observer."""

    rb: rollbus.Client
    observer: Observer
    workers: dict[str, Worker] = field(default_factory=dict)
    engines: dict[str, SyntheticEngine] = field(default_factory=dict)
    given: dict[str, list[tuple[GenerateRequest, KvTransfer | None]]] = field(default_factory=dict)
    """The requests that each engine received, by worker."""

    def fallbacks(self) -> dict[str, int]:
        """Return the number of requests without a prefill phase, by reason; omit reasons with 0 requests."""
        return {reason: count for reason, count in self.rb.stats().prefill_fallbacks.items() if count}

    def spy(self, worker: str) -> None:
        """Record the requests that the engine of this worker receives."""
        engine, given = self.engines[worker], self.given.setdefault(worker, [])
        add = engine.add

        async def noting(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
            given.append((request, kv))
            await add(key, request, kv)

        engine.add = noting  # type: ignore[method-assign]


async def until_paired(rb: rollbus.Client, *workers: str) -> None:
    """Wait until the client knows that all these workers serve."""
    await until_true(lambda: {one.worker for one in rb.fleet.workers if one.state is WorkerState.SERVING} >= {*workers})


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
    """Run prefill workers (names with p) and decode workers (names with d), and check the invariants at the end.

    Args:
        prefill: engine configuration of the prefill workers; its role is ignored. The same holds for `decode`.
        fields: configuration fields of all workers.
    """
    configs = {"p": prefill or SyntheticConfig(), "d": decode or SyntheticConfig()}
    async with (
        observing(nats_url, fleet) as observer,
        contextlib.AsyncExitStack() as stack,
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        found = Disaggregated(rb, observer)
        for name in workers:
            worker, engine = await stack.enter_async_context(
                role_worker(nats_url, fleet, name, configs[name[0]], **fields)
            )
            found.workers[name], found.engines[name] = worker, engine
            found.spy(name)
        await until_paired(rb, *workers)
        yield found
        await observer.check_at_rest()


def long(request_id: str, prompt_len: int = 100, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """Return a greedy request of exactly `max_tokens`, with a unique prompt that is long enough for two phases."""
    prompt = [sum(request_id.encode()), *range(1, prompt_len)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(**{"prompt_token_ids": prompt, "sampling": sampling, "request_id": request_id, **fields})


def role_of(worker: str) -> WorkerRole:
    """Return the role in a worker's name: p for prefill, d for decode, all other letters for both."""
    roles: dict[str, WorkerRole] = {"p": "prefill", "d": "decode"}
    return roles.get(worker[0], "both")


def role_worker(
    nats_url: str, fleet: str, worker: str, config: SyntheticConfig, **fields: Any
) -> contextlib.AbstractAsyncContextManager[tuple[Worker, SyntheticEngine]]:
    """Run a worker with the role in its name; the role in `config` is ignored."""
    return synthetic_worker(nats_url, fleet, config=replace(config, role=role_of(worker)), worker_id=worker, **fields)


@dataclass
class Shaped:
    """The workers and engines of a fleet in `SHAPES`, by name."""

    workers: dict[str, Worker] = field(default_factory=dict)
    engines: dict[str, SyntheticEngine] = field(default_factory=dict)

    def are_idle(self) -> bool:
        """Return True if no engine has a request."""
        return all(map(is_idle, self.engines.values()))


@contextlib.asynccontextmanager
async def shaped(
    nats_url: str, fleet: str, shape: str, config: SyntheticConfig, *, prefill: SyntheticConfig | None = None
) -> AsyncIterator[Shaped]:
    """Run the workers of a fleet in `SHAPES`.

    Args:
        prefill: configuration of the prefill worker's engine, if it differs from `config`.
    """
    found = Shaped()
    async with contextlib.AsyncExitStack() as stack:
        for name in SHAPES[shape]:
            own = prefill if prefill is not None and role_of(name) == "prefill" else config
            starting = role_worker(nats_url, fleet, name, own)
            found.workers[name], found.engines[name] = await stack.enter_async_context(starting)
        yield found


@contextlib.asynccontextmanager
async def filtered(
    nats_url: str, fleet: str, shape: str, config: SyntheticConfig, *, client: MakeFilter, workers: MakeFilter
) -> AsyncIterator[tuple[Shaped, rollbus.Client]]:
    """Run the workers of a fleet in `SHAPES` and a client, with filters on the bytes that the server sends to them.

    Args:
        client: makes the filter for each connection of the client.
        workers: makes the filter for each connection of the workers.
    """
    async with tcp_proxy(nats_url) as before_client, tcp_proxy(nats_url) as before_workers:
        before_client.make_filter, before_workers.make_filter = client, workers
        async with (
            shaped(before_workers.url, fleet, shape, config) as running,
            rollbus.connect(before_client.url, fleet=fleet, prefill_min_tokens=2) as rb,
        ):
            await until_paired(rb, *running.workers)
            yield running, rb


def in_two_legs(results: Iterable[Generation]) -> list[Generation]:
    """Return the results that began on a prefill worker and ended on a worker of another role."""
    return [
        result
        for result in results
        if role_of(result.worker_ids[0]) == "prefill" and role_of(result.worker_ids[-1]) != "prefill"
    ]


def check_legs(results: Sequence[Generation], shape: str) -> None:
    """Assert that at least a third of the results had two phases, or no result in a fleet without a prefill worker."""
    num_in_two = len(in_two_legs(results))
    assert num_in_two >= len(results) / 3 if shape == "disaggregated" else num_in_two == 0
