"""What an answer's text says apart from its content: reasoning and tool calls, as found by parsers of models' formats.

This module decides how often and how much a parser is asked; `vllm_parsers.py` has the parsers. The token ids, logprobs
and routing of an answer stay those of the engine, whatever a parser makes of the text.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from ....schemas.errors import RollbusError
from ....schemas.foreign_code import ForeignError, foreign_code
from ...tokenization import Tokenizer

__all__ = [
    "AnswerParser",
    "AnswerParts",
    "AnswerReader",
    "CallPart",
    "ParsePlan",
    "ParserUnavailable",
    "Parsers",
    "ToolQuestion",
    "load_parsers",
]

logger = logging.getLogger(__name__)

SHORT_TEXT: Final = 4096
"""Characters that take a parser less time than a thread costs."""
MAX_TEXT: Final = 1 << 20
"""Characters of an answer that a parser is given. The text behind them is content: no tool call is as long."""
MIN_GROWTH: Final = 64
"""A parser that looks at all of the text each time is asked again once the text has grown by a 64th: its work is then
linear in the text."""
POOL: Final = ThreadPoolExecutor(2, "answer-parser")
"""Parses long texts, so that other requests go on. It is no larger: a parser of Python holds the interpreter."""


class ParserUnavailable(RollbusError):
    """A parser cannot be loaded; the message names the option and what is allowed."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, or what a stream adds to one."""

    index: int
    id: str | None
    """None in a stream after the first part of a call; so is the name."""
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """An answer by parts, or what some more text adds to them."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        """Return whether any part has something."""
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolQuestion:
    """What a request says that parsers need to know."""

    tools: Sequence[Mapping[str, Any]]
    choice: str
    """`none`, `auto`, `required` or `named`."""
    name: str | None
    """The function that must be called, with `named`."""
    template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as `enable_thinking`."""
    skip_special_tokens: bool

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a tool call."""
        return self.choice in ("required", "named")


class AnswerParser(Protocol):
    """Parses one answer; either method may raise anything, as the text is the model's."""

    def whole(self, text: str, token_ids: list[int]) -> AnswerParts:
        """All of an answer."""

    def add(self, text: str, token_ids: list[int], *, prompt: list[int], final: bool) -> AnswerParts:
        """What the next text of an answer adds."""


class ParsePlan(Protocol):
    """How the answers to one request are parsed."""

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """What the engine must hold the answer to, in vLLM's form; None: nothing."""

    @property
    def skip_special_tokens(self) -> bool:
        """False where the parser looks for special tokens."""

    def answer_parser(self) -> AnswerParser:
        """Make the parser of one answer."""


class Parsers(Protocol):
    """The parsers that the service was started with."""

    tool_call_parser: str | None
    reasoning_parser: str | None

    def plan(self, tokenizer: Tokenizer, question: ToolQuestion) -> ParsePlan:
        """Decide how the answers to a request are parsed; called in several threads.

        Raises:
            HttpError: 400, the tools cannot be used; 501, the parser does not fit the model.
        """


def load_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> Parsers | None:
    """Import the parsers, which takes some seconds; None if neither is named.

    Raises:
        ParserUnavailable: vLLM is not installed, or has no parser of that name.
    """
    if tool_call_parser is None and reasoning_parser is None:
        return None
    from .vllm_parsers import VllmParsers

    return VllmParsers(tool_call_parser, reasoning_parser)


class AnswerReader:
    """Reads one answer by parts; a text on which the parser fails is content from there on.

    Args:
        prompt: the prompt's token ids.
        show_reasoning: false: reasoning is left out.
        one_call: calls after the first are left out.
    """

    def __init__(
        self,
        parser: AnswerParser,
        question: ToolQuestion,
        prompt: list[int],
        *,
        show_reasoning: bool,
        one_call: bool,
    ) -> None:
        self._parser = parser
        self._question = question
        self._prompt = prompt
        self._show_reasoning = show_reasoning
        self._one_call = one_call
        self._has_failed = False
        self._has_calls = False
        self._num_given = 0
        self._texts: list[str] = []
        self._ids: list[int] = []

    async def whole(self, text: str, token_ids: list[int]) -> AnswerParts:
        """The parts of a whole answer."""
        found = await self._parsed(text, len(text), lambda: self._parser.whole(text, token_ids))
        # A forced call that was cut off is no call, and parsers drop its text.
        return self._shown(found if found else AnswerParts(content=text))

    async def add(self, text: str, token_ids: list[int], *, final: bool) -> AnswerParts:
        """What some more text adds; nothing if it is too little to ask the parser."""
        self._texts.append(text)
        self._ids += token_ids
        num_new = sum(map(len, self._texts))
        if not final and num_new * MIN_GROWTH < self._num_given:
            return AnswerParts()
        text, self._texts = "".join(self._texts), []
        ids, self._ids = self._ids, []
        self._num_given += num_new
        found = await self._parsed(
            text, self._num_given, lambda: self._parser.add(text, ids, prompt=self._prompt, final=final)
        )
        return self._shown(found)

    def finish_reason(self, of_engine: str) -> str:
        """OpenAI's reason for the end of the answer; a named function is `stop` there too."""
        is_called = self._has_calls and of_engine == "stop" and self._question.choice != "named"
        return "tool_calls" if is_called else of_engine

    async def _parsed(self, text: str, size: int, parse: Callable[[], AnswerParts]) -> AnswerParts:
        if self._has_failed or size > MAX_TEXT:
            self._has_failed = True
            return AnswerParts(content=text)
        try:
            with foreign_code():
                if size <= SHORT_TEXT:
                    return parse()
                return await asyncio.get_running_loop().run_in_executor(POOL, parse)
        except ForeignError as exc:
            # Whatever a parser raises, it raises of a model's text, which its message may quote.
            logger.warning("parser.failed error=%s chars=%d", type(exc.cause).__name__, size)
            self._has_failed = True
            return AnswerParts(content=text)

    def _shown(self, parts: AnswerParts) -> AnswerParts:
        if parts.calls and self._one_call:
            parts = replace(parts, calls=tuple(call for call in parts.calls if call.index == 0))
        if not self._show_reasoning:
            parts = replace(parts, reasoning=None)
        self._has_calls = self._has_calls or bool(parts.calls)
        return parts
