"""The INFO message of a NATS server, or of an attacker on the connection."""

from typing import Any

import pytest

from rollbus.bus.nats.client import MAX_LEARNED_SERVERS, parse_info
from rollbus.schemas.errors import RemoteProtocolError


@pytest.mark.parametrize(
    "info",
    [[], None, {"nonce": 7}, {"max_payload": "1"}, {"max_payload": 0}, {"connect_urls": [7]}, {"tls_required": "no"}],
)
def test_fields_of_a_wrong_type_are_refused(info: Any) -> None:
    """A field of a wrong type is rejected, because nats-py would fail later or misinterpret it."""
    with pytest.raises(RemoteProtocolError, match="INFO that cannot be used"):
        parse_info(info)


def test_unknown_fields_of_a_newer_server_are_ignored() -> None:
    """Unknown fields of a newer server are ignored."""
    assert parse_info({"version": "3", "new": {"x": 1}, "connect_urls": None}).learned_servers == []


def test_only_valid_addresses_are_learned() -> None:
    """Only valid addresses of host and port are learned, also for IPv6."""
    good = ["a.example:4222", "10.0.0.1:1", "[2001:db8::1]:65535"]
    bad = ["a", "a:", "a:x", "a:0", "a:65536", "[::1", "u:p@a:1", "a b:1", "a:1/x", "tls://a:1", ""]
    assert parse_info({"connect_urls": bad + good}).learned_servers == good


def test_the_number_of_learned_addresses_is_bounded() -> None:
    """The number of learned addresses is bounded, because each address costs a connection attempt."""
    urls = [f"h{i}:1" for i in range(1000)]
    assert parse_info({"connect_urls": urls}).learned_servers == urls[:MAX_LEARNED_SERVERS]


@pytest.mark.parametrize(
    ("info", "offers"), [({}, False), ({"tls_required": True}, True), ({"tls_available": True}, True)]
)
def test_a_server_that_requires_or_supports_tls_offers_tls(info: dict[str, bool], offers: bool) -> None:
    """A server offers TLS if it requires TLS or has it available."""
    assert parse_info(info).offers_tls is offers
