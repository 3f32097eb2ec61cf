"""A Python program that cannot connect gets a typed error of one line with the next step and a short traceback."""

import traceback
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.auth.credentials import Role
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.nats.embedded import EmbeddedServer
from tests.support.nats_server import require_binary

pytestmark = pytest.mark.slow

MAX_FOREIGN_LINES = 3
"""One frame of rollbus, its source line, and the message."""


async def lines_of_error(url: str, credentials: Path | None = None) -> tuple[type[BaseException], list[str]]:
    """Connect without success. Return the error type and the traceback lines that do not belong to this function."""
    try:
        async with rollbus.connect(url, fleet="f", credentials=credentials):
            raise AssertionError("it connected")
    except rollbus.RollbusError as exc:
        kind, text = type(exc), traceback.format_exc()
    head, caller, source, *foreign = text.splitlines()
    assert head == "Traceback (most recent call last):"
    assert Path(__file__).name in caller
    assert "rollbus.connect(" in source
    # A line of carets below a source line belongs to that source line.
    return kind, [line for line in foreign if line.strip(" ^~")]


async def test_the_error_without_a_server_states_the_address_and_the_next_step() -> None:
    """If no server listens, the error states the address, the reason and the next step."""
    kind, lines = await lines_of_error("nats://127.0.0.1:1")

    assert kind is rollbus.ServerUnreachable
    assert len(lines) <= MAX_FOREIGN_LINES
    assert "no NATS server at nats://127.0.0.1:1 within 3 s: [Errno" in lines[-1]
    assert "start one (rollbus up, or nats-server -js), or correct the address" in lines[-1]


@pytest.mark.parametrize(
    ("has_credentials", "has_password", "advice"),
    [
        (False, False, "it received no credentials: set --creds FILE, credentials=FILE or $ROLLBUS_CREDS"),
        (False, True, "it received the user of the URL: check the user, password or token there"),
        (True, False, "it received the key of trainer eve of fleet f; nats-server --signal reload"),
    ],
)
async def test_the_error_for_a_rejected_user_states_the_credentials(
    tmp_path: Path, has_credentials: bool, has_password: bool, advice: str
) -> None:
    """If the server rejects the user, the error states which credentials the server received and how to set others."""
    require_binary()
    [known] = ensure_users(tmp_path / "known", [("f", Role.TRAINER, "alice")])
    [stranger] = ensure_users(tmp_path / "others", [("f", Role.TRAINER, "eve")])
    async with EmbeddedServer(users=[known.user]) as server:
        url = server.url.replace("//", "//bob:hunter2@") if has_password else server.url
        kind, lines = await lines_of_error(url, stranger.path if has_credentials else None)

    assert kind is rollbus.BusBroken
    assert len(lines) <= MAX_FOREIGN_LINES
    assert "refused" in lines[-1]
    assert advice in lines[-1]
    assert "hunter2" not in lines[-1]


async def test_an_invalid_url_or_missing_credentials_fail_before_sending(tmp_path: Path) -> None:
    """An invalid URL and a missing credentials file raise an error before the client sends anything."""
    for url, path, message in [
        ("http://127.0.0.1:1", None, "its scheme is 'http', not nats or tls"),
        ("nats://127.0.0.1:1", tmp_path / "none", "cannot be read: No such file or directory"),
    ]:
        kind, lines = await lines_of_error(url, path)
        assert kind is rollbus.BusBroken
        assert len(lines) <= MAX_FOREIGN_LINES
        assert message in lines[-1]
