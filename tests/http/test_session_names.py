"""Session and group names over HTTP are separate for each user, because all users share the service's client."""

import httpx
import pytest

from tests.http.support import http_service, noted_requests

PATH = "/inference/v1/generate"
BODY = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}


async def test_users_do_not_share_sessions_and_groups(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal session and group names of two users differ on the bus, and those of one user stay equal."""
    wanted = noted_requests(monkeypatch)
    async with http_service(nats_url, fleet) as http:

        async def ask(address: str, session: str, group: str) -> tuple[str, str]:
            """Return the names on the bus."""
            headers = {"X-Session-ID": session, "X-Group-ID": group, "X-Forwarded-For": address}
            answer: httpx.Response = await http.client.post(PATH, json=BODY, headers=headers)
            assert answer.status_code == 200, answer.text
            request = wanted.pop()
            assert request.session_id is not None
            assert request.group_id is not None
            return request.session_id, request.group_id

        first = await ask("192.0.2.1", "s", "g")
        assert await ask("192.0.2.1", "s", "g") == first
        # Another user, and other names of the same user. No name on the bus equals any other name.
        names = [*first, *await ask("192.0.2.2", "s", "g"), *await ask("192.0.2.1", "s2", "g2"), "s", "g"]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("header", ["X-Session-ID", "X-Group-ID"])
async def test_the_error_gives_the_length_of_the_name_in_the_request(nats_url: str, fleet: str, header: str) -> None:
    """The error gives the length of the name in the request, not of the name on the bus."""
    async with http_service(nats_url, fleet) as http:
        answer = await http.client.post(PATH, json=BODY, headers={header: "x" * 10_000})
        assert answer.status_code == 400
        assert "10000 characters" in answer.text
