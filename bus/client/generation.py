"""The results of requests as arrays: of one request, and of a trainer's step over groups of answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr
from numpy.typing import ArrayLike

from ...schemas.chunk import Chunk, ChunkError, FinishReason
from ...schemas.errors import InvalidRequest, RequestError
from ...schemas.request import GenerateRequest, num_kept_rows
from ...schemas.rows import Rows
from ..protocol.html import as_html
from ..protocol.stream.response_stream import ResponseStream
from ..protocol.stream.result_arrays import Spans, TokenMasks

_OF_PROMPT = ("prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs", "cached_tokens")
_BY_TOKEN = (
    "token_ids",
    "logprobs",
    "weight_versions",
    "lora_versions",
    "kv_mixed",
    "top_token_ids",
    "top_logprobs",
)


class SampleKey(NamedTuple):
    """Identifies one sample among the samples of all clients."""

    client: str
    """Incarnation of the client that sent the request: random for each connected client."""
    number: int
    """Number of the request, unique within that client."""
    child: int
    """Index of the sample, 0 to n - 1."""


# The constructor of a struct is C code. That of a frozen dataclass sets each field with a call in the caller's loop.
# `dataclass` is for `dataclasses.replace` and `dataclasses.fields`.
@dataclass(init=False, repr=False, eq=False, match_args=False)
class Generation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one request, or of one child of a request with n > 1.

    Each array belongs to the caller and is writable. A failed request of `complete_many` has `finish_reason` ERROR,
    `error` set, and the tokens received before the failure. In the shapes below, Lp is `prompt_len` and G is the number
    of generated tokens.
    """

    request: GenerateRequest
    """The caller's request object, also for siblings. A stored result therefore keeps its prompt in memory."""
    request_id: str
    """Id of the request. Siblings have the same id."""
    child: int
    """Index of this sample, 0 to n - 1."""
    prompt_len: int
    """Lp: number of prompt tokens."""
    token_ids: npt.NDArray[np.int32]
    """i4[G]: generated token ids."""
    logprobs: npt.NDArray[np.float32] | None
    """f4[G]: log probabilities from the sampler. None if `sampling.logprobs` was None."""
    weight_versions: npt.NDArray[np.int32]
    """i4[G]: version of the weights that sampled each token."""
    routed_experts: Rows | None
    """u1|u2[Lp - start + G - 1, num_layers, top_k]: expert ids. Row i belongs to position `start + i`. None if the
    request has no routed experts."""
    start: int
    """The `routed_experts_prompt_start` that was applied: position of the first row."""
    finish_reason: FinishReason
    """Why the response stream ended."""
    stop_reason: int | None = None
    """Id of the stop token that ended the request. None if no token of `stop_token_ids` ended it."""
    lora_versions: npt.NDArray[np.int32] | None = None
    """i4[G]: version of the adapter that sampled each token. None without an adapter."""
    kv_version_spans: Spans | None = None
    """(first position, weight version) of each span of the KV cache at the end of the request. Each span gives the
    weights that computed its KV. The KV covers positions 0 to Lp + G - 2. After a preemption, a forced reset of the
    cache or another attempt, the engine computes all earlier KV again. None if a worker did not report recomputed KV,
    or if there are no tokens."""
    kv_lora_version_spans: Spans | None = None
    """The same spans with the version of the adapter. Also None if the request uses no adapter."""
    kv_mixed: npt.NDArray[np.bool_] | None = None
    """bool[G]: True if earlier KV had another weight version or adapter version than this token when it was sampled.
    None if a worker did not report recomputed KV."""
    top_token_ids: npt.NDArray[np.int32] | None = None
    """i4[G, k]: the k most likely tokens at each position, best first. None unless `sampling.logprobs` > 0."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """f4[G, k]: log probabilities of `top_token_ids`."""
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    """f4[Lp - 1]: log probabilities of prompt tokens 1 to Lp - 1. None unless `sampling.prompt_logprobs` is set."""
    prompt_top_token_ids: npt.NDArray[np.int32] | None = None
    """i4[Lp - 1, k]: the k most likely tokens at each prompt position. None unless `sampling.prompt_logprobs` > 0."""
    prompt_top_logprobs: npt.NDArray[np.float32] | None = None
    """f4[Lp - 1, k]: log probabilities of `prompt_top_token_ids`."""
    sampling_mask: TokenMasks | None = None
    """For each of the G tokens, the ids from which the sampler chose. None if a worker of this request creates no
    masks, or if the request declined them."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache or received from a prefill worker. None if unknown."""
    attempts: int = 1
    """Number of times that the request was published: 1, plus 1 for each worker lost during the request. A prefill
    worker and a decode worker together are one attempt."""
    exact: bool = True
    """True if an undisturbed run could have produced this result; see `rollbus.bus.protocol.stream.response_stream`."""
    worker_ids: tuple[str, ...] = ()
    """Ids of the workers that served the request, in order."""
    model: str | None = None
    """Name of the model that answered, without an adapter. None if the request failed before its model was known."""
    parts: int = 1
    """Number of requests that produced this result: more than 1 if it was stopped and continued."""
    siblings: tuple["Generation", ...] = ()
    """With n > 1, on child 0: the other children, in order. Otherwise empty."""
    error: RequestError | None = None
    """Cause of the failure. None unless `finish_reason` is ERROR."""
    key: SampleKey | None = None
    """Key of this sample in records of runs. None if the request was not sent."""
    opened_at: float | None = None
    """Unix time at which the client opened the request. None if the request was not sent."""
    ended_at: float | None = None
    """Unix time at which the request ended. None if the request was not sent."""

    @property
    def lora(self) -> str | None:
        """Name of the adapter that answered. None without an adapter."""
        return self.request.lora

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        rows = "none" if self.routed_experts is None else "x".join(map(str, self.routed_experts.shape))
        return (
            f"<Generation {self.request_id}/{self.child} {self.finish_reason} tokens={len(self.token_ids)} "
            f"rows={rows} start={self.start} attempts={self.attempts}>"
        )

    def _repr_html_(self) -> str:
        versions = sorted(set(self.weight_versions.tolist()))
        rows: list[tuple[str, object]] = [
            ("model", self.model if self.lora is None else f"{self.model}, adapter {self.lora}"),
            ("ended", self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}"),
            ("tokens", f"{len(self.token_ids)} after {self.prompt_len} of the prompt"),
            ("weight versions", ", ".join(map(str, versions))),
            ("routed experts", "none" if self.routed_experts is None else self.routed_experts.shape),
            ("workers", ", ".join(self.worker_ids)),
            ("attempts", self.attempts),
            ("siblings", len(self.siblings)),
        ]
        return as_html(f"Generation {self.request_id}/{self.child}", rows)

    def joined(self, rest: "Generation") -> "Generation":
        """Join this stopped generation with its continuation and return both as one.

        Each token keeps its versions. Each row of routed experts comes from the part that sampled its token; rows that
        `rest` computed again are discarded. Prompt, `start`, siblings, `cached_tokens` and prompt log probabilities are
        those of this part.

        Args:
            rest: result of `generation.request.continuing(generation)`.

        Raises:
            InvalidRequest: `rest` has another prompt or another model, or its rows do not follow the rows of this part.
        """
        sequence = np.concatenate([np.asarray(self.request.prompt_token_ids), self.token_ids])
        if rest.prompt_len != len(sequence) or not np.array_equal(rest.request.prompt_token_ids, sequence):
            raise _unfit(f"has another prompt, of {rest.prompt_len} tokens", f"the {len(sequence)} tokens of this part")
        if rest.model and self.model and rest.model != self.model:
            raise _unfit(f"is by the model {rest.model!r}", f"the model of this part, {self.model!r}")
        parts = [part for part in (self, rest) if len(part.token_ids)] or [rest]
        first, last = parts[0], parts[-1]
        arrays: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in _BY_TOKEN}
        for name, pieces in arrays.items():
            arrays[name] = None if any(piece is None for piece in pieces) else np.concatenate(pieces)
        return replace(
            rest,
            request=self.request,
            request_id=self.request_id,
            key=self.key,
            opened_at=self.opened_at,
            model=rest.model or self.model,
            child=self.child,
            prompt_len=self.prompt_len,
            start=self.start,
            siblings=self.siblings,
            routed_experts=_join_rows(self, rest),
            kv_version_spans=last.kv_version_spans,
            kv_lora_version_spans=last.kv_lora_version_spans,
            sampling_mask=TokenMasks.joined_of_all([part.sampling_mask for part in parts]),
            attempts=self.attempts + rest.attempts,
            parts=self.parts + rest.parts,
            exact=self.exact and rest.exact and (first is rest or self.request.sampling.is_continuable),
            worker_ids=self.worker_ids + rest.worker_ids,
            **{name: getattr(first, name) for name in _OF_PROMPT},
            **arrays,
        )


def _join_rows(first: Generation, rest: Generation) -> Rows | None:
    """Return the rows of the tokens of both parts. Leave out rows that arrived before their token."""
    kept = num_kept_rows(first)
    if rest.start != first.start + kept:
        raise _unfit(
            f"has routed experts from position {rest.start} on", f"position {first.start + kept}, the first missing row"
        )
    pieces = [
        part.routed_experts[: num_kept_rows(part)]
        for part in (first, rest)
        if part.routed_experts is not None and len(part.token_ids)
    ]
    if not pieces:
        return None
    if any(piece.shape[1:] != pieces[0].shape[1:] for piece in pieces) or (
        rest.routed_experts is None and len(rest.token_ids)
    ):
        shape = None if rest.routed_experts is None else rest.routed_experts.shape
        raise _unfit(f"has routed experts of shape {shape}", f"the layers and top-k of shape {pieces[0].shape}")
    return np.concatenate(pieces)


def _unfit(problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest("rest", problem, allowed)


class ChildResult(NamedTuple):
    """The result of one child of a request."""

    child: int
    stream: ResponseStream
    """The response stream with its chunks. Only the owner of this result uses it."""
    workers: tuple[str, ...] = ()
    """Ids of the workers that served the attempts, in order."""


def join_samples(
    request: GenerateRequest,
    samples: Sequence[ChildResult],
    error: RequestError | None,
    model: str | None = None,
    key: SampleKey | None = None,
    times: tuple[float | None, float | None] = (None, None),
) -> Generation:
    """Return the first sample with the others as siblings. Without `samples`, return empty results.

    Args:
        model: the model that answered. None: the model that the request names.
        key: key of the first sample. None: the request was not sent.
        times: Unix times at which a sent request was opened and has ended.
    """
    samples = samples or _empty_samples(request)

    def generation(sample: ChildResult) -> Generation:
        stream, end = sample.stream, sample.stream.end
        return Generation(
            request=request,
            request_id=request.request_id,
            child=sample.child,
            key=key if key is None or not sample.child else SampleKey(key.client, key.number, sample.child),
            prompt_len=request.prompt_len,
            start=stream.start,
            finish_reason=FinishReason.ERROR if end is None or error is not None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            attempts=stream.num_attempts,
            worker_ids=sample.workers,
            exact=stream.is_exact,
            error=error,
            model=model or request.model,
            opened_at=times[0],
            ended_at=times[1],
            **stream.arrays(),
        )

    first, *others = map(generation, samples)
    return replace(first, siblings=tuple(others)) if others else first


def failed_ends(request: GenerateRequest, samples: Sequence[ChildResult], error: RequestError) -> list[Chunk]:
    """Return a terminal chunk with `error` for each sample of a failed request that has none. Call this once."""
    cause = ChunkError.of(error)
    open_streams = (one.stream for one in samples or _empty_samples(request) if one.stream.end is None)
    ends = [stream.fail(cause) for stream in open_streams]
    for end in ends:
        force_setattr(end, "request_id", request.request_id)
    return ends


def _empty_samples(request: GenerateRequest) -> list[ChildResult]:
    return [ChildResult(i, ResponseStream(request, child=i, attempt=0, keep=True)) for i in range(request.sampling.n)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The answers to one prompt."""

    key: object
    """The key of the caller's `GroupPrompt`. None without a key."""
    request: GenerateRequest
    """Request for all samples, as it was first sent."""
    generations: tuple[Generation, ...]
    """Results, one for each sample, in order. The parts of a continued answer are joined. The answers of a dropped or
    failed group have the tokens received so far."""
    steps: int
    """Number of steps that generated the group. 1: no part comes from an earlier step."""
    error: RequestError | None = None
    """Cause of the failure. None if the group did not fail."""

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        return f"<Group key={self.key!r} answers={len(self.generations)} steps={self.steps}>"

    @property
    def oldest_version(self) -> int | None:
        """Weight version of the oldest token, or adapter version if an adapter is used. None without tokens."""
        versions = [_versions(generation) for generation in self.generations if len(generation.token_ids)]
        return min((int(array.min()) for array in versions), default=None)


def _versions(generation: Generation) -> npt.NDArray[np.int32]:
    # Tokens have an adapter's version also if the adapter answers under the model's name.
    return generation.weight_versions if generation.lora_versions is None else generation.lora_versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStats:
    """Statistics of one step: the lengths of its answers, and its duration.

    Short answers end first. The answers in `taken` are therefore shorter than the average of all answers, unless later
    steps take every carried group. Groups that are dropped for their age are longer. The lengths show this bias.
    """

    taken: npt.NDArray[np.int32]
    """i4[answers]: number of tokens of each answer in this step's groups."""
    carried: npt.NDArray[np.int32]
    """i4[answers]: number of tokens received so far for each answer of the groups that stay, including ended answers.
    Tokens that the client had not received when the step ended are not counted."""
    dropped: npt.NDArray[np.int32]
    """i4[answers]: number of tokens of each answer in the dropped groups."""
    seconds: float
    """Seconds from the call of `step` to its return."""
    started: int
    """Number of groups that the step started."""
    continued: int
    """Number of groups that the step continued from their tokens."""
    carried_complete: int
    """Number of carried groups that are complete. The next step returns them first."""
    version: int | None = None
    """Version of the trainer's weights: the one that `step` was called with, or the newest one of a live worker."""
    paused_s: float = 0.0
    """Seconds of the step in which the model was paused, for example for an update of its weights."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of `taken` per second of the step."""
        return float(self.taken.sum()) / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        """Return one line with means, without contents."""
        parts = {"taken": self.taken, "carried": self.carried, "dropped": self.dropped}
        means = " ".join(f"{name}={len(a)}x{a.mean() if len(a) else 0:.1f}" for name, a in parts.items())
        return f"<GroupStats {means} seconds={self.seconds:.3f} tokens_per_s={self.tokens_per_s:.1f}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStep:
    """One step of a trainer. A step is true if it has any group. After the last prompt, the last step is false."""

    groups: tuple[Group, ...]
    """Groups to train on: `need` groups, or fewer if the prompts are used up or too many groups failed."""
    dropped: tuple[Group, ...]
    """Groups that are too old for `max_lag`, or that cannot be continued exactly with `inexact="drop"`."""
    failed: tuple[Group, ...]
    """Groups that failed, each with its `error`. The step started other groups in their place."""
    stats: GroupStats
    """Counts and durations of the step."""

    def __bool__(self) -> bool:
        """Return True if the step has any group, also a dropped or a failed one."""
        return bool(self.groups or self.dropped or self.failed)

    def metrics(
        self,
        *,
        rewards: Iterable[ArrayLike] | None = None,
        trainer_logprobs: Iterable[ArrayLike] | None = None,
    ) -> dict[str, float]:
        """Return the numbers of this step by name, for `wandb.log`, `trackio.log`, TensorBoard or another logger.

        Means are over answers, and staleness over tokens. A name is missing if there is nothing to count.

        Args:
            rewards: for each group, the rewards of its answers.
            trainer_logprobs: for each answer of each group, in order, f[G]: the trainer's log probabilities of its
                tokens. With these, `kl` is the estimate k3 of KL(sampler || trainer).

        Raises:
            ValueError: there is not a reward for each answer, or not a log probability for each token.
        """
        answers = [generation for group in self.groups for generation in group.generations]
        numbers: dict[str, Any] = {
            "groups": len(self.groups),
            "answers": len(answers),
            "dropped": len(self.dropped),
            "failed": len(self.failed),
            "resumed": sum(answer.attempts > answer.parts for answer in answers),
            "continued": sum(answer.parts > 1 for answer in answers),
            "tokens_per_s": self.stats.tokens_per_s,
            "wait_s": self.stats.seconds,
            "pause_s": self.stats.paused_s,
        }
        if not answers:
            return {name: float(value) for name, value in numbers.items()}
        lengths = self.stats.taken
        numbers |= {"length/mean": lengths.mean(), "length/max": lengths.max(), "length/min": lengths.min()}
        numbers["length/truncated"] = np.mean([answer.finish_reason is FinishReason.LENGTH for answer in answers])
        versions = np.concatenate([_versions(answer) for answer in answers])
        if self.stats.version is not None and len(versions):
            lags = np.maximum(self.stats.version - versions.astype("i8"), 0)
            numbers |= {"staleness/mean": lags.mean(), "staleness/max": lags.max()}
        if rewards is not None:
            flat = np.concatenate([np.asarray(group, float).ravel() for group in rewards])
            if len(flat) != len(answers):
                raise ValueError(f"rewards has {len(flat)} numbers; allowed: {len(answers)}, one for each answer")
            numbers |= {"reward/mean": flat.mean(), "reward/std": flat.std()}
        if trainer_logprobs is not None:
            numbers["kl"] = _kl(answers, [np.asarray(array, float) for array in trainer_logprobs])
        return {name: float(value) for name, value in numbers.items()}

    def __repr__(self) -> str:
        """Return one line with counts."""
        counts = f"groups={len(self.groups)} dropped={len(self.dropped)} failed={len(self.failed)}"
        return f"<GroupStep {counts} {self.stats!r}>"

    def _repr_html_(self) -> str:
        stats = self.stats
        rows = [
            (name, len(getattr(self, name)), len(lengths), f"{lengths.mean():.1f}" if len(lengths) else "")
            for name, lengths in (
                ("groups", stats.taken),
                ("dropped", stats.dropped),
                ("failed", lengths_of(self.failed)),
            )
        ]
        title = f"Step of {stats.seconds:.1f} s, {stats.tokens_per_s:.0f} tokens/s"
        return as_html(title, rows, ("", "groups", "answers", "mean tokens"))


def lengths_of(groups: Iterable[Group]) -> npt.NDArray[np.int32]:
    """Return the number of tokens of each answer, i4[answers]."""
    return np.array([len(generation.token_ids) for group in groups for generation in group.generations], "i4")


def _kl(answers: Sequence[Generation], trainer: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the estimate of `rollbus.trainer.sampler_kl`: infinite if the sampler could not choose a token."""
    given = [len(array) for array in trainer]
    if given != (lengths := [len(answer.token_ids) for answer in answers]):
        raise ValueError(
            f"trainer_logprobs has arrays of lengths {given[:8]}; allowed: those of the answers, {lengths[:8]}"
        )
    sampler = [answer.logprobs for answer in answers if answer.logprobs is not None]
    if len(sampler) != len(answers):
        raise ValueError(
            "trainer_logprobs are given, but the answers have none; allowed: with `logprobs` in `sampling`"
        )
    ours, theirs = np.concatenate(trainer), np.concatenate(sampler).astype(float)
    ratio = np.where(np.isneginf(theirs), np.inf, ours - np.where(np.isneginf(theirs), 0.0, theirs))
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.where(np.isinf(ratio), np.inf, np.expm1(ratio) - ratio)
    return float(terms.mean()) if len(terms) else 0.0
