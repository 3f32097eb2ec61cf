"""The network parts without a word, before a worker or before the client, for less and for more than a lease."""

import asyncio
import contextlib
import time

import pytest

import bus
from schemas.presence import WorkerState
from tests.chaos.workload import make_requests
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.invariants import observing
from tests.support.load import VOCAB_SIZE, Load, greedy
from tests.support.tcp_proxy import Direction, tcp_proxy
from workers.engines.synthetic import SyntheticConfig

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(step_s=0.003, max_num_seqs=16, vocab_size=VOCAB_SIZE)
BRIEFLY_S = 0.4
"""Far less than the lease of a worker without its margin."""


@pytest.mark.parametrize("direction", [*Direction, Direction.BOTH])
async def test_a_worker_cut_off_briefly_goes_on(nats_url: str, fleet: str, direction: Direction) -> None:
    """For less than its lease no byte passes, one way or both: links go on, and no request needs another attempt."""
    load = await Load.mixed(60, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        synthetic_worker(proxy.url, fleet, config=CONFIG) as (worker, _),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        life = worker.presence().incarnation

        async def part() -> None:
            proxy.freeze(direction)
            # How long it lasts is what this test is about.
            await asyncio.sleep(BRIEFLY_S)
            proxy.thaw()

        results = await load.run(rb, strikes={10: part})
        assert {generation.attempts for generation in results} == {1}
        assert worker.presence().incarnation == life
        await observer.check_at_rest()


async def test_an_announcement_that_is_lost_is_made_again(nats_url: str, fleet: str) -> None:
    """The connection breaks before an announcement is confirmed: the next one confirms another, and nothing is lost."""
    async with (
        tcp_proxy(nats_url) as proxy,
        hand_client(nats_url, fleet) as client,
        synthetic_worker(proxy.url, fleet, config=CONFIG, worker_id="w") as (worker, _),
    ):
        await client.until_serving("w")
        life = worker._life
        proxy.freeze(Direction.TO_CLIENT)
        client.presences.clear()
        await client.until_serving("w")
        unconfirmed_at = time.monotonic()
        proxy.cut()
        proxy.thaw()
        await proxy.restore()
        while time.monotonic() - life.lease_age_s < unconfirmed_at and not life.times_fenced:  # noqa: ASYNC110 - or ends
            await asyncio.sleep(0.01)

        assert life.times_fenced == 0


@pytest.mark.parametrize("direction", [Direction.TO_CLIENT, Direction.BOTH])
async def test_a_worker_cut_off_for_long_hands_over(nats_url: str, fleet: str, direction: Direction) -> None:
    """For more than its lease: its requests go on elsewhere, it gives up all it had, and serves again afterwards."""
    mixed = make_requests(60, seed=0)
    # What such a worker made may still reach the client for a while: these take longer than its lease holds.
    lasting = [greedy(index, 1000, request_id=f"lasting-{index}", return_routed_experts=False) for index in range(4)]
    load = await Load.of([*lasting, *mixed], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        synthetic_worker(proxy.url, fleet, config=CONFIG, worker_id="a", lease_s=3.0) as (a, engine),
        contextlib.AsyncExitStack() as others,
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        life = a.presence().incarnation

        async def part() -> None:
            proxy.freeze(direction)
            other = synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="b", lease_s=30.0)
            await others.enter_async_context(other)

        results = await load.run(rb, strikes={10: part})
        resumed = [generation for generation in results if generation.attempts > 1]
        assert {request.request_id for request in lasting} <= {generation.request_id for generation in resumed}
        assert {generation.worker_ids[-1] for generation in resumed} == {"b"}
        assert a.presence().incarnation != life
        assert is_idle(engine)

        proxy.thaw()
        # What it said before it was cut off arrives now, and reads as if it served already.
        while a.presence().state is not WorkerState.SERVING:  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(0.01)
        again = await (await Load.of(mixed, CONFIG)).run(rb)
        assert {name for generation in again for name in generation.worker_ids} == {"a", "b"}
        await observer.check_at_rest()


async def test_a_client_cut_off_briefly_goes_on(nats_url: str, fleet: str) -> None:
    """For less than the leases nothing reaches the client: afterwards all arrives, and no request was lost."""
    load = await Load.mixed(60, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        synthetic_worker(nats_url, fleet, config=CONFIG),
        bus.connect(proxy.url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()

        async def part() -> None:
            proxy.freeze()
            # How long it lasts is what this test is about.
            await asyncio.sleep(BRIEFLY_S)
            proxy.thaw()

        results = await load.run(rb, strikes={10: part})
        assert {generation.attempts for generation in results} == {1}
        await observer.check_at_rest()


async def test_a_client_cut_off_for_long_resumes(nats_url: str, fleet: str) -> None:
    """For more than its lease: its requests are ended in the engine, and all complete after its return."""
    load = await Load.mixed(60, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        synthetic_worker(nats_url, fleet, config=CONFIG) as (_, engine),
        bus.connect(proxy.url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()

        async def part() -> None:
            proxy.freeze()
            # Its lease and the margin, by when nothing of it may run any more.
            await asyncio.sleep(7.0)
            assert is_idle(engine)
            proxy.thaw()

        results = await load.run(rb, strikes={10: part})
        assert max(generation.attempts for generation in results) > 1
        await observer.check_at_rest()
