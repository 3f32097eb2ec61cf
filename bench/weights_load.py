"""Keeps a fleet busy for `bench.weights` in its own process, so that its client does not count for the trainer.

    python -m bench.weights_load URL VOCAB_SIZE STREAMS

STREAMS requests are streamed at any time. When a request ends, the next one starts. The program answers each line `FROM
TO` on stdin, in seconds of `time.monotonic`, with the number of tokens that arrived in that time.
"""

import asyncio
import itertools
import sys
import time
from bisect import bisect
from typing import Any

import uvloop

import rollbus
from bench.on_the_bus import bus_request
from bench.ways import answer

PROMPT_TOKENS = 16
MAX_TOKENS = 400
"""Tokens of a request. A request lasts longer than most updates."""


class Load:
    """Endless streams, and the times at which their tokens arrived."""

    def __init__(self, rb: rollbus.Client, vocab_size: int) -> None:
        self._rb = rb
        self._vocab_size = vocab_size
        self._serials = itertools.count()
        self._times: list[float] = []

    async def stream(self) -> None:
        """Stream one request after the other until cancelled."""
        while True:
            first = next(self._serials) * PROMPT_TOKENS
            prompt = [token % self._vocab_size for token in range(first, first + PROMPT_TOKENS)]
            async for chunk in self._rb.generate(bus_request(prompt, MAX_TOKENS, routing=False)):
                self._times.extend([time.monotonic()] * chunk.num_tokens)

    async def count(self, question: list[str]) -> dict[str, Any]:
        """Return the number of tokens of a period."""
        begin, end = map(float, question)
        return {"tokens": bisect(self._times, end) - bisect(self._times, begin)}


async def main(url: str, vocab_size: int, num_streams: int) -> None:
    """Run the streams until stdin ends."""
    async with rollbus.connect(url, client="load") as rb:
        await rb.fleet.wait_for_workers()
        load = Load(rb, vocab_size)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(load.stream(), name=f"stream {i}") for i in range(num_streams)]
            await answer(load.count)
            for stream in streams:
                stream.cancel()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
