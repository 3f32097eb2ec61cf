"""The running requests of a synthetic engine, as a table.

A step is a few operations on the columns of the table, independent of the number of rows.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ....bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ....schemas.chunk import FinishReason
from ....schemas.presence import EngineStats
from ..rates import TokenRates
from .model import MULTIPLIER, Prefilled, Running, SyntheticKv, SyntheticModel, SyntheticWeights, mix

Column = npt.NDArray[np.uint64]

_COLUMNS = np.dtype(
    [
        # Hash of all tokens so far, in order; their number; and the factor of the next token in the hash.
        ("context", "u8"),
        ("length", "u8"),
        ("power", "u8"),
        # Number of generated tokens, their limit, and the last token, which is not in the context yet.
        ("count", "u8"),
        ("limit", "u8"),
        ("last", "u8"),
        # Index of the first generated token that may be the end-of-sequence token.
        ("may_stop_at", "u8"),
        # State of the sampler, and the constant that each step adds to it besides the token. 0: sampling has no
        # state.
        ("sampler", "u8"),
        ("draw", "u8"),
    ]
)
"""One row for each request. The columns are unsigned, because hashes are computed modulo 2**64."""


class SyntheticBatch:
    """The requests that an engine runs.

    Args:
        weights_of: returns the current weights for the name of an adapter, or for None (no adapter).
    """

    def __init__(self, model: SyntheticModel, weights_of: Callable[[str | None], SyntheticWeights]) -> None:
        self._model = model
        self._config = model.config
        self._weights_of = weights_of
        self._running: list[Running] = []
        self._table = np.empty(0, _COLUMNS)
        self._keys: list[str] = []
        # `_special`: rows whose tokens or logprobs do not follow from the columns alone. `_is_alike`: mask of the rows
        # that want only the common output.
        self._special: list[int] = []
        self._is_alike: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._has_loras = self._has_routing = False
        # Keys of the requests whose KV the next step recomputes.
        self._preempted: set[str] = set()
        self.preempt_every = 0
        self._num_preemptions = 0
        self.rates = TokenRates()
        self.prefill_s = 0.0
        """Additional seconds of the last step, for the prompt tokens that it computed."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._running)

    def remove(self, keys: Collection[str]) -> list[str]:
        """Remove these requests. Return the keys that were in the batch."""
        dropped = [running.key for running in self._running if running.key in keys]
        if dropped:
            self._keep([running.key not in keys for running in self._running])
        return dropped

    def preempt(self) -> None:
        """Preempt all requests: their next step recomputes their KV."""
        self._preempted.update(self._keys)

    def stats(self, num_prefilling: int, num_waiting: int) -> EngineStats:
        """Return the load of the engine, which also has these requests outside of the batch."""
        prefill, decode = self.rates.prefill, self.rates.decode
        return EngineStats(
            kv_cache_use=min(int(self._table["length"].sum()) / self._config.kv_cache_tokens, 1.0),
            running=len(self) + num_prefilling,
            waiting=num_waiting,
            preemptions=self._num_preemptions,
            prefill_tokens_per_s=None if prefill is None else round(prefill, 3),
            decode_tokens_per_s=None if decode is None else round(decode, 3),
            kv_cache_tokens=self._config.kv_cache_tokens,
        )

    def clear(self) -> None:
        """Remove all requests."""
        self._keep([False] * len(self._running))

    def _keep(self, is_kept: Sequence[bool]) -> None:
        self._set(
            [running for running, kept in zip(self._running, is_kept, strict=True) if kept],
            self._table[np.array(is_kept, np.bool_)],
        )

    def _set(self, running: list[Running], table: npt.NDArray[np.void]) -> None:
        self._running, self._table = running, table
        self._keys = [one.key for one in running]
        self._special = [i for i, one in enumerate(running) if one.is_special]
        self._has_loras = any(one.request.lora is not None for one in running)
        has_experts = self._config.num_experts > 0
        self._has_routing = has_experts and any(one.has_routed_experts for one in running)
        self._is_alike = np.array(
            [
                not one.is_special
                and not self._has_masks(one)
                and (has_experts and one.has_routed_experts) == self._has_routing
                for one in running
            ],
            np.bool_,
        )

    def _has_masks(self, running: Running) -> bool:
        return self._config.sampling_mask and running.request.return_sampling_mask is not False

    def step(self, joining: Sequence[Running]) -> list[RequestStep | TokenBatch]:
        """Compute the last token of each request and the prompts of `joining`, then sample one token for each."""
        self._append_last()
        self.prefill_s = 0.0
        num_old = len(self._running)
        is_recomputed = self._pop_preempted()
        prefilled = [self._model.prefill(running) for running in joining]
        if joining:
            rows = np.array([self._make_row(running) for running in joining], _COLUMNS)
            self._set([*self._running, *joining], np.concatenate([self._table, rows]))
        if not self._running:
            return []
        tokens, experts = self._read_weights()
        choices = mix(self._table["context"] + self._table["sampler"] + tokens)
        made = self._make_batch(choices, self._sample(choices), experts)
        is_plain = self._is_alike & ~self._may_be_over()
        is_plain[num_old:] = False
        is_plain[:num_old][is_recomputed] = False
        batch = made if is_plain.all() else made.pick(is_plain.nonzero()[0].tolist())
        apart = (~is_plain).nonzero()[0].tolist()
        steps = made.pick(apart).split() if apart else []
        for i, step in zip(apart, steps, strict=True):
            self._add_requested(step, self._running[i], int(choices[i]))
            step.kv_recomputed = i < num_old and bool(is_recomputed[i])
        for step, extra in zip(steps[len(steps) - len(joining) :], prefilled, strict=True):
            extra.add_to(step)
        self._measure(joining, prefilled, num_old)
        self._end(apart, steps)
        return [batch, *steps] if len(batch) else list(steps)

    def _measure(self, joining: Sequence[Running], prefilled: Sequence[Prefilled], num_old: int) -> None:
        """Measure the step that ends now: the prompts of `joining`, and one token of each older request."""
        num_computed = 0
        for running, extra in zip(joining, prefilled, strict=True):
            num_computed += running.length - extra.cached_tokens
            self.rates.add_prefill(running.length - extra.cached_tokens, running.scheduled_at)
        self.prefill_s = num_computed * self._config.prefill_token_s
        self.rates.end_step(time.monotonic() + self.prefill_s, num_old)

    def _pop_preempted(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows whose KV this step recomputes, and clear the set of preempted requests."""
        if not self._preempted and not self.preempt_every:
            return np.zeros(len(self._keys), np.bool_)
        preempted, self._preempted = self._preempted, set()
        is_preempted = np.array([key in preempted for key in self._keys], np.bool_)
        if self.preempt_every:
            is_preempted |= self._table["count"] % np.uint64(self.preempt_every) == 0
        self._num_preemptions += int(is_preempted.sum())
        return is_preempted

    def _append_last(self) -> None:
        table = self._table
        table["context"] += (table["last"] + np.uint64(1)) * table["power"]
        table["power"] *= np.uint64(MULTIPLIER)
        table["length"] += np.uint64(1)

    def _make_row(self, running: Running) -> tuple[int, ...]:
        """Return the row of a request whose prompt was computed."""
        sampling, length = running.request.sampling, running.length
        room = max(self._config.max_model_len - length, 1)
        return (
            running.context,
            length,
            pow(MULTIPLIER, length + 1, 2**64),
            0,
            room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            0,
            self._config.max_model_len if sampling.ignore_eos else sampling.min_tokens,
            running.first_sampler_state,
            MULTIPLIER if running.is_stateful else 0,
        )

    def _read_weights(self) -> tuple[Column, Column]:
        """Return the weights for tokens and for experts: one value for each row, or one value for all rows."""
        if not self._has_loras:
            weights = self._weights_of(None)
            return np.array(weights.tokens, np.uint64), np.array(weights.experts, np.uint64)
        rows = [self._weights_of(running.request.lora) for running in self._running]
        return np.array([row.tokens for row in rows], np.uint64), np.array([row.experts for row in rows], np.uint64)

    def _sample(self, choices: Column) -> Column:
        """Return the next token of each row."""
        table, config = self._table, self._config
        sampled = choices % np.uint64(config.vocab_size)
        sampled += (sampled == config.eos_token_id) & (table["count"] < table["may_stop_at"])
        for i in self._special:
            allowed = self._running[i].request.sampling.allowed_token_ids
            if allowed:
                sampled[i] = allowed[int(choices[i]) % len(allowed)]
        table["last"] = sampled
        table["count"] += np.uint64(1)
        table["sampler"] += np.where(table["draw"], table["draw"] + sampled, np.uint64(0))
        return sampled

    def _make_batch(self, choices: Column, sampled: Column, experts: Column) -> TokenBatch:
        """Return the output that all requests have in common, even for requests that do not want it."""
        table = self._table
        return TokenBatch(
            keys=self._keys,
            token_ids=sampled.astype(np.int32),
            logprobs=self._model.logprobs(choices),
            routed_experts=self._model.rows(table["context"], experts) if self._has_routing else None,
            routed_experts_starts=table["length"].astype(np.int64) - 1 if self._has_routing else None,
        )

    def _may_be_over(self) -> npt.NDArray[np.bool_]:
        table = self._table
        is_full: npt.NDArray[np.bool_] = table["count"] >= table["limit"]
        is_full |= table["last"] == self._config.eos_token_id
        return is_full

    def _add_requested(self, step: RequestStep, running: Running, choice: int) -> None:
        """Add the output that this request wants to its step, and remove the output that it does not want."""
        width = running.request.sampling.logprobs
        if width is None:
            step.logprobs = None
        step.top_logprobs = self._model.top_logprobs(choice, width)
        if self._has_masks(running):
            step.sampling_mask = self._model.sampling_mask(int(step.token_ids[0]), running.request.sampling.top_k)
        if not running.has_routed_experts:
            step.routed_experts, step.routed_experts_start = None, 0

    def _end(self, rows: Sequence[int], steps: Sequence[RequestStep]) -> None:
        """Set the finish reason of each last step, and remove the requests that ended."""
        table = self._table
        is_kept = [True] * len(self._running)
        for i, step in zip(rows, steps, strict=True):
            running = self._running[i]
            count, length = int(table["count"][i]), int(table["length"][i])
            step.finish_reason, step.stop_reason = self._model.finish(running, int(step.token_ids[0]), count, length)
            if step.finish_reason is FinishReason.LENGTH and running.keeps_kv:
                weights = self._weights_of(running.request.lora)
                kv = SyntheticKv(num_tokens=length, context=int(table["context"][i]), weights=weights.tokens)
                step.kv_params = msgspec.msgpack.encode(kv)
            is_kept[i] = step.finish_reason is None
        if not all(is_kept):
            self._keep(is_kept)


def ending_step(key: str, reason: FinishReason, **fields: Any) -> RequestStep:
    """Return a step that ends a request and adds no tokens."""
    return RequestStep(key=key, token_ids=np.empty(0, np.int32), finish_reason=reason, **fields)
