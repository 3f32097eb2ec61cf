"""The request for the rest of an answer: for the next attempt after a loss, and for an answer that was stopped.

Rows of routed experts exist for all positions but the last token's. So the rest asks for rows from there on: the
boundary row is computed, and has its version, with the rest. No row is computed twice.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from .chunk import FinishReason
from .errors import InvalidRequest
from .limits import MAX_SEED
from .rows import Rows, expected_rows
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .request import GenerateRequest

__all__ = [
    "Inexact",
    "StoppedAnswer",
    "check_continuable",
    "num_kept_rows",
    "rest_of",
    "rest_of_answer",
    "why_ended",
]

Inexact = Literal["refuse", "continue"]
"""What becomes of an answer whose sampler had a state of its own: `continue` goes on with another seed, and the joined
result is not `exact`."""
OPEN_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""An answer that ended so may go on."""


class StoppedAnswer(Protocol):
    """What a continuation needs of a `rollbus.Generation`."""

    @property
    def child(self) -> int:
        """Which of n samples."""

    @property
    def prompt_len(self) -> int:
        """Lp."""

    @property
    def start(self) -> int:
        """Absolute position of the first row."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[G]."""

    @property
    def routed_experts(self) -> Rows | None:
        """Rows from `start` on; None without routing."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""


def rest_of(request: "GenerateRequest", token_ids: npt.NDArray[np.int32], num_rows: int) -> "GenerateRequest":
    """Return `request` for what comes after `token_ids`, of which there are some, with the same id.

    Args:
        request: for one sample.
        num_rows: rows of routed experts that are there; 0 also where none are wanted.
    """
    sampling, num_tokens = request.sampling, len(token_ids)
    return replace(
        request,
        prompt_token_ids=np.concatenate([np.asarray(request.prompt_token_ids), token_ids]),
        routed_experts_prompt_start=request.routed_experts_prompt_start + num_rows,
        sampling=replace(
            sampling,
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - num_tokens,
            min_tokens=max(sampling.min_tokens - num_tokens, 0),
            prompt_logprobs=None,
            # The state of the first seed's generator is lost; the same seed would repeat the first tokens' noise.
            seed=None if sampling.seed is None else _derived_seed(sampling.seed, num_tokens),
        ),
    )


def rest_of_answer(
    request: "GenerateRequest", answer: StoppedAnswer, *, inexact: Inexact, request_id: str
) -> "GenerateRequest":
    """Return the request for the rest of `answer`, with this id; see `GenerateRequest.continuing`."""
    sampling, num_tokens = request.sampling, len(answer.token_ids)
    start = request.routed_experts_prompt_start
    if (answer.prompt_len, answer.start) != (request.prompt_len, start):
        raise InvalidRequest(
            field="generation",
            problem=f"has a prompt of {answer.prompt_len} tokens and rows from {answer.start} on",
            allowed=f"one of this request: {request.prompt_len} tokens, rows from {start} on",
        )
    if answer.child >= sampling.n:
        raise InvalidRequest(
            field="generation", problem=f"is of sample {answer.child}", allowed=f"samples 0 to {sampling.n - 1}"
        )
    reason = answer.finish_reason if answer.finish_reason not in OPEN_ENDS else why_ended(sampling, answer.token_ids)
    if reason is not None:
        raise InvalidRequest(
            field="generation", problem=f"has ended by itself ({reason})", allowed="one that was aborted, or has failed"
        )
    if num_tokens and inexact == "refuse":
        check_continuable(sampling)
    seed = None if sampling.seed is None else sampling.seed + answer.child
    request = replace(request, sampling=replace(sampling, n=1, seed=seed), request_id=request_id)
    if not num_tokens:
        return request
    return rest_of(request, answer.token_ids, num_kept_rows(answer))


def num_kept_rows(answer: StoppedAnswer) -> int:
    """Return how many rows of a stopped answer belong to its tokens: some may have come ahead of theirs."""
    if answer.routed_experts is None:
        return 0
    expected = expected_rows(answer.prompt_len, answer.start, len(answer.token_ids))
    return min(len(answer.routed_experts), expected)


def check_continuable(sampling: SamplingParams) -> None:
    """Refuse sampling whose state is lost when an answer is stopped.

    Raises:
        InvalidRequest: it has a seed, penalties, bad words, or parameters of the engine, as a grammar is.
    """
    if fields := sampling.stateful_fields:
        raise InvalidRequest(
            field=f"sampling.{fields[0]}",
            problem="gives the sampler a state that is lost when an answer is stopped: it cannot be continued exactly",
            allowed="no seed (but with temperature 0), penalties, bad words or extra; or another choice of `inexact`",
        )


def why_ended(sampling: SamplingParams, token_ids: npt.NDArray[np.int32]) -> FinishReason | None:
    """Return why there is nothing after `token_ids`, where its terminal chunk was lost; None: more may come."""
    num_tokens = len(token_ids)
    if num_tokens > sampling.min_tokens and int(token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens == sampling.max_tokens else None


def _derived_seed(seed: int, num_tokens: int) -> int:
    """Another seed for what comes after `num_tokens` tokens: the same for the same two, else unrelated."""
    digest = blake2b(f"{seed} {num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
