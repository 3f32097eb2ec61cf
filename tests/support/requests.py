"""Requests with deterministic tokens, for tests that only need some tokens."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import rollbus
from rollbus import CommandIncomplete, CommandResult, GenerateRequest, Generation, RequestError
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import make_requests, undisturbed
from tests.support.invariants import assert_equal, check_results

PROMPT_LEN = 3


def greedy(prompt: int, max_tokens: int, **fields: object) -> GenerateRequest:
    """Return a greedy request of exactly `max_tokens`, whose prompt begins with `prompt`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[prompt, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


def sized(prompt_len: int = 5, max_tokens: int = 8, **fields: object) -> GenerateRequest:
    """Return a greedy request of exactly `max_tokens` with a prompt of this length."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=range(prompt_len), sampling=sampling, **fields)  # type: ignore[arg-type]


def endless(request_id: str = "endless", **fields: object) -> GenerateRequest:
    """Return a request that runs for hours unless it is aborted."""
    return greedy(1, 4_000_000, request_id=request_id, **fields)


def short(request_id: str, **fields: object) -> GenerateRequest:
    """Return a request for three tokens."""
    return greedy(1, 3, request_id=request_id, **fields)


# Outcomes of requests and commands: results or errors.


E = TypeVar("E", bound=Exception)


async def outcome(completing: Awaitable[Generation]) -> Generation | RequestError:
    """Return the result of a request, or its error."""
    try:
        return await completing
    except RequestError as exc:
        return exc


async def error_of(failing: Awaitable[object], kind: type[E]) -> E:
    """Assert that the awaitable raises an error of this class; return the error."""
    with pytest.raises(kind) as caught:
        await failing
    return caught.value


async def incomplete(command: Awaitable[CommandResult]) -> CommandIncomplete:
    """Return the error of an incomplete command."""
    return await error_of(command, CommandIncomplete)


# Requests whose chunks a task reads.


T = TypeVar("T")


class Stream:
    """A request that a task reads; `start_stream` creates it."""

    def __init__(self, request: GenerateRequest, tasks: asyncio.TaskGroup, rb: rollbus.Client) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.has_begun = asyncio.Event()
        self.reading = tasks.create_task(self._read(rb))

    async def _read(self, rb: rollbus.Client) -> None:
        async for chunk in rb.generate(self.request):
            self.chunks.append(chunk)
            if chunk.num_tokens:
                self.has_begun.set()

    @property
    def versions(self) -> list[int]:
        """The weight version of each token."""
        return [chunk.weight_version for chunk in self.chunks for _ in range(chunk.num_tokens)]

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason; None if the request has not ended."""
        end = self.chunks[-1].end
        return None if end is None else end.finish_reason


async def start_stream(tasks: asyncio.TaskGroup, rb: rollbus.Client, request: GenerateRequest) -> Stream:
    """Start to read a request in a task; return after its first token."""
    stream = Stream(request, tasks, rb)
    await stream.has_begun.wait()
    return stream


async def all_of(items: AsyncIterable[T]) -> list[T]:
    """Return all items of an iterator, for use as a task."""
    return [item async for item in items]


# Comparison of two vLLM results: in float32 tokens and expert sets are equal, and logprobs agree to a tolerance.


TOLERANCE = 1e-4
"""Tolerance of logprobs between different kernels and batches in float32."""


def expert_sets(rows: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Return rows with sorted experts in each layer, because vLLM does not order them."""
    assert rows is not None
    return np.sort(rows, axis=-1)


def assert_same(received: Generation, expected: Generation) -> None:
    """Assert that tokens and expert sets are equal and that logprobs agree to the tolerance."""
    np.testing.assert_array_equal(received.token_ids, expected.token_ids)
    assert received.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(received.logprobs, expected.logprobs, atol=TOLERANCE)
    np.testing.assert_array_equal(expert_sets(received.routed_experts), expert_sets(expected.routed_experts))


# A load for fault tests: requests of all kinds, whose results must equal the results without faults.

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
        """Make mixed requests and, before them, eight of six seconds, which run when the first mixed ones have ended.

        A fault after the first results then hits requests that run, also if the results reach the client late.
        """
        lasting = [greedy(i, round(6 / config.step_s), request_id=f"lasting-{i}") for i in range(8)]
        return await cls.of([*lasting, *make_requests(count, 0)], config)

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
