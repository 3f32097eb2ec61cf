"""`bench.routing` compares equal work: every method delivers the engine's own rows as a writable tensor."""

import numpy as np
import pytest

pytest.importorskip("pybase64", reason="comes with vLLM")

from bench.routing_ways import CLOCK, WAYS, Case, clock_us, digest, make_rows
from rollbus.bus.nats.embedded import EmbeddedServer

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
