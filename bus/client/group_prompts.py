"""The prompts of a trainer's groups, drawn from the caller's source one at a time and only on demand."""

import uuid
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from ...schemas.checks import describe
from ...schemas.continuation import check_continuable
from ...schemas.errors import InvalidRequest
from ...schemas.request import GenerateRequest, TokenIds
from ...schemas.sampling import SamplingParams
from .drawing import Drawing

__all__ = ["GroupPrompt", "GroupPrompts", "InexactGroups", "Prompt", "PromptForm", "Prompts"]

InexactGroups = Literal["refuse", "continue", "drop"]
"""Handling of a stopped group whose sampler has state. With `refuse`, such prompts are rejected."""


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """A prompt with a key of the caller."""

    prompt: "GenerateRequest | TokenIds"
    """A request, or token ids that get the sampling parameters of the groups."""
    key: object = None
    """Returned as `Group.key`. The key stays in this process."""


Prompt = GenerateRequest | TokenIds | GroupPrompt
Prompts = Iterable[Prompt] | AsyncIterable[Prompt]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Builds requests from prompts."""

    n: int
    sampling: SamplingParams
    """Sampling parameters of prompts that are token ids."""
    inexact: InexactGroups

    def request(self, prompt: "GenerateRequest | TokenIds") -> GenerateRequest:
        """Return the request for a group of answers, with a group id.

        Each request gets a new request id, because a data set can repeat a request while the first one runs.

        Raises:
            InvalidRequest: a field is wrong, or the sampler has state and `inexact` is `refuse`.
        """
        if not isinstance(prompt, GenerateRequest):
            prompt = GenerateRequest(prompt_token_ids=prompt, sampling=self.sampling)
        if prompt.sampling.n not in (1, self.n):
            raise InvalidRequest(field="sampling.n", problem=f"is {prompt.sampling.n}", allowed=f"1, or n={self.n}")
        if self.inexact == "refuse":
            check_continuable(prompt.sampling)
        group_id = prompt.group_id or uuid.uuid4().hex
        sampling = replace(prompt.sampling, n=self.n)
        return replace(prompt, request_id=uuid.uuid4().hex, group_id=group_id, sampling=sampling)


class GroupPrompts:
    """Prompts from an iterable or an async iterable, one at a time.

    Args:
        prompts: the caller's prompts.
        form: builds the requests.
        wake: called when an async iterable has returned a prompt, ended or raised an error.

    Raises:
        InvalidRequest: `prompts` is not iterable.
    """

    def __init__(self, prompts: Prompts, form: PromptForm, wake: Callable[[], None]) -> None:
        if not isinstance(prompts, Iterable | AsyncIterable):
            raise InvalidRequest(
                field="prompts", problem=f"is {describe(prompts)}", allowed="an iterable or an async iterable"
            )
        self._drawing: Drawing[Prompt] = Drawing(prompts, wake)
        self._form = form

    @property
    def is_ready(self) -> bool:
        """True if `pop` has a prompt or the end. If False, a prompt is being drawn, and `wake` will be called."""
        return self._drawing.is_ready

    def pop(self) -> tuple[GenerateRequest, object] | None:
        """Return the next request and its key, or None if no prompts are left. Call this only if `is_ready`.

        Raises:
            InvalidRequest: the prompt is not valid. The next prompt may be valid.
            Exception: the iterable raised it.
        """
        try:
            prompt = self._drawing.pop()
        except (StopIteration, StopAsyncIteration):
            return None
        if isinstance(prompt, GroupPrompt):
            return self._form.request(prompt.prompt), prompt.key
        return self._form.request(prompt), None

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        await self._drawing.close()
