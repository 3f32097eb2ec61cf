"""What a bench asks of a fleet: requests of one size, with prompts that nobody has seen before."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....bus import GenerateRequest, SamplingParams
from ....schemas.presence import Capabilities
from ..exits import CommandFailed, ExitCode

__all__ = ["BenchLoad", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The size of each request, and what is to come back with its tokens."""

    input_tokens: int
    output_tokens: int
    logprobs: int | None = 0
    """As in `SamplingParams`."""
    routing: bool | None = None
    """As `return_routed_experts` of a request."""
    cache_salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of all requests: what an earlier run with the same seed left in prefix caches is not found."""

    def check(self, engines: Sequence[Capabilities]) -> None:
        """See whether each of the engines can do it.

        Raises:
            CommandFailed: one cannot; the message names the option and what is allowed.
        """
        positions = self.input_tokens + self.output_tokens
        max_model_len = min(engine.max_model_len for engine in engines)
        if positions > max_model_len:
            raise refused(
                f"--input-tokens {self.input_tokens} and --output-tokens {self.output_tokens} are {positions} together",
                f"{max_model_len}, the max_model_len of the workers",
            )
        max_logprobs = min(engine.max_logprobs for engine in engines)
        if self.logprobs is not None and self.logprobs > max_logprobs:
            raise refused(f"--logprobs {self.logprobs}", f"none, or 0 to {max_logprobs}, as the workers say")
        if self.routing and any(engine.routed_experts is None for engine in engines):
            raise refused("--routing", "--no-routing, as the model has no experts")

    def requests(self, model: str, vocab_size: int, count: int, rng: np.random.Generator) -> Iterator[GenerateRequest]:
        """Make `count` requests, each as it is needed; their prompts are what `rng` gives next."""
        sampling = SamplingParams(max_tokens=self.output_tokens, ignore_eos=True, logprobs=self.logprobs)
        for _ in range(count):
            yield GenerateRequest(
                prompt_token_ids=rng.integers(vocab_size, size=self.input_tokens, dtype=np.int32),
                sampling=sampling,
                model=model,
                return_routed_experts=self.routing,
                cache_salt=self.cache_salt,
            )


def refused(what: str, allowed: str) -> CommandFailed:
    """Return the error for options that cannot be measured."""
    return CommandFailed(f"{what}; allowed: {allowed}", ExitCode.USAGE)
