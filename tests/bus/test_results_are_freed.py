"""What a client held of a request is free once its caller has the result: it may be megabytes of routing."""

import gc

import bus
from bus import GenerateRequest, SamplingParams
from bus.protocol.stream import Stream
from tests.support.fleet import synthetic_worker
from tests.support.invariants import until

SAMPLED = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=8, n=2, seed=1))


async def num_streams() -> int:
    """Streams that are there, garbage or not; each holds the chunks that came."""
    # By type: `isinstance` asks the things themselves, and some of other libraries answer with a warning.
    return sum(type(thing) is Stream for thing in gc.get_objects())


async def test_nothing_waits_for_the_garbage_collector(nats_url: str, fleet: str) -> None:
    """Completed, streamed, left in the middle: without a single collection nothing stays."""
    gc.collect()
    gc.disable()
    try:
        async with synthetic_worker(nats_url, fleet), bus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(SAMPLED)).error is None
            assert [part async for part in rb.generate(SAMPLED)]
            async for _ in rb.generate(SAMPLED):
                break
            assert [result async for result in rb.complete_many([SAMPLED] * 3)]
            await until(num_streams, 0)
    finally:
        gc.enable()
