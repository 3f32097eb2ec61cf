"""What the two APIs share: common fields, the messages of a chat with calls and results, and names of errors."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec

from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ....schemas.errors import RollbusError
from ..body import STRICT
from ..errors import HttpError, http_error, invalid, unsupported
from ..openai.body import Priority
from ..sampling import TokenIds

MEDIA: Final = frozenset(
    ("image", "input_image", "image_url", "document", "input_file", "file", "input_audio", "audio", "video")
)
"""Types of content that no model of the fleet reads."""


class AgentFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Fields of both APIs with the names and meanings of the chat route. The lower ones are vLLM's and rollbus's."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: JsonObject | None = None
    thinking_token_budget: Annotated[int, STRICT] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = None
    """False: the answer omits the text of the reasoning."""
    chat_template_kwargs: JsonObject | None = None
    vllm_xargs: JsonObject | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    session_id: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None

    def chat_fields(self) -> JsonObject:
        """Return the fields that the chat route has too."""
        return {name: getattr(self, name) for name in AgentFields.__struct_fields__}


def refuse_fields(body: msgspec.Struct, refused: Mapping[str, tuple[str, Sequence[object], str]]) -> None:
    """Reject known fields that the service does not support.

    Args:
        refused: by field: the reason, the values besides null that request nothing, and the allowed values as text.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, (reason, harmless, allowed) in refused.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise unsupported(name, reason, allowed=allowed)


def read_text(field: str, content: object, kinds: Sequence[str], *, joined: str = "\n") -> str:
    """Return the text of a content: a text, or a list of blocks.

    Args:
        kinds: the allowed types of blocks, which have their text in the field `text`.
        joined: what stands between the texts of two blocks.

    Raises:
        HttpError: 400, naming the block.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(field, f"is {describe(content)}", "text, or a list of blocks")
    return joined.join(read_block(f"{field}[{index}]", block, kinds) for index, block in enumerate(content))


def read_block(field: str, block: object, kinds: Sequence[str]) -> str:
    """Return the text of a block.

    Raises:
        HttpError: 400, naming the block.
    """
    kind = read_type(field, block, kinds)
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str):
        raise invalid(f"{field}.text", "is missing or is not text", f"the text of a block of type {kind}")
    return text


def read_type(field: str, block: object, kinds: Iterable[str]) -> str:
    """Return the type of an item or block.

    Raises:
        HttpError: 400, naming it.
    """
    if not isinstance(block, dict):
        raise invalid(field, f"is {describe(block)}", "an object with a type")
    kind = block.get("type")
    if isinstance(kind, str) and kind in kinds:
        return kind
    if isinstance(kind, str) and kind in MEDIA:
        raise unsupported(f"{field}.type", f"{kind} is not text, and this service accepts text only", allowed="text")
    raise invalid(f"{field}.type", f"is {describe(kind)}", ", ".join(kinds))


def read_string(field: str, owner: Mapping[str, Any], name: str) -> str:
    """Return a field that must be a text with at least one character.

    Raises:
        HttpError: 400, naming it.
    """
    value = owner.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{field}.{name}", "is missing or is not text", "a text")
    return value


class History:
    """The messages of a chat. A call has one result, and a result has a call before it.

    An id may be used again after its call has a result, because some models number the calls of each turn.

    Attributes:
        messages: the messages so far, without system messages at the beginning. Besides the fields of the chat route,
            those of the assistant may have `id`, the id of the answer that they are from, and `seal`, the client's copy
            of the signature of their reasoning.
    """

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._system: list[str] = []
        self._open_calls: dict[str, str] = {}

    def resume(self, served: Sequence[JsonObject], *, with_system: bool) -> None:
        """Begin with served messages, of which the last one is an answer. They are copied: an item may add to the last.

        Args:
            with_system: False: leave out the system messages at their beginning.
        """
        for message in served:
            if message["role"] != "system" or self.messages or with_system:
                self.messages.append(copy.deepcopy(message))
        for call in served[-1].get("tool_calls") or ():
            self._open_calls[call["id"]] = "previous_response_id"

    def add(self, message: JsonObject) -> None:
        """Add a message that is not a result."""
        if message["role"] == "system" and not self.messages:
            self._system.append(message["content"])
            return
        self.messages.append(message)

    def finish(self) -> list[JsonObject]:
        """Return all messages. The system messages at the beginning are one, because many templates allow only one."""
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return [*system, *self.messages]

    def add_call(self, field: str, message: JsonObject, call_id: str, name: str, arguments: str) -> None:
        """Add a call to a message of the assistant.

        Raises:
            HttpError: 400, another call without a result has the same id.
        """
        if call_id in self._open_calls:
            raise invalid(field, f"is {describe(call_id)}, which an earlier call without a result has", "another id")
        self._open_calls[call_id] = field
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def add_result(self, field: str, call_id: str, text: str) -> None:
        """Add the result of a call.

        Raises:
            HttpError: 400, no call before it has this id, or the call has a result already.
        """
        if self._open_calls.pop(call_id, None) is None:
            allowed = (
                ", ".join(map(describe, list(self._open_calls)[:8])) or "no result, because all calls have results"
            )
            raise invalid(field, f"is {describe(call_id)}, and no call without a result has this id", allowed)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def check_answered(self, before: str) -> None:
        """Check that every call has a result.

        Args:
            before: what must not stand before the results, for the message.

        Raises:
            HttpError: 400, naming the first call without a result.
        """
        for call_id, field in self._open_calls.items():
            raise invalid(field, f"is {describe(call_id)}, and this call has no result", f"a result before {before}")


def function_tool(name: object, description: object, parameters: object, strict: object) -> JsonObject:
    """Return a tool in the format of the chat route, which checks the types."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


@contextmanager
def renamed_errors(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Convert the chat route's errors to errors with the names of another API.

    Args:
        names: names of the chat route at the beginning of a field, or with a dot within one, and what replaces them.

    Raises:
        HttpError: for every error.
    """
    try:
        yield
    except (HttpError, RollbusError) as error:
        failure = error if isinstance(error, HttpError) else http_error(error)
        old = failure.param
        if old is not None:
            new = old
            for part, replacement in names:
                at = new.find(part) if part.startswith(".") else 0
                after = at + len(part)
                if at >= 0 and new[at:after] == part and new[after : after + 1] in ("", ".", "["):
                    new = new[:at] + replacement + new[after:]
            failure.param = new
            if failure.message.startswith(old):
                failure.message = new + failure.message.removeprefix(old)
        raise failure from None
