"""The synthetic model: what it makes of prompts, and of numbers that stand for all that came before."""

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bus.protocol.step import RequestStep
from schemas.chunk import FinishReason, PromptLogprobs, TopLogprobs
from schemas.request import GenerateRequest
from schemas.rows import DTYPES, Rows, dtype_for
from schemas.sampling import SamplingParams
from workers.engines.synthetic.cache import PrefixCache
from workers.engines.synthetic.config import SyntheticConfig
from workers.engines.synthetic.hashing import MASK, MULTIPLIER, mix, mix_one
from workers.engines.synthetic.kv import Kv
from workers.engines.synthetic.weights import Weights

__all__ = ["Prefilled", "Running", "SyntheticModel"]


@dataclass(slots=True)
class Running:
    """A request inside the engine."""

    key: str
    request: GenerateRequest
    salt: str
    """Of its entries in the prefix cache: they are shared only between requests of the same."""
    context: int = 0
    """A hash of its prompt, in order; 0 before the prefill."""
    length: int = 0
    """Tokens of its prompt; 0 before the prefill."""
    keeps_kv: bool = False
    """It is a prefill leg."""
    kv: Kv | None = None
    """Of the beginning of its prompt, computed by another engine; None: there is none."""
    kv_delta: int = 0
    """Between the weights of `kv` and those that went on from there, which is 0 unless somebody mixed them."""

    @property
    def has_routing(self) -> bool:
        """Routing is wanted, should the model have experts."""
        return self.request.return_routed_experts is not False

    @property
    def is_special(self) -> bool:
        """Its tokens are not just any, or not each with its logprob alone."""
        sampling = self.request.sampling
        return bool(sampling.logprobs != 0 or sampling.allowed_token_ids or sampling.stop_token_ids)

    @property
    def is_stateful(self) -> bool:
        """The next token depends on more than the context."""
        sampling = self.request.sampling
        return sampling.temperature > 0 or not sampling.is_continuable

    @property
    def first_sampler_state(self) -> int:
        """What is added to the context for the choice of the first token, modulo 2**64."""
        if not self.is_stateful:
            return self.kv_delta
        seed = self.request.sampling.seed
        seed = zlib.crc32(self.key.encode()) if seed is None else seed
        return (self.kv_delta + mix_one(seed + 1) + MULTIPLIER) & MASK


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prompt brings with its request's first step."""

    routed_experts: Rows | None
    routed_experts_start: int
    prompt_logprobs: PromptLogprobs | None
    cached_tokens: int

    def add_to(self, step: RequestStep) -> None:
        """Put it in the first step."""
        step.routed_experts, step.routed_experts_start = self.routed_experts, self.routed_experts_start
        step.prompt_logprobs, step.cached_tokens = self.prompt_logprobs, self.cached_tokens


class SyntheticModel:
    """Computes from hashes what a model would compute.

    Args:
        cache: of prompts; None: nothing is remembered.
    """

    def __init__(self, config: SyntheticConfig, cache: PrefixCache | None) -> None:
        self.config = config
        self._cache = cache

    def prefill(self, running: Running, weights: Weights) -> Prefilled:
        """Take a prompt through the model."""
        request = running.request
        num_loaded, start = 0, request.routed_experts_prompt_start
        if running.kv is not None:
            num_loaded = running.kv.num_loaded(request.prompt_len)
            running.kv_delta = (running.kv.weights - weights.tokens) & MASK
        contexts = _contexts(np.asarray(request.prompt_token_ids))
        running.context, running.length = int(contexts[-1]), len(contexts)
        rows = None
        if self.config.num_experts and running.has_routing:
            rows = self.rows(contexts[start:], np.array(weights.experts, np.uint64))
            # Nobody has computed these here: what lies in their place is of some other request.
            rows[: max(num_loaded - start, 0)] = 0
        return Prefilled(
            routed_experts=rows,
            routed_experts_start=start,
            prompt_logprobs=self._prompt_logprobs(contexts, request.sampling, weights),
            cached_tokens=max(self._find_cached(running, contexts), num_loaded),
        )

    def fits(self, kv: Kv, request: GenerateRequest) -> bool:
        """It is of the beginning of this prompt."""
        tokens = np.asarray(request.prompt_token_ids)[: kv.num_tokens]
        return len(tokens) > 0 and int(_contexts(tokens)[-1]) == kv.context

    def rows(self, contexts: npt.NDArray[np.uint64], weights: npt.NDArray[np.uint64]) -> Rows:
        """Distinct experts for each position and layer, u1|u2[n, num_layers, top_k]."""
        config = self.config
        mixed = mix(contexts + weights)
        layers = np.arange(config.num_layers, dtype=np.uint64) * np.array(MULTIPLIER, np.uint64)
        firsts = mix(mixed[:, None] + layers) % np.uint64(config.num_experts)
        chosen = (firsts[:, :, None] + np.arange(config.top_k, dtype=np.uint64)) % np.uint64(config.num_experts)
        return chosen.astype(DTYPES[dtype_for(config.num_experts)])

    def finish(self, running: Running, token: int, count: int, length: int) -> tuple[FinishReason | None, int | None]:
        """Whether a request ends with `token`, its `count`th, sampled behind `length` others; the stop token if so."""
        sampling = running.request.sampling
        if count > sampling.min_tokens or count == sampling.max_tokens:
            if token == self.config.eos_token_id and not sampling.ignore_eos:
                return FinishReason.STOP, None
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if count == sampling.max_tokens or length + 1 >= self.config.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    @staticmethod
    def logprobs(choices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """The log probability of each choice."""
        return -((choices >> np.uint64(40)) % np.uint64(1024)).astype(np.float32) / np.float32(256)

    def top_logprobs(self, choice: int, width: int | None) -> TopLogprobs | None:
        """The `width` most likely tokens where `choice` was made."""
        if not width:
            return None
        ids = [(choice + i) % self.config.vocab_size for i in range(width)]
        logprobs = self.logprobs(np.array([choice], np.uint64))[0] - np.arange(width, dtype="<f4")
        return TopLogprobs(width, np.array(ids).astype("<i4").tobytes(), logprobs.astype("<f4").tobytes())

    def _find_cached(self, running: Running, contexts: npt.NDArray[np.uint64]) -> int:
        if self._cache is None:
            return 0
        num_cached = self._cache.take(running.salt, contexts)
        return num_cached if running.request.sampling.prompt_logprobs is None else 0

    def _prompt_logprobs(
        self, contexts: npt.NDArray[np.uint64], sampling: SamplingParams, weights: Weights
    ) -> PromptLogprobs | None:
        if sampling.prompt_logprobs is None:
            return None
        choices = mix(contexts[:-1] + np.array(weights.tokens, np.uint64))
        tops = [self.top_logprobs(int(choice), sampling.prompt_logprobs) for choice in choices]
        width = sampling.prompt_logprobs
        top = None
        if width:
            top = TopLogprobs(
                width,
                b"".join(t.token_ids_data for t in tops if t is not None),
                b"".join(t.logprobs_data for t in tops if t is not None),
            )
        return PromptLogprobs(start=1, logprobs_data=self.logprobs(choices).tobytes(), top=top)


def _contexts(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A hash of `tokens`, in order, up to each of them."""
    powers = np.full(len(tokens), MULTIPLIER, np.uint64)
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers))
