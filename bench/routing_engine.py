"""An engine with precomputed routed experts, so that a bench measures only their transport to the client."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import DTYPES, Rows, dtype_for
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

CLOCK = 2**31
"""Token ids count microseconds below this number, which is half an hour, and then start from 0 again."""


class Case(NamedTuple):
    """The routed experts of one request. All its tokens except one belong to the prompt."""

    num_tokens: int
    """Number of rows: all tokens of prompt and answer except the last."""
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_tokens * self.num_layers * self.top_k * DTYPES[dtype_for(self.num_experts)].itemsize


CASES = {"u1": Case(32_768, 48, 8, 128), "u2": Case(32_768, 61, 8, 384)}
"""Cases by the dtype of their rows: 12.6 MB as in Qwen3-30B-A3B, and 32 MB as in Kimi-K2."""


def make_rows(case: Case) -> Rows:
    """Return u1|u2[num_tokens, num_layers, top_k], the same each time."""
    shape = (case.num_tokens, case.num_layers, case.top_k)
    dtype = DTYPES[dtype_for(case.num_experts)]
    return np.random.default_rng(1).integers(0, case.num_experts, shape, dtype)


def clock_us() -> int:
    """Return the microseconds that token ids count, on the clock that all processes of a machine share."""
    return time.monotonic_ns() // 1000 % CLOCK


class RoutedEngine(SyntheticEngine):
    """A synthetic engine with the rows of a case. Its token ids are the time at which the engine output them.

    No request may be longer than the case.

    Args:
        step_s: seconds between two steps.
        is_fresh: True: each request's rows are a new array, as in a real engine, so that their memory counts. False:
            all rows are views of one array, so that an engine in the process of its worker needs no time for copies.

    Attributes:
        handed_at: time of the output of the last step, on `time.monotonic()`.
    """

    def __init__(self, case: Case, *, step_s: float, is_fresh: bool) -> None:
        super().__init__(SyntheticConfig(num_experts=0, step_s=step_s))
        _, num_layers, top_k, num_experts = case
        routing = RoutedExpertsInfo(
            num_layers=num_layers, top_k=top_k, num_experts=num_experts, dtype=dtype_for(num_experts)
        )
        self.capabilities = replace(self.capabilities, routed_experts=routing, vocab_size=CLOCK)
        self._rows = make_rows(case)
        self._is_fresh = is_fresh
        self._positions: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self.handed_at = 0.0

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Queue a request."""
        self._positions[key], self._prompts[key] = request.routed_experts_prompt_start, request.prompt_len
        await super().add(key, request, kv)

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield one batch of output for each step, with its rows."""
        async for made in super().steps():
            steps = split(made)
            for step in steps:
                self._route(step)
            now = clock_us()
            for step in steps:
                step.token_ids[:] = now
            self.handed_at = time.monotonic()
            yield steps

    def _route(self, step: RequestStep) -> None:
        """Add the prompt's rows to the first token, and one row to each further token."""
        if len(step.token_ids):
            start = self._positions[step.key]
            end = max(start + 1, self._prompts[step.key])
            rows = self._rows[start:end]
            step.routed_experts = rows.copy() if self._is_fresh else rows
            step.routed_experts_start = start
            self._positions[step.key] = end
        if step.finish_reason is not None:
            del self._positions[step.key], self._prompts[step.key]
