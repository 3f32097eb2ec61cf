"""The synthetic model: computes its output from prompts and from hashes of all earlier tokens.

No computed data is stored, not even as KV: the KV transfer parameters contain everything that a real connector would
fetch. So the engines of the two phases of a request may run in one process or in two. The weights are numbers that are
mixed into the output.
"""

import base64
import binascii
import hashlib
import itertools
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ....bus.protocol.stream.engine_step import RequestStep
from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import ControlCode, ControlError, InvalidRequest
from ....schemas.request import GenerateRequest
from ....schemas.rows import DTYPES, Rows, dtype_for
from ....schemas.sampling import SamplingParams
from .config import SyntheticConfig

MULTIPLIER = 0x9E3779B97F4A7C15
"""An odd number, so that its powers are never 0 modulo 2**64."""
MASK = 2**64 - 1
BLOCK_TOKENS = 16
"""Number of tokens in a block. The cache finds whole blocks only."""
READ_BYTES = 1024**2
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LOGPROBS = -np.arange(1024, dtype=np.float32) / np.float32(256)
"""The values that a log probability can have."""
_POWERS = np.multiply.accumulate(np.full(1024, MULTIPLIER, np.uint64))
"""The factors of the tokens of a usual prompt in its hash."""


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of splitmix64 for each value: every input bit affects every output bit."""
    mixed = values >> _SHIFTS[0]
    mixed ^= values
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def mix_one(value: int) -> int:
    """Return `mix` of one number modulo 2**64."""
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


class SyntheticKv(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one prompt. Its KV transfer parameters are this struct as msgpack."""

    num_tokens: int
    """Number of tokens of the prompt."""
    context: int
    """Hash of these tokens, in order."""
    weights: int
    """Weights of the model, with its adapter, that computed the KV."""

    def num_loaded(self, prompt_len: int) -> int:
        """Return the number of tokens that a prompt loads from this KV: whole blocks, but never its last token.

        Args:
            prompt_len: length of a prompt that begins with the prompt of this KV.
        """
        return min(self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, prompt_len - 1)


class PrefixCache:
    """The cached prefixes of prompts, by salt.

    The least recently used blocks are evicted first. Of one prompt, the last blocks are evicted first.

    Args:
        max_tokens: number of tokens that fit into the cache.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        # For each block, the time of its last use on the monotonic clock; the oldest block first.
        self._blocks: dict[tuple[str, int], float] = {}
        self._has_forgotten = False
        self.num_queried = self.num_hits = 0
        """Number of prompt tokens that were looked up, and the number of these that were found."""

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._blocks)

    def add_prompt(self, salt: str, contexts: npt.NDArray[np.uint64]) -> int:
        """Add a prompt. Return the number of its tokens that were cached before; the last token never counts.

        Args:
            contexts: u8[Lp], the hash of the prompt up to each position.
        """
        blocks = [(salt, int(context)) for context in contexts[BLOCK_TOKENS - 1 : -1 : BLOCK_TOKENS]]
        num_known = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        now = time.monotonic()
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = now
        self._has_forgotten |= len(self._blocks) > self._max_blocks
        for block in list(itertools.islice(self._blocks, max(len(self._blocks) - self._max_blocks, 0))):
            del self._blocks[block]
        return num_known * BLOCK_TOKENS

    def counts(self) -> dict[str, int]:
        """Return the counters under their names in `EngineStats`."""
        return {"prefix_cache_queries": self.num_queried, "prefix_cache_hits": self.num_hits}

    def oldest_s(self, now: float) -> float | None:
        """Return the seconds since the last use of the oldest cached prefix; None: none was evicted since `clear`."""
        return now - next(iter(self._blocks.values()), now) if self._has_forgotten else None

    def clear(self) -> None:
        """Remove all prefixes."""
        self._blocks.clear()
        self._has_forgotten = False


class SyntheticWeights(NamedTuple):
    """The numbers on which the output of a model depends besides the tokens."""

    tokens: int
    """Number that is mixed into tokens and logprobs."""
    experts: int
    """Number that is mixed into the routed experts. It differs from `tokens` only in an engine with a fault."""

    @classmethod
    def of(cls, checksum: int) -> "SyntheticWeights":
        """Return the weights of a checkpoint with this checksum, or of a seed."""
        return cls(mix_one(checksum), mix_one(checksum))

    def with_wrong_experts(self) -> "SyntheticWeights":
        """Return weights with the same tokens and other routed experts."""
        return SyntheticWeights(self.tokens, mix_one(self.experts))

    def with_adapter(self, checksum: int) -> "SyntheticWeights":
        """Return the weights after the change by the LoRA adapter with this checksum."""
        delta = mix_one(checksum)
        return SyntheticWeights((self.tokens + delta) & MASK, (self.experts + delta) & MASK)


@dataclass(frozen=True, slots=True)
class SyntheticAdapter:
    """A loaded LoRA adapter."""

    version: int
    checksum: int
    salt: int
    """Salt of the prefix cache. Each load has another salt, so requests do not find older entries."""


DROPPED = SyntheticWeights.of(-1)
"""Weights that are missing or incomplete. No checkpoint gives the same output."""


def checksum_of(folder: Path) -> int:
    """Return a checksum of the bytes of all `*.safetensors` files in `folder`, in the order of their names.

    Raises:
        ControlError: `engine_error`: there are no files, or a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=7)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ControlError(ControlCode.ENGINE_ERROR, f"folder {folder} has no *.safetensors files")
    try:
        for path in files:
            with path.open("rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
    except OSError as exc:
        raise ControlError(ControlCode.ENGINE_ERROR, f"{exc}") from exc
    return int.from_bytes(digest.digest(), "little")


class ReceivedWeights:
    """Weights that arrive in chunks: `{"data": base64}` appends bytes, `{"seed": n}` names a model.

    The bytes of a checkpoint's files, in the order of their names, give the same weights as the checkpoint.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=7)
        self._has_bytes = False
        self._seed: int | None = None

    def add(self, info: Mapping[str, Any]) -> None:
        """Add one chunk.

        Raises:
            ControlError: `engine_error`: the chunk has neither data nor seed, or its data is not base64. Nothing was
                added.
        """
        data, seed = info.get("data"), info.get("seed")
        if isinstance(data, str):
            try:
                self._digest.update(base64.b64decode(data, validate=True))
            except binascii.Error as exc:
                raise ControlError(ControlCode.ENGINE_ERROR, f"info.data is not base64: {exc}") from None
            self._has_bytes = True
        elif isinstance(seed, int):
            self._seed = seed
        else:
            raise ControlError(ControlCode.ENGINE_ERROR, "info has neither data (base64) nor seed (an integer)")

    def weights(self) -> SyntheticWeights:
        """Return the received weights.

        Raises:
            ControlError: `half_written`: no weights were received.
        """
        if self._seed is not None:
            return SyntheticWeights.of(self._seed)
        if not self._has_bytes:
            raise ControlError(ControlCode.HALF_WRITTEN, "the weight update received no weights")
        return SyntheticWeights.of(int.from_bytes(self._digest.digest(), "little"))


@dataclass(slots=True)
class Running:
    """A request inside the engine."""

    key: str
    request: GenerateRequest
    salt: str
    """Salt of the request's entries in the prefix cache. Only requests with the same salt share entries."""
    context: int = 0
    """Hash of the prompt tokens, in order; 0 before the prefill."""
    length: int = 0
    """Number of prompt tokens; 0 before the prefill."""
    keeps_kv: bool = False
    """True for a prefill phase."""
    scheduled_at: float = 0.0
    """Time on the monotonic clock at which the engine started the request."""
    kv: SyntheticKv | None = None
    """KV of the beginning of the prompt, which another engine computed; None: there is none."""
    kv_delta: int = 0
    """Difference of the weights that computed `kv` or earlier parts of the prompt from the weights of the last part.

    It is 0 unless different weights computed the prompt. It changes the sampled tokens.
    """
    parts: list[tuple[int, SyntheticWeights]] = field(default_factory=list)
    """The computed part of the prompt: for each step, the number of tokens and the weights."""

    @property
    def num_prefilled(self) -> int:
        """Number of computed prompt tokens."""
        return sum(count for count, _ in self.parts)

    @property
    def has_routed_experts(self) -> bool:
        """True if the request wants routed experts; the model may have no experts."""
        return self.request.return_routed_experts is not False

    @property
    def is_special(self) -> bool:
        """True if the request restricts its tokens, has stop tokens, or wants the most likely alternatives."""
        sampling = self.request.sampling
        return bool(sampling.logprobs or sampling.allowed_token_ids or sampling.stop_token_ids)

    @property
    def is_stateful(self) -> bool:
        """True if the next token depends on more than the context."""
        sampling = self.request.sampling
        return (sampling.temperature > 0 and sampling.top_k != 1) or not sampling.is_continuable

    def begin_sampler(self) -> tuple[int, int]:
        """Return two numbers modulo 2**64, which are added besides the token.

        The first is added to the context for the choice of the first token, the second with each later token.
        """
        if not self.is_stateful:
            return self.kv_delta, 0
        seed = self.request.sampling.seed
        seed = zlib.crc32(self.key.encode()) if seed is None else seed
        return (self.kv_delta + mix_one(seed + 1) + MULTIPLIER) & MASK, MULTIPLIER


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The output of a prompt, which is part of the first step of its request."""

    routed_experts: Rows | None
    routed_experts_start: int
    prompt_logprobs: PromptLogprobs | None
    cached_tokens: int

    def add_to(self, step: RequestStep) -> None:
        """Add this output to the first step of the request."""
        step.routed_experts, step.routed_experts_start = self.routed_experts, self.routed_experts_start
        step.prompt_logprobs, step.cached_tokens = self.prompt_logprobs, self.cached_tokens


class SyntheticModel:
    """Computes the output of a model from hashes.

    Args:
        cache: prefix cache; None: no prompt is cached.
    """

    def __init__(self, config: SyntheticConfig, cache: PrefixCache | None) -> None:
        self.config = config
        self._cache = cache
        self._layers = np.arange(config.num_layers, dtype=np.uint64) * np.array(MULTIPLIER, np.uint64)
        self._choices = np.arange(config.top_k, dtype=np.uint64)
        self._num_experts = np.uint64(config.num_experts)
        self._row_dtype = DTYPES[dtype_for(max(config.num_experts, 1))]

    def check(self, request: GenerateRequest) -> None:
        """Validate that the request allows a sampling mask, if the engine returns sampling masks.

        vLLM rejects the same requests. With this check, tests notice a request of the worker itself that vLLM would
        reject.

        Raises:
            InvalidRequest: `temperature` or `top_k` is not above 0.
        """
        sampling = request.sampling
        for name, value in {"temperature": sampling.temperature, "top_k": sampling.top_k}.items():
            if self.config.sampling_mask and value <= 0:
                raise InvalidRequest(
                    f"sampling.{name}", f"is {value:g}", "above 0, because the engine returns sampling masks"
                )

    def advance(self, running: Running, weights: SyntheticWeights) -> bool:
        """Compute the part of a prompt that fits into one step. Return True if the whole prompt is computed."""
        left = running.request.prompt_len - running.num_prefilled
        count = min(self.config.prefill_step_tokens or left, left)
        running.parts.append((count, weights))
        return count == left

    def prefill(self, running: Running) -> Prefilled:
        """Return the output of a prompt that `advance` has computed."""
        request, weights = running.request, running.parts[-1][1]
        num_loaded, start = 0, request.routed_experts_prompt_start
        if running.kv is not None:
            num_loaded = running.kv.num_loaded(request.prompt_len)
            running.kv_delta = running.kv.weights - weights.tokens
        running.kv_delta += sum(part.tokens - weights.tokens for _, part in running.parts)
        running.kv_delta &= MASK
        contexts = _hash_prefixes(np.asarray(request.prompt_token_ids))
        running.context, running.length = int(contexts[-1]), len(contexts)
        rows = None
        if self.config.num_experts and running.has_routed_experts:
            experts = np.repeat(
                np.array([part.experts for _, part in running.parts], np.uint64), [count for count, _ in running.parts]
            )
            rows = self.rows(contexts[start:], experts[start:])
            # This engine did not compute the loaded positions. In a real engine their rows belong to another
            # request.
            rows[: max(num_loaded - start, 0)] = 0
        return Prefilled(
            routed_experts=rows,
            routed_experts_start=start,
            prompt_logprobs=self._prompt_logprobs(contexts, request.sampling, weights),
            cached_tokens=max(self._find_cached(running, contexts), num_loaded),
        )

    def fits(self, kv: SyntheticKv, request: GenerateRequest) -> bool:
        """True if this KV belongs to the beginning of the request's prompt."""
        tokens = np.asarray(request.prompt_token_ids)[: kv.num_tokens]
        return len(tokens) > 0 and int(_hash_prefixes(tokens)[-1]) == kv.context

    def rows(self, contexts: npt.NDArray[np.uint64], weights: np.uint64 | npt.NDArray[np.uint64]) -> Rows:
        """Return distinct experts for each position and layer, u1|u2[n, num_layers, top_k]."""
        firsts = mix(mix(contexts + weights)[:, None] + self._layers) % self._num_experts
        chosen = firsts[:, :, None] + self._choices
        chosen %= self._num_experts
        return chosen.astype(self._row_dtype)

    def finish(self, running: Running, token: int, count: int, length: int) -> tuple[FinishReason | None, int | None]:
        """Return the finish reason if the request ends with `token`, and the stop token that ended it, if one did.

        Args:
            count: number of generated tokens, including `token`.
            length: number of tokens before `token`, including the prompt.
        """
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
        """Return the log probability of each choice."""
        # numpy converts other indices than signed integers.
        return _LOGPROBS.take(((choices >> np.uint64(40)) & np.uint64(1023)).view(np.int64))

    def top_logprobs(self, choice: int, width: int | None) -> TopLogprobs | None:
        """Return the `width` most likely tokens at the position of `choice`; None: no tokens are wanted."""
        if not width:
            return None
        ids = [(choice + i) % self.config.vocab_size for i in range(width)]
        logprobs = self.logprobs(np.array([choice], np.uint64))[0] - np.arange(width, dtype="<f4")
        return TopLogprobs(width, np.array(ids).astype("<i4").tobytes(), logprobs.astype("<f4").tobytes())

    def sampling_mask(self, token: int, top_k: int) -> SamplingMask:
        """Return the mask from which `token` was sampled. It follows from the token, so tests can compute it."""
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
        width = sampling.prompt_logprobs
        if width is None:
            return None
        choices = mix(contexts[:-1] + np.array(weights.tokens, np.uint64))
        tops = [top for choice in choices if (top := self.top_logprobs(int(choice), width)) is not None]
        ids, logprobs = b"".join(top.token_ids_data for top in tops), b"".join(top.logprobs_data for top in tops)
        top = TopLogprobs(width, ids, logprobs) if width else None
        return PromptLogprobs(start=1, logprobs_data=self.logprobs(choices).tobytes(), top=top)


def _hash_prefixes(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Return the hash of `tokens`, in order, up to each position."""
    num_tokens = len(tokens)
    powers = _POWERS[:num_tokens]
    if len(powers) < num_tokens:
        powers = np.multiply.accumulate(np.full(num_tokens, MULTIPLIER, np.uint64))
    factors = tokens.astype(np.uint64)
    factors += np.uint64(1)
    factors *= powers
    return np.add.accumulate(factors)
