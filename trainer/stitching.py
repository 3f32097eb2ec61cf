"""Joins pieces of one sequence: turns of a conversation, attempts of a request, prefill and decode phases.

Every row of routed experts has an absolute position. The result has one row for each position from the first to the
last. No row is padded, guessed or narrowed. A piece that does not fit causes an error that gives the place.

At the boundary of two turns, the last token of the first turn has not passed through the model, so the first turn has
no row for it. The next turn computes that token as part of its prompt and returns the row, if it was requested to
return rows from that position or an earlier one. The row of a prompt's last token belongs to the first sampled token.
Request rows from `Stitcher.next_start`.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from ..schemas.rows import Rows, expected_rows
from .errors import PackError, StitchError, check_entries, check_integer, check_rows, check_vector, describe

Overlap = Literal["refuse", "first", "last"]
"""Handling of two pieces with a row for the same position. `refuse`: they must agree. Otherwise the first or the last
row is kept."""
OVERLAPS = ("refuse", "first", "last")
NOT_SAMPLED = -1
"""Weight version of a token that was not sampled: a token of a prompt, of a tool, or padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Sample:
    """A sequence of S tokens. The constructor checks the arrays and does not copy them.

    Row i of the routed experts belongs to position `start + i`. The last token has not passed through the model and has
    no row. A sample of S tokens therefore has `S - 1 - start` rows, by the row rule of `rollbus.schemas.rows`.

    Raises:
        PackError: fields contradict each other.
    """

    token_ids: npt.NDArray[np.int32]
    """i4[S]: prompts, sampled tokens, and tokens between them, in order."""
    loss_mask: npt.NDArray[np.bool_]
    """bool[S]: True if the token was sampled and is trained. Token 0 has no prediction and is never trained."""
    logprobs: npt.NDArray[np.float32]
    """f4[S]: log probabilities from the sampler, possibly -inf; 0.0 where not sampled."""
    weight_versions: npt.NDArray[np.int32]
    """i4[S]: version of the weights that sampled each token; -1 where not sampled."""
    routed_experts: Rows | None = None
    """u1|u2[S - 1 - start, L, K]: expert ids. Row i belongs to position `start + i`. None without routed experts."""
    start: int = 0
    """Position of the first row."""
    advantage: "float | npt.NDArray[np.float32]" = 0.0
    """One advantage for all tokens, or f4[S]."""

    def __post_init__(self) -> None:
        check_vector(PackError, "token_ids", self.token_ids, np.int32)
        size = len(self.token_ids)
        check_vector(PackError, "loss_mask", self.loss_mask, np.bool_, size)
        check_vector(PackError, "logprobs", self.logprobs, np.float32, size)
        check_vector(PackError, "weight_versions", self.weight_versions, np.int32, size)
        self._check_advantage()
        check_entries(PackError, "token_ids", self.token_ids, self.token_ids >= 0, "0 and above")
        if size and self.loss_mask[0]:
            raise PackError("loss_mask is on at position 0, which nothing predicts; allowed: positions 1 and above")
        good = (self.logprobs < np.inf) | ~self.loss_mask
        check_entries(PackError, "logprobs", self.logprobs, good, "numbers, and -inf, where the loss mask is on")
        good = (self.weight_versions >= 0) | ~self.loss_mask
        check_entries(PackError, "weight_versions", self.weight_versions, good, "0 and above where the loss mask is on")
        check_integer(PackError, "start", self.start, 0)
        if self.routed_experts is not None:
            self._check_rows(self.routed_experts)

    def _check_advantage(self) -> None:
        advantage: Any = self.advantage
        if isinstance(advantage, np.ndarray):
            check_vector(PackError, "advantage", advantage, np.float32, len(self.token_ids))
            check_entries(PackError, "advantage", advantage, np.isfinite(advantage), "finite numbers")
        elif not isinstance(advantage, Real):
            raise PackError(f"advantage is {describe(advantage)}; allowed: a number, or a numpy array of float32")
        elif not abs(cast(float, advantage)) <= float(np.finfo(np.float32).max):
            raise PackError(f"advantage is {advantage}; allowed: finite numbers that float32 has")

    def _check_rows(self, rows: Rows) -> None:
        check_rows(PackError, "routed_experts", rows)
        size = len(self.token_ids)
        if self.start > max(size - 1, 0):
            raise PackError(f"start is {self.start} of {size} tokens; allowed: 0 to S - 1")
        if len(rows) != (wanted := expected_rows(size - 1, self.start, 1)):
            raise PackError(
                f"routed_experts has {len(rows)} rows for {size} tokens from start {self.start};"
                f" allowed: S - 1 - start = {wanted}"
            )

    def __len__(self) -> int:
        """Return S, the number of tokens."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        rows = "none" if self.routed_experts is None else "x".join(map(str, self.routed_experts.shape))
        trained = np.count_nonzero(self.loss_mask)
        return f"<Sample tokens={len(self.token_ids)} trained={trained} rows={rows} start={self.start}>"


class Turn(Protocol):
    """The result of one request after a prompt of Lp tokens. `rollbus.Generation` has this type."""

    @property
    def prompt_len(self) -> int:
        """Lp: number of prompt tokens."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[G]: sampled token ids."""

    @property
    def logprobs(self) -> npt.NDArray[np.float32] | None:
        """f4[G]: log probabilities from the sampler. None if they were not requested."""

    @property
    def weight_versions(self) -> npt.NDArray[np.int32]:
        """i4[G]: version of the weights that sampled each token."""

    @property
    def routed_experts(self) -> Rows | None:
        """u1|u2[Lp - start + G - 1, L, K]: expert ids. None without routed experts."""

    @property
    def start(self) -> int:
        """Position of the first row, 0 to Lp."""

    @property
    def error(self) -> Exception | None:
        """Cause of the failure. None if the request did not fail."""


class Stitcher:
    """Joins the turns of one conversation into one sample.

    The prompt of each turn begins with all tokens so far. The stitcher copies no array until `sample`, so the arrays
    must not change until then.

    Args:
        overlap: handling of rows that an earlier turn already had; see `stitch_rows`. With `refuse` (default), a turn
            may be rejected if it recomputes earlier positions in another batch shape or with other weights. To avoid
            this, request rows only from `next_start`, or use `first`, which keeps for each token the experts of its
            sampling.
    """

    def __init__(self, *, overlap: Overlap = "refuse") -> None:
        self._run = RowStitcher(overlap)
        self._sampled: list[tuple[slice, npt.NDArray[np.float32], npt.NDArray[np.int32]]] = []
        """Positions, log probabilities and weight versions of each turn with sampled tokens."""
        self._num_added = 0
        self._tokens: tuple[npt.NDArray[np.int32], ...] = ()
        """All tokens so far: the last prompt and the tokens sampled after it."""
        self._unrouted: int | None = None
        """First turn without routed experts whose rows no later turn has returned."""

    @property
    def num_tokens(self) -> int:
        """Number of all tokens so far."""
        return sum(map(len, self._tokens))

    @property
    def next_start(self) -> int:
        """First position for which the next turn must return a row: its `routed_experts_prompt_start`.

        It is the end of the present rows. If the row of the first sampled token is missing, it is the position before
        that token: its turn had no routed experts, or its rows began at the length of its prompt.
        """
        if not self._sampled:
            return 0
        first_needed: int = self._sampled[0][0].start - 1
        if self._run.layout is None or self._run.start > first_needed:
            return first_needed
        return self._run.end

    def add(self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], turn: Turn) -> None:
        """Add the next turn. An error leaves the stitcher unchanged.

        Args:
            prompt_token_ids: the whole prompt of the turn, which begins with all tokens so far.
            turn: result of the turn. It may have zero tokens, with or without empty routed experts. The result of a
                failed request is rejected.

        Raises:
            StitchError: the turn does not fit. The message gives its index, the position and the reason.
        """
        where = f"turn {self._num_added}"
        _check_outcome(where, turn)
        prompt = _as_token_ids(f"{where}: prompt_token_ids", prompt_token_ids)
        sampled = _as_token_ids(f"{where}: token_ids", turn.token_ids)
        self._check_prompt(where, prompt)
        logprobs = _check_turn(where, turn, len(prompt), len(sampled))
        if len(sampled):
            self._add_rows(where, turn)
            span = slice(len(prompt), len(prompt) + len(sampled))
            self._sampled.append((span, logprobs, turn.weight_versions))
        self._tokens = (prompt, sampled)
        self._num_added += 1

    def sample(self, advantage: "float | npt.NDArray[np.float32]" = 0.0) -> Sample:
        """Return all turns so far as one sequence, which ends with the last sampled token.

        The arrays are newly allocated, except for rows that all come from one turn. A later prompt of a turn without
        sampled tokens is left out, because it has no rows and no trained tokens. If no turn has sampled tokens, the
        sample is the last prompt, without trained tokens.

        Raises:
            StitchError: there are no turns, or only some turns have routed experts.
            PackError: `advantage` is not valid for `Sample`.
        """
        if not self._num_added:
            raise StitchError("there are no turns; allowed: one or more")
        size = self._sampled[-1][0].stop if self._sampled else self.num_tokens
        routed = self._run.layout is not None
        if routed and self._unrouted is not None:
            raise StitchError(
                f"turn {self._unrouted}: no routed experts from position {self.next_start} on, which other turns have;"
                " allowed: routed experts in all turns, in none, or a later turn that returns these rows"
            )
        token_ids = np.concatenate(self._tokens, dtype=np.int32)[:size]
        loss_mask = np.zeros(size, np.bool_)
        logprobs = np.zeros(size, np.float32)
        weight_versions = np.full(size, NOT_SAMPLED, np.int32)
        for span, turn_logprobs, turn_versions in self._sampled:
            loss_mask[span] = True
            logprobs[span] = turn_logprobs
            weight_versions[span] = turn_versions
        return Sample(
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            weight_versions=weight_versions,
            routed_experts=self._run.join(copy=False) if routed else None,
            start=self._run.start if routed else 0,
            advantage=advantage,
        )

    def _check_prompt(self, where: str, prompt: npt.NDArray[np.int32]) -> None:
        position = 0
        for known in self._tokens:
            new = prompt[position : position + len(known)]
            same = new == known[: len(new)]
            if not same.all():
                at = int(same.argmin())
                raise StitchError(
                    f"{where}: its prompt has token {new[at]} at position {position + at}, and the sequence so far"
                    f" {known[at]}; allowed: a prompt that begins with all {self.num_tokens} tokens so far"
                )
            if len(new) < len(known):
                raise StitchError(
                    f"{where}: its prompt ends at position {len(prompt)}; allowed: a prompt that begins with all"
                    f" {self.num_tokens} tokens so far"
                )
            position += len(known)

    def _add_rows(self, where: str, turn: Turn) -> None:
        if turn.routed_experts is None:
            if self._unrouted is None:
                self._unrouted = self._num_added
            return
        if self._sampled and turn.start > (position := self.next_start):
            raise StitchError(
                f"{where}: rows begin at position {turn.start}, and that of position {position} is missing;"
                f" allowed: a start of at most {position}"
            )
        self._run.add(where, turn.start, turn.routed_experts)
        self._unrouted = None


class RowStitcher:
    """Contiguous rows in parts that do not overlap. `join` copies them; before that, only small remainders are copied.

    A piece touches only the parts that it overlaps, so the cost of many pieces is that of their rows.
    """

    def __init__(self, overlap: Overlap) -> None:
        if overlap not in OVERLAPS:
            raise StitchError(f"overlap is {overlap!r}; allowed: {', '.join(OVERLAPS)}")
        self._overlap = overlap
        self.layout: tuple[int, int] | None = None
        """Layers and top-k. None until a piece was added."""
        self._dtype: np.dtype[Any] = np.dtype("u1")
        self._parts: list[Rows] = []
        """Parts in order of their positions, each with at least one row."""
        self._starts: list[int] = []
        """Position of the first row of each part."""
        self._empty_start = 0
        """Position of the first piece while no piece has rows."""

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self._starts[0] if self._starts else self._empty_start

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self._starts[-1] + len(self._parts[-1]) if self._starts else self._empty_start

    def add(self, where: str, start: int, rows: Rows) -> None:
        """Add a piece that begins at position `start`. An error leaves this object unchanged.

        Raises:
            StitchError: the piece is not valid, leaves a gap or contradicts earlier rows. The message begins with
                `where`.
        """
        start = check_integer(StitchError, f"{where}: start", start, 0)
        layout = self._check_layout(where, start, rows)
        if self._parts and len(rows):
            self._check_reach(where, start, start + len(rows))
            if self._overlap == "refuse":
                self._check_agreement(where, start, rows)
            if self._overlap == "last":
                self._replace(start, rows)
            else:
                self._extend(start, rows)
        elif len(rows):
            self._starts, self._parts = [start], [rows]
        elif self.layout is None:
            self._empty_start = start
        self.layout = layout
        self._dtype = np.result_type(self._dtype, rows.dtype)

    def join(self, *, copy: bool = True) -> Rows:
        """Return all rows in the widest dtype of any piece. Without `copy`, a single part is returned as a view."""
        if self.layout is None:
            raise StitchError("there are no pieces; allowed: one or more, also without rows")
        if not self._parts:
            return np.empty((0, *self.layout), self._dtype)
        if len(self._parts) == 1 and not copy:
            return self._parts[0].astype(self._dtype, copy=False)
        return np.concatenate(self._parts, dtype=self._dtype)

    def _extend(self, start: int, rows: Rows) -> None:
        """Add the rows of positions without a row, before and after the present rows."""
        head, tail = self.start - start, self.end - start
        if tail < len(rows):
            self._starts.append(self.end)
            self._parts.append(_cut(rows, tail, len(rows)))
        if head > 0:
            self._starts.insert(0, start)
            self._parts.insert(0, _cut(rows, 0, head))

    def _replace(self, start: int, rows: Rows) -> None:
        """Add all rows. Of the parts that they overlap, the rows before and after them stay."""
        end = start + len(rows)
        starts, parts = [start], [rows]
        first, after = bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)
        if after and self._starts[after - 1] + len(self._parts[after - 1]) > end:
            part = self._parts[after - 1]
            starts.append(end)
            parts.append(_cut(part, end - self._starts[after - 1], len(part)))
        if first and self._starts[first - 1] + len(self._parts[first - 1]) > start:
            first -= 1
            starts.insert(0, self._starts[first])
            parts.insert(0, _cut(self._parts[first], 0, start - self._starts[first]))
        self._starts[first:after] = starts
        self._parts[first:after] = parts

    def _select_rows(self, start: int, end: int) -> list[Rows]:
        """Return the present rows of positions `start` to `end - 1` as views."""
        views = []
        for index in range(max(bisect.bisect_right(self._starts, start) - 1, 0), bisect.bisect_left(self._starts, end)):
            part, first = self._parts[index], self._starts[index]
            views.append(part[max(start - first, 0) : end - first])
        return views

    def _check_reach(self, where: str, start: int, end: int) -> None:
        if self.start <= end and start <= self.end:
            return
        missing = f"{self.end} to {start - 1}" if start > self.end else f"{end} to {self.start - 1}"
        raise StitchError(
            f"{where}: rows of positions {start} to {end - 1} leave a gap, {missing}; allowed: pieces that touch"
            f" those before them, {self.start} to {self.end - 1}"
        )

    def _check_layout(self, where: str, start: int, rows: Rows) -> tuple[int, int]:
        check_rows(StitchError, f"{where}: routed_experts", rows)
        layout = (rows.shape[1], rows.shape[2])
        if self.layout is not None and layout != self.layout:
            raise StitchError(
                f"{where}, from position {start}: {layout[0]} layers of top-{layout[1]}, after"
                f" {self.layout[0]} layers of top-{self.layout[1]}; allowed: one layout in all pieces"
            )
        return layout

    def _check_agreement(self, where: str, start: int, rows: Rows) -> None:
        """Check that rows of the same position name the same experts. The order within a top-k has no meaning."""
        position = max(start, self.start)
        for held in self._select_rows(position, min(start + len(rows), self.end)):
            new = rows[position - start :][: len(held)]
            if not np.array_equal(held, new):
                differs = (np.sort(held, axis=2) != np.sort(new, axis=2)).any(axis=2)
                if differs.any():
                    row, layer = np.unravel_index(int(differs.argmax()), differs.shape)
                    raise StitchError(
                        f"{where}: its row for position {position + int(row)}, layer {int(layer)}, disagrees with"
                        f" an earlier one: {new[row, layer]} after {held[row, layer]}"
                    )
            position += len(held)


def _cut(rows: Rows, begin: int, end: int) -> Rows:
    """Return a view, or a copy if it is small, because a view keeps the whole piece in memory."""
    part = rows[begin:end]
    return part.copy() if len(part) * 2 < len(rows) else part


def check_samples(samples: object) -> list[Sample]:
    """Return the samples as a list.

    Raises:
        PackError: `samples` is a single sample, or has an item that is no sample.
    """
    if not isinstance(samples, Iterable):
        raise PackError(f"samples is {describe(samples)}; allowed: a list, or anything else that yields samples")
    listed = list(samples)
    for index, sample in enumerate(listed):
        if not isinstance(sample, Sample):
            raise PackError(f"sample {index} is {describe(sample)}; allowed: rollbus.trainer.Sample")
    return listed


def stitch_rows(pieces: Iterable[tuple[int, Rows]], *, overlap: Overlap = "refuse") -> tuple[int, Rows]:
    """Join pieces of routed experts, given in order, into one array of contiguous positions.

    Args:
        pieces: (position of the first row, u1|u2[rows, L, K]) pairs. Each piece begins at most where the pieces before
            it end. A piece without rows counts only for layout and dtype.
        overlap: handling of two rows for the same position. `refuse` (default): both must name the same experts, in any
            order, and the first is kept. `first` or `last`: they may differ, and that row is kept.

    Returns:
        The position of the first row, and the rows: u1, or u2 if any piece is u2. Newly allocated and writable.

    Raises:
        StitchError: there are no pieces, they have a gap, overlapping rows disagree, or layers or top-k differ.
    """
    run = RowStitcher(overlap)
    for number, (start, rows) in enumerate(pieces):
        run.add(f"piece {number}", start, rows)
    return run.start, run.join()


def _as_token_ids(name: str, token_ids: object) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError):
        raise StitchError(f"{name} is {describe(token_ids)}; allowed: integers in one dimension, in memory") from None
    if array.shape == (0,):
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = describe(array if array.ndim else token_ids)
        raise StitchError(f"{name} is {found}; allowed: integers in one dimension")
    check_entries(StitchError, name, array, (array >= 0) & (array <= np.iinfo(np.int32).max), "0 to 2147483647")
    return array.astype(np.int32, copy=False)


def _check_outcome(where: str, turn: Turn) -> None:
    """Reject the result of a failed request: it ends at any position, and is no sample of the policy."""
    # Objects of other programs may lack the field; only this field shows a failure.
    error = getattr(turn, "error", None)
    if error is not None:
        raise StitchError(f"{where}: its request failed: {error}; allowed: turns whose error is None")


def _check_turn(where: str, turn: Turn, prompt_len: int, num_sampled: int) -> npt.NDArray[np.float32]:
    """Check that the arrays of a turn fit together, with rows by the row rule. Return the log probabilities."""
    told = getattr(turn, "prompt_len", prompt_len)
    if told != prompt_len:
        raise StitchError(f"{where}: sampled after {told} prompt tokens; allowed: the prompt given, of {prompt_len}")
    if num_sampled and not prompt_len:
        raise StitchError(f"{where}: tokens were sampled after an empty prompt; allowed: one prompt token or more")
    if num_sampled and turn.logprobs is None:
        raise StitchError(f"{where}: no logprobs, from position {prompt_len} on; allowed: SamplingParams(logprobs=0)")
    logprobs = np.empty(0, np.float32) if turn.logprobs is None else turn.logprobs
    check_vector(StitchError, f"{where}: logprobs", logprobs, np.float32, num_sampled)
    check_entries(StitchError, f"{where}: logprobs", logprobs, logprobs < np.inf, "numbers, and -inf")
    versions = turn.weight_versions
    check_vector(StitchError, f"{where}: weight_versions", versions, np.int32, num_sampled)
    check_entries(StitchError, f"{where}: weight_versions", versions, versions >= 0, "0 and above")
    rows = turn.routed_experts
    if rows is None:
        return logprobs
    check_rows(StitchError, f"{where}: routed_experts", rows)
    if check_integer(StitchError, f"{where}: start", turn.start, 0) > prompt_len:
        raise StitchError(f"{where}: start is {turn.start}; allowed: 0 to {prompt_len}, the prompt's length")
    if len(rows) != (wanted := expected_rows(prompt_len, turn.start, num_sampled)):
        raise StitchError(
            f"{where}: {len(rows)} rows for {prompt_len} prompt and {num_sampled} sampled tokens from start"
            f" {turn.start}; allowed: {wanted}"
        )
    return logprobs
