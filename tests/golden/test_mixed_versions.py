"""Releases of wire version 1 decode each other's messages in both directions and reject every other version."""

import msgspec
import pytest

from rollbus.schemas.control import Command
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import RequestMessage, decode_command, decode_request, decode_request_message
from tests.golden.releases import earlier, later, of_version
from tests.golden.test_golden import check_decodes_to, envelope, golden_bytes
from tests.golden.vectors import VECTORS, Message
from tests.schemas.strategies import plain

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
