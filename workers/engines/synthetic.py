"""A deterministic engine without a model, for benches and fault tests. Nothing it says is about a real engine.

Tokens, logprobs and routing are functions of the tokens before them, so that any split of a request into attempts
can be checked. Seeded sampling also depends on how many tokens this attempt has made, as a real random generator's
state does, and penalties on what this attempt has made: a resumed request differs exactly where a real one would.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bus.protocol.step import RequestStep
from schemas.chunk import FinishReason, PromptLogprobs, TopLogprobs
from schemas.errors import EngineDead, InvalidRequest
from schemas.presence import Capabilities, RoutedExpertsInfo
from schemas.request import GenerateRequest
from schemas.rows import DTYPES, Rows, dtype_for
from schemas.sampling import SamplingParams

__all__ = ["SyntheticConfig", "SyntheticEngine"]

MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that its powers never vanish modulo 2**64."""
MASK = 2**64 - 1


class SyntheticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The make of a synthetic model and the pace of its engine."""

    seed: int = 0
    """The weights: another seed is another model."""
    step_s: float = 0.0
    """Seconds that one step takes; 0: as fast as it goes."""
    max_num_seqs: int = 256
    """Requests in one step."""
    max_model_len: int = 65_536
    vocab_size: int = 32_000
    eos_token_id: int = 2
    num_layers: int = 4
    top_k: int = 4
    num_experts: int = 16
    """0: a model without experts, which returns no routing."""
    die_after_steps: int | None = None
    """Let the engine die after so many steps, as a real one may."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "SyntheticConfig":
        """Build from `--engine-args`.

        Raises:
            InvalidRequest: an unknown argument or a value of the wrong type.
        """
        try:
            return msgspec.convert(dict(args), cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(
                field="engine_args", problem=f"{exc}", allowed=", ".join(cls.__struct_fields__)
            ) from None


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_one(value: int) -> int:
    return int(_mix(np.array([value & MASK], np.uint64))[0])


@dataclass(slots=True)
class _Running:
    """A request inside the engine."""

    key: str
    request: GenerateRequest
    context: int = 0
    """A hash of all tokens so far, in order."""
    length: int = 0
    """Tokens so far, prompt and generated; 0 before the prefill."""
    generated: list[int] = field(default_factory=list)


class SyntheticEngine:
    """An `Engine` that computes its output from hashes; see the module."""

    def __init__(self, config: SyntheticConfig | None = None) -> None:
        self._config = config or SyntheticConfig()
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._aborted: list[str] = []
        self._wake = asyncio.Event()
        self._num_steps = 0
        self._dead: str | None = None

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<SyntheticEngine running={len(self._running)} waiting={len(self._waiting)} steps={self._num_steps}>"

    @property
    def capabilities(self) -> Capabilities:
        """What the configuration says."""
        config = self._config
        routing = None
        if config.num_experts:
            routing = RoutedExpertsInfo(
                num_layers=config.num_layers,
                top_k=config.top_k,
                num_experts=config.num_experts,
                dtype=dtype_for(config.num_experts),
            )
        return Capabilities(
            engine="synthetic",
            engine_version="1",
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_logprobs=20,
            dtype="none",
            routed_experts=routing,
            priority=True,
        )

    async def start(self) -> None:
        """Nothing to load."""

    async def add(self, key: str, request: GenerateRequest) -> None:
        """Queue a request, before all that are less urgent."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        at = len(self._waiting)
        while at and self._waiting[at - 1].request.priority > request.priority:
            at -= 1
        self._waiting.insert(at, _Running(key, request))
        self._wake.set()

    async def abort(self, keys: Sequence[str]) -> None:
        """End requests with the next step; unknown keys are ignored."""
        self._aborted.extend(keys)
        self._wake.set()

    async def close(self) -> None:
        """Forget all requests; `steps` raises."""
        self._dead = self._dead or "the engine was closed"
        self._waiting.clear()
        self._running.clear()
        self._wake.set()

    def kill(self, reason: str = "killed") -> None:
        """Die as a real engine does: at once, with requests open."""
        self._dead = reason
        self._wake.set()

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield one batch of output a step; waits while there is nothing to do."""
        while True:
            while not self._waiting and not self._running and not self._aborted and self._dead is None:
                self._wake.clear()
                await self._wake.wait()
            # The pace of the engine; at 0 still a chance for everyone else.
            await asyncio.sleep(self._config.step_s)
            if self._num_steps == self._config.die_after_steps:
                self._dead = f"died after {self._num_steps} steps, as configured"
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._num_steps += 1
            yield self._step()

    def _step(self) -> list[RequestStep]:
        aborted, self._aborted = self._aborted, []
        output = [step for key in aborted for step in self._abort(key)]
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            running = self._waiting.popleft()
            self._running[running.key] = running
        for running in list(self._running.values()):
            step = self._advance(running)
            if step.finish_reason is not None:
                del self._running[running.key]
            output.append(step)
        return output

    def _abort(self, key: str) -> list[RequestStep]:
        waiting = next((w for w in self._waiting if w.key == key), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        elif self._running.pop(key, None) is None:
            return []
        return [RequestStep(key=key, token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ABORT)]

    def _advance(self, running: _Running) -> RequestStep:
        """Prefill, or take the last token through the model; then sample one token."""
        request = running.request
        first = running.length == 0
        if first:
            contexts = self._extend(running, np.asarray(request.prompt_token_ids))
            start = request.routed_experts_prompt_start
        else:
            contexts = self._extend(running, np.array(running.generated[-1:], np.int32))
            start = running.length - 1
        rows = None
        if self._config.num_experts and request.return_routed_experts is not False:
            rows = self._rows(contexts[start - (running.length - len(contexts)) :])
        sampling = request.sampling
        choice = self._choice(running)
        token = self._token(choice, running)
        running.generated.append(token)
        finish_reason, stop_reason = self._finish(running, token)
        return RequestStep(
            key=running.key,
            token_ids=np.array([token], np.int32),
            logprobs=None if sampling.logprobs is None else self._logprobs(np.array([choice], np.uint64)),
            top_logprobs=self._top(choice, sampling.logprobs),
            prompt_logprobs=self._prompt_logprobs(contexts, sampling) if first else None,
            routed_experts=rows,
            routed_experts_start=start,
            cached_tokens=0 if first else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _extend(self, running: _Running, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Take tokens into the context; u8[n], the mixed context at each of their positions."""
        powers = np.full(len(tokens), MULTIPLIER, np.uint64)
        powers[0] = pow(MULTIPLIER, running.length + 1, 2**64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers)
        contexts = np.cumsum(terms) + np.array(running.context, np.uint64)
        running.context = int(contexts[-1])
        running.length += len(tokens)
        return _mix(contexts + np.array(_mix_one(self._config.seed), np.uint64))

    def _rows(self, contexts: npt.NDArray[np.uint64]) -> Rows:
        """Distinct experts for each position and layer, u1|u2[n, num_layers, top_k]."""
        config = self._config
        layers = np.arange(config.num_layers, dtype=np.uint64) * np.array(MULTIPLIER, np.uint64)
        firsts = _mix(contexts[:, None] + layers) % np.uint64(config.num_experts)
        chosen = (firsts[:, :, None] + np.arange(config.top_k, dtype=np.uint64)) % np.uint64(config.num_experts)
        return chosen.astype(DTYPES[dtype_for(config.num_experts)])

    def _choice(self, running: _Running) -> int:
        """64 bits that decide the next token: of the context alone when sampling is stateless."""
        sampling = running.request.sampling
        state = running.context + _mix_one(self._config.seed)
        if sampling.temperature > 0 or not sampling.is_continuable:
            seed = sampling.seed if sampling.seed is not None else zlib.crc32(running.key.encode())
            state += _mix_one(seed + 1) + MULTIPLIER * (len(running.generated) + 1) + sum(running.generated)
        return _mix_one(state)

    def _token(self, choice: int, running: _Running) -> int:
        sampling = running.request.sampling
        if sampling.allowed_token_ids:
            return sampling.allowed_token_ids[choice % len(sampling.allowed_token_ids)]
        token = choice % self._config.vocab_size
        may_stop = not sampling.ignore_eos and len(running.generated) >= sampling.min_tokens
        return token if may_stop or token != self._config.eos_token_id else token + 1

    def _finish(self, running: _Running, token: int) -> tuple[FinishReason | None, int | None]:
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

    def _prompt_logprobs(self, contexts: npt.NDArray[np.uint64], sampling: SamplingParams) -> PromptLogprobs | None:
        if sampling.prompt_logprobs is None:
            return None
        tops = [self._top(int(context), sampling.prompt_logprobs) for context in contexts[:-1]]
        width = sampling.prompt_logprobs
        top = None
        if width:
            top = TopLogprobs(
                width,
                b"".join(t.token_ids_data for t in tops if t is not None),
                b"".join(t.logprobs_data for t in tops if t is not None),
            )
        return PromptLogprobs(start=1, logprobs_data=self._logprobs(contexts[:-1]).tobytes(), top=top)
