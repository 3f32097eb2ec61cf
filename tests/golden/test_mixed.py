"""Messages of other releases of wire version 1, made from messages of this release.

A later release appends to each array that is a struct, and adds fields to each map. An earlier release omits the fields
that it does not know. Here it omits all fields with their default, because a message sent before a field was added
always has the field's default.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollbus.schemas.control import Command
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestMessage,
    decode_command,
    decode_request,
    decode_request_message,
    encode,
)
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.golden.test_golden import check_decodes_to, envelope, golden_bytes
from tests.golden.vectors import DECODERS, VECTORS, Message
from tests.schemas.strategies import plain
from tests.support.disagg import SHAPES, filtered
from tests.support.invariants import observing
from tests.support.requests import Load
from tests.support.waits import until_true

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


# A client and workers of different releases: a proxy rewrites the messages from NATS into those of another release.


CONFIG = SyntheticConfig(step_s=0.0, max_num_seqs=16, vocab_size=VOCAB_SIZE)
MESSAGE = re.compile(rb"(H?)MSG rb\.v1\.[^.]+\.(\w+)\.\S+ .*?(?:(\d+) )?(\d+)\r\n")
ANY_MESSAGE = re.compile(rb"H?MSG .*?(\d+)\r\n")
RELEASES = {"later": later, "earlier": earlier}


class Rewriting:
    """Rewrites the messages that a NATS server delivers to one side, as another release would send them."""

    def __init__(self, release: Callable[[msgspec.Struct], bytes]) -> None:
        self._release = release
        self.counts: Counter[str] = Counter()
        """Number of messages whose bytes changed, by the kind of their subjects."""

    def filter(self) -> Callable[[bytes], bytes]:
        """Return a function that rewrites the bytes of one connection, from its first byte."""
        unread = bytearray()

        def rewrite(data: bytes) -> bytes:
            unread.extend(data)
            written = bytearray()
            while (end := unread.find(b"\r\n")) >= 0:
                line = bytes(unread[: end + 2])
                head = ANY_MESSAGE.fullmatch(line)
                size = len(line) + (int(head[1]) + 2 if head else 0)
                if len(unread) < size:
                    break
                payload = bytes(unread[len(line) : size])
                del unread[:size]
                written += self._rewritten(line, payload[:-2]) + payload[-2:] if head else line
            return bytes(written)

        return rewrite

    def _rewritten(self, line: bytes, payload: bytes) -> bytes:
        found = MESSAGE.fullmatch(line)
        kind = found[2].decode() if found else ""
        if found is None or kind not in DECODERS:
            return line + payload
        num_header_bytes = int(found[3]) if found[1] else 0
        headers, data = payload[:num_header_bytes], payload[num_header_bytes:]
        message = DECODERS[kind](data)
        changed = self._release(message)
        self.counts[kind] += changed != data
        start = line[: found.start(3) if found[1] else found.start(4)]
        sizes = b"%d %d" % (len(headers), len(headers) + len(changed)) if found[1] else b"%d" % len(changed)
        return start + sizes + b"\r\n" + headers + changed


@pytest.mark.proves("P12")
@pytest.mark.parametrize(("release", "shape"), list(zip(RELEASES, reversed(SHAPES), strict=True)))
async def test_a_fleet_of_two_releases_has_the_same_results(
    nats_url: str, fleet: str, release: str, shape: str
) -> None:
    """With workers and a client of other releases, results are the same as without them, and commands are applied."""
    load = await Load.mixed(15, CONFIG)
    for_client, for_worker = Rewriting(RELEASES[release]), Rewriting(RELEASES[release])
    async with (
        observing(nats_url, fleet) as observer,
        filtered(nats_url, fleet, shape, CONFIG, client=for_client.filter, workers=for_worker.filter) as (running, rb),
    ):
        results = await load.run(rb, legs=len(running.workers))
        ledger = await rb.fleet.pause()
        assert ledger.is_complete
        assert (await rb.fleet.resume()).is_complete
        stats = rb.stats()

        assert {generation.attempts for generation in results} == {1}
        assert (stats.bad_messages, observer.history.problems) == (0, [])
        assert {"ack", "frame", "presence"} <= set(for_client.counts)
        await until_true(lambda: {"client", "link", "req"} <= set(for_worker.counts))
        assert min((for_client.counts + for_worker.counts).values()) > 0
        await observer.check_at_rest()


# Releases of wire version 1 decode each other's messages in both directions and reject every other version.


OTHER = 7
every_message = pytest.mark.parametrize("name", VECTORS)


@pytest.mark.proves("P12")
@every_message
def test_additional_values_of_later_releases_are_ignored(name: str) -> None:
    """A message with an additional value in each array and map decodes to the same message."""
    message = VECTORS[name]
    data = later(message)

    assert b"the future" in data or isinstance(message, Command)
    check_same(data, message)


@pytest.mark.proves("P12")
@every_message
def test_fields_that_earlier_releases_omit_have_their_default(name: str) -> None:
    """A message without the fields that have their default decodes to the same message."""
    check_same(earlier(VECTORS[name]), VECTORS[name])


def check_same(data: bytes, expected: Message) -> None:
    """Assert that these bytes decode to `expected`. Their other content has no effect."""
    if isinstance(expected, RequestMessage):
        message = decode_request_message(data)
        assert envelope(message) == envelope(expected)
        assert plain(decode_request(message.request)) == plain(decode_request(expected.request))
    else:
        check_decodes_to(data, expected)


@pytest.mark.proves("P12")
@every_message
def test_another_wire_version_is_refused_by_its_number(name: str) -> None:
    """A message of another wire version is rejected, regardless of its content. The error names both versions."""
    message = VECTORS[name]
    with pytest.raises((RemoteProtocolError, InvalidRequest)) as caught:
        check_decodes_to(of_version(message, OTHER), message)

    where = "v is" if isinstance(message, Command) else "wire version"
    assert f"{where} {OTHER}; allowed: {WIRE_VERSION}" in str(caught.value)


@pytest.mark.proves("P91")
def test_a_command_with_an_unknown_field_is_refused_by_the_name_of_the_field() -> None:
    """A worker rejects a command with an unknown field and names the field.

    It does not ignore the field, because the field may change the command's meaning.
    """
    fields = msgspec.json.decode(golden_bytes("command_pause")) | {"at_noon": True}

    with pytest.raises(InvalidRequest, match="at_noon is unknown"):
        decode_command(msgspec.json.encode(fields))
