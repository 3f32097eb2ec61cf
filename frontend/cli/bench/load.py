"""Creates the requests of a bench. They have the same size, and their prompts are in no prefix cache."""

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
    """The size of each request, and the data to request for each token."""

    input_tokens: int
    output_tokens: int
    logprobs: int | None = 0
    """The field `logprobs` of `SamplingParams`."""
    routing: bool | None = None
    """The field `return_routed_experts` of each request."""
    cache_salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Salt of all requests. Because of it, prefixes that an earlier run with the same seed cached are not found."""

    def check(self, engines: Sequence[Capabilities]) -> None:
        """Check that each of the engines supports this load.

        Raises:
            CommandFailed: an engine does not support it. The message has the option and the allowed values.
        """
        positions = self.input_tokens + self.output_tokens
        max_model_len = min(engine.max_model_len for engine in engines)
        if positions > max_model_len:
            raise refused(
                f"--input-tokens {self.input_tokens} and --output-tokens {self.output_tokens} are {positions} together",
                f"at most {max_model_len}, the max_model_len of the workers",
            )
        max_logprobs = min(engine.max_logprobs for engine in engines)
        if self.logprobs is not None and self.logprobs > max_logprobs:
            raise refused(
                f"--logprobs {self.logprobs}", f"none, or 0 to {max_logprobs}, the max_logprobs of the workers"
            )
        if self.routing and any(engine.routed_experts is None for engine in engines):
            raise refused("--routing", "--no-routing, because the model has no experts")

    def requests(self, model: str, vocab_size: int, count: int, rng: np.random.Generator) -> Iterator[GenerateRequest]:
        """Yield `count` requests with prompts from `rng`."""
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
