"""The prompts of a body as token ids: the body has token ids, texts or messages."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ...tokenization import Tokenizer
from ..chat import Chat, encode_chat, encode_text
from ..errors import invalid
from ..lax import LaxReader
from .body import ChatBody, CommonBody, CompletionBody

__all__ = [
    "BodyPrompt",
    "TokenizerLoader",
    "chat_prompt",
    "completion_prompts",
    "count_prompts",
    "one_of",
    "template_variables",
]

MAX_PROMPTS: Final = 256
"""Maximum prompts in one body. Each prompt becomes a separate request to the fleet."""
FUNCTION_FIELDS: Final = ("name", "description", "parameters")
"""Fields of a tool that vLLM passes to templates even if they are null."""
T = TypeVar("T")
TokenizerLoader = Callable[[], Awaitable[Tokenizer]]
"""Loads the model's tokenizer. Prompts of token ids do not need it."""


@dataclass(frozen=True, slots=True)
class BodyPrompt:
    """One prompt."""

    token_ids: Sequence[int]
    field: str
    """The field of the body with the prompt."""
    text: str | None = None
    """The text of the prompt in the body; None: the prompt was token ids or a chat."""


def one_of(**values: T | None) -> T | None:
    """Return the value of several fields with the same meaning; None if no field has a value.

    In the names of the arguments, `__` stands for a dot.

    Raises:
        HttpError: 400, the values of the fields differ.
    """
    given = [(name.replace("__", "."), value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise invalid(name, f"contradicts {given[0][0]}", "one of the two")
    return given[0][1] if given else None


def _given_tokens(body: CommonBody) -> BodyPrompt | None:
    token_data = None if body.nvext is None else body.nvext.token_data
    token_ids = one_of(nvext__token_data=token_data, tokens=body.tokens)
    return None if token_ids is None else BodyPrompt(token_ids, "tokens" if token_data is None else "nvext.token_data")


async def chat_prompt(body: ChatBody, load: TokenizerLoader) -> BodyPrompt:
    """Return the chat's prompt: the body's token ids, otherwise its messages in the model's chat template.

    Raises:
        HttpError: 400 if the body has neither, or the chat is invalid; 501 if the model has no template.
        InvalidRequest: a field of the body is invalid.
    """
    given = _given_tokens(body)
    if given is not None:
        # The token ids already include the tools, if there are any.
        return given
    if not body.messages:
        raise invalid("messages", "is missing", "at least one message, or nvext.token_data")
    chat = Chat(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message is True,
        add_special_tokens=body.add_special_tokens is True,
        tools=_chat_tools(body),
        chat_template_kwargs=template_variables(body),
    )
    return BodyPrompt(await encode_chat(await load(), chat), "messages")


async def completion_prompts(body: CompletionBody, load: TokenizerLoader) -> list[BodyPrompt]:
    """Return the prompts of a completion.

    Raises:
        HttpError: 400, the prompt is missing or has a wrong format.
    """
    given = _given_tokens(body)
    if given is not None:
        return [given]
    if not body.prompt:
        raise invalid("prompt", "is missing", "a text, token ids, a list of either, or nvext.token_data")
    add_special_tokens = body.add_special_tokens is not False
    token_ids: Sequence[int]
    if isinstance(body.prompt, str):
        token_ids = await encode_text(await load(), body.prompt, add_special_tokens=add_special_tokens)
        return [BodyPrompt(token_ids, "prompt", body.prompt)]
    ids = [item for item in body.prompt if isinstance(item, int)]
    if ids and len(ids) < len(body.prompt):
        # As in vLLM, ids may be texts if other items show that the list has ids. A list of texts alone has prompts.
        read = LaxReader().read(body.prompt, list[int])
        ids = [item for item in read if isinstance(item, int)]
    if len(ids) == len(body.prompt):
        return [BodyPrompt(ids, "prompt")]
    if ids or len({type(item) for item in body.prompt}) > 1:
        raise invalid("prompt", "mixes texts and token ids", "all of one kind")
    if len(body.prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(body.prompt)} prompts", f"1 to {MAX_PROMPTS}")
    prompts = []
    for index, item in enumerate(body.prompt):
        if isinstance(item, str):
            token_ids = await encode_text(await load(), item, add_special_tokens=add_special_tokens)
        else:
            token_ids = item if isinstance(item, list) else []
        prompts.append(BodyPrompt(token_ids, f"prompt[{index}]", item if isinstance(item, str) else None))
    return prompts


def count_prompts(body: CompletionBody) -> int:
    """Return the number of prompts of a completion whose prompts are not checked yet."""
    if _given_tokens(body) is not None or not isinstance(body.prompt, list):
        return 1
    return 1 if any(isinstance(item, int) for item in body.prompt) else min(len(body.prompt), MAX_PROMPTS)


def _chat_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools in the format in which vLLM passes them to chat templates."""
    if not body.tools:
        return None
    shown = []
    for tool in body.tools:
        function = tool["function"]
        fields = {name: function.get(name) for name in FUNCTION_FIELDS}
        if function.get("strict") is not None:
            fields["strict"] = function["strict"]
        shown.append({"type": "function", "function": fields})
    return shown


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Return the variables of the chat template that a body sets."""
    variables = dict(
        one_of(chat_template_kwargs=body.chat_template_kwargs, chat_template_args=body.chat_template_args) or {}
    )
    if body.reasoning_effort is None:
        return variables
    # vLLM sets the same two variables.
    effort = body.reasoning_effort
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}
