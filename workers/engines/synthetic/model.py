"""The synthetic model: what it makes of prompts, and of numbers that stand for all that came before."""

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....bus.protocol.stream.engine_step import RequestStep
from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import InvalidRequest
from ....schemas.request import GenerateRequest
from ....schemas.rows import DTYPES, Rows, dtype_for
from ....schemas.sampling import SamplingParams
from .config import SyntheticConfig
from .hashing import MASK, MULTIPLIER, mix, mix_one
from .kv import PrefixCache, SyntheticKv
from .weights import SyntheticWeights

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
    scheduled_at: float = 0.0
    """When the engine began with it, by the monotonic clock."""
    kv: SyntheticKv | None = None
    """Of the beginning of its prompt, computed by another engine; None: there is none."""
    kv_delta: int = 0
    """Between the weights of `kv`, or of parts of the prompt, and those that went on from there, which is 0 unless
    weights were mixed."""
    parts: list[tuple[int, SyntheticWeights]] = field(default_factory=list)
    """The prompt as far as it was computed: how many tokens one step after the other, with which weights."""

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens that were computed."""
        return sum(count for count, _ in self.parts)

    @property
    def has_routed_experts(self) -> bool:
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
        return (sampling.temperature > 0 and sampling.top_k != 1) or not sampling.is_continuable

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

    def check(self, request: GenerateRequest) -> None:
        """Refuse what vLLM refuses where it makes sampling masks, so that it is known of requests of the worker's own.

        Raises:
            InvalidRequest: it is sampled in another way.
        """
        sampling = request.sampling
        for name, value in {"temperature": sampling.temperature, "top_k": sampling.top_k}.items():
            if self.config.sampling_mask and value <= 0:
                raise InvalidRequest(
                    field=f"sampling.{name}",
                    problem=f"is {value:g}",
                    allowed="above 0 where the engine makes sampling masks",
                )

    def advance(self, running: Running, weights: SyntheticWeights) -> bool:
        """Take as much of a prompt through the model as one step does; True: that was the rest."""
        left = running.request.prompt_len - running.num_prefilled
        count = min(self.config.prefill_step_tokens or left, left)
        running.parts.append((count, weights))
        return count == left

    def prefill(self, running: Running) -> Prefilled:
        """What comes of a prompt that `advance` has taken through the model."""
        request, weights = running.request, running.parts[-1][1]
        num_loaded, start = 0, request.routed_experts_prompt_start
        if running.kv is not None:
            num_loaded = running.kv.num_loaded(request.prompt_len)
            running.kv_delta = running.kv.weights - weights.tokens
        running.kv_delta += sum(part.tokens - weights.tokens for _, part in running.parts)
        running.kv_delta &= MASK
        contexts = _contexts(np.asarray(request.prompt_token_ids))
        running.context, running.length = int(contexts[-1]), len(contexts)
        rows = None
        if self.config.num_experts and running.has_routed_experts:
            experts = np.repeat(
                np.array([part.experts for _, part in running.parts], np.uint64), [count for count, _ in running.parts]
            )
            rows = self.rows(contexts[start:], experts[start:])
            # Nobody has computed these here: what lies in their place is of some other request.
            rows[: max(num_loaded - start, 0)] = 0
        return Prefilled(
            routed_experts=rows,
            routed_experts_start=start,
            prompt_logprobs=self._prompt_logprobs(contexts, request.sampling, weights),
            cached_tokens=max(self._find_cached(running, contexts), num_loaded),
        )

    def fits(self, kv: SyntheticKv, request: GenerateRequest) -> bool:
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

    def sampling_mask(self, token: int, top_k: int) -> SamplingMask:
        """What `token` was sampled from: it follows from the token, so that tests know it without the engine."""
        count = 1 + mix_one(token) % min(top_k, self.config.vocab_size)
        ids = (token + np.arange(count)) % self.config.vocab_size
        return SamplingMask(np.array([count]).astype("<i4").tobytes(), ids.astype("<i4").tobytes())

    def _find_cached(self, running: Running, contexts: npt.NDArray[np.uint64]) -> int:
        if self._cache is None:
            return 0
        num_cached = self._cache.add_prompt(running.salt, contexts)
        if running.request.sampling.prompt_logprobs is not None:
            return 0
        self._cache.num_queried += len(contexts)
        self._cache.num_hits += num_cached
        return num_cached

    def _prompt_logprobs(
        self, contexts: npt.NDArray[np.uint64], sampling: SamplingParams, weights: SyntheticWeights
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
