"""State and functions that the steps of the tour share."""

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
"""Maximum number of characters of a quoted question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A fleet with one worker, its prompts, and the output of the tour."""

    rb: bus.Client
    tokenizer: Tokenizer
    prompts: Sequence[PromptLine]
    routing: RoutedExpertsInfo
    max_model_len: int
    write: Callable[[str], None]
    shows_progress: bool
    report: dict[str, Any] = field(default_factory=dict)
    """Results of the steps, for --json."""

    @property
    def first_question(self) -> PromptLine:
        """First prompt with text, or the first prompt if none has text."""
        return next((prompt for prompt in self.prompts if prompt.text is not None), self.prompts[0])

    def request(self, prompt: PromptLine, **sampling: Any) -> GenerateRequest:
        """Return a request for one sample of `prompt`, with changed sampling parameters."""
        request = prompt.request(self.tokenizer)
        return replace(request, sampling=replace(request.sampling, n=1, **sampling))

    def write_result(self, result: bus.CommandResult) -> None:
        """Write the result of a command as the command line does."""
        from ..ledger import summary

        self.write(f"      {summary(result)}")


def quoted(prompt: PromptLine) -> str:
    """Return the beginning of the prompt that fits into a line."""
    if prompt.text is None:
        return "(given as token ids)"
    return f"“{prompt.text if len(prompt.text) <= NUM_SHOWN_CHARS else prompt.text[: NUM_SHOWN_CHARS - 1] + '…'}”"


def took(started: float) -> str:
    """Return the time since `started` on `time.monotonic()` as text."""
    return f"{time.monotonic() - started:.1f} s"


def require(condition: bool, problem: str) -> None:
    """End the tour if a condition is false.

    Raises:
        CommandFailed: `condition` is false.
    """
    if not condition:
        raise CommandFailed(problem)
