"""Write the generated parts of docs/wire.md from the code: `python -m tests.schemas.wire_tables`.

A part lies between `<!-- table: name -->` and `<!-- end -->`. Meanings are the docstrings below the fields: the whole
text for the messages of a request, which every client sends or receives, and otherwise the first sentence.
"""

import ast
import enum
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as wire_types

from rollbus.schemas import acks, chunk, control, limits, messages, presence, telemetry, weights
from rollbus.schemas.errors import ERRORS, ControlCode, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

DOC = Path(__file__).parents[2] / "docs" / "wire.md"
TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.DOTALL)

CHECKED_IN_CODE = (SamplingParams, GenerateRequest)
"""Structs whose fields have plain types on the wire.

The column of allowed values has the text of their error messages.
"""
COMMANDS: tuple[type[control.Command], ...] = get_args(control.AnyCommand)
_OF_REQUESTS: tuple[type[msgspec.Struct], ...] = (
    *CHECKED_IN_CODE,
    *(messages.RequestMessage, messages.Sibling, messages.KvTransfer, messages.Frame, messages.RequestKey),
    *(messages.LinkMessage, chunk.Chunk, chunk.RoutedExperts, chunk.TopLogprobs, chunk.SamplingMask),
    *(chunk.PromptLogprobs, chunk.End, chunk.ChunkError),
)
_OTHERS: tuple[type[msgspec.Struct], ...] = (
    *(presence.WorkerPresence, presence.Capabilities, presence.RoutedExpertsInfo, presence.LoraInfo),
    *(presence.SamplingLimits, presence.EngineStats, presence.ClientPresence, control.Command),
    *(weights.WeightSource, weights.Canary, weights.Verified),
    *(weights.Staging, weights.OpenTransfer, weights.PublishedVersion, weights.UpdateTiming),
    *(telemetry.ExpertLoad, telemetry.ExpertCounts, telemetry.TokenTally),
    *(telemetry.RequestTimeline, telemetry.RequestProgress, telemetry.LostAttempt, telemetry.TimelineEvent),
    *(telemetry.ServiceMessage, telemetry.WaitingRequest),
    *(acks.Ack, acks.AckError, control.DesiredState, control.Recorded, control.SeenCommand, control.Certificate),
)
STRUCTS = {kind.__name__: kind for kind in (*_OF_REQUESTS, *_OTHERS)}
ENUMS = {kind.__name__: kind for kind in (chunk.FinishReason, acks.AckStatus, ControlCode)}
NAMED_RANGES = {
    (0, limits.MAX_POSITION): "position",
    (0, 2**31 - 1): "int32",
    (0, 2**53): "int53",
    (0, 2**63 - 1): "count",
    (1, 2**63 - 1): "count from 1",
}
"""Ranges of integers that many fields have. The page explains the names."""
ALLOWED = {"sampling": "a map of `SamplingParams`", "routed_experts_prompt_start": "int(0 to Lp)"}
ALLOWED["request_id"] = f"1 to {limits.MAX_REQUEST_ID_CHARS} of A-Z a-z 0-9 _ : -"
"""Allowed values of fields whose error messages do not state them for all requests."""


def with_tables(text: str) -> str:
    """Return the document with each part as the code defines it now."""
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n{part(match[1])}<!-- end -->", text)


def part(name: str) -> str:
    """Return a generated part in Markdown."""
    if name in LISTS:
        return bullets(LISTS[name]())
    if name in ENUMS:
        return bullets(f"`{value}`: {meaning}" for value, meaning in enum_meanings(ENUMS[name]))
    kind = STRUCTS[name]
    if kind in CHECKED_IN_CODE:
        return bullets(checked_items(kind))
    if kind.__struct_config__.array_like:
        return "".join(f"{at}. {escaped(item)}\n" for at, item in enumerate(struct_items(kind)))
    return bullets(struct_items(kind))


def bullets(items: Iterable[str]) -> str:
    """Return a Markdown list. Items are escaped, and None becomes nil."""
    return "".join(f"- {escaped(item)}\n" for item in items)


def escaped(text: str) -> str:
    """Escape text so that Markdown shows it unchanged."""
    parts = re.sub(r"\bNone\b", "nil", text).split("`")
    # Every other part is code, which needs no escape.
    return "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(parts))


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring."""
    found = re.match(r".*?\.(?= [A-Z`0]|$)", text)
    return found[0] if found else text


def error_items() -> Iterator[str]:
    """Yield each error code with the party that must act, whether a retry may help, and whether it may have started."""
    for code, facts in ERRORS.items():
        notes = [facts.fault, *["retry"] * facts.retryable, *["started"] * facts.admitted]
        yield f"`{code}` ({', '.join(notes)}): {facts.meaning}"


def command_items() -> Iterator[str]:
    """Yield each command with its register and its default timeout."""
    for kind in COMMANDS:
        timeout = next(field.default for field in msgspec.structs.fields(kind) if field.name == "timeout_s")
        register = f"`{kind.sets}`, " if kind.sets is not None else ""
        if kind in (control.LoadLora, control.UnloadLora):
            register = "`lora:<name>`, "
        meaning = first_sentence(" ".join((inspect.getdoc(kind) or "").split()))
        yield f"`{kind.__struct_config__.tag}` ({register}{timeout:g} s): {meaning}"


def field_items() -> Iterator[str]:
    """Yield each field that only some commands have, once for all commands that have it with the same text."""
    commands: dict[str, list[str]] = {}
    for kind in COMMANDS:
        for item in struct_items(kind):
            commands.setdefault(item, []).append(f"`{kind.__struct_config__.tag}`")
    return (f"{', '.join(names)}: {item}" for item, names in commands.items())


def enum_meanings(kind: type[enum.StrEnum]) -> Iterator[tuple[str, str]]:
    """Yield each value with its meaning."""
    meanings = docstrings(inspect.getsource(kind))
    return ((member.value, meanings[member.name]) for member in kind)


def checked_items(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield each field of a request, with the allowed values from its error message."""
    meanings = docstrings(inspect.getsource(kind))
    for field in msgspec.structs.fields(kind):
        if field.name != "id_scope":  # Never on the wire.
            kind_name = short(allowed(kind, field.name))
            is_type = re.match(r"(int|float|bool|str|array)\b", kind_name.replace("int32", "int"))
            initial = default(field) if field.default is not None else "?" if is_type else ", or nil"
            # The bounds of a number stand beside its type.
            meaning = re.sub(r", (at least|above|-?\d+ to) [^;.]+(?=[;.])", "", meanings[field.name])
            yield f"`{field.name}` ({kind_name}{initial}): {meaning}"


def allowed(kind: type[Any], name: str) -> str:
    """Return the allowed values in the field's error message."""
    required = {"prompt_token_ids": [1]} if kind is GenerateRequest else {}
    if name in ALLOWED:
        return ALLOWED[name]
    try:
        kind(**(required | {name: object()}))
    except InvalidRequest as exc:
        return exc.allowed
    raise ValueError(f"{kind.__name__}.{name} accepts anything")


def short(text: str) -> str:
    """Return the allowed values of an error message in the terms of the page's types."""
    text = re.sub(r"\d+", lambda match: f"{int(match[0]):,}", text)
    text = re.sub(r"^a flat list of (?:0 to )?(.+?) token ids from .*", r"array(\1) of int32", text)
    text = re.sub(r"^(\S+ to \S+) characters, none a control character$", r"str(\1, no control characters)", text)
    text = re.sub(r"^an integer from (.*)", r"int(\1)", text)
    text = re.sub(r"^a number (?:from )?(.*)", r"float(\1)", text)
    return text.replace("int(0 to 2,147,483,647)", "int32").replace("true or false", "bool")


def struct_items(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield each field of a message. For a command, omit the fields that all commands have."""
    meanings = docstrings(inspect.getsource(kind))
    common = control.Command.__struct_fields__ if kind in COMMANDS else ()
    info = wire_types.type_info(kind)
    if not isinstance(info, wire_types.StructType):
        raise TypeError(f"{kind.__name__} is no struct")
    for field, typed in zip(msgspec.structs.fields(kind), info.fields, strict=True):
        is_known = field.name == "v" and not kind.__struct_config__.array_like  # The page explains `v` of maps once.
        if field.name not in common and not is_known:
            meaning = meanings[field.name] if kind in _OF_REQUESTS else first_sentence(meanings[field.name])
            if kind.__module__ == presence.__name__:
                meaning = re.sub("; None: .*", ".", meaning)  # The page says once what nil means in presence.
            if isinstance(typed.type, wire_types.BoolType):
                # The page says once that true is meant.
                meaning = re.sub("^True(?:: | if )(.)", lambda match: match[1].upper(), meaning)
            yield f"`{field.name}` ({type_name(typed.type)}{default(field)}): {meaning}"


def default(field: msgspec.structs.FieldInfo) -> str:
    """Return the text for a default: empty for a required field, for None beside `?`, and for the version."""
    if field.required or field.default is None or field.name == "v":
        return ""
    if isinstance(field.default, msgspec.Struct):
        return ", all defaults"
    if field.default_factory is dict:
        return "=`{}`"
    if field.default is msgspec.NODEFAULT:
        return ", random"
    return f"=`{msgspec.json.encode(field.default).decode()}`" if field.default != b"" else ", empty"


def type_name(kind: wire_types.Type) -> str:
    """Return the name of a type in msgpack's terms."""
    match kind:
        case wire_types.UnionType():
            members = [type_name(member) for member in kind.types if not isinstance(member, wire_types.NoneType)]
            if len(members) == len(COMMANDS):
                return "a command"
            return " or ".join(members) + "?" * kind.includes_none
        case wire_types.LiteralType():
            return f"`{'|'.join(map(str, kind.values))}`"
        case wire_types.EnumType() | wire_types.StructType():
            return f"`{kind.cls.__name__}`"
        case wire_types.ListType() | wire_types.VarTupleType():
            bound = f"({kind.max_length:,})" if kind.max_length else ""
            return f"array{bound} of {type_name(kind.item_type)}"
        case wire_types.TupleType():
            return f"{len(kind.item_types)} {type_name(kind.item_types[0])}"
        case wire_types.DictType():
            return f"map of {type_name(kind.key_type)} to {type_name(kind.value_type)}"
        case _:
            return scalar_name(kind)


def scalar_name(kind: wire_types.Type) -> str:
    """Return the name of a scalar type with its bounds."""
    match kind:
        case wire_types.IntType():
            if (kind.ge, kind.le) in NAMED_RANGES:
                return NAMED_RANGES[kind.ge, kind.le]
            return "int" + range_text(kind.ge, kind.le)
        case wire_types.FloatType():
            if (kind.ge, kind.le) == (0, None):
                return "ufloat"
            return "float" + ("(above 0)" if kind.gt == 0 else range_text(kind.ge, kind.le))
        case wire_types.StrType():
            return "str" + (f"({kind.max_length})" if kind.max_length else "")
    return {"BytesType": "bin", "BoolType": "bool", "RawType": "map", "AnyType": "any value"}[type(kind).__name__]


def range_text(low: float | None, high: float | None) -> str:
    """Return the bounds of a number as text."""
    if low is None:
        return ""
    return f"(from {low:,})" if high is None else f"({low:,} to {high:,})"


def docstrings(source: str) -> dict[str, str]:
    """Return the strings below assignments on one line each, by the assigned names."""
    tree = ast.parse(source)
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else tree.body
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case (ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]), ast.Expr()):
                found[name] = " ".join(str(ast.literal_eval(following.value)).split())
    return found


LISTS = {"commands": command_items, "fields": field_items, "errors": error_items}
"""Parts that combine several structs or enums."""

if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text()))
