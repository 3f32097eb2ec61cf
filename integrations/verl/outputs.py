"""What verl asks, as a request of rollbus, and a generation as verl's `TokenOutput`. Pure: no verl, no Ray."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...bus.client.generation import Generation
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest
from ...schemas.rows import expected_rows
from ...schemas.sampling import SamplingParams
from ..rows import convert_rows

STOP_REASONS: Final = {FinishReason.STOP: "completed", FinishReason.LENGTH: "completed", FinishReason.ABORT: "aborted"}
"""verl's words for the reasons that it distinguishes. All others keep their own."""
LENGTHS: Final = ("max_tokens", "max_new_tokens")
SEPARATOR: Final = "/"
"""Separates verl's request id, which all turns of a sample share, from the id of a turn."""
MAX_VERSIONS: Final = 10_000
"""Versions whose steps are remembered. No request spans as many."""


class RolloutFailed(RuntimeError):
    """A rollout or an update failed. Ray carries it to the caller, which Ray cannot do with the errors of rollbus."""


def sampling_of(asked: Mapping[str, Any], *, default_tokens: int, room: int, ignore_eos: bool) -> SamplingParams:
    """Return the sampling parameters of one call of verl.

    Args:
        asked: verl's `sampling_params`. `logprobs` is a bool there.
        default_tokens: number of tokens if verl gives none.
        room: tokens between the prompt and the end of the context.
        ignore_eos: value if verl gives none.

    Raises:
        InvalidRequest: the prompt fills the context, a value is not allowed, or a parameter has no counterpart.
    """
    if room < 1:
        raise InvalidRequest("prompt_ids", f"leave {room} tokens of the context", "at least 1")
    values = {"ignore_eos": ignore_eos, **asked}
    lengths = [int(values.pop(name)) for name in LENGTHS if values.get(name) is not None]
    values["max_tokens"] = max(1, min(lengths[0] if lengths else default_tokens, room))
    values["logprobs"] = 0 if values.pop("logprobs", False) else None
    allowed = [name for name in SamplingParams.__struct_fields__ if name != "n"]
    for name in values:
        if name not in allowed:
            raise InvalidRequest(f"sampling_params.{name}", "is not supported", ", ".join(allowed))
    return SamplingParams(**values)


def session_of(request_id: str) -> str:
    """Return the session of a request: the same for all turns that verl sends with one request id."""
    return hashlib.blake2b(request_id.partition(SEPARATOR)[0].encode(), digest_size=16).hexdigest()


class Steps:
    """Maps weight versions of the fleet to steps of the trainer, which verl calls `global_steps`."""

    def __init__(self) -> None:
        self._steps: dict[int, int | None] = {}
        self.latest: int | None = None

    def add(self, version: int, step: int | None) -> None:
        """Record the step whose weights were published as `version`."""
        self._steps[version] = self.latest = step
        while len(self._steps) > MAX_VERSIONS:
            del self._steps[next(iter(self._steps))]

    def of(self, versions: Sequence[int]) -> list[int]:
        """Return the steps of versions in ascending order. Empty before the first publication of this trainer.

        Raises:
            RolloutFailed: another program has loaded weights in between.
        """
        if not self._steps:
            return []
        for version in versions:
            if version not in self._steps:
                raise RolloutFailed(
                    f"tokens have weights of version {version}, which this trainer did not publish; "
                    f"published: {min(self._steps)} to {max(self._steps)}"
                )
        return sorted(step for step in {self._steps[version] for version in versions} if step is not None)


def output_fields(
    generation: Generation, steps: Steps, *, rows_dtype: str | None, largest_id: int | None
) -> dict[str, Any]:
    """Return the fields of verl's `TokenOutput`.

    Args:
        generation: whole or aborted result of a request whose rows start at position 0.
        steps: steps of the versions.
        rows_dtype: dtype of routed experts. None: verl wants no rows.
        largest_id: the model's number of experts minus one.

    Raises:
        RolloutFailed: rows are missing, or tokens have weights of another trainer.
        InvalidRequest: an expert id does not fit the dtype.
    """
    num_tokens = len(generation.token_ids)
    rows = None
    if rows_dtype is not None and num_tokens:
        needed = expected_rows(generation.prompt_len, 0, num_tokens)
        found = 0 if generation.routed_experts is None else len(generation.routed_experts)
        if generation.routed_experts is None or generation.start != 0 or found != needed:
            raise RolloutFailed(
                f"the result has {found} rows of routed experts from position {generation.start}; "
                f"allowed: {needed} rows from position 0"
            )
        rows = convert_rows(generation.routed_experts, rows_dtype, largest_id)
    present: Sequence[int | None] = steps.of(generation.weight_versions.tolist()) or [steps.latest]
    return {
        "token_ids": generation.token_ids.tolist(),
        "log_probs": None if generation.logprobs is None else generation.logprobs.tolist(),
        "routed_experts": rows,
        "stop_reason": STOP_REASONS.get(generation.finish_reason, str(generation.finish_reason)),
        "extra_fields": {
            "global_steps": present[-1],
            "min_global_steps": present[0],
            "max_global_steps": present[-1],
            "num_cached_tokens": generation.cached_tokens,
        },
    }


def merge_legs(legs: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, int]:
    """Return the lowest and highest step of a sample that verl generated in several calls.

    Args:
        legs: number of tokens and `extra_fields` of each call. Calls without tokens count only if all have none.
    """
    sampled = [extra for count, extra in legs if count] or [extra for _, extra in legs]
    merged: dict[str, int] = {}
    for name, choose in (("min_global_steps", min), ("max_global_steps", max)):
        known = [extra[name] for extra in sampled if extra.get(name) is not None]
        if known:
            merged[name] = choose(known)
    return merged
