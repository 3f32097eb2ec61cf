"""`bench.routing` compares equal work: every method delivers the engine's own rows as a writable tensor."""

import numpy as np
import pytest

pytest.importorskip("pybase64", reason="comes with vLLM")

import rollbus
from bench.routing_ways import CLOCK, WAYS, Case, RoutedEngine, bus_request, clock_us, digest, make_rows, running_worker
from rollbus.bus.nats.embedded import EmbeddedServer
from tests.support.waits import SOON_S

CASES = [Case(700, 48, 8, 128), Case(700, 5, 2, 384)]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=["u1", "u2"])
async def test_every_method_delivers_the_rows_of_the_engine(way: str, case: Case) -> None:
    """Every method delivers the engine's rows with equal bits and dtype, and reports the time of their handover."""
    serve, connect = WAYS[way]
    async with EmbeddedServer() as nats, serve(case, nats.url) as (address, handed), connect(address) as get:
        before = clock_us() / 1e6
        tensor = await get(case.num_tokens)
        assert before <= handed() % (CLOCK / 1e6) <= clock_us() / 1e6
        part = await get(case.num_tokens // 2)
    found = tensor.numpy()
    assert digest(found) == digest(make_rows(case))
    assert found.flags.writeable
    assert np.array_equal(part.numpy(), make_rows(case)[: case.num_tokens // 2])


async def test_synthetic_tokens_carry_the_time_of_their_handover() -> None:
    """The synthetic tokens carry the time of their handover, and each token has its row."""
    case = CASES[0]
    before = clock_us()
    engine = RoutedEngine(case, step_s=0, is_fresh=False)
    async with EmbeddedServer() as nats, running_worker(engine, nats.url), rollbus.connect(nats.url) as rb:
        await rb.fleet.wait_for_workers(timeout_s=SOON_S)
        generation = await rb.complete(bus_request(10, 30))
    times = generation.token_ids.tolist()
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= clock_us()
    assert generation.routed_experts is not None
    assert np.array_equal(generation.routed_experts, make_rows(case)[:39])
