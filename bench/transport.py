"""Tokens a second from the synthetic engine in a process of its own to a client, one token a step, with routing.

    python -m bench.transport [--concurrency 64 256] [--tokens 128] [--rounds 5]

Prints one line for each concurrency: the median of the rounds, and their range. The synthetic engine's own work is in
it, and there is no peer in this run: the figures compare versions of rollbus on one machine.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time

import bus
from bus import GenerateRequest, SamplingParams
from bus.embedded import EmbeddedServer


async def measure(rb: bus.Client, concurrency: int, tokens: int) -> float:
    """Tokens a second of `concurrency` requests at once."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    requests = [GenerateRequest(prompt_token_ids=[i + 1], sampling=sampling) for i in range(concurrency)]
    started = time.perf_counter()
    received = 0
    async for generation in rb.complete_many(requests, max_in_flight=concurrency):
        if generation.error is not None:
            raise generation.error
        received += len(generation.token_ids)
    return received / (time.perf_counter() - started)


async def run(concurrencies: list[int], tokens: int, rounds: int) -> None:
    """Start a server and a worker, measure, print."""
    async with EmbeddedServer() as server:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers", "--nats", server.url, "--engine", "synthetic"),
            *("--engine-args", '{"max_num_seqs": 1024}', "--log-level", "warning"),
        )
        try:
            async with bus.connect(server.url) as rb:
                await rb.fleet.wait_for_workers(timeout_s=30)
                for concurrency in concurrencies:
                    await measure(rb, concurrency, tokens)
                    rates = [await measure(rb, concurrency, tokens) for _ in range(rounds)]
                    middle, low, high = statistics.median(rates), min(rates), max(rates)
                    sys.stdout.write(
                        f"{concurrency:>5} concurrent x {tokens} tokens: {middle:>9,.0f} tokens/s "
                        f"(median of {rounds}; {low:,.0f} to {high:,.0f})\n"
                    )
        finally:
            worker.terminate()
            await worker.wait()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description="Tokens a second through the bus.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sys.stdout.write(f"{' '.join(['python -m bench.transport', *sys.argv[1:]])}\n")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    asyncio.run(run(args.concurrency, args.tokens, args.rounds))


if __name__ == "__main__":
    main()
