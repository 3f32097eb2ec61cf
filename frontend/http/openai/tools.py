"""The tools of a chat: validation of the request, and the plan for parsing the answers."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final

from ...tokenization import Tokenizer
from ..errors import invalid, unsupported
from ..request_target import RequestTarget
from .body import ChatBody
from .parsers import ParsePlan, Parsers, ToolQuestion
from .prompts import template_variables

__all__ = ["make_plan", "read_question"]

NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
"""Allowed names of functions. Templates and grammars contain the name unchanged."""
MAX_TOOLS: Final = 1024
"""Maximum tools in a request. More tools would fill the context of any model."""
CHOICES: Final = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


def read_question(body: ChatBody, parsers: Parsers | None) -> ToolQuestion:
    """Validate the tools and the tool choice. This function is fast enough for the event loop.

    Raises:
        HttpError: 400; the error names the field, or `tools` and the missing option of the service.
    """
    names = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate((body.tools or [])[:MAX_TOOLS])]
    if len(body.tools or ()) > MAX_TOOLS:
        raise invalid("tools", f"has {len(body.tools or ())} tools", f"at most {MAX_TOOLS}")
    choice, name = _choice(body.tool_choice, names)
    if choice in ("auto", "required", "named") and (parsers is None or parsers.tool_call_parser is None):
        has_tokens = body.tokens is not None or (body.nvext is not None and body.nvext.token_data is not None)
        if not has_tokens or choice != "auto":
            raise unsupported(
                "tools",
                "the service has no tool call parser; start it with --tool-call-parser NAME",
                allowed='tool_choice "none"',
            )
        # Clients that render the prompt themselves also parse the tokens of the answer themselves.
        choice = "none"
    tools = body.tools or []
    if choice == "named":
        tools = [_with_parameters(tool) for tool in tools]
    return ToolQuestion(
        tools=tools,
        choice=choice,
        name=name,
        template_kwargs=template_variables(body),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


async def make_plan(
    question: ToolQuestion, parsers: Parsers | None, tokenizer: Tokenizer | None, target: RequestTarget
) -> ParsePlan | None:
    """Return the plan for parsing the answers; None: the whole text is content.

    Raises:
        HttpError: 400 if the tools cannot be used, or the engine cannot constrain an answer to them. 501 if the parser
            does not match the model.
    """
    if parsers is None or (parsers.reasoning_parser is None and question.choice == "none"):
        return None
    if tokenizer is None:
        if question.is_forced:
            raise invalid("detokenize", "is false, but tool calls are parsed from text", "true with this tool_choice")
        return None
    # The plan compiles a grammar from the request's schemas. The first plan also reads the whole vocabulary.
    plan = await asyncio.to_thread(parsers.plan, tokenizer, question)
    needs_structure = question.is_forced or plan.structured_outputs is not None
    if needs_structure and "structured_outputs" not in target.capabilities.extra:
        raise unsupported(
            "tool_choice" if question.is_forced else "tools",
            "this model's engine has no structured outputs, which constrain an answer to the tools",
            allowed="tool_choice auto or none" if question.is_forced else "tools that are not strict",
        )
    return plan


def _check_tool(field: str, tool: Mapping[str, Any]) -> str:
    if tool.get("type", "function") != "function":
        raise invalid(f"{field}.type", "is not a supported type", "function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{field}.function", "is missing or is not an object", '{"name": ..., "parameters": {...}}')
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{field}.function.name", "is missing or is not a valid name", "1 to 128 letters, digits, _, . and -"
        )
    for key, kind, allowed in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema, as an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise invalid(f"{field}.function.{key}", "has the wrong type", allowed)
    return name


def _choice(given: object, names: list[str]) -> tuple[str, str | None]:
    """Return the choice of `tool_choice`, and the name of the function if the choice is `named`."""
    if not names:
        if given in (None, "none", "auto"):
            return "none", None
        raise invalid("tool_choice", "is given without tools", "none or auto")
    if given is None or isinstance(given, str):
        return given or "auto", None
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid("tool_choice", "is not a valid choice", CHOICES)
    name = function.get("name")
    if name not in names:
        raise invalid("tool_choice.function.name", "is not the name of a tool", ", ".join(names))
    return "named", name


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Add an empty schema to a tool without parameters. Without a schema, the engine would not enforce JSON."""
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}
