"""A trainer as a process of its own, to be killed or stopped: `python -m tests.support.client_program URL FLEET N MAX`.

It asks for N greedy results of MAX tokens each at once, says `started` when the first chunk is there, and in the end
prints one line of JSON for each result: prompt, attempts, tokens.
"""

import asyncio
import json
import sys

import bus
from tests.support.load import greedy

__all__ = ["main"]


async def main(url: str, fleet: str, num_requests: int, max_tokens: int) -> None:
    """Complete all of them."""
    requests = [greedy(index, max_tokens, request_id=f"r-{index}") for index in range(num_requests)]
    async with bus.connect(url, fleet=fleet, client="program") as rb:
        await rb.fleet.wait_for_workers()
        first = rb.generate(greedy(num_requests, max_tokens))
        await anext(first)
        say("started")
        async for generation in rb.complete_many(requests):
            tokens = [int(token) for token in generation.token_ids]
            say(json.dumps([int(generation.request_id[2:]), generation.attempts, tokens]))
        await first.aclose()


def say(line: str) -> None:
    """Print a line, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
