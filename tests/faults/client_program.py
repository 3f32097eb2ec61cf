"""A trainer in its own process, which tests kill or stop.

The arguments are URL FLEET N MAX. The program reads an endless response stream
and prints `started` after its first chunk. It then sends N greedy requests of MAX tokens each at once. For each result
it prints one line of JSON: prompt, attempts, workers, tokens.
"""

import asyncio
import contextlib
import json
import sys
from unittest.mock import patch

import rollbus
from rollbus.bus.client import dispatch, runtime
from rollbus.bus.protocol.attempt import machine
from tests.support.processes import print_line
from tests.support.requests import greedy
from tests.support.waits import SOON_S

TIMES = (
    # Shorter than the defaults: tests wait until the lease has expired and until orphans have left the queue.
    (runtime, "LEASE_S", 1.5),
    (dispatch, "ORPHAN_AGE_S", 1.0),
    # Longer than the defaults: on a busy machine some requests would be served without a prefill worker.
    (machine, "HAND_OVER_S", SOON_S),
    (machine, "PREFILL_WAIT_S", SOON_S),
)


async def send(url: str, fleet: str, num_requests: int, max_tokens: int) -> None:
    """Send all requests and print their results."""
    requests = [greedy(index, max_tokens, request_id=f"r-{index}") for index in range(num_requests)]
    async with rollbus.connect(url, fleet=fleet, client="program", prefill_min_tokens=2) as rb:
        await rb.fleet.wait_for_workers()
        endless = rb.generate(greedy(num_requests, 1_000_000))
        await anext(endless)
        print_line("started")
        async for generation in rb.complete_many(requests):
            tokens = [int(token) for token in generation.token_ids]
            print_line(json.dumps([int(generation.request_id[2:]), generation.attempts, generation.worker_ids, tokens]))
        await endless.aclose()


def main() -> int:
    """Run the program."""
    with contextlib.ExitStack() as times:
        for module, name, seconds in TIMES:
            times.enter_context(patch.object(module, name, seconds))
        asyncio.run(send(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    return 0
