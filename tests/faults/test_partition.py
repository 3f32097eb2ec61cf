"""The network freezes in front of a worker or the client, for less and for more than a lease."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

import rollbus
from rollbus.bus.client import runtime
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE, make_requests
from tests.support.disagg import SHAPES, Shaped, check_legs, role_of, role_worker, shaped, until_paired
from tests.support.fleet import is_idle, requests_at, synthetic_worker, until_known
from tests.support.hand_client import hand_client
from tests.support.invariants import observing
from tests.support.requests import Load, greedy
from tests.support.tcp_proxy import Direction, TcpProxy, tcp_proxy
from tests.support.waits import until_true

CONFIG = SyntheticConfig(step_s=0.009, max_num_seqs=16, vocab_size=VOCAB_SIZE)
PREFILL = replace(CONFIG, step_s=0.1, max_num_seqs=4)
"""Slow, so that every fault happens during the prefill phase of some requests."""
NUM_REQUESTS = 40
"""More than twice the slots of a worker."""
BRIEFLY_S = 0.4
"""Seconds, far less than the lease of a worker without its margin."""
LEASE_S = 3.0
"""Lease of a worker that is disconnected for longer, in seconds.

A busy machine must not exceed the lease without the margin by itself.
"""


@contextlib.asynccontextmanager
async def running(
    proxy: TcpProxy, nats_url: str, fleet: str, workers: Sequence[str], cut_off: str, **fields: float
) -> AsyncIterator[Shaped]:
    """Run workers with the roles of their names. The worker `cut_off` has these fields and is behind the proxy."""
    found = Shaped()
    async with contextlib.AsyncExitStack() as stack:
        for name in workers:
            url, own = (proxy.url, fields) if name == cut_off else (nats_url, {})
            starting = role_worker(url, fleet, name, PREFILL if role_of(name) == "prefill" else CONFIG, **own)
            found.workers[name], found.engines[name] = await stack.enter_async_context(starting)
        yield found


async def until_at(rb: rollbus.Client, worker: str, *request_ids: str) -> None:
    """Wait until the client knows that this worker has these requests, or any request if none is given."""
    await until_true(lambda: (have := requests_at(rb, worker)) and have.issuperset(request_ids))


@pytest.mark.proves("P66")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("direction", "cut_off"), [*((way, "w") for way in Direction), (Direction.BOTH, "p")])
async def test_a_worker_frozen_for_less_than_its_lease_keeps_its_requests(
    nats_url: str, fleet: str, direction: Direction, cut_off: str
) -> None:
    """If a worker is frozen for less than its lease in one or both directions, no request needs another attempt.

    The same holds for prefill phases, which reach the worker without the queue.
    """
    load = await Load.mixed(NUM_REQUESTS, CONFIG)
    shape = "one" if cut_off == "w" else "disaggregated"
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        running(proxy, nats_url, fleet, SHAPES[shape], cut_off) as parts,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *parts.workers)
        worker = parts.workers[cut_off]
        life = worker.presence().incarnation

        async def interrupt() -> None:
            await until_at(rb, cut_off)
            proxy.freeze(direction)
            # The test is about an outage of this length.
            await asyncio.sleep(BRIEFLY_S)
            proxy.thaw()

        results = await load.run(rb, strikes={10: interrupt}, legs=len(parts.workers))
        assert {generation.attempts for generation in results} == {1}
        assert worker.presence().incarnation == life
        check_legs(results, shape)
        await observer.check_at_rest()


async def test_a_later_presence_renews_the_lease_after_a_lost_presence(nats_url: str, fleet: str) -> None:
    """If the connection breaks before presence is confirmed, a later presence renews the lease.

    The worker is not fenced.
    """
    async with (
        tcp_proxy(nats_url) as proxy,
        hand_client(nats_url, fleet) as client,
        synthetic_worker(proxy.url, fleet, config=CONFIG, worker_id="w") as (worker, _),
    ):
        await client.until_serving("w")
        life = worker._lifecycle
        proxy.freeze(Direction.TO_CLIENT)
        client.presences.clear()
        await client.until_serving("w")
        unconfirmed_at = time.monotonic()
        proxy.cut()
        proxy.thaw()
        await proxy.restore()
        await until_true(lambda: time.monotonic() - life.lease_age_s >= unconfirmed_at or life.times_fenced)
        assert life.times_fenced == 0


@pytest.mark.proves("P2")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("direction", "cut_off"), [(Direction.TO_CLIENT, "w"), (Direction.BOTH, "d")])
async def test_requests_of_a_worker_frozen_beyond_its_lease_resume_elsewhere(
    nats_url: str, fleet: str, direction: Direction, cut_off: str
) -> None:
    """If a worker is frozen for more than its lease, its requests resume elsewhere, and it is fenced.

    Afterwards it serves again. Requests of a decode worker resume with another prefill phase.
    """
    mixed = make_requests(NUM_REQUESTS, seed=0)
    # If only the direction to the worker is frozen, its frames still reach the client for a while. These requests then
    # run for longer than its lease.
    max_tokens = 100 if direction is Direction.BOTH else 333
    lasting = [greedy(index, max_tokens, request_id=f"lasting-{index}") for index in range(4)]
    load = await Load.of([*lasting, *mixed], CONFIG)
    workers = SHAPES["one" if cut_off == "w" else "disaggregated"]
    other = f"{cut_off}2"
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        running(proxy, nats_url, fleet, workers, cut_off, lease_s=LEASE_S) as parts,
        contextlib.AsyncExitStack() as others,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *workers)
        worker = parts.workers[cut_off]
        life = ""

        async def interrupt() -> None:
            nonlocal life
            await until_at(rb, cut_off, *(request.request_id for request in lasting))
            proxy.freeze(direction)
            life = worker.presence().incarnation
            quick = replace(CONFIG, step_s=0.003)
            await others.enter_async_context(role_worker(nats_url, fleet, other, quick, lease_s=30.0))

        results = await load.run(rb, strikes={1: interrupt}, legs=len(workers))
        resumed = {generation.request_id: generation for generation in results if generation.attempts > 1}
        for request in lasting:
            assert resumed[request.request_id].worker_ids[-len(workers) :] == (*workers[:-1], other)
        await until_true(lambda: worker.presence().incarnation != life and is_idle(parts.engines[cut_off]))

        proxy.thaw()
        # Presence from before the freeze arrives now and shows the worker as serving.
        await until_known(rb, worker)
        again = await Load(mixed, load.expected).run(rb, legs=len(workers))
        assert {name for generation in again for name in generation.worker_ids} == {*workers, other}
        await observer.check_at_rest()


@pytest.mark.proves("P66")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_client_frozen_for_less_than_the_leases_loses_no_request(nats_url: str, fleet: str, shape: str) -> None:
    """If the client is frozen for less than the leases, all data arrive afterwards, and no request is lost."""
    load = await Load.mixed(NUM_REQUESTS, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        shaped(nats_url, fleet, shape, CONFIG, prefill=PREFILL) as parts,
        rollbus.connect(proxy.url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *parts.workers)

        async def interrupt() -> None:
            await until_at(rb, SHAPES[shape][0])
            proxy.freeze()
            # The test is about an outage of this length.
            await asyncio.sleep(BRIEFLY_S)
            proxy.thaw()

        results = await load.run(rb, strikes={10: interrupt}, legs=len(parts.workers))
        assert {generation.attempts for generation in results} == {1}
        check_legs(results, shape)
        await observer.check_at_rest()


@pytest.mark.proves("P67")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_client_frozen_beyond_its_lease_completes_all_requests(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """If a client is frozen for more than its lease, engines end its requests, and all complete after its return."""
    monkeypatch.setattr(runtime, "LEASE_S", 1.5)
    # These requests run for longer than lease and margin. All other requests have left the engine by then.
    lasting = [greedy(index, 667, request_id=f"lasting-{index}") for index in range(4)]
    load = await Load.of([*lasting, *make_requests(NUM_REQUESTS, seed=0)], CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        shaped(nats_url, fleet, shape, CONFIG, prefill=PREFILL) as parts,
        rollbus.connect(proxy.url, fleet=fleet, prefill_min_tokens=2) as rb,
    ):
        await until_paired(rb, *parts.workers)

        async def interrupt() -> None:
            await until_at(rb, SHAPES[shape][-1], *(request.request_id for request in lasting))
            proxy.freeze()
            await until_true(parts.are_idle)
            proxy.thaw()

        results = await load.run(rb, strikes={1: interrupt}, legs=len(parts.workers))
        attempts = {generation.request_id: generation.attempts for generation in results}
        assert min(attempts[request.request_id] for request in lasting) > 1
        check_legs(results, shape)
        await observer.check_at_rest()
