"""Workers join and leave in order while requests run: each serves some requests, and the results do not change."""

import contextlib

from msgspec.structs import replace

import rollbus
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.disagg import check_legs, role_of, role_worker
from tests.support.invariants import observing
from tests.support.load import Load

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
PREFILL = replace(CONFIG, step_s=0.05)
"""Slow, so that a worker that leaves has requests to hand over."""


class WorkerRotation:
    """The workers of a fleet, which join and leave by name. At the end of the block, all leave."""

    def __init__(self, nats_url: str, fleet: str) -> None:
        self._at = nats_url, fleet
        self._workers: dict[str, contextlib.AsyncExitStack] = {}

    async def __aenter__(self) -> "WorkerRotation":
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for name in list(self._workers):
            await self.leave(name)

    async def join(self, name: str) -> None:
        """Start a worker with the role of its name."""
        config = PREFILL if role_of(name) == "prefill" else CONFIG
        self._workers[name] = contextlib.AsyncExitStack()
        await self._workers[name].enter_async_context(role_worker(*self._at, name, config))

    async def leave(self, name: str) -> None:
        """Stop a worker in order."""
        await self._workers.pop(name).aclose()


async def test_results_stay_exact_while_workers_of_both_roles_join_and_leave(nats_url: str, fleet: str) -> None:
    """If two workers of each role take turns, requests have two phases while both roles are present, and otherwise one.

    Requests at a leaving worker continue immediately, with two phases if possible.
    """
    load = await Load.mixed(150, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        WorkerRotation(nats_url, fleet) as workers,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await workers.join("d1")
        await rb.fleet.wait_for_workers()
        strikes = {
            10: lambda: workers.join("p1"),
            40: lambda: workers.join("d2"),
            60: lambda: workers.leave("d1"),
            80: lambda: workers.join("p2"),
            100: lambda: workers.leave("p1"),
        }
        # Few requests at a time, because the client decides about the phases when it sends a request.
        results = await load.run(rb, strikes=strikes, max_in_flight=24, legs=2)

        check_legs(results, "disaggregated")
        assert {name for generation in results for name in generation.worker_ids} == {"d1", "d2", "p1", "p2"}
        assert max(generation.attempts for generation in results) in {2, 3}
        await observer.check_at_rest()
