"""Requests for the rest of an answer: the next attempt after a loss, and the continuation of a stopped answer.

Routed experts have a row for each position except the last token's. The request for the rest therefore asks for rows
from that position on. The engine computes this boundary row with the rest and its weight version. No row is computed
twice.
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
"""How to continue an answer whose sampler had state. `refuse` raises `InvalidRequest`. `continue` uses another seed,
and the joined result is not `exact`."""
OPEN_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""Finish reasons after which an answer may be continued."""


class StoppedAnswer(Protocol):
    """The part of `rollbus.Generation` that a continuation needs."""

    @property
    def child(self) -> int:
        """Number of the sample, 0 to n - 1."""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens, Lp."""

    @property
    def start(self) -> int:
        """Absolute position of the first row."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Generated tokens, i4[G]."""

    @property
    def model(self) -> str | None:
        """Model that generated it; None if it is unknown."""

    @property
    def routed_experts(self) -> Rows | None:
        """Rows from `start` on; None without routed experts."""

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the answer ended."""


def rest_of(request: "GenerateRequest", token_ids: npt.NDArray[np.int32], num_rows: int) -> "GenerateRequest":
    """Return `request` for the tokens after `token_ids`, with the same id. `token_ids` must not be empty.

    Args:
        request: a request for one sample.
        num_rows: number of rows of routed experts that already exist; 0 also if the request wants none.
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
            # The state of the seeded generator is lost. The same seed would repeat the noise of the first tokens.
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
            allowed=f"a generation of this request: {request.prompt_len} tokens, rows from {start} on",
        )
    if answer.child >= sampling.n:
        raise InvalidRequest(
            field="generation", problem=f"is of sample {answer.child}", allowed=f"samples 0 to {sampling.n - 1}"
        )
    reason = answer.finish_reason if answer.finish_reason not in OPEN_ENDS else why_ended(sampling, answer.token_ids)
    if reason is not None:
        raise InvalidRequest(
            field="generation", problem=f"ended normally ({reason})", allowed="a generation that was aborted or failed"
        )
    if num_tokens and inexact == "refuse":
        check_continuable(sampling)
    seed = None if sampling.seed is None else sampling.seed + answer.child
    model = request.model or answer.model
    request = replace(request, sampling=replace(sampling, n=1, seed=seed), request_id=request_id, model=model)
    if not num_tokens:
        return request
    return rest_of(request, answer.token_ids, num_kept_rows(answer))


def num_kept_rows(answer: StoppedAnswer) -> int:
    """Return the number of rows of a stopped answer that belong to its tokens.

    Rows may arrive before their tokens; the number excludes these rows.
    """
    if answer.routed_experts is None:
        return 0
    expected = expected_rows(answer.prompt_len, answer.start, len(answer.token_ids))
    return min(len(answer.routed_experts), expected)


def check_continuable(sampling: SamplingParams) -> None:
    """Check that the sampling has no state that is lost when an answer stops.

    Raises:
        InvalidRequest: the sampling has a seed, penalties, bad words, or engine parameters such as a grammar.
    """
    if fields := sampling.stateful_fields:
        raise InvalidRequest(
            field=f"sampling.{fields[0]}",
            problem="gives the sampler a state that is lost when an answer stops: an exact continuation is impossible",
            allowed="no seed (except with temperature 0), penalties, bad words or extra; or inexact='continue'",
        )


def why_ended(sampling: SamplingParams, token_ids: npt.NDArray[np.int32]) -> FinishReason | None:
    """Return why an answer ended after `token_ids`, if its terminal chunk was lost. None: more tokens may follow."""
    num_tokens = len(token_ids)
    if num_tokens > sampling.min_tokens and int(token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens == sampling.max_tokens else None


def _derived_seed(seed: int, num_tokens: int) -> int:
    """Return another seed for the tokens after the first `num_tokens`.

    The same arguments always give the same seed. Seeds of different arguments are unrelated.
    """
    digest = blake2b(f"{seed} {num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
