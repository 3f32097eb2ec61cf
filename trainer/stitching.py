"""Joins pieces of one sequence: turns of a conversation, attempts of a request, prefill and decode phases.

Every row of routed experts has an absolute position. The result has one row for each position from the first to the
last. No row is padded, guessed or narrowed. A piece that does not fit causes an error that gives the place.

At the boundary of two turns, the last token of the first turn has not passed through the model, so the first turn has
no row for it. The next turn computes that token as part of its prompt and returns the row, if it was requested to
return rows from that position or an earlier one. The row of a prompt's last token belongs to the first sampled token.
Request rows from `Stitcher.next_start`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..schemas.rows import Rows, expected_rows
from .checks import check_entries, check_integer, check_rows, check_vector, describe
from .errors import StitchError
from .row_run import Overlap, RowStitcher
from .sample import NOT_SAMPLED, Sample

__all__ = ["Stitcher", "Turn", "stitch_rows"]


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
            self._add_rows(where, turn, len(prompt))
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

    def _add_rows(self, where: str, turn: Turn, prompt_len: int) -> None:
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
