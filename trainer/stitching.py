"""Pieces of one sequence become one: the turns of a conversation, the attempts of a request, prefill and decode.

Every row of routed experts knows its absolute position, and the result has one row for each position from the first
to the last: nothing is padded, guessed or narrowed, and what does not fit is an error that says where.

The boundary: the last token of a turn has not been through the model, so its turn has no row for it. The next turn
runs it as part of its prompt and brings the row, if it was asked for rows from there on or from before:
`Stitcher.next_start` is what to ask for.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.rows import Rows, expected_rows
from trainer.errors import StitchError
from trainer.row_run import Overlap, RowRun
from trainer.sample import NOT_SAMPLED, Sample

__all__ = ["Stitcher", "Turn", "stitch_rows"]


class Turn(Protocol):
    """What one request produced, after a prompt of Lp tokens. A `bus.Generation` is one."""

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
    run = RowRun(overlap)
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
        self._run = RowRun(overlap)
        self._sampled: list[tuple[slice, npt.NDArray[np.float32], npt.NDArray[np.int32]]] = []
        """Of each turn that sampled something: its positions, logprobs and weight versions."""
        self._num_added = 0
        self._tokens: tuple[npt.NDArray[np.int32], ...] = ()
        """All tokens so far: the last prompt, and what was sampled after it."""
        self._unrouted: tuple[int, int] | None = None
        """The first turn without routing that no later one covers, and the first position whose row it needs."""

    @property
    def num_tokens(self) -> int:
        """All tokens so far."""
        return sum(map(len, self._tokens))

    @property
    def next_start(self) -> int:
        """The first position that the next turn must bring a row for: its `routed_experts_prompt_start`."""
        if self._run.layout is not None:
            return self._run.end
        return 0 if self._unrouted is None else self._unrouted[1]

    def add(self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], turn: Turn) -> None:
        """Add the next turn. After an error the stitcher is as it was before.

        Args:
            prompt_token_ids: its whole prompt, which begins with all tokens so far.
            turn: what was sampled after it. Zero tokens are fine, with or without an empty routing.

        Raises:
            StitchError: which turn does not follow, where, and why.
        """
        where = f"turn {self._num_added}"
        prompt = _as_token_ids(where, "prompt", prompt_token_ids)
        sampled = _as_token_ids(where, "turn", turn.token_ids)
        self._check_prompt(where, prompt)
        logprobs = _check_turn(where, turn, len(prompt))
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
        """
        if not self._num_added:
            raise StitchError("there are no turns; allowed: one or more")
        size = self._sampled[-1][0].stop if self._sampled else self.num_tokens
        routed = self._run.layout is not None
        if routed and self._unrouted is not None:
            turn, position = self._unrouted
            raise StitchError(
                f"turn {turn}: no routing for positions {position} to {size - 2}, which other turns have;"
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
                self._unrouted = (self._num_added, prompt_len - 1 if self._run.layout is None else self._run.end)
            return
        needed = self._unrouted is not None or self._run.layout is not None
        if needed and turn.start > self.next_start:
            raise StitchError(
                f"{where}: rows begin at position {turn.start}, and those of positions {self.next_start} to"
                f" {turn.start - 1} are missing; allowed: a start of at most {self.next_start}"
            )
        self._run.add(where, turn.start, turn.routed_experts)
        self._unrouted = None


def _as_token_ids(
    where: str, what: str, token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int32]:
    array = np.asarray(token_ids) if len(token_ids) else np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise StitchError(f"{where}: {what} tokens are {array.dtype} of shape {array.shape}; allowed: integers")
    good = (array >= 0) & (array <= np.iinfo(np.int32).max)
    if not good.all():
        at = int(good.argmin())
        raise StitchError(f"{where}: {what} token {at} is {array[at]}; allowed: 0 to 2147483647")
    return array.astype(np.int32, copy=False)


def _check_turn(where: str, turn: Turn, prompt_len: int) -> npt.NDArray[np.float32]:
    """A turn must not contradict itself: one of everything for each token, rows by the row rule. Returns logprobs."""
    num_sampled = len(turn.token_ids)
    if num_sampled and not prompt_len:
        raise StitchError(f"{where}: tokens were sampled after an empty prompt; allowed: one prompt token or more")
    if num_sampled and turn.logprobs is None:
        raise StitchError(f"{where}: no logprobs, from position {prompt_len} on; allowed: SamplingParams(logprobs=0)")
    logprobs = np.empty(0, np.float32) if turn.logprobs is None else turn.logprobs
    versions = turn.weight_versions
    for name, array in (("logprobs", logprobs), ("weight_versions", versions)):
        if len(array) != num_sampled:
            raise StitchError(f"{where}: {len(array)} {name} for {num_sampled} tokens; allowed: one for each")
    _check_values(where, "logprobs", logprobs, logprobs < np.inf, "numbers, and -inf")
    _check_values(where, "weight_versions", versions, versions >= 0, "0 and above")
    rows = turn.routed_experts
    if rows is not None and not 0 <= turn.start <= prompt_len:
        raise StitchError(f"{where}: start is {turn.start}; allowed: 0 to {prompt_len}, the prompt's length")
    if rows is not None and len(rows) != (wanted := expected_rows(prompt_len, turn.start, num_sampled)):
        raise StitchError(
            f"{where}: {len(rows)} rows for {prompt_len} prompt and {num_sampled} sampled tokens from start"
            f" {turn.start}; allowed: {wanted}"
        )
    return logprobs


def _check_values(where: str, name: str, array: npt.NDArray[Any], good: npt.NDArray[np.bool_], allowed: str) -> None:
    if not good.all():
        token = int(good.argmin())
        raise StitchError(f"{where}: {name} of sampled token {token} is {array[token]}; allowed: {allowed}")
