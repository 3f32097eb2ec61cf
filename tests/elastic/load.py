"""The requests of an elastic run. Each result is compared with an undisturbed engine on the weights of its tokens."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace

import rollbus
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.checkpoints import assert_fresh, assert_fresh_tokens
from tests.chaos.workload import undisturbed
from tests.support.invariants import check_results, check_stream

KINDS = ("whole", "stream", "session", "group")
NUM_SESSIONS = 6


class Load:
    """Keeps requests of all kinds in flight until `end`.

    Args:
        checkpoints: checkpoint folders by version; grows during the run.
    """

    def __init__(
        self, rb: rollbus.Client, seed: int, engine: SyntheticConfig, checkpoints: Mapping[int, Path | None]
    ) -> None:
        self.results: Counter[str] = Counter()
        """Number of right results by kind."""
        self.attempts: Counter[int] = Counter()
        self.num_tokens = 0
        self.num_mixed = 0
        """Number of results with tokens of several versions."""
        self._rb = rb
        self._engine = engine
        self._checkpoints = checkpoints
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._has_ended = False

    def begin(self, tasks: asyncio.TaskGroup, in_flight: int) -> list[asyncio.Task[None]]:
        """Start so many senders."""
        return [tasks.create_task(self._send(), name="elastic.load") for _ in range(in_flight)]

    def end(self) -> None:
        """Send no more requests. Each sender ends with its request."""
        self._has_ended = True

    async def _send(self) -> None:
        checks: Mapping[str, Callable[[GenerateRequest], object]] = {"stream": self._stream, "group": self._group}
        while not self._has_ended:
            kind = self._rng.choice(KINDS)
            request = self._make(kind)
            await checks.get(kind, self._complete)(request)  # type: ignore[misc]
            self.results[kind] += 1

    def _make(self, kind: str) -> GenerateRequest:
        rng = self._rng
        sampling = SamplingParams(max_tokens=rng.randint(1, 150), temperature=0, ignore_eos=True)
        if kind == "group":
            sampling = replace(sampling, temperature=1.0, seed=rng.randrange(2**32), n=rng.randint(2, 4))
        return GenerateRequest(
            request_id=f"{kind}-{next(self._numbers)}",
            prompt_token_ids=[rng.randrange(self._engine.vocab_size) for _ in range(rng.randint(1, 40))],
            session_id=f"session-{rng.randrange(NUM_SESSIONS)}" if kind == "session" else None,
            sampling=sampling,
            timeout_s=600.0,
        )

    async def _complete(self, request: GenerateRequest) -> None:
        generation = await self._rb.complete(request)
        assert generation.error is None, f"{request.request_id}: {generation.error}"
        check_results([generation], [request])
        versions = {*generation.weight_versions.tolist()}
        self._count(generation.attempts, versions, len(generation.token_ids))
        await assert_fresh(generation, request, self._checkpoints, self._engine)

    async def _stream(self, request: GenerateRequest) -> None:
        chunks = [chunk async for chunk in self._rb.generate(request)]
        check_stream(chunks, request)
        end = chunks[-1].end
        assert end.error is None, f"{request.request_id}: {end.error}"
        tokens = [token for chunk in chunks for token in chunk.token_ids.tolist()]
        versions = [chunk.weight_version for chunk in chunks for _ in range(chunk.num_tokens)]
        self._count(len({chunk.attempt for chunk in chunks}), {*versions}, len(tokens))
        await assert_fresh_tokens(versions, tokens, request, self._checkpoints, self._engine)

    async def _group(self, request: GenerateRequest) -> None:
        """Check the samples of a request. Samples of several versions have no undisturbed result to compare with."""
        generation = await self._rb.complete(request)
        assert generation.error is None, f"{request.request_id}: {generation.error}"
        check_results([generation], [request])
        children = [generation, *generation.siblings]
        versions = {version for child in children for version in child.weight_versions.tolist()}
        for child in children:
            self._count(child.attempts, {*child.weight_versions.tolist()}, len(child.token_ids))
        if len(versions) == 1:
            expected = await undisturbed([request], self._engine, self._checkpoints[versions.pop()])
            whole = expected[request.request_id]
            for child, other in zip(children, [whole, *whole.siblings], strict=True):
                for name in ("token_ids", "logprobs", "routed_experts"):
                    np.testing.assert_array_equal(getattr(child, name), getattr(other, name), err_msg=name)

    def _count(self, attempts: int, versions: set[int], num_tokens: int) -> None:
        self.attempts[attempts] += 1
        self.num_mixed += len(versions) > 1
        self.num_tokens += num_tokens
