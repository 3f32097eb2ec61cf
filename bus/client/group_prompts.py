"""The prompts of a trainer's groups: what the caller gives, one at a time and no sooner than it is needed."""

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
"""What becomes of a stopped group whose sampler had a state of its own; `refuse`: such prompts are not accepted."""


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """A prompt with what the caller knows it by."""

    prompt: "GenerateRequest | TokenIds"
    key: object = None
    """Comes back as `Group.key`; it stays in this process."""


Prompt = GenerateRequest | TokenIds | GroupPrompt
Prompts = Iterable[Prompt] | AsyncIterable[Prompt]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a request is made of a prompt."""

    n: int
    sampling: SamplingParams
    """Of prompts that are token ids."""
    inexact: InexactGroups

    def request(self, prompt: "GenerateRequest | TokenIds") -> GenerateRequest:
        """Return the request for a group of answers, with a group id.

        Its request id is new: data sets bring the same request again, perhaps while it runs.

        Raises:
            InvalidRequest: a field is wrong, or it could not be continued, where that is refused.
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
    """Prompts one at a time, of an iterable or an async one.

    Args:
        prompts: the caller's.
        form: of the requests.
        wake: called when an async iterable has brought a prompt.
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
        """True if `pop` has a prompt or the end; if not, one is on its way, and `wake` will be called."""
        return self._drawing.is_ready

    def pop(self) -> tuple[GenerateRequest, object] | None:
        """Return the next request and its key; None: there are no more. Call it when `is_ready`.

        Raises:
            InvalidRequest: the prompt is wrong; the next one may be right.
            Exception: whatever the iterable raised.
        """
        try:
            prompt = self._drawing.pop()
        except (StopIteration, StopAsyncIteration):
            return None
        if isinstance(prompt, GroupPrompt):
            return self._form.request(prompt.prompt), prompt.key
        return self._form.request(prompt), None

    async def close(self) -> None:
        """Cancel the drawing that is under way, and wait until the source has cleaned up."""
        await self._drawing.close()
