"""Releases of wire version 1 understand each other in both directions, and no other version, from the golden bytes."""

import msgspec
import pytest

from rollbus.schemas.control import Command
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import (
    WIRE_VERSION,
    RequestMessage,
    decode_command,
    decode_request,
    decode_request_message,
)
from tests.golden.releases import earlier, later, of_version
from tests.golden.test_golden import check_means, envelope, golden_bytes
from tests.golden.vectors import VECTORS, Message
from tests.schemas.strategies import plain

OTHER = 7
every_message = pytest.mark.parametrize("name", VECTORS)


@pytest.mark.proves("P12")
@every_message
def test_what_later_releases_add_is_ignored(name: str) -> None:
    """With something new in every array and map of it, each message means what it means here."""
    message = VECTORS[name]
    data = later(message)

    assert b"the future" in data or isinstance(message, Command)
    check_same(data, message)


@pytest.mark.proves("P12")
@every_message
def test_what_earlier_releases_did_not_know_has_its_default(name: str) -> None:
    """Without all that has its default, each message means what it means here."""
    check_same(earlier(VECTORS[name]), VECTORS[name])


def test_earlier_releases_left_something_out() -> None:
    """What the test above leaves out is much: the messages of an earlier release are other bytes."""
    shorter = [name for name, message in VECTORS.items() if len(earlier(message)) < len(golden_bytes(name).rstrip())]

    assert len(shorter) > len(VECTORS) // 3


def check_same(data: bytes, expected: Message) -> None:
    """These bytes mean `expected`, whatever else is in them."""
    if isinstance(expected, RequestMessage):
        message = decode_request_message(data)
        assert envelope(message) == envelope(expected)
        assert plain(decode_request(message.request)) == plain(decode_request(expected.request))
    else:
        check_means(data, expected)


@pytest.mark.proves("P12")
@every_message
def test_another_version_is_refused_by_its_number(name: str) -> None:
    """A message of another wire version is refused, naming that one and ours, whatever else is in it."""
    message = VECTORS[name]
    with pytest.raises((RemoteProtocolError, InvalidRequest)) as caught:
        check_means(of_version(message, OTHER), message)

    where = "v is" if isinstance(message, Command) else "wire version"
    assert f"{where} {OTHER}; allowed: {WIRE_VERSION}" in str(caught.value)


@pytest.mark.proves("P91")
def test_a_command_of_a_later_release_is_refused_by_its_field() -> None:
    """What a worker does not know of a command may be what matters: it says so instead of leaving it out."""
    fields = msgspec.json.decode(golden_bytes("command_pause")) | {"at_noon": True}

    with pytest.raises(InvalidRequest, match="at_noon is unknown"):
        decode_command(msgspec.json.encode(fields))
