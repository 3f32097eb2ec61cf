"""vLLM's parsers of tool calls and reasoning, through the interface of vLLM's own server (`vllm.parser`).

The import of the parsers imports torch. It happens once, at the start of the service, and only if a parser is named.
"""

import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from ...tokenization import Tokenizer
from ..errors import HttpError, invalid
from .parsers import AnswerParser, AnswerParts, CallPart, ParsePlan, ParserUnavailable, ToolQuestion

__all__ = ["VllmParsers"]

CALLED: Final = ("adjust_request", "parse", "parse_delta")
"""Methods of a parser that this module calls."""
QUIET: Final = ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers")
"""Loggers that log generated text when a parser fails."""
MAX_MESSAGE_CHARS: Final = 200
FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that parsers raise if the tokenizer lacks their tokens, or if they cannot make a grammar of a schema."""


class VllmParsers:
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
        self._tokenizers: WeakKeyDictionary[Tokenizer, Any] = WeakKeyDictionary()
        try:
            self._parser_class: Any = ParserManager.get_parser(
                tool_parser_name=tool_call_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_call_parser is not None,
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

        Raises:
            HttpError: 400 if the tools cannot be used, 501 if the parser does not match the model.
        """
        if tokenizer not in self._tokenizers:
            # Each new parser reads the whole vocabulary, so a cached tokenizer is kept. If two threads reach this line
            # at the same time, either result is correct.
            self._tokenizers[tokenizer] = self._cached(tokenizer.wrapped)
        try:
            request = self._request_class(**_request_fields(question))
        except ValueError as exc:
            raise invalid("tools", f"cannot be used: {_first_line(exc)}", "tools that vLLM accepts") from exc
        plan = _ParserPlan(self._parser_class, self._tokenizers[tokenizer], request, dict(question.template_kwargs))
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


@dataclass(slots=True)
class _ParserPlan:
    parser_class: Any
    tokenizer: Any
    request: Any
    template_kwargs: dict[str, Any]

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        params = self.request.structured_outputs
        if params is None:
            return None
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        return {name: value for name in names if (value := getattr(params, name, None)) is not None}

    @property
    def skip_special_tokens(self) -> bool:
        return bool(self.request.skip_special_tokens)

    def make(self) -> Any:
        return self.parser_class(
            self.tokenizer, self.request.tools, chat_template_kwargs=self.template_kwargs, model_config=None
        )

    def answer_parser(self) -> AnswerParser:
        return _VllmAnswerParser(self.make(), self.request)


@dataclass(frozen=True, slots=True)
class _VllmAnswerParser:
    parser: Any
    request: Any

    def whole(self, text: str, token_ids: list[int]) -> AnswerParts:
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

    def add(self, text: str, token_ids: list[int], *, prompt: list[int], final: bool) -> AnswerParts:
        delta = self.parser.parse_delta(text, token_ids, self.request, prompt_token_ids=prompt, finished=final)
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


def _request_fields(question: ToolQuestion) -> Mapping[str, Any]:
    """Return the fields of a request that parsers read. No parser reads the messages."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": ""}],
        "skip_special_tokens": question.skip_special_tokens,
    }
    if question.tools:
        fields["tools"] = [dict(tool) for tool in question.tools]
        named = {"type": "function", "function": {"name": question.name}}
        fields["tool_choice"] = named if question.choice == "named" else question.choice
    return fields


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
