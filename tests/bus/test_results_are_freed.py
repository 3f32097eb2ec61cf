"""The client frees the data of a request, which may be megabytes of routed experts, when its caller has the result."""

import gc

from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from tests.support.fleet import StartServed
from tests.support.waits import until

SAMPLED = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=8, n=2, seed=1))


async def num_streams() -> int:
    """Return the number of existing response streams, including garbage. Each stream holds its received chunks."""
    # Compare types: `isinstance` accesses the objects, and objects of some libraries then emit a warning.
    return sum(type(thing) is ResponseStream for thing in gc.get_objects())


async def test_ended_requests_are_freed_without_the_garbage_collector(one_worker: StartServed) -> None:
    """Completed, streamed and abandoned requests leave no response stream, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        async with one_worker() as (rb, *_):
            assert (await rb.complete(SAMPLED)).error is None
            assert [part async for part in rb.generate(SAMPLED)]
            async for _ in rb.generate(SAMPLED):
                break
            assert [result async for result in rb.complete_many([SAMPLED] * 3)]
            await until(num_streams, 0)
    finally:
        gc.enable()
