"""What the steps of the tour have in common."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from .... import bus
from ....bus import GenerateRequest
from ....schemas.presence import RoutedExpertsInfo
from ...tokenization import Tokenizer
from ..exits import CommandFailed
from ..prompts import PromptLine

__all__ = ["Guide", "quoted", "require", "took"]

NUM_SHOWN_CHARS = 60
"""Of a question that is quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A fleet of one worker to show, what to ask it, and where to say what comes of it."""

    rb: bus.Client
    tokenizer: Tokenizer
    prompts: Sequence[PromptLine]
    routing: RoutedExpertsInfo
    max_model_len: int
    write: Callable[[str], None]
    shows_progress: bool
    report: dict[str, Any] = field(default_factory=dict)
    """What the steps found out, for --json."""

    @property
    def first_question(self) -> PromptLine:
        """The first prompt that is text, or the first."""
        return next((prompt for prompt in self.prompts if prompt.text is not None), self.prompts[0])

    def request(self, prompt: PromptLine, **sampling: Any) -> GenerateRequest:
        """One sample of `prompt`, with other fields of its sampling."""
        request = prompt.request(self.tokenizer)
        return replace(request, sampling=replace(request.sampling, n=1, **sampling))

    def write_result(self, result: bus.CommandResult) -> None:
        """Write the result of a command as the command line does."""
        from ..ledger import summary

        self.write(f"      {summary(result)}")


def quoted(prompt: PromptLine) -> str:
    """The prompt as far as it fits a line."""
    if prompt.text is None:
        return "(given as token ids)"
    return f"“{prompt.text if len(prompt.text) <= NUM_SHOWN_CHARS else prompt.text[: NUM_SHOWN_CHARS - 1] + '…'}”"


def took(started: float) -> str:
    """The time since `started` on `time.monotonic()`."""
    return f"{time.monotonic() - started:.1f} s"


def require(condition: bool, problem: str) -> None:
    """End the tour where reality is not as told.

    Raises:
        CommandFailed: `condition` does not hold.
    """
    if not condition:
        raise CommandFailed(problem)
