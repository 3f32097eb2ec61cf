"""A trainer as a process of its own, to be killed or stopped: `python -m tests.support.client_program URL FLEET N MAX`.

It reads a stream that has no end, says `started` when its first chunk is there, asks for N greedy results of MAX tokens
each at once, and prints one line of JSON for each: prompt, attempts, workers, tokens.
"""

import asyncio
import contextlib
import json
import sys
from unittest.mock import patch

import rollbus
from rollbus.bus.client import dispatch, runtime
from rollbus.bus.protocol.attempt import machine
from tests.support.patience import SOON_S
from tests.support.requests import greedy

__all__ = ["main"]

TIMES = (
    # Shorter than usual: tests wait until the lease has run out, and for what has left the queue since.
    (runtime, "LEASE_S", 1.5),
    (dispatch, "ORPHAN_AGE_S", 1.0),
    # Longer: on a busy machine some requests would be served without a prefill worker.
    (machine, "HAND_OVER_S", SOON_S),
    (machine, "PREFILL_WAIT_S", SOON_S),
)


async def main(url: str, fleet: str, num_requests: int, max_tokens: int) -> None:
    """Complete all of them."""
    requests = [greedy(index, max_tokens, request_id=f"r-{index}") for index in range(num_requests)]
    async with rollbus.connect(url, fleet=fleet, client="program", prefill_min_tokens=2) as rb:
        await rb.fleet.wait_for_workers()
        endless = rb.generate(greedy(num_requests, 1_000_000))
        await anext(endless)
        say("started")
        async for generation in rb.complete_many(requests):
            tokens = [int(token) for token in generation.token_ids]
            say(json.dumps([int(generation.request_id[2:]), generation.attempts, generation.worker_ids, tokens]))
        await endless.aclose()


def say(line: str) -> None:
    """Print a line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.ExitStack() as times:
        for module, name, seconds in TIMES:
            times.enter_context(patch.object(module, name, seconds))
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
