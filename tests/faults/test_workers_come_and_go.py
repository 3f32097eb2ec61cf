"""Workers join and leave in order while requests run: each gets its share, and nothing shows in the results."""

import contextlib

import pytest
from msgspec.structs import replace

import rollbus
from rollbus.workers.engines.synthetic import SyntheticConfig
from tests.support.disagg import check_legs, role_of, role_worker
from tests.support.invariants import observing
from tests.support.load import VOCAB_SIZE, Load

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=8, vocab_size=VOCAB_SIZE)
PREFILL = replace(CONFIG, step_s=0.05)
"""So slow that one that leaves has something to hand over."""


class Comings:
    """The workers of a fleet, which join and leave by their names, on leaving all of them."""

    def __init__(self, nats_url: str, fleet: str) -> None:
        self._at = nats_url, fleet
        self._lives: dict[str, contextlib.AsyncExitStack] = {}

    async def __aenter__(self) -> "Comings":
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for name in list(self._lives):
            await self.leave(name)

    async def join(self, name: str) -> None:
        """Start a worker of the role that its name says."""
        config = PREFILL if role_of(name) == "prefill" else CONFIG
        self._lives[name] = contextlib.AsyncExitStack()
        await self._lives[name].enter_async_context(role_worker(*self._at, name, config))

    async def leave(self, name: str) -> None:
        """Stop one in order."""
        await self._lives.pop(name).aclose()


async def test_workers_join_and_leave_under_load(nats_url: str, fleet: str) -> None:
    """Three workers take turns, two at a time: all serve, those that leave hand over at once, and all is exact."""
    load = await Load.mixed(150, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        Comings(nats_url, fleet) as workers,
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await workers.join("a")
        await rb.fleet.wait_for_workers()
        strikes = {
            20: lambda: workers.join("b"),
            50: lambda: workers.leave("a"),
            70: lambda: workers.join("c"),
            100: lambda: workers.leave("b"),
        }
        results = await load.run(rb, strikes=strikes)

        assert {name for generation in results for name in generation.worker_ids} == {"a", "b", "c"}
        assert max(generation.attempts for generation in results) in {2, 3}
        await observer.check_at_rest()


async def test_workers_of_both_roles_join_and_leave_under_load(nats_url: str, fleet: str) -> None:
    """Two of each role take turns: requests have two legs as soon as there is who may serve them, else one.

    Those whose leg is at a worker that leaves go on at once, by two legs again where that is possible.
    """
    load = await Load.mixed(150, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        Comings(nats_url, fleet) as workers,
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
        # A few at a time: what is asked for is decided when it is sent.
        results = await load.run(rb, strikes=strikes, max_in_flight=24, legs=2)

        check_legs(results, "disaggregated")
        assert {name for generation in results for name in generation.worker_ids} == {"d1", "d2", "p1", "p2"}
        assert max(generation.attempts for generation in results) in {2, 3}
        await observer.check_at_rest()
