"""A group of answers while a trainer's step has it: what has come of each answer, and what is in flight."""

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
"""An answer that ended so is complete."""


class OpenGroup:
    """The answers to one prompt, until a step takes, drops or loses them.

    Args:
        number: no other group of the same steps has it.
        request: for all samples.
        key: the caller's.
        step: number of the step that starts it.
    """

    def __init__(self, number: int, request: GenerateRequest, key: object, step: int) -> None:
        self.number = number
        self._request = request
        self._key = key
        self._first_step = step
        first = join_samples(request, (), None)
        # By sample, all parts joined.
        self._answers = [replace_result(answer, siblings=()) for answer in (first, *first.siblings)]
        # Which answers each call is for.
        self._calls: dict[Call, tuple[int, ...]] = {}
        self._is_begun = False
        self._model = request.model
        self.error: RequestError | None = None
        """Why it failed."""

    def __repr__(self) -> str:
        """One line with counts."""
        num_open = sum(not _is_complete(answer) for answer in self._answers)
        return f"<OpenGroup {self.number} answers={len(self._answers)} open={num_open} calls={len(self._calls)}>"

    @property
    def policy(self) -> tuple[str | None, str | None]:
        """The model and the adapter that it is sampled with; the model is None until it is known."""
        return self._model, self._request.lora

    @property
    def calls(self) -> list[Call]:
        """What is in flight."""
        return [*self._calls]

    @property
    def is_complete(self) -> bool:
        """True if all answers have ended by themselves."""
        return all(_is_complete(answer) for answer in self._answers)

    @property
    def can_continue_exactly(self) -> bool:
        """True if no open answer has tokens whose sampler had a state of its own."""
        has_tokens = any(len(answer.token_ids) for answer in self._answers if not _is_complete(answer))
        return self._request.sampling.is_continuable or not has_tokens

    def rest(self) -> Iterator[tuple[GenerateRequest, tuple[int, ...]]]:
        """Yield a request for each open answer, with the answers that it is for: one for all, if nothing has come.

        Raises:
            InvalidRequest: an answer with its prompt is too long for a request.
        """
        if not any(len(answer.token_ids) for answer in self._answers):
            # A new id: what is left of an earlier call must not be taken for this one's.
            request_id = uuid.uuid4().hex if self._is_begun else self._request.request_id
            yield replace(self._request, request_id=request_id), tuple(range(len(self._answers)))
            return
        for index, answer in enumerate(self._answers):
            if not _is_complete(answer):
                yield self._request.continuing(answer, inexact="continue"), (index,)

    def add(self, call: Call, indexes: tuple[int, ...]) -> None:
        """Have a call in flight for these answers."""
        self._calls[call] = indexes
        self._model = call.model

    def end(self, call: Call) -> None:
        """Join what an ended call has brought to the answers that it was for."""
        first = call.generation()
        for index, generation in zip(self._calls.pop(call), (first, *first.siblings), strict=True):
            part = replace_result(generation, siblings=())
            self._answers[index] = self._answers[index].joined(part) if self._is_begun else part
        self._is_begun = True
        self.error = self.error or first.error

    def forget_calls(self) -> None:
        """Have nothing in flight any more."""
        self._calls.clear()

    def lengths(self, in_flight: dict[str, list[int]]) -> list[int]:
        """Return the tokens of each answer.

        Args:
            in_flight: by request id, what the children of open calls have.
        """
        lengths = [len(answer.token_ids) for answer in self._answers]
        for call, indexes in self._calls.items():
            for index, num_tokens in zip(indexes, in_flight.get(call.request.request_id, ()), strict=False):
                lengths[index] += num_tokens
        return lengths

    def result(self, step: int) -> Group:
        """Return it as it is, at the end of this step."""
        return Group(
            key=self._key,
            request=self._request,
            generations=tuple(self._answers),
            steps=step - self._first_step + 1,
            error=self.error,
        )


def _is_complete(answer: Generation) -> bool:
    return answer.finish_reason in OWN_ENDS
