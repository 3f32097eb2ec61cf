"""An open group of a trainer's step: the tokens of its answers, and its calls in flight."""

import uuid
from collections.abc import Iterator
from dataclasses import replace as replace_result

from msgspec.structs import replace

from ...schemas.chunk import FinishReason
from ...schemas.errors import RequestError
from ...schemas.request import GenerateRequest
from .calls import Call
from .generation import Generation, join_samples
from .group_results import Group

__all__ = ["OpenGroup"]

OWN_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})
"""Finish reasons of complete answers."""


class OpenGroup:
    """The answers to one prompt, until a step returns, drops or fails the group.

    Args:
        number: number of the group, unique within its sampler.
        request: request for all samples.
        key: key from the caller's `GroupPrompt`.
        step: number of the step that starts the group.
    """

    def __init__(self, number: int, request: GenerateRequest, key: object, step: int) -> None:
        self.number = number
        self._request = request
        self._key = key
        self._first_step = step
        first = join_samples(request, (), None)
        # One for each sample; the parts of a continued answer are joined.
        self._answers = [replace_result(answer, siblings=()) for answer in (first, *first.siblings)]
        # Indexes of the answers that each call generates.
        self._calls: dict[Call, tuple[int, ...]] = {}
        self._is_begun = False
        self._model = request.model
        self.error: RequestError | None = None
        """Cause of the failure. None if the group has not failed."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        num_open = sum(not _is_complete(answer) for answer in self._answers)
        return f"<OpenGroup {self.number} answers={len(self._answers)} open={num_open} calls={len(self._calls)}>"

    @property
    def policy(self) -> tuple[str | None, str | None]:
        """Model and adapter that sample the group. The model is None until it is known."""
        return self._model, self._request.lora

    @property
    def calls(self) -> list[Call]:
        """Calls in flight."""
        return [*self._calls]

    @property
    def is_complete(self) -> bool:
        """True if all answers ended on their own: by a stop token, their length or a repetition."""
        return all(_is_complete(answer) for answer in self._answers)

    @property
    def can_continue_exactly(self) -> bool:
        """True if no open answer has tokens from a sampler with state."""
        has_tokens = any(len(answer.token_ids) for answer in self._answers if not _is_complete(answer))
        return self._request.sampling.is_continuable or not has_tokens

    def rest(self) -> Iterator[tuple[GenerateRequest, tuple[int, ...]]]:
        """Yield requests for the open answers, each with the indexes of its answers.

        If no answer has tokens, yield one request for all answers. Otherwise yield one request for each open answer.

        Raises:
            InvalidRequest: prompt and answer together are too long for a request.
        """
        if not any(len(answer.token_ids) for answer in self._answers):
            # A new id, so that late chunks of an earlier call are not accepted as chunks of this call.
            request_id = uuid.uuid4().hex if self._is_begun else self._request.request_id
            yield replace(self._request, request_id=request_id), tuple(range(len(self._answers)))
            return
        for index, answer in enumerate(self._answers):
            if not _is_complete(answer):
                yield self._request.continuing(answer, inexact="continue"), (index,)

    def add(self, call: Call, indexes: tuple[int, ...]) -> None:
        """Record a call in flight for these answers."""
        self._calls[call] = indexes
        self._model = call.model

    def end(self, call: Call) -> None:
        """Join the result of an ended call with its answers."""
        first = call.generation()
        for index, generation in zip(self._calls.pop(call), (first, *first.siblings), strict=True):
            part = replace_result(generation, siblings=())
            self._answers[index] = self._answers[index].joined(part) if self._is_begun else part
        self._is_begun = True
        self.error = self.error or first.error

    def forget_calls(self) -> None:
        """Remove all calls in flight from the group."""
        self._calls.clear()

    def lengths(self, in_flight: dict[str, list[int]]) -> list[int]:
        """Return the number of tokens of each answer.

        Args:
            in_flight: numbers of tokens of the children of open calls, by request id.
        """
        lengths = [len(answer.token_ids) for answer in self._answers]
        for call, indexes in self._calls.items():
            for index, num_tokens in zip(indexes, in_flight.get(call.request.request_id, ()), strict=False):
                lengths[index] += num_tokens
        return lengths

    def result(self, step: int) -> Group:
        """Return the group in its present state, at the end of step `step`."""
        return Group(
            key=self._key,
            request=self._request,
            generations=tuple(self._answers),
            steps=step - self._first_step + 1,
            error=self.error,
        )


def _is_complete(answer: Generation) -> bool:
    return answer.finish_reason in OWN_ENDS
