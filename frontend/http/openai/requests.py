"""Conversion of a body to token requests: prompts as token ids, options, tools, and the prompt that `echo` returns."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .... import bus
from ....schemas.checks import describe
from ....schemas.decoding import JsonObject, nearest
from ...tokenization import Tokenizer
from .. import Settings
from ..answers import Update
from ..body import LaxReader
from ..chat import Chat, encode_chat, encode_text, template_tools
from ..errors import invalid, unsupported
from ..requests import RequestTarget
from ..sampling import SamplingFields, bus_sampling, check_stream_options, count_samples, given_fields, sampling_names
from ..text import stop_strings
from ..tokens import RowsJson, Scored, Scores, rows_json
from .body import ChatBody, CommonBody, CompletionBody
from .parsers import ParsePlan, Parsers, ToolQuestion

TOKENS: Final = ("nvext.token_data", "tokens")
"""Fields with the token ids of a prompt."""
MAX_PROMPTS: Final = 256
"""Maximum prompts in one body. Each prompt becomes a separate request to the fleet."""
TokenizerLoader = Callable[[], Awaitable[Tokenizer]]
"""Loads the model's tokenizer. Prompts of token ids do not need it."""


class BodyPrompt(NamedTuple):
    """One prompt."""

    token_ids: Sequence[int]
    field: str
    """The field of the body with the prompt."""
    text: str | None = None
    """The text of the prompt in the body; None: the prompt was token ids or a chat."""


FIELDS: Final = {
    "request_id": ("request_id",),
    "timeout_s": ("timeout_s",),
    "cache_salt": ("nvext.cache_salt", "cache_salt"),
    "priority": ("nvext.agent_hints.priority", "priority"),
    "routed_experts_prompt_start": ("nvext.routed_experts_prompt_start", "routed_experts_prompt_start"),
    "session_id": ("nvext.session_control.session_id", "session_id"),
    "group_id": ("prompt_cache_key",),
}
"""By field of `rollbus.GenerateRequest`: the fields of a body with this meaning."""
OF_BODY: Final = tuple(name for names in FIELDS.values() for name in names if "." not in name)
OF_NVEXT: Final = tuple(name.split(".")[1] for names in FIELDS.values() for name in names if "." in name)
"""The same fields, those of a body and those of its `nvext`."""
URGENCY: Final = "nvext.agent_hints.priority"
"""Dynamo's priority: a higher number is more urgent, on the bus a lower number."""


def given_values(body: CommonBody, *names: str) -> JsonObject:
    """Return the values of the fields that have one, by name."""
    found: JsonObject = {}
    for name in names:
        value: Any = body
        for part in name.split("."):
            value = getattr(value, part, None)
            if value is None:
                break
        else:
            found[name] = -value if name == URGENCY else value
    return found


def one_of(body: CommonBody, *names: str) -> Any:
    """Return the value of several fields with the same meaning; None if no field has a value.

    Raises:
        HttpError: 400, the values of the fields differ.
    """
    given = given_values(body, *names)
    return _only_value(given) if given else None


def _only_value(given: JsonObject) -> Any:
    first, *others = given.items()
    for name, value in others:
        if value != first[1]:
            raise invalid(name, f"contradicts {first[0]}", "one of the two")
    return first[1]


def _read_tokens(body: CommonBody) -> BodyPrompt | None:
    given = {} if body.tokens is None and body.nvext is None else given_values(body, *TOKENS)
    return BodyPrompt(_only_value(given), next(iter(given))) if given else None


async def chat_prompt(body: ChatBody, load: TokenizerLoader) -> BodyPrompt:
    """Return the chat's prompt: the body's token ids, otherwise its messages in the model's chat template.

    Raises:
        HttpError: 400 if the body has neither, or the chat is invalid; 501 if the model has no template.
        InvalidRequest: a field of the body is invalid.
    """
    given = _read_tokens(body)
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
        tools=template_tools(body.tools),
        chat_template_kwargs=template_variables(body),
    )
    return BodyPrompt(await encode_chat(await load(), chat), "messages")


async def completion_prompts(body: CompletionBody, load: TokenizerLoader) -> list[BodyPrompt]:
    """Return the prompts of a completion.

    Raises:
        HttpError: 400, the prompt is missing or has a wrong format.
    """
    given = _read_tokens(body)
    if given is not None:
        return [given]
    if not body.prompt:
        raise invalid("prompt", "is missing", "a text, token ids, a list of either, or nvext.token_data")
    add_special_tokens = body.add_special_tokens is not False
    token_ids: Sequence[int]
    if isinstance(body.prompt, str):
        token_ids = await encode_text(await load(), body.prompt, add_special_tokens=add_special_tokens)
        return [BodyPrompt(token_ids, "prompt", body.prompt)]
    ids: list[Any] = body.prompt
    kinds = set(map(type, ids))
    if int in kinds and len(kinds) > 1:
        # As in vLLM, ids may be texts if other items show that the list has ids. A list of texts alone has prompts.
        ids = LaxReader().read(ids, list[int])
    if set(map(type, ids)) == {int}:
        return [BodyPrompt(ids, "prompt")]
    if len(kinds) > 1:
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


def count_choices(body: ChatBody | CompletionBody) -> int:
    """Return the number of answers to a body that is not checked yet."""
    num_prompts = 1
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list) and not given_values(body, *TOKENS):
        num_prompts = 1 if int in set(map(type, body.prompt)) else min(len(body.prompt), MAX_PROMPTS)
    return num_prompts * count_samples(body)


def template_variables(body: ChatBody) -> JsonObject:
    """Return the variables of the chat template that a body sets."""
    variables = dict(one_of(body, "chat_template_kwargs", "chat_template_args") or {})
    if body.reasoning_effort is None:
        return variables
    # vLLM sets the same two variables.
    effort = body.reasoning_effort
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}


EXTRA_FIELDS: Final = frozenset(
    {
        "completion_token_ids",
        "engine_data",
        "prompt_token_ids",
        "routed_experts",
        "timing",
        "token_ids",
        "weight_version",
        "worker_id",
    }
)
"""Fields that an answer's `nvext` can have."""
ELSEWHERE: Final = frozenset({"prompt_logprobs", "stop_reason"})
"""Dynamo's names for fields that the answer or its choices have, instead of `nvext`."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""Default of `max_tokens` for /v1/completions, as in OpenAI and vLLM."""


@dataclass(slots=True, kw_only=True)
class Options:
    """The contents of an answer."""

    text: bool
    """True if the answer has text. Without text, there are no stop strings and the answer needs no tokenizer."""
    stops: Sequence[str]
    include_stop: bool
    skip_special_tokens: bool
    top_logprobs: int | None
    """Number of alternatives to each token; None: no logprobs."""
    token_ids: bool
    """True if the answer has token ids, as with vLLM's `return_token_ids`."""
    as_token_ids: bool
    """True if the logprobs name each token `token_id:N`."""
    extra: frozenset[str]
    """Fields of the answer's `nvext`."""
    routed_experts: bool
    """True if each choice has its routed experts."""
    as_json: RowsJson
    """Format of the routed experts of a choice."""
    usage: bool
    """True if a stream ends with the usage."""
    continuous_usage: bool
    """True if each event of a stream has the usage so far."""

    @property
    def routing(self) -> bool:
        """True if the answer needs routed experts, provided that the model has experts."""
        return self.routed_experts or not self.extra.isdisjoint({"engine_data", "routed_experts"})

    @classmethod
    def of(cls, body: Any, sampling: SamplingFields, settings: Settings, **own: Any) -> "Options":
        """Return the contents that a body asks for in the same way on all routes, and the route's `own`.

        Args:
            body: has `stream_options`, `return_token_ids` and `routed_experts_format`.
            sampling: the body, or the part of it with the sampling fields.
        """
        stream = body.stream_options
        usage = stream is not None and bool(stream.include_usage)
        return cls(
            stops=stop_strings(sampling.stop),
            include_stop=sampling.include_stop_str_in_output is True,
            skip_special_tokens=sampling.skip_special_tokens is not False,
            token_ids=settings.returns_tokens or bool(body.return_token_ids),
            as_json=rows_json(body.routed_experts_format, npy=settings.routed_experts_npy),
            usage=usage,
            continuous_usage=usage and bool(stream.continuous_usage_stats),
            **own,
        )


def read_options(body: ChatBody | CompletionBody, target: RequestTarget, settings: Settings) -> Options:
    """Return the contents of the answer.

    Raises:
        HttpError: 400, an option contradicts another option or the model.
    """
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "is given without logprobs", "logprobs true")
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        top_logprobs = body.logprobs
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid("best_of", f"is {body.best_of}", "the same as n")
    check_stream_options(body.stream_options, body.stream)
    for name in ("return_routed_experts", "routed_experts_format"):
        if getattr(body, name) and target.capabilities.routed_experts is None:
            raise invalid(name, f"is {describe(getattr(body, name))}", "null: this model returns no routed experts")
    with_rows = body.return_routed_experts
    if with_rows is None:
        has_rows = settings.routed_experts_npy and target.capabilities.routed_experts is not None
        with_rows = body.routed_experts_format is not None or has_rows
    if settings.returns_tokens and top_logprobs is None:
        top_logprobs = 0
    return Options.of(
        body,
        body,
        settings,
        text=body.detokenize is not False,
        top_logprobs=top_logprobs,
        as_token_ids=bool(body.return_tokens_as_token_ids),
        extra=_extra_fields(body, target),
        routed_experts=with_rows,
    )


def _extra_fields(body: CommonBody, target: RequestTarget) -> frozenset[str]:
    asked = () if body.nvext is None else body.nvext.extra_fields or ()
    extra = EXTRA_FIELDS.intersection(asked)
    for index, name in enumerate(asked):
        if name not in EXTRA_FIELDS | ELSEWHERE:
            problem = f"is {describe(name)}{nearest(name, EXTRA_FIELDS)}, which is unknown"
            raise invalid(f"nvext.extra_fields[{index}]", problem, ", ".join(sorted(EXTRA_FIELDS | ELSEWHERE)))
    if extra and (body.n or 1) > 1:
        raise invalid("n", f"is {body.n}", "1 with nvext.extra_fields, which describe one answer")
    if "routed_experts" in extra and target.capabilities.routed_experts is None:
        raise invalid(
            "nvext.extra_fields", "asks for routed_experts", "other fields: this model returns no routed experts"
        )
    return extra


def sampling_fields(body: ChatBody | CompletionBody, options: Options, tokenizer: Tokenizer | None) -> JsonObject:
    """Return the fields of `rollbus.SamplingParams` that the request sets.

    Raises:
        HttpError: 400, a field of the body is invalid, or two fields contradict each other.
    """
    fields = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **bus_sampling(body, tokenizer)}
    if isinstance(body, ChatBody):
        fields["max_tokens"] = one_of(body, "max_completion_tokens", "max_tokens")
    elif body.echo:
        # As in vLLM, the engine generates at least one token, even if the client asks only for the prompt.
        fields["max_tokens"] = fields["max_tokens"] or 1
        fields.setdefault("prompt_logprobs", options.top_logprobs)
    if body.nvext is not None and body.nvext.greed_sampling:
        fields["temperature"] = 0.0
    # Logprobs of only the sampled token cost little, and `engine_data` always has them.
    fields["logprobs"] = 0 if options.top_logprobs is None and "engine_data" in options.extra else options.top_logprobs
    return {**fields, "extra": {**(fields["extra"] or {}), **_more_extra(body)} or None}


MORE_EXTRA: Final = ("response_format", "vllm_xargs", "extra_args", "kv_hints")
"""Fields from which `_more_extra` makes entries."""


def _more_extra(body: CommonBody) -> JsonObject:
    """Return entries of `extra` that the body has under other names or in another format."""
    if not given_fields(body, MORE_EXTRA):
        return {}
    structure = _structure(body.response_format)
    if structure is not None and body.structured_outputs:
        raise invalid("structured_outputs", "is given with response_format", "one of the two")
    extra = {
        "structured_outputs": structure,
        "extra_args": one_of(body, "vllm_xargs", "extra_args"),
        "kv_hints": body.kv_hints,
    }
    return {name: value for name, value in extra.items() if value is not None}


def _structure(response_format: JsonObject | None) -> JsonObject | None:
    """Return vLLM's `structured_outputs` for OpenAI's `response_format`; None: no constraint."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(described, dict) and isinstance(described.get("schema"), dict):
        return {"json": described["schema"]}
    raise invalid(
        "response_format", "is unknown or incomplete", "type text, type json_object, or type json_schema with a schema"
    )


def bus_fields(body: CommonBody, options: Options) -> JsonObject:
    """Return the fields of `rollbus.GenerateRequest` that the body sets, except the prompt and the sampling parameters.

    Raises:
        HttpError: 400, two fields of the body contradict each other.
    """
    given: JsonObject = {}
    if given_fields(body, OF_BODY) or (body.nvext is not None and given_fields(body.nvext, OF_NVEXT)):
        fields = {name: one_of(body, *sources) for name, sources in FIELDS.items()}
        # If the body names no session and no group, the headers count.
        given = {name: value for name, value in fields.items() if value is not None}
    # The OpenAI routes have no field for sampling masks.
    return {**given, "return_routed_experts": None if options.routing else False, "return_sampling_mask": False}


def bus_names(body: ChatBody | CompletionBody, prompt_field: str) -> dict[str, str]:
    """Return this body's names for fields of the bus request, for `named_errors`."""
    given = {name: given_values(body, *sources) for name, sources in FIELDS.items()}
    names = {
        **{name: next(iter(values)) for name, values in given.items() if values},
        "prompt_token_ids": prompt_field,
        **sampling_names(body),
        "lora": "model",
    }
    if body.vllm_xargs is not None:
        names["sampling.extra.extra_args"] = "vllm_xargs"
    if body.response_format is not None:
        names["sampling.extra.structured_outputs"] = "response_format"
    if isinstance(body, ChatBody):
        if body.tools and body.tool_choice != "none":
            names["sampling.extra.structured_outputs"] = "tools"
        names["sampling.logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            names["sampling.max_tokens"] = "max_completion_tokens"
    elif body.echo and body.prompt_logprobs is None:
        names["sampling.prompt_logprobs"] = "logprobs"
    return names


@dataclass(frozen=True, slots=True)
class Echo:
    """The texts of the prompts that precede the answers."""

    texts: Sequence[str]
    """The text of each request's prompt."""
    alone: bool
    """True if `max_tokens` is 0, so that no answers follow. The engine generates one token, which the answer omits."""

    def update(self, at: int, update: Update, *, is_first: bool = True) -> Update:
        """Return the shown text and tokens of an answer, or a part of an answer, to the request with index `at`."""
        before = self.texts[at] if is_first else ""
        return Update(before if self.alone else before + update.text, update.tokens)

    def scores(self, request: bus.GenerateRequest, of_prompt: Scores, scores: Scores) -> "EchoedScores":
        """Return the log probabilities of the prompt, followed by those of an answer."""
        first = int(np.asarray(request.prompt_token_ids)[0])
        return EchoedScores(first, (of_prompt,) if self.alone else (of_prompt, scores))


@dataclass(frozen=True, slots=True)
class EchoedScores:
    """Log probabilities of a whole prompt and of the answer after it."""

    first: int
    """First token of the prompt. It has no log probability, so JSON has null."""
    parts: Sequence[Scores]

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """Yield blocks of positions, as `Scores.blocks` does."""
        yield [[Scored(self.first, float("nan"), None)]]
        for part in self.parts:
            yield from part.blocks()


async def read_echo(
    body: ChatBody | CompletionBody, prompts: Sequence[BodyPrompt], options: Options, tokenizer: Tokenizer | None
) -> Echo | None:
    """Return the prompts to echo; None if the request has no `echo`.

    Raises:
        HttpError: 400, `echo`, `stream` and `logprobs` are all set.
    """
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    if body.stream and options.top_logprobs is not None:
        raise invalid(
            "echo", "is given with stream and logprobs", "at most two of them: streams have no logprobs of prompts"
        )
    texts = []
    for prompt in prompts:
        text = prompt.text
        if tokenizer is None or not options.text or body.return_token_ids:
            # With token ids, vLLM omits the text of the prompt, because `prompt_token_ids` has its ids.
            text = ""
        elif text is None:
            text = await asyncio.to_thread(tokenizer.decode, prompt.token_ids, skip_special_tokens=False)
        texts.append(text)
    return Echo(texts, body.max_tokens == 0)


NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
"""Allowed names of functions. Templates and grammars contain the name unchanged."""
MAX_TOOLS: Final = 1024
"""Maximum tools in a request. More tools would fill the context of any model."""
CHOICES: Final = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


QUESTION: Final = ("tools", "tool_choice", "chat_template_kwargs", "chat_template_args")
"""Fields of a chat that `read_question` checks."""


def read_question(body: ChatBody, parsers: Parsers | None) -> ToolQuestion | None:
    """Validate the tools and the tool choice. This function is fast enough for the event loop.

    Returns:
        None: the chat has neither, and the service has no parsers.

    Raises:
        HttpError: 400; the error names the field, or `tools` and the missing option of the service.
    """
    if parsers is None and not given_fields(body, QUESTION):
        return None
    tools = body.tools or []
    names = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools[:MAX_TOOLS])]
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has {len(tools)} tools", f"at most {MAX_TOOLS}")
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


def _with_parameters(tool: JsonObject) -> JsonObject:
    """Add an empty schema to a tool without parameters. Without a schema, the engine would not enforce JSON."""
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}
