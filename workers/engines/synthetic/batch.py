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
from ..rates import TokenRates, sum_rates
from .model import MULTIPLIER, Prefilled, Running, SyntheticKv, SyntheticModel, SyntheticWeights, mix

Column = npt.NDArray[np.uint64]

_COLUMNS = (
    # Hash of all tokens so far, in order, and the factor of the next token in the hash.
    "context",
    "power",
    # Number of prompt tokens; number of generated tokens, and their limit; the last token, which is not in the context
    # yet.
    "prompt",
    "count",
    "limit",
    "last",
    # Index of the first generated token that may be the end-of-sequence token.
    "may_stop_at",
    # State of the sampler, and the constant that each step adds to it besides the token. 0: sampling has no state.
    "sampler",
    "draw",
    # A sum of the following constants.
    "kind",
)
"""One column for each property of the requests. They are unsigned, because hashes are computed modulo 2**64."""
_ROUTED, _LOGPROBS, _APART, _SPECIAL, _ADAPTED, _STATEFUL = 1, 2, 4, 8, 16, 32
"""Kinds of requests: it wants routed experts; it wants logprobs; it wants other than the common output; its tokens or
logprobs do not follow from the columns alone; it uses an adapter; its sampler has a state."""
_COMMON = _ROUTED | _LOGPROBS
_FIRST_ROOM = 64
_ONE = np.uint64(1)
_MULTIPLIER = np.uint64(MULTIPLIER)


class SyntheticBatch:
    """The requests that an engine runs.

    Args:
        weights_of: returns the current weights for the name of an adapter, or for None (no adapter).
    """

    def __init__(self, model: SyntheticModel, weights_of: Callable[[str | None], SyntheticWeights]) -> None:
        self._model = model
        self._config = model.config
        self._eos = np.uint64(self._config.eos_token_id)
        self._vocab_size = np.uint64(self._config.vocab_size)
        self._weights_of = weights_of
        # The columns, with room for more requests. `_table` has views of the rows in use, by name.
        self._columns = np.zeros((len(_COLUMNS), _FIRST_ROOM), np.uint64)
        self._set([], [])
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
            self._keep([i for i, running in enumerate(self._running) if running.key not in keys])
        return dropped

    def preempt(self) -> None:
        """Preempt all requests: their next step recomputes their KV."""
        self._preempted.update(self._keys)

    def stats(self, num_prefilling: int, num_waiting: int) -> EngineStats:
        """Return the load of the engine, which also has these requests outside of the batch."""
        # The last token of each request is not in the KV cache.
        num_computed = int(self._table["prompt"].sum() + self._table["count"].sum()) - len(self)
        return EngineStats(
            kv_cache_use=min(num_computed / self._config.kv_cache_tokens, 1.0),
            running=len(self) + num_prefilling,
            waiting=num_waiting,
            preemptions=self._num_preemptions,
            prefill_tokens_per_s=sum_rates([self.rates.prefill]),
            decode_tokens_per_s=sum_rates([self.rates.decode]),
            kv_cache_tokens=self._config.kv_cache_tokens,
        )

    def clear(self) -> None:
        """Remove all requests."""
        self._set([], [])

    def _keep(self, rows: Sequence[int]) -> None:
        self._columns[:, : len(rows)] = self._columns[:, rows]
        self._set([self._running[i] for i in rows], [self._keys[i] for i in rows])

    def _join(self, joining: Sequence[Running]) -> None:
        rows = np.array([self._make_row(running) for running in joining], np.uint64)
        old, new = len(self._running), len(self._running) + len(joining)
        if new > self._columns.shape[1]:
            grown = np.zeros((len(_COLUMNS), 2 * new), np.uint64)
            grown[:, :old] = self._columns[:, :old]
            self._columns = grown
        self._columns[:, old:new] = rows.T
        self._set([*self._running, *joining], [*self._keys, *[running.key for running in joining]])

    def _set(self, running: list[Running], keys: list[str]) -> None:
        self._running, self._keys = running, keys
        self._table = dict(zip(_COLUMNS, self._columns[:, : len(running)], strict=True))
        self._has_changed = True

    def _read_kinds(self) -> None:
        """Read the kinds of all requests, after the requests have changed."""
        kinds, self._has_changed = self._table["kind"], False
        found = int(np.bitwise_or.reduce(kinds))
        self._special = (kinds & np.uint64(_SPECIAL)).nonzero()[0].tolist() if found & _SPECIAL else []
        self._has_loras, self._has_draws = bool(found & _ADAPTED), bool(found & _STATEFUL)
        self._has_routing, self._has_logprobs = bool(found & _ROUTED), bool(found & _LOGPROBS)
        # Mask of the rows that want only the common output.
        self._is_alike = kinds & np.uint64(_COMMON | _APART) == np.uint64(found & _COMMON)
        self._are_alike = np.count_nonzero(self._is_alike) == len(kinds)

    def _has_masks(self, running: Running) -> bool:
        return self._config.sampling_mask and running.request.return_sampling_mask is not False

    def step(self, joining: Sequence[Running]) -> list[RequestStep | TokenBatch]:
        """Compute the last token of each request and the prompts of `joining`, then sample one token for each."""
        self._append_last()
        self.prefill_s = 0.0
        num_old = len(self._running)
        is_recomputed = self._find_preempted()
        prefilled = [self._model.prefill(running) for running in joining]
        if joining:
            self._join(joining)
        if not self._running:
            return []
        if self._has_changed:
            self._read_kinds()
        tokens, experts = self._read_weights()
        choices = mix(self._table["context"] + self._table["sampler"] + tokens)
        made = self._make_batch(choices, self._sample(choices), experts)
        is_over = self._may_be_over()
        if not joining and is_recomputed is None and self._are_alike and not np.count_nonzero(is_over):
            self._measure(joining, prefilled, num_old)
            return [made]
        is_plain = self._is_alike & ~is_over
        is_plain[num_old:] = False
        if is_recomputed is not None:
            is_plain[:num_old][is_recomputed] = False
        batch = made.pick(is_plain.nonzero()[0].tolist())
        apart = (~is_plain).nonzero()[0].tolist()
        steps = made.pick(apart).split()
        for i, step in zip(apart, steps, strict=True):
            self._add_requested(step, self._running[i], int(choices[i]))
            step.kv_recomputed = is_recomputed is not None and i < num_old and bool(is_recomputed[i])
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

    def _find_preempted(self) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the rows whose KV this step recomputes, and clear the set of preempted requests.

        None: no row.
        """
        if not self._preempted and not self.preempt_every:
            return None
        preempted, self._preempted = self._preempted, set()
        is_preempted = np.array([key in preempted for key in self._keys], np.bool_)
        if self.preempt_every:
            is_preempted |= self._table["count"] % np.uint64(self.preempt_every) == 0
        self._num_preemptions += int(is_preempted.sum())
        return is_preempted

    def _append_last(self) -> None:
        table = self._table
        table["context"] += (table["last"] + _ONE) * table["power"]
        table["power"] *= _MULTIPLIER

    def _make_row(self, running: Running) -> tuple[int, ...]:
        """Return the row of a request whose prompt was computed."""
        request, length = running.request, running.length
        sampling = request.sampling
        room = max(self._config.max_model_len - length, 1)
        sampler, draw = running.begin_sampler()
        kind = _ROUTED if self._config.num_experts and running.has_routed_experts else 0
        if sampling.logprobs is not None:
            kind |= _LOGPROBS
        if running.is_special:
            kind |= _SPECIAL | _APART
        if self._has_masks(running):
            kind |= _APART
        if request.lora is not None:
            kind |= _ADAPTED
        return (
            running.context,
            pow(MULTIPLIER, length + 1, 2**64),
            length,
            0,
            room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            0,
            self._config.max_model_len if sampling.ignore_eos else sampling.min_tokens,
            sampler,
            draw,
            kind | _STATEFUL if draw else kind,
        )

    def _read_weights(self) -> tuple[np.uint64 | Column, np.uint64 | Column]:
        """Return the weights for tokens and for experts: one value for each row, or one value for all rows."""
        if not self._has_loras:
            weights = self._weights_of(None)
            return np.uint64(weights.tokens), np.uint64(weights.experts)
        rows = [self._weights_of(running.request.lora) for running in self._running]
        return np.array([row.tokens for row in rows], np.uint64), np.array([row.experts for row in rows], np.uint64)

    def _sample(self, choices: Column) -> Column:
        """Return the next token of each row."""
        table = self._table
        sampled = choices % self._vocab_size
        is_end = sampled == self._eos
        if np.count_nonzero(is_end):
            sampled += is_end & (table["count"] < table["may_stop_at"])
        for i in self._special:
            allowed = self._running[i].request.sampling.allowed_token_ids
            if allowed:
                sampled[i] = allowed[int(choices[i]) % len(allowed)]
        table["last"][:] = sampled
        table["count"] += _ONE
        if self._has_draws:
            table["sampler"] += np.where(table["draw"], table["draw"] + sampled, np.uint64(0))
        return sampled

    def _make_batch(self, choices: Column, sampled: Column, experts: np.uint64 | Column) -> TokenBatch:
        """Return the output that all requests have in common, even for requests that do not want it."""
        rows = starts = None
        if self._has_routing:
            table = self._table
            rows = self._model.rows(table["context"], experts)
            # The row of the position before the sampled token.
            starts = (table["prompt"] + table["count"]).astype(np.int64) - 2
        return TokenBatch(
            keys=self._keys,
            token_ids=sampled.astype(np.int32),
            logprobs=self._model.logprobs(choices) if self._has_logprobs else None,
            routed_experts=rows,
            routed_experts_starts=starts,
        )

    def _may_be_over(self) -> npt.NDArray[np.bool_]:
        table = self._table
        is_full: npt.NDArray[np.bool_] = table["count"] >= table["limit"]
        is_full |= table["last"] == self._eos
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
        ended: set[int] = set()
        for i, step in zip(rows, steps, strict=True):
            running = self._running[i]
            count = int(table["count"][i])
            length = running.length + count - 1
            step.finish_reason, step.stop_reason = self._model.finish(running, int(step.token_ids[0]), count, length)
            if step.finish_reason is FinishReason.LENGTH and running.keeps_kv:
                weights = self._weights_of(running.request.lora)
                kv = SyntheticKv(num_tokens=length, context=int(table["context"][i]), weights=weights.tokens)
                step.kv_params = msgspec.msgpack.encode(kv)
            if step.finish_reason is not None:
                ended.add(i)
        if ended:
            self._keep([i for i in range(len(self._running)) if i not in ended])


def ending_step(key: str, reason: FinishReason, **fields: Any) -> RequestStep:
    """Return a step that ends a request and adds no tokens."""
    return RequestStep(key=key, token_ids=np.empty(0, np.int32), finish_reason=reason, **fields)
