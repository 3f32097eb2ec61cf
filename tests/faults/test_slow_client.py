"""A client with a slow connection and many routed experts: the worker merges frames and waits, and drops nothing."""

import asyncio

import pytest

import rollbus
from rollbus.bus.client.links import MAX_WINDOW_BYTES
from rollbus.bus.protocol.attempt import machine
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.support.disagg import SHAPES, check_legs, shaped, until_paired
from tests.support.invariants import Observer, observing
from tests.support.load import Load
from tests.support.tcp_proxy import tcp_proxy

CONFIG = SyntheticConfig(step_s=0.001, num_layers=32, top_k=8)
ROW_BYTES = 32 * 8
PROMPT_LEN = 8000
NUM_REQUESTS = 12
TOTAL_BYTES = NUM_REQUESTS * PROMPT_LEN * ROW_BYTES
"""24 MB: many times the window of a client."""


@pytest.mark.proves("P6")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_slow_client_loses_nothing(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """For a client that receives 8 MB/s, only its window of routed experts is in transit. The rest waits at the worker.

    Most rows belong to prompts, and come from the prefill worker if the fleet has one.
    """
    # On a busy machine, some offers of a prefill worker would be late behind the rows of other requests.
    monkeypatch.setattr(machine, "HAND_OVER_S", 60.0)
    requests = [
        GenerateRequest(
            request_id=f"large-{index}",
            prompt_token_ids=[index] * PROMPT_LEN,
            sampling=SamplingParams(max_tokens=50, temperature=0, ignore_eos=True),
        )
        for index in range(NUM_REQUESTS)
    ]
    load = await Load.of(requests, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        tcp_proxy(nats_url) as proxy,
        shaped(nats_url, fleet, shape, CONFIG) as parts,
        rollbus.connect(proxy.url, fleet=fleet, client="slow") as rb,
        asyncio.TaskGroup() as tasks,
    ):
        await until_paired(rb, *parts.workers)
        proxy.bytes_per_s = 8_000_000
        most = LargestValues()
        watching = tasks.create_task(most.watch(observer, parts.workers[SHAPES[shape][0]]))
        results = await load.run(rb, legs=len(parts.workers))
        watching.cancel()

        assert {generation.attempts for generation in results} == {1}
        check_legs(results, shape)
        # Until a write is complete, the server counts all of its bytes as pending.
        assert most.pending_bytes < 1.5 * MAX_WINDOW_BYTES
        # The worker buffered the engine's output less the bytes in transit, and no more than the engine made.
        assert TOTAL_BYTES / 4 < most.held_bytes < 1.1 * TOTAL_BYTES
        await observer.check_at_rest()


class LargestValues:
    """Largest observed values."""

    def __init__(self) -> None:
        self.pending_bytes = 0
        """Bytes in the server for the client."""
        self.held_bytes = 0
        """Bytes at the worker."""

    async def watch(self, observer: Observer, worker: Worker) -> None:
        """Update the values repeatedly until cancelled."""
        while True:
            self.pending_bytes = max(self.pending_bytes, await observer.pending_bytes("client slow"))
            self.held_bytes = max(self.held_bytes, worker.presence().held_bytes)
            await asyncio.sleep(0.01)
