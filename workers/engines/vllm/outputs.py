"""Converts engine outputs to `RequestStep`s. Counts tokens and rows, and fails a request whose output is invalid."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import ErrorCode
from ....schemas.messages import KvTransfer
from ....schemas.presence import RoutedExpertsInfo
from ....schemas.request import GenerateRequest
from ....schemas.rows import Rows, expected_rows, no_rows, rows_as_wire
from ....schemas.sampling import SamplingParams
from .kv.config import encode_params
from .params import no_token_left

VllmMask = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]] | None, Any]
"""vLLM's `SamplingMaskLists` (v1/outputs.py): all ids, the offset of each token's ids, and an unused field.
Without offsets, all ids belong to one token, as in every step of 0.30."""
KV_NOT_LOADED = "the KV of the prompt could not be loaded; the engine's log gives the reason"


def mask_of(mask: VllmMask | None, token_ids: Sequence[int], vocab_size: int) -> SamplingMask:
    """Return the mask for the tokens of one step.

    Raises:
        ValueError: the mask is missing, belongs to other tokens, or has ids outside of the vocabulary.
    """
    if mask is None:
        raise ValueError(f"no mask for {len(token_ids)} tokens")
    ids, offsets = np.asarray(mask[0]), mask[1]
    offsets = np.array([0, len(ids)]) if offsets is None else np.asarray(offsets)
    if len(offsets) != len(token_ids) + 1 or not 0 <= offsets[0] <= offsets[-1] <= len(ids):
        raise ValueError(f"mask of {len(offsets) - 1} tokens with {len(ids)} ids, for {len(token_ids)} tokens")
    ids = ids[offsets[0] : offsets[-1]]
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}; allowed: 0 to below {vocab_size}")
    counts = np.diff(offsets)
    found = SamplingMask(counts.astype("<i4").tobytes(), ids.astype("<i4").tobytes())
    for token_id, own in zip(token_ids, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        if token_id not in own:
            raise ValueError(f"token {token_id} is not among the {len(own)} ids of its mask")
    return found


class LogprobTable(NamedTuple):
    """Log probabilities from vLLM: column 0 is the token itself, then come the most likely tokens, best first.

    In a batch of requests with different `logprobs`, every table is as wide as the widest table
    (v1/sample/sampler.py: gather_logprobs). Only the first `logprobs` columns after column 0 belong to the request.
    """

    token_ids: npt.NDArray[np.integer[Any]]
    """[positions, width]"""
    logprobs: npt.NDArray[np.floating[Any]]
    """[positions, width]"""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Output of one request in one engine report, in vLLM's terms."""

    engine_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobTable | None = None
    prompt_logprobs: LogprobTable | None = None
    """Positions 1 to Lp - 1."""
    routed_experts: npt.NDArray[Any] | None = None
    cached_tokens: int | None = None
    num_external: int = 0
    """Number of `cached_tokens` that a KV connector loaded, if the engine reports it."""
    was_recomputed: bool = False
    """True if this is the first output after a preemption, after which the engine recomputed the KV."""
    kv_params: Mapping[str, Any] | None = None
    """With `finish_reason`: the KV transfer parameters for the worker that continues the request."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sampling_mask: VllmMask | None = None
    """The token sets from which the tokens of this output were sampled."""
    error: str = "the engine failed this request; its log gives the reason"
    """Only with `finish_reason` ERROR."""

    @property
    def is_plain(self) -> bool:
        """True if the output has one token and neither begins nor ends the request."""
        return (
            len(self.token_ids) == 1
            and self.finish_reason is None
            and self.prompt_logprobs is None
            and self.cached_tokens is None
            and not self.was_recomputed
        )


class Restarted(NamedTuple):
    """A request that must be added to the engine again."""

    old_id: str
    """Engine id of the old submission, which must be aborted."""
    new_id: str
    request: GenerateRequest


class _UnusableOutput(Exception):
    """The engine's output must not leave the worker. This fails the request and affects no other request."""


class _NotANumber(_UnusableOutput):
    """The engine computed NaN."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """One request in the engine."""

    key: str
    prompt_len: int
    start: int
    returns_rows: bool
    returns_masks: bool
    sampling: SamplingParams
    kv: KvTransfer | None
    request: GenerateRequest | None
    """The request as submitted, until it has a token: a restart submits it again."""
    num_tokens: int = 0
    num_rows: int = 0
    has_begun: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the request has a token and needs at most a logprob and a row for each further token."""
        return self.request is None and not self.sampling.logprobs and self.kv is None and not self.returns_masks

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key of the batches that the request may join: whether it needs logprobs and routed experts."""
        return self.sampling.logprobs is not None, self.returns_rows


class OpenRequests:
    """Table of the requests that the engine has accepted and not ended.

    Invariant: the rows returned for a request start at its `start`, have no gap, and match the number of the row rule
    after each step.

    Args:
        routing: layout of the routed experts; None: the engine returns no routed experts.
        vocab_size: vocabulary size if the engine creates sampling masks, else None.
    """

    def __init__(self, routing: RoutedExpertsInfo | None, *, vocab_size: int | None = None) -> None:
        self._routing = routing
        self._mask_vocab_size = vocab_size
        self._open: dict[str, _Open] = {}
        self._engine_ids: dict[str, str] = {}
        self._num_opened = 0
        self.has_seen_nan = False
        """True if a request received NaN: the engine's KV cache may contain NaN. Code that clears the cache sets this
        to False.
        """

    def __len__(self) -> int:
        return len(self._open)

    def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> str:
        """Open a request and return its engine id, which is unique for the lifetime of the engine.

        A key may be used again before the late outputs of an aborted request arrive. The engine core dies if it
        receives an id that it already has.
        """
        engine_id = f"{self._num_opened}-{key}"
        self._num_opened += 1
        self._engine_ids[key] = engine_id
        self._open[engine_id] = _Open(
            key=key,
            prompt_len=request.prompt_len,
            start=request.routed_experts_prompt_start,
            returns_rows=self._routing is not None and request.return_routed_experts is not False,
            returns_masks=self._mask_vocab_size is not None and request.return_sampling_mask is not False,
            sampling=request.sampling,
            kv=kv,
            request=request,
        )
        return engine_id

    def restart(self, key: str) -> Restarted | None:
        """Open a request without a token again, under a new engine id; ignore later outputs of the old id.

        Returns:
            None: the request has a token, has a separate prefill or decode phase, or is not open.
        """
        old_id = self._engine_ids.get(key)
        old = None if old_id is None else self._open[old_id]
        if old_id is None or old is None or old.request is None or old.kv is not None:
            return None
        del self._open[old_id]
        return Restarted(old_id, self.add(key, old.request), old.request)

    def remove(self, engine_id: str) -> None:
        """Remove a request that the engine rejected or has ended."""
        request = self._open.pop(engine_id, None)
        if request is not None and self._engine_ids.get(request.key) == engine_id:
            del self._engine_ids[request.key]

    def engine_ids(self, keys: Iterable[str]) -> list[str]:
        """Return the engine ids of the open requests among `keys`."""
        return [self._engine_ids[key] for key in keys if key in self._engine_ids]

    def read(self, outputs: Iterable[StepOutput]) -> tuple[list[RequestStep | TokenBatch], list[str]]:
        """Convert the outputs of one step for the worker; ignore outputs of requests that are not open.

        Returns:
            The steps, and the engine ids of requests that failed here while the engine still runs them.
        """
        steps: list[RequestStep | TokenBatch] = []
        broken: list[str] = []
        plain: dict[tuple[bool, bool], list[tuple[_Open, StepOutput]]] = {}
        for output in outputs:
            request = self._open.get(output.engine_id)
            if request is None:
                continue
            if request.is_plain and output.is_plain:
                plain.setdefault(request.kind, []).append((request, output))
            else:
                steps.append(self._read_one(request, output, broken))
        for (has_logprobs, has_rows), found in plain.items():
            batch = self._batch(found, has_logprobs=has_logprobs, has_rows=has_rows)
            steps += [self._read_one(*one, broken) for one in found] if batch is None else [batch]
        return steps, broken

    def _read_one(self, request: _Open, output: StepOutput, broken: list[str]) -> RequestStep:
        try:
            step = self._step(request, output)
        except _UnusableOutput as exc:
            step = _fail_request(request, str(exc))
            if isinstance(exc, _NotANumber) and (fault := no_token_left(request.sampling)) is not None:
                step = _fail_request(request, fault.message, fault.code)
            self.has_seen_nan |= isinstance(exc, _NotANumber)
            if output.finish_reason is None:
                broken.append(output.engine_id)
        if step.finish_reason is not None:
            self.remove(output.engine_id)
        return step

    def _batch(
        self, found: Sequence[tuple[_Open, StepOutput]], *, has_logprobs: bool, has_rows: bool
    ) -> TokenBatch | None:
        """Return the batch of plain outputs of requests of one kind; None if one of the outputs is invalid."""
        logprobs = rows = starts = None
        if has_logprobs:
            tables = [output.logprobs for _, output in found]
            logprobs = np.array([np.nan if table is None else table.logprobs[0, 0] for table in tables], np.float32)
            if np.isnan(logprobs).any():
                return None
        if has_rows:
            rows = self._batch_rows([output.routed_experts for _, output in found])
            if rows is None:
                return None
            starts = np.array([request.start + request.num_rows for request, _ in found], np.int64)
        for request, _ in found:
            request.num_tokens += 1
            request.num_rows += has_rows
        return TokenBatch(
            keys=[request.key for request, _ in found],
            token_ids=np.array([output.token_ids[0] for _, output in found], np.int32),
            logprobs=logprobs,
            routed_experts=rows,
            routed_experts_starts=starts,
        )

    def _batch_rows(self, parts: Sequence[npt.NDArray[Any] | None]) -> Rows | None:
        """Return one row per part; None if a part has another shape. Earlier rows already match the earlier tokens."""
        routing = self._routing
        found = [part for part in parts if part is not None]
        if routing is None or len(found) < len(parts):
            return None
        expected = (1, routing.num_layers, routing.top_k)
        if any(part.shape != expected for part in found):
            return None
        try:
            return rows_as_wire(np.concatenate(found), routing.dtype)
        except ValueError:
            return None

    def _step(self, request: _Open, output: StepOutput) -> RequestStep:
        if output.finish_reason is FinishReason.ERROR:
            if request.kv is not None and not request.kv.is_prefill and not request.has_begun:
                return _fail_request(request, KV_NOT_LOADED, ErrorCode.KV_TRANSFER_FAILED)
            return _fail_request(request, output.error)
        token_ids = np.array(output.token_ids, np.int32)
        logprobs, top = _logprobs(request.sampling.logprobs, output.logprobs, len(token_ids))
        mask = self._mask(output) if request.returns_masks and len(token_ids) else None
        prompt_logprobs = None
        if not request.has_begun and len(token_ids) and request.sampling.prompt_logprobs is not None:
            prompt_logprobs = _prompt_logprobs(request, output.prompt_logprobs)
        rows_start = request.start + request.num_rows
        if output.num_external and request.returns_rows and request.start < (output.cached_tokens or 0):
            raise _UnusableOutput(
                f"a KV connector loaded {output.num_external} prompt tokens without a request for them; "
                "their routed experts are unknown"
            )
        rows = self._rows(request, output) if request.returns_rows else None
        stop = output.stop_reason
        step = RequestStep(
            key=request.key,
            token_ids=token_ids,
            logprobs=logprobs,
            top_logprobs=top,
            prompt_logprobs=prompt_logprobs,
            routed_experts=rows,
            routed_experts_start=rows_start,
            cached_tokens=None if request.has_begun else output.cached_tokens,
            finish_reason=output.finish_reason,
            # vLLM also reports a stop token that is one of the model's own end-of-sequence tokens.
            stop_reason=stop if isinstance(stop, int) and stop in request.sampling.stop_token_ids else None,
            kv_recomputed=output.was_recomputed and request.num_tokens > 0,
            kv_params=None if request.kv is None or not request.kv.is_prefill else encode_params(output.kv_params),
            sampling_mask=mask,
        )
        request.has_begun = True
        if len(token_ids):
            request.request = None
        request.num_tokens += len(token_ids)
        request.num_rows += 0 if rows is None else len(rows)
        return step

    def _mask(self, output: StepOutput) -> SamplingMask:
        try:
            return mask_of(output.sampling_mask, output.token_ids, self._mask_vocab_size or 0)
        except ValueError as exc:
            raise _UnusableOutput(f"the engine's sampling mask is invalid: {exc}") from exc

    def _rows(self, request: _Open, output: StepOutput) -> Rows:
        routing = self._routing
        if routing is None:
            raise _UnusableOutput("the engine returned routed experts for a model that has no experts")
        if output.routed_experts is None:
            rows = no_rows(routing.num_layers, routing.top_k, routing.dtype)
        else:
            try:
                rows = rows_as_wire(output.routed_experts, routing.dtype)
            except ValueError as exc:
                raise _UnusableOutput(f"the engine's routed experts are invalid: {exc}") from exc
        if rows.shape[1:] != (routing.num_layers, routing.top_k):
            raise _UnusableOutput(f"the engine's routed experts have the shape {rows.shape}")
        num_rows = request.num_rows + len(rows)
        num_tokens = request.num_tokens + len(output.token_ids)
        expected = expected_rows(request.prompt_len, request.start, num_tokens)
        if num_rows != expected:
            raise _UnusableOutput(
                f"the engine returned {num_rows} rows of routed experts for {num_tokens} tokens after a prompt of "
                f"{request.prompt_len} tokens, from position {request.start}; expected {expected} rows"
            )
        return rows


def _fail_request(request: _Open, error: str, code: ErrorCode = ErrorCode.ENGINE_ERROR) -> RequestStep:
    return RequestStep(
        key=request.key,
        token_ids=np.empty(0, np.int32),
        logprobs=None if request.sampling.logprobs is None else np.empty(0, np.float32),
        routed_experts_start=request.start + request.num_rows,
        finish_reason=FinishReason.ERROR,
        error=error,
        error_code=code,
    )


def _logprobs(
    num_logprobs: int | None, table: LogprobTable | None, num_tokens: int
) -> tuple[npt.NDArray[np.float32] | None, TopLogprobs | None]:
    """Return the sampled tokens' log probabilities f4[k] and the `num_logprobs` best alternatives at each position."""
    if num_logprobs is None:
        return None, None
    if num_tokens == 0:
        return np.empty(0, np.float32), None
    if table is None or len(table.logprobs) != num_tokens:
        raise _UnusableOutput(f"the engine returned no log probabilities for {num_tokens} tokens")
    return _split(table, num_logprobs)


def _prompt_logprobs(request: _Open, table: LogprobTable | None) -> PromptLogprobs:
    width = request.sampling.prompt_logprobs or 0
    if request.prompt_len == 1:
        # A prompt of one token has no log probabilities, and vLLM returns no table.
        return PromptLogprobs(start=1, logprobs_data=b"", top=TopLogprobs(width, b"", b"") if width else None)
    if table is None or len(table.logprobs) != request.prompt_len - 1:
        raise _UnusableOutput(f"the engine returned no log probabilities for a prompt of {request.prompt_len} tokens")
    logprobs, top = _split(table, width)
    return PromptLogprobs(start=1, logprobs_data=logprobs.astype("<f4", copy=False).tobytes(), top=top)


def _split(table: LogprobTable, width: int) -> tuple[npt.NDArray[np.float32], TopLogprobs | None]:
    used = table.logprobs[:, : width + 1]
    if np.isnan(used).any():
        # Example: the parameters leave no token to sample, so every logit is -inf.
        raise _NotANumber("the engine computed NaN as a log probability")
    if used.shape[1] <= width:
        raise _UnusableOutput(f"the engine returned {used.shape[1] - 1} of {width} top log probabilities")
    top = None
    if width:
        top = TopLogprobs(
            width,
            table.token_ids[:, 1 : width + 1].astype("<i4").tobytes(),
            used[:, 1:].astype("<f4").tobytes(),
        )
    return np.ascontiguousarray(used[:, 0], np.float32), top
