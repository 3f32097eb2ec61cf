"""Reasoning and tool calls in the text of an answer, found by vLLM's parsers for the formats of models.

The parsers run through the interface of vLLM's own server (`vllm.parser`). Importing them imports torch. That happens
once, at the start of the service, and only if a parser is named. `AnswerReader` limits how often a parser runs and how
much text it gets. The parsers do not change the token ids, logprobs and routed experts of an answer.
"""

import asyncio
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from ....schemas.decoding import JsonObject
from ....schemas.errors import ForeignError, RollbusError, foreign_code
from ...tokenization import SHORT_TEXT, Tokenizer
from ..errors import HttpError, invalid

logger = logging.getLogger(__name__)

MAX_TEXT: Final = 1 << 20
"""Maximum characters of an answer that a parser gets. The text after them is content: no tool call is as long."""
MIN_GROWTH: Final = 64
"""A parser may process all of the text in each call. So it is called again only after the text has grown by 1/64. Its
total work is then linear in the length of the text."""
MAX_WORK: Final = 1 << 28
"""Characters, counted again in each call, that the parser of a stream may process: some seconds. Each mark in the text
is a call of its own, so an answer of marks alone would take quadratic time. What follows is held back to the end."""
POOL: Final = ThreadPoolExecutor(2, "answer-parser")
"""Threads that parse long texts, so that other requests continue. More threads would not help, because a parser in
Python holds the interpreter lock."""


HARMONY: Final = "openai"
"""Begins the names of the parsers of gpt-oss. vLLM has one parser for both, which reads token ids."""
CALLED: Final = ("adjust_request", "extract_reasoning", "is_reasoning_end", "parse", "parse_delta")
"""Methods of a parser that this module calls."""
QUIET: Final = ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers")
"""Loggers that log generated text when a parser fails."""
MAX_MESSAGE_CHARS: Final = 200
FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that parsers raise if the tokenizer lacks their tokens, or if they cannot make a grammar of a schema."""


class ParserUnavailable(RollbusError):
    """A parser cannot be loaded. The message names the option and the allowed values."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, or the addition of a stream event to a tool call."""

    index: int
    id: str | None
    """Id of the call. In a stream, only the first part of a call has an id and a name; in other parts they are None."""
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of an answer, or the additions to them from new text."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        """Return True if any part has content."""
        return bool(self.content or self.reasoning or self.calls)


def joined_parts(found: Sequence[AnswerParts]) -> AnswerParts:
    """Return additions to an answer as one."""
    content = "".join(each.content or "" for each in found)
    reasoning = "".join(each.reasoning or "" for each in found)
    return AnswerParts(content or None, reasoning or None, tuple(call for each in found for call in each.calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolQuestion:
    """The properties of a request that parsers need."""

    tools: Sequence[Mapping[str, Any]]
    choice: str
    """`none`, `auto`, `required` or `named`."""
    name: str | None
    """The function that the model must call if `choice` is `named`."""
    template_kwargs: Mapping[str, Any]
    """Variables of the chat template, for example `enable_thinking`."""
    skip_special_tokens: bool

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a tool call."""
        return self.choice in ("required", "named")


@dataclass(frozen=True, slots=True)
class AnswerParser:
    """Parser of one answer. Each method may raise any exception, because the model can generate any text."""

    parser: Any
    request: Any
    vocabulary: "Vocabulary"
    is_harmony: bool

    def whole(self, text: str, token_ids: list[int], *, prompt: list[int]) -> AnswerParts:
        """Return the parts of a whole answer."""
        if self.is_harmony:
            return self.add(text, token_ids, prompt=prompt, final=True)
        if self.parser.reasoning_parser is not None and self.parser.is_reasoning_end(prompt):
            self.parser.reasoning_parser = None
        reasoning, content, calls = self.parser.parse(
            text, self.request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        return AnswerParts(
            content or None,
            reasoning or None,
            tuple(
                CallPart(index, call.id or f"chatcmpl-tool-{uuid.uuid4().hex}", call.name, call.arguments)
                for index, call in enumerate(calls or ())
            ),
        )

    def without_calls(self, text: str, found: AnswerParts) -> AnswerParts:
        """Return the parts of a whole answer without calls. What the parser omits of a cut call is content."""
        if self.is_harmony:
            return found or AnswerParts(text)
        reasoning, content = self.parser.extract_reasoning(text, self.request)
        return AnswerParts(content or None, reasoning or None)

    def add(self, text: str, token_ids: list[int], *, prompt: list[int], final: bool) -> AnswerParts:
        """Return the additions from the next text of an answer."""
        if self.is_harmony:
            return self._delta(text, token_ids, prompt, final=final)
        # Parsers of streams read the ids of marks, and only of marks that come alone. A model may spell a mark with
        # several tokens.
        pieces = self.vocabulary.split(text)
        found = [
            self._delta(piece, self.vocabulary.encode(piece), prompt, final=final and at == len(pieces))
            for at, piece in enumerate(pieces, 1)
        ]
        return joined_parts(found)

    def opening(self, prompt: list[int]) -> list[int]:
        """Return the end of a prompt that opens the answer. The reasoning of earlier answers is not in it."""
        special = self.vocabulary.special_ids
        return prompt[next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] in special), 0) :]

    def _delta(self, text: str, ids: list[int], prompt: list[int], *, final: bool) -> AnswerParts:
        delta = self.parser.parse_delta(text, ids, self.request, prompt_token_ids=prompt, finished=final)
        if delta is None:
            return AnswerParts()
        calls = ((call, call.function) for call in delta.tool_calls or ())
        return AnswerParts(
            delta.content or None,
            delta.reasoning or None,
            tuple(
                CallPart(call.index, call.id, function and function.name, (function and function.arguments) or "")
                for call, function in calls
            ),
        )


class Vocabulary:
    """A model's tokenizer as parsers need it."""

    def __init__(self, tokenizer: Tokenizer, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.special_ids = tokenizer.special_ids
        self.encode = partial(tokenizer.encode, add_special_tokens=False)
        # Without tokens of several line ends, which some models have and no parser reads as marks.
        self._marks = re.compile(f"({tokenizer.added_pattern.pattern})")
        self._beginnings = frozenset(text[:size] for text in tokenizer.added_texts for size in range(1, len(text)))
        self._longest = max(map(len, tokenizer.added_texts), default=0)

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text, of which each is the text of an added token or has none."""
        return [piece for piece in self._marks.split(text) if piece] or [text]

    def open_chars(self, text: str) -> int:
        """Return the number of characters at the end of a text that may be the beginning of a token's text."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)


@dataclass(slots=True)
class ParsePlan:
    """The parsing of the answers to one request."""

    parser_class: Any
    vocabulary: Vocabulary
    request: Any
    template_kwargs: JsonObject
    is_harmony: bool = False

    @property
    def structured_outputs(self) -> JsonObject | None:
        """The constraint that the engine must enforce on the answer, in vLLM's format; None: no constraint."""
        params = self.request.structured_outputs
        if params is None:
            return None
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        return {name: value for name in names if (value := getattr(params, name, None)) is not None}

    @property
    def skip_special_tokens(self) -> bool:
        """False if the parser needs special tokens in the text."""
        return bool(self.request.skip_special_tokens)

    def make(self) -> Any:
        """Create vLLM's parser of one answer."""
        return self.parser_class(
            self.vocabulary.wrapped, self.request.tools, chat_template_kwargs=self.template_kwargs, model_config=None
        )

    def answer_parser(self) -> AnswerParser:
        """Create the parser of one answer."""
        return AnswerParser(self.make(), self.request, self.vocabulary, self.is_harmony)


class Parsers:
    """vLLM's parsers, with the names that `vllm serve` uses.

    Args:
        tool_call_parser: name of the parser of tool calls; None: the service rejects tools.
        reasoning_parser: name of the parser of reasoning; None: reasoning stays in the content.

    Raises:
        ParserUnavailable: vLLM is not installed, has no parser with that name, rejects the parsers, or has parsers with
            another interface.
    """

    def __init__(self, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        self.tool_call_parser = tool_call_parser
        self.reasoning_parser = reasoning_parser
        try:
            with _own_logging():
                from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
                from vllm.parser import ParserManager
                from vllm.reasoning import ReasoningParserManager
                from vllm.tokenizers.hf import get_cached_tokenizer
                from vllm.tool_parsers import ToolParserManager
        except ImportError as exc:
            option = "--tool-call-parser" if tool_call_parser else "--reasoning-parser"
            raise ParserUnavailable(
                f"{option} needs vLLM's parsers ({exc}): install vLLM 0.30 to 0.33 for the HTTP service"
            ) from exc
        _check_name("--tool-call-parser", tool_call_parser, ToolParserManager.list_registered())
        _check_name("--reasoning-parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._request_class: Any = ChatCompletionRequest
        self._cached = get_cached_tokenizer
        self._vocabularies: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()
        self._is_harmony = HARMONY in (tool_call_parser, (reasoning_parser or "").partition("_")[0])
        if self._is_harmony:
            _check_harmony()
        try:
            self._parser_class: Any = ParserManager.get_parser(
                tool_parser_name=tool_call_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_call_parser is not None,
                is_harmony=self._is_harmony,
            )
        except (TypeError, ValueError) as exc:
            # From vLLM 0.32 on, some parsers can only be combined with the other parser of the same model.
            raise ParserUnavailable(f"vLLM rejects the parsers: {_first_line(exc)}") from exc
        missing = [name for name in CALLED if not callable(getattr(self._parser_class, name, None))]
        if missing:
            raise ParserUnavailable(
                f"the parsers of the installed vLLM have no method {missing[0]}; allowed: vLLM 0.30 to 0.33"
            )

    def plan(self, tokenizer: Tokenizer, question: ToolQuestion) -> ParsePlan:
        """Return the plan for parsing answers, with the constraints that vLLM's server would give to the engine.

        Several threads may call this method at the same time.

        Raises:
            HttpError: 400 if the tools cannot be used, 501 if the parser does not match the model.
        """
        vocabulary = self._vocabularies.get(tokenizer)
        if vocabulary is None:
            # Each new parser reads the whole vocabulary, so a cached tokenizer is kept. If two threads reach this line
            # at the same time, either result is correct.
            vocabulary = self._vocabularies[tokenizer] = Vocabulary(tokenizer, self._cached(tokenizer.wrapped))
        try:
            request = self._request_class(**_request_fields(question))
        except ValueError as exc:
            raise invalid("tools", f"cannot be used: {_first_line(exc)}", "tools that vLLM accepts") from exc
        variables = dict(question.template_kwargs)
        plan = ParsePlan(self._parser_class, vocabulary, request, variables, self._is_harmony)
        try:
            parser = plan.make()
        except FAILURES as exc:
            names = " and ".join(name for name in (self.tool_call_parser, self.reasoning_parser) if name)
            problem = f"the parser {names} does not match this model: {_first_line(exc)}"
            raise HttpError(501, problem, code="no_parser") from exc
        try:
            plan.request = parser.adjust_request(request)
        except FAILURES as exc:
            raise invalid("tools", f"cannot be used: {_first_line(exc)}", "JSON schemas that vLLM accepts") from exc
        return plan


def load_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> Parsers | None:
    """Import the parsers and return them; None if no parser is named. The import takes some seconds.

    Raises:
        ParserUnavailable: vLLM is not installed, has no parser with that name, or rejects the parsers.
    """
    if tool_call_parser is None and reasoning_parser is None:
        return None
    return Parsers(tool_call_parser, reasoning_parser)


class AnswerReader:
    """Splits one answer into parts. If the parser fails, all text that has no part yet is content.

    A stream has the same parts as a whole answer. A call may turn out to be malformed or cut only at the end, and the
    parsers then decide about the whole text. So the first sign of a call holds all later text back, and at the end the
    whole text is parsed.

    Args:
        make: creates a parser.
        prompt: the prompt's token ids.
        show_reasoning: False: omit the reasoning.
        one_call: True: omit calls after the first.
    """

    def __init__(
        self,
        make: Callable[[], AnswerParser],
        question: ToolQuestion,
        prompt: list[int],
        *,
        show_reasoning: bool,
        one_call: bool,
    ) -> None:
        self._make = make
        self._parser = make()
        self._question = question
        self._prompt = self._parser.opening(prompt)
        self._show_reasoning = show_reasoning
        self._one_call = one_call
        self._has_failed = False
        self._has_calls = False
        # The next fields are only for streams.
        self._is_holding = False
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._waiting = ""
        self._waiting_ids: list[int] = []
        self._num_given = 0
        self._work = 0
        self._num_streamed = 0
        self._streamed = AnswerParts()
        self._blanks = AnswerParts()

    async def whole(self, text: str, token_ids: list[int]) -> AnswerParts:
        """Return the parts of a whole answer: those of a stream that brings it at once."""
        return await self.add(text, token_ids, final=True)

    async def add(self, text: str, token_ids: list[int], *, final: bool) -> AnswerParts:
        """Return the additions from new text; empty parts if the text is held back, or too short to call the parser."""
        self._texts.append(text)
        self._ids += token_ids
        found = AnswerParts()
        if not self._is_holding:
            self._waiting += text
            self._waiting_ids += token_ids
            if final or len(self._waiting) * MIN_GROWTH >= self._num_given:
                found = await self._stream()
        return self._select_parts(joined_parts([found, await self._last()]) if final else found)

    async def _stream(self) -> AnswerParts:
        """Return the additions from the waiting text that the whole answer has too."""
        end = len(self._waiting) - self._parser.vocabulary.open_chars(self._waiting)
        given, self._waiting = self._waiting[:end], self._waiting[end:]
        if not given:
            return AnswerParts()
        self._work += (self._num_given + end) * len(self._parser.vocabulary.split(given))
        if self._work > MAX_WORK:
            self._is_holding = True
            return AnswerParts()
        ids, self._waiting_ids = self._waiting_ids, []
        self._num_given += end
        return self._certain(await self._read(given, ids, final=False))

    async def _read(self, text: str, ids: list[int], *, final: bool) -> AnswerParts:
        parser = self._parser
        return await self._parse(text, self._num_given, lambda: parser.add(text, ids, prompt=self._prompt, final=final))

    def _certain(self, found: AnswerParts) -> AnswerParts:
        """Return the new text that the whole answer has too, and hold the rest back."""
        self._is_holding = self._has_failed or bool(found.calls)
        if self._has_failed:
            # The parser of whole answers may accept this text.
            self._has_failed = False
            return AnswerParts()
        self._num_streamed = self._num_given
        # Parsers of whole answers drop blanks around calls and reasoning.
        content, self._blanks = _without_blanks(self._blanks, found)
        self._streamed = AnswerParts(
            (self._streamed.content or "") + (content.content or ""),
            (self._streamed.reasoning or "") + (content.reasoning or ""),
        )
        return content

    async def _last(self) -> AnswerParts:
        """Return the parts of the whole answer without those that were streamed."""
        text = "".join(self._texts)
        parser, ids = self._make(), self._ids
        found = await self._parse(text, len(text), lambda: parser.whole(text, ids, prompt=self._prompt))
        content, reasoning = self._streamed.content or "", self._streamed.reasoning or ""
        if self._has_failed and reasoning:
            return AnswerParts((self._blanks.content or "") + text[self._num_streamed :])
        if not (found.calls or self._has_failed):
            shown = await self._parse(text, len(text), lambda: parser.without_calls(text, found))
            # If other text follows what the parser omits, this is no cut call.
            found = shown if _begins(shown, found) else found
        if not _begins(found, self._streamed):
            # The two parsers disagree about text that is already sent. The rest is that of the parser of streams.
            if self._is_holding:
                rest = None if found.calls else text[self._num_streamed :]
                return joined_parts([self._blanks, AnswerParts(rest, calls=found.calls)])
            return joined_parts([self._blanks, await self._read(self._waiting, self._waiting_ids, final=True)])
        return AnswerParts(
            (found.content or "")[len(content) :] or None,
            (found.reasoning or "")[len(reasoning) :] or None,
            found.calls,
        )

    def finish_reason(self, of_engine: str) -> str:
        """Return the finish reason as vLLM's server does. A call of a named function ends with `stop`."""
        choice = self._question.choice
        is_called = self._has_calls if choice == "auto" else choice == "required" and of_engine == "stop"
        return "tool_calls" if is_called else of_engine

    async def _parse(self, text: str, size: int, parse: Callable[[], AnswerParts]) -> AnswerParts:
        if self._has_failed or size > MAX_TEXT:
            self._has_failed = True
            return AnswerParts(content=text)
        try:
            with foreign_code():
                if size <= SHORT_TEXT:
                    return parse()
                return await asyncio.get_running_loop().run_in_executor(POOL, parse)
        except ForeignError as exc:
            # The message of the exception may quote the model's text, so only its type is logged.
            logger.warning("parser.failed error=%s chars=%d", type(exc.cause).__name__, size)
            self._has_failed = True
            return AnswerParts(content=text)

    def _select_parts(self, parts: AnswerParts) -> AnswerParts:
        if parts.calls and self._one_call:
            parts = replace(parts, calls=tuple(call for call in parts.calls if call.index == 0))
        if not self._show_reasoning:
            parts = replace(parts, reasoning=None)
        self._has_calls = self._has_calls or bool(parts.calls)
        return parts


def _begins(whole: AnswerParts, sent: AnswerParts) -> bool:
    """Return True if a whole answer begins with what was sent of it."""
    has_content = (whole.content or "").startswith(sent.content or "")
    return has_content and (whole.reasoning or "").startswith(sent.reasoning or "")


def _without_blanks(blanks: AnswerParts, found: AnswerParts) -> tuple[AnswerParts, AnswerParts]:
    """Return the text after earlier blanks without the blanks at its end, and those blanks."""
    content = (blanks.content or "") + (found.content or "")
    reasoning = (blanks.reasoning or "") + (found.reasoning or "")
    kept = AnswerParts(content.rstrip() or None, reasoning.rstrip() or None)
    return kept, AnswerParts(content[len(kept.content or "") :], reasoning[len(kept.reasoning or "") :])


def _request_fields(question: ToolQuestion) -> Mapping[str, Any]:
    """Return the fields of a request that parsers read. No parser reads the messages."""
    fields: JsonObject = {
        "messages": [{"role": "user", "content": ""}],
        "skip_special_tokens": question.skip_special_tokens,
    }
    if question.tools:
        fields["tools"] = [dict(tool) for tool in question.tools]
        named = {"type": "function", "function": {"name": question.name}}
        fields["tool_choice"] = named if question.choice == "named" else question.choice
    return fields


def _check_harmony() -> None:
    try:
        with foreign_code():
            from openai_harmony import HarmonyEncodingName, load_harmony_encoding

            load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except ForeignError as exc:
        raise ParserUnavailable(
            f"the parsers of gpt-oss need the vocabulary of openai_harmony ({_first_line(exc.cause)}); allowed: a"
            " directory with o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE"
        ) from exc


def _check_name(option: str, name: str | None, names: list[str]) -> None:
    if name is not None and name not in names:
        raise ParserUnavailable(f"{option} {name} is not a parser of vLLM; allowed: {', '.join(names)}")


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:MAX_MESSAGE_CHARS]


@contextmanager
def _own_logging() -> Iterator[None]:
    """Prevent vLLM from logging to stdout, and its parsers from logging generated text."""
    before = os.environ.get("VLLM_CONFIGURE_LOGGING")
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_CONFIGURE_LOGGING"]
        else:
            os.environ["VLLM_CONFIGURE_LOGGING"] = before
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
