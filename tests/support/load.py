"""A load for fault tests: requests of all kinds, whose results must equal the results without faults."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import make_requests, undisturbed
from tests.support.invariants import assert_equal, check_results
from tests.support.requests import greedy

Strike = Callable[[], Awaitable[object]]


class Load:
    """Requests and their expected results on engines of one configuration; `mixed` or `of` creates it."""

    def __init__(self, requests: Sequence[GenerateRequest], expected: Mapping[str, Generation]) -> None:
        self.requests = requests
        self.expected = expected

    @classmethod
    async def mixed(cls, count: int, config: SyntheticConfig, *, seed: int = 0) -> "Load":
        """Make requests of all kinds; `config` needs the vocabulary size `VOCAB_SIZE`."""
        return await cls.of(make_requests(count, seed), config)

    @classmethod
    async def lasting(cls, count: int, config: SyntheticConfig) -> "Load":
        """Make mixed requests and, before them, eight of 2,000 tokens, which run when the first mixed ones have ended.

        A fault after the first results then hits requests that run, also if the results reach the client late.
        """
        return await cls.of(
            [*(greedy(i, 2000, request_id=f"lasting-{i}") for i in range(8)), *make_requests(count, 0)], config
        )

    @classmethod
    async def of(cls, requests: Sequence[GenerateRequest], config: SyntheticConfig) -> "Load":
        """Make a load of these requests."""
        return cls(requests, await undisturbed(requests, config))

    async def run(
        self,
        rb: rollbus.Client,
        *,
        strikes: Mapping[int, Strike] | None = None,
        max_in_flight: int = 512,
        legs: int = 1,
        on_result: Callable[[], object] = lambda: None,
    ) -> list[Generation]:
        """Complete all requests and check each result (I1 to I3, and equality with the expected result).

        Args:
            strikes: functions to call, each by the number of results after which it is called.
            legs: how many workers may serve one attempt.
            on_result: called after each result.
        """
        left = dict(strikes or {})
        results = []
        async for generation in rb.complete_many(self.requests, max_in_flight=max_in_flight):
            results.append(generation)
            on_result()
            strike = left.pop(len(results), None)
            if strike is not None:
                await strike()

        assert left == {}
        assert [(g.request_id, g.error) for g in results if g.error is not None] == []
        check_results(results, self.requests, legs=legs)
        for generation in results:
            assert_equal(generation, self.expected[generation.request_id])
        return results
