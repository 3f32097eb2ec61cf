"""Pieces of one sequence become one: the turns of a conversation, the attempts of a request, prefill and decode.

Every row of routed experts knows its absolute position, and the result has one row for each position from the first
to the last: nothing is padded, guessed or narrowed, and what does not fit is an error that says where.

The boundary: the last token of a turn has not been through the model, so its turn has no row for it. The next turn
runs it as part of its prompt and brings the row, if it was asked for rows from there on or from before. And the row
of a prompt's last token belongs to the first token sampled. `Stitcher.next_start` is what to ask for.
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
    """What one request produced, after a prompt of Lp tokens. A `rollbus.Generation` is one."""

    @property
    def prompt_len(self) -> int:
        """Lp."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[G]: what was sampled."""

    @property
    def logprobs(self) -> npt.NDArray[np.float32] | None:
        """f4[G]: the sampler's."""

    @property
    def weight_versions(self) -> npt.NDArray[np.int32]:
        """i4[G]: the weights that sampled each token."""

    @property
    def routed_experts(self) -> Rows | None:
        """u1|u2[Lp - start + G - 1, L, K]; None without routing."""

    @property
    def start(self) -> int:
        """The position of the first row, 0 to Lp."""

    @property
    def error(self) -> Exception | None:
        """Why the request failed; None if it did not."""


def stitch_rows(pieces: Iterable[tuple[int, Rows]], *, overlap: Overlap = "refuse") -> tuple[int, Rows]:
    """Join pieces of routed experts, given in order, into one array of contiguous positions.

    Args:
        pieces: (position of the first row, u1|u2[rows, L, K]). Each begins where those before it end, or earlier.
            Pieces of no rows count for layout and dtype only.
        overlap: `refuse`: where two pieces have a row for the same position they must name the same experts, in any
            order; the first is kept. `first` and `last`: they may differ, and this one counts.

    Returns:
        The position of the first row, and the rows: u1, or u2 if any piece is; newly allocated and writable.

    Raises:
        StitchError: no pieces, a gap, an overlap that disagrees, or pieces of different layers or top_k.
    """
    run = RowStitcher(overlap)
    for number, (start, rows) in enumerate(pieces):
        run.add(f"piece {number}", start, rows)
    return run.start, run.join()


class Stitcher:
    """The turns of one conversation become one sample.

    Each turn's prompt begins with all tokens so far. Arrays are looked at, not copied, until `sample`: leave them
    as they are until then.

    Args:
        overlap: what counts where a turn brings rows that an earlier one had brought; see `stitch_rows`. With
            `refuse`, a turn that recomputes earlier positions in another batch shape, or by other weights, may be
            refused: ask for rows from `next_start` only, or choose `first`, under which each token keeps the
            routing it was sampled with.
    """

    def __init__(self, *, overlap: Overlap = "refuse") -> None:
        self._run = RowStitcher(overlap)
        self._sampled: list[tuple[slice, npt.NDArray[np.float32], npt.NDArray[np.int32]]] = []
        """Of each turn that sampled something: its positions, logprobs and weight versions."""
        self._num_added = 0
        self._tokens: tuple[npt.NDArray[np.int32], ...] = ()
        """All tokens so far: the last prompt, and what was sampled after it."""
        self._unrouted: int | None = None
        """The first turn without routing whose rows no later one has brought."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far."""
        return sum(map(len, self._tokens))

    @property
    def next_start(self) -> int:
        """The first position that the next turn must bring a row for: its `routed_experts_prompt_start`.

        That is where the rows so far end; or the position before the first token sampled, as long as its row is
        missing: its turn had no routing, or began at its prompt's length.
        """
        if not self._sampled:
            return 0
        first_needed: int = self._sampled[0][0].start - 1
        if self._run.layout is None or self._run.start > first_needed:
            return first_needed
        return self._run.end

    def add(self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], turn: Turn) -> None:
        """Add the next turn. After an error the stitcher is as it was before.

        Args:
            prompt_token_ids: its whole prompt, which begins with all tokens so far.
            turn: what was sampled after it. Zero tokens are fine, with or without an empty routing; a request that
                failed is not, whatever it had brought by then.

        Raises:
            StitchError: which turn does not follow, where, and why.
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
        """All turns so far as one sequence, which ends with the last token sampled.

        Its arrays are newly allocated, except for the rows where all came with one turn: they are that turn's own.
        A prompt after that token, of a turn that sampled nothing, has nothing to train and no rows: it is left out.
        If no turn sampled anything, the sample is the last prompt, with nothing to train.

        Raises:
            StitchError: no turns, or some turns lack routing that others have.
            PackError: an `advantage` that `Sample` refuses.
        """
        if not self._num_added:
            raise StitchError("there are no turns; allowed: one or more")
        size = self._sampled[-1][0].stop if self._sampled else self.num_tokens
        routed = self._run.layout is not None
        if routed and self._unrouted is not None:
            raise StitchError(
                f"turn {self._unrouted}: no routing from position {self.next_start} on, which other turns have;"
                " allowed: routing in all turns, in none, or a later turn that brings these rows"
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
    """What a failed request left behind ends anywhere, and is no sample of the policy."""
    # Objects of a trainer's own may do without the field; nothing else says that a turn failed.
    error = getattr(turn, "error", None)
    if error is not None:
        raise StitchError(f"{where}: its request failed: {error}; allowed: turns whose error is None")


def _check_turn(where: str, turn: Turn, prompt_len: int, num_sampled: int) -> npt.NDArray[np.float32]:
    """A turn must not contradict itself: one of everything for each token, rows by the row rule. Returns logprobs."""
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
