"""Messages of other releases of wire version 1, made from messages of this release.

A later release appends to each array that is a struct, and adds fields to each map. An earlier release omits the fields
that it does not know. Here it omits all fields with their default, because a message sent before a field was added
always has the field's default.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from rollbus.schemas.control import Command
from rollbus.schemas.messages import Frame, LinkMessage, RequestMessage, decode_request, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

ADDED = {"from": "the future", "list": [1, {"a": None}]}
"""The value that a later release adds at each possible place."""
PACKED = (Frame, LinkMessage, RequestMessage)
"""The message types encoded as msgpack; all others are JSON."""


def packed(message: object, plain: Any) -> bytes:
    """Encode the plain value `plain` in the format of `message`."""
    return msgspec.msgpack.encode(plain) if isinstance(message, PACKED) else msgspec.json.encode(plain)


def later(message: msgspec.Struct) -> bytes:
    """Return the message as a later release may send it."""
    return packed(message, _changed(message, _add))


def earlier(message: msgspec.Struct) -> bytes:
    """Return the message as sent by an earlier release, which knew none of the fields that have their default here."""
    return packed(message, _changed(message, _leave_out))


def of_version(message: msgspec.Struct, version: int) -> bytes:
    """Return the message under another wire version, with fields of other types."""
    plain = msgspec.to_builtins(message) if not isinstance(message, PACKED) else msgspec.msgpack.decode(encode(message))
    if isinstance(plain, list):
        return packed(message, [version, *([None] * (len(plain) - 1))])
    return packed(message, dict.fromkeys(plain) | {"v": version})


Change = Callable[[msgspec.Struct, Any], Any]


def _changed(value: Any, change: Change) -> Any:
    """Return `value` in plain types, with `change` applied to each struct in it."""
    if isinstance(value, RequestMessage):
        fields = {name: _changed(getattr(value, name), change) for name in value.__struct_fields__ if name != "request"}
        return change(value, fields | {"request": _changed(decode_request(value.request), change)})
    if isinstance(value, GenerateRequest | SamplingParams):
        plain = msgspec.msgpack.decode(encode(value))  # type: ignore[arg-type]  # a part of a request
        sampling = {"sampling": _changed(value.sampling, change)} if isinstance(value, GenerateRequest) else {}
        return change(value, plain | sampling)
    if isinstance(value, msgspec.Struct):
        names = [field.encode_name for field in msgspec.structs.fields(value)]
        values = [_changed(getattr(value, name), change) for name in value.__struct_fields__]
        return change(value, values if value.__struct_config__.array_like else _tagged(value, names, values))
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _changed(item, change) for name, item in value.items()}
    return value


def _tagged(value: msgspec.Struct, names: list[str], values: list[Any]) -> dict[str, Any]:
    config = value.__struct_config__
    tag = {} if config.tag_field is None else {config.tag_field: config.tag}
    return tag | dict(zip(names, values, strict=True))


def _add(value: msgspec.Struct, plain: Any) -> Any:
    if isinstance(plain, list):
        return [*plain, ADDED, "more"]
    # People write commands as JSON, so a worker rejects unknown fields of a command.
    return plain if isinstance(value, Command) else {"added_later": ADDED, **plain}


def _leave_out(value: msgspec.Struct, plain: Any) -> Any:
    fields = msgspec.structs.fields(value)
    defaults = {field.encode_name for field in fields if not field.required and _has_default(value, field)}
    if isinstance(plain, dict):
        return {name: item for name, item in plain.items() if name not in defaults}
    end = len(plain)
    while end and fields[end - 1].encode_name in defaults:
        end -= 1
    return plain[:end]


def _has_default(value: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return bool(getattr(value, field.name) == default)
