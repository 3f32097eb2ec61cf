"""The synthetic model: what one step makes of one request."""

import zlib
from dataclasses import dataclass, field

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

__all__ = ["Running", "SyntheticModel"]


@dataclass(slots=True)
class Running:
    """A request inside the engine."""

    key: str
    request: GenerateRequest
    salt: str
    """Of its entries in the prefix cache: they are shared only between requests of the same."""
    context: int = 0
    """A hash of all tokens so far, in order."""
    length: int = 0
    """Tokens so far, prompt and generated; 0 before the prefill."""
    generated: list[int] = field(default_factory=list)
    keeps_kv: bool = False
    """It is a prefill leg."""
    kv: Kv | None = None
    """Of the beginning of its prompt, computed by another engine; None: there is none."""
    kv_delta: int = 0
    """Between the weights of `kv` and those that went on from there, which is 0 unless somebody mixed them."""


class SyntheticModel:
    """Computes from hashes what a model would compute.

    Args:
        cache: of prompts; None: nothing is remembered.
    """

    def __init__(self, config: SyntheticConfig, cache: PrefixCache | None) -> None:
        self._config = config
        self._cache = cache

    def advance(self, running: Running, weights: Weights) -> RequestStep:
        """Prefill, or take the last token through the model; then sample one token."""
        request, sampling = running.request, running.request.sampling
        first = running.length == 0
        num_loaded = 0
        if first:
            if running.kv is not None:
                num_loaded = running.kv.num_loaded(request.prompt_len)
                running.kv_delta = (running.kv.weights - weights.tokens) & MASK
            contexts = self._extend(running, np.asarray(request.prompt_token_ids))
            start = request.routed_experts_prompt_start
        else:
            contexts = self._extend(running, np.array(running.generated[-1:], np.int32))
            start = running.length - 1
        rows = None
        if self._config.num_experts and request.return_routed_experts is not False:
            rows = self._rows(contexts[start - (running.length - len(contexts)) :], weights)
            # Nobody has computed these here: what lies in their place is of some other request.
            rows[: max(num_loaded - start, 0)] = 0
        choice = self._choice(running, weights)
        token = self._token(choice, running)
        running.generated.append(token)
        finish_reason, stop_reason = self._finish(running, token)
        return RequestStep(
            key=running.key,
            token_ids=np.array([token], np.int32),
            logprobs=None if sampling.logprobs is None else self._logprobs(np.array([choice], np.uint64)),
            top_logprobs=self._top(choice, sampling.logprobs),
            prompt_logprobs=self._prompt_logprobs(contexts, sampling, weights) if first else None,
            routed_experts=rows,
            routed_experts_start=start,
            cached_tokens=max(self._find_cached(running, contexts), num_loaded) if first else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def kv_of(self, running: Running, weights: Weights) -> Kv:
        """The KV of a request's prompt, after one step."""
        return Kv(num_tokens=running.length, context=running.context, weights=weights.tokens)

    def fits(self, kv: Kv, request: GenerateRequest) -> bool:
        """It is of the beginning of this prompt."""
        tokens = np.asarray(request.prompt_token_ids)[: kv.num_tokens]
        return len(tokens) > 0 and int(self._extend(Running("", request, ""), tokens)[-1]) == kv.context

    def _extend(self, running: Running, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Take tokens into the context; u8[n], the context at each of their positions."""
        powers = np.full(len(tokens), MULTIPLIER, np.uint64)
        powers[0] = pow(MULTIPLIER, running.length + 1, 2**64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers)
        contexts: npt.NDArray[np.uint64] = np.cumsum(terms) + np.array(running.context, np.uint64)
        running.context = int(contexts[-1])
        running.length += len(tokens)
        return contexts

    def _find_cached(self, running: Running, contexts: npt.NDArray[np.uint64]) -> int:
        if self._cache is None:
            return 0
        num_cached = self._cache.take(running.salt, contexts)
        return num_cached if running.request.sampling.prompt_logprobs is None else 0

    def _rows(self, contexts: npt.NDArray[np.uint64], weights: Weights) -> Rows:
        """Distinct experts for each position and layer, u1|u2[n, num_layers, top_k]."""
        config = self._config
        mixed = mix(contexts + np.array(weights.experts, np.uint64))
        layers = np.arange(config.num_layers, dtype=np.uint64) * np.array(MULTIPLIER, np.uint64)
        firsts = mix(mixed[:, None] + layers) % np.uint64(config.num_experts)
        chosen = (firsts[:, :, None] + np.arange(config.top_k, dtype=np.uint64)) % np.uint64(config.num_experts)
        return chosen.astype(DTYPES[dtype_for(config.num_experts)])

    def _choice(self, running: Running, weights: Weights) -> int:
        """64 bits that decide the next token: of the context alone when sampling is stateless."""
        sampling = running.request.sampling
        state = running.context + weights.tokens + running.kv_delta
        if sampling.temperature > 0 or not sampling.is_continuable:
            seed = sampling.seed if sampling.seed is not None else zlib.crc32(running.key.encode())
            state += mix_one(seed + 1) + MULTIPLIER * (len(running.generated) + 1) + sum(running.generated)
        return mix_one(state)

    def _token(self, choice: int, running: Running) -> int:
        sampling = running.request.sampling
        if sampling.allowed_token_ids:
            return sampling.allowed_token_ids[choice % len(sampling.allowed_token_ids)]
        token = choice % self._config.vocab_size
        may_stop = not sampling.ignore_eos and len(running.generated) >= sampling.min_tokens
        return token if may_stop or token != self._config.eos_token_id else token + 1

    def _finish(self, running: Running, token: int) -> tuple[FinishReason | None, int | None]:
        sampling = running.request.sampling
        num_generated = len(running.generated)
        if num_generated > sampling.min_tokens or num_generated == sampling.max_tokens:
            if token == self._config.eos_token_id and not sampling.ignore_eos:
                return FinishReason.STOP, None
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if num_generated == sampling.max_tokens or running.length + 1 >= self._config.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    @staticmethod
    def _logprobs(choices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        return -((choices >> np.uint64(40)) % np.uint64(1024)).astype(np.float32) / np.float32(256)

    def _top(self, choice: int, width: int | None) -> TopLogprobs | None:
        if not width:
            return None
        ids = [(choice + i) % self._config.vocab_size for i in range(width)]
        logprobs = self._logprobs(np.array([choice], np.uint64))[0] - np.arange(width, dtype="<f4")
        return TopLogprobs(width, np.array(ids).astype("<i4").tobytes(), logprobs.astype("<f4").tobytes())

    def _prompt_logprobs(
        self, contexts: npt.NDArray[np.uint64], sampling: SamplingParams, weights: Weights
    ) -> PromptLogprobs | None:
        if sampling.prompt_logprobs is None:
            return None
        choices = mix(contexts[:-1] + np.array(weights.tokens, np.uint64))
        tops = [self._top(int(choice), sampling.prompt_logprobs) for choice in choices]
        width = sampling.prompt_logprobs
        top = None
        if width:
            top = TopLogprobs(
                width,
                b"".join(t.token_ids_data for t in tops if t is not None),
                b"".join(t.logprobs_data for t in tops if t is not None),
            )
        return PromptLogprobs(start=1, logprobs_data=self._logprobs(choices).tobytes(), top=top)
