"""Routes that only read."""

import httpx

from rollbus.frontend.http.settings import Settings
from tests.http.support import http_before, http_service


async def test_a_service_without_workers_is_alive_and_not_ready(nats_url: str, fleet: str) -> None:
    """A service without a fleet is alive, lists no models and is not ready."""
    async with http_before(nats_url, fleet) as http:
        assert (await http.client.get("/health")).status_code == 200
        ready = await http.client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False})
        assert (await http.client.get("/v1/models")).json() == {"object": "list", "data": []}


async def test_models_and_state_are_those_of_the_fleet(nats_url: str, fleet: str) -> None:
    """The service lists the model of a live worker with its context length, and returns the state of the bus."""
    async with http_service(nats_url, fleet, weight_version=3) as http:
        (model,) = (await http.client.get("/v1/models")).json()["data"]
        state = (await http.client.get("/v1/rl/state")).json()
        (worker,) = (await http.rb.fleet.state()).workers

    assert (model["id"], model["max_model_len"]) == ("synthetic", worker.capabilities.max_model_len)
    assert (state["ready"], state["in_flight"]) == (True, 0)
    assert state["workers"][0]["weight_version"] == 3


async def test_data_routes_require_a_token(nats_url: str, fleet: str) -> None:
    """Data routes require the data token or the admin token, and `/health` requires none."""
    async with http_service(nats_url, fleet, Settings(token="data", admin_token="admin")) as http:

        async def get(path: str, authorization: str | None) -> httpx.Response:
            headers = {} if authorization is None else {"Authorization": authorization}
            return await http.client.get(path, headers=headers)

        for wrong in (None, "Bearer", "Bearer x", "Basic data", "data"):
            answer = await get("/v1/models", wrong)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "unauthorized"
        for right in ("Bearer data", "bearer data", "Bearer admin"):
            assert (await get("/v1/models", right)).status_code == 200
        assert (await get("/health", None)).status_code == 200


async def test_unknown_routes_and_methods_are_json_errors(nats_url: str, fleet: str) -> None:
    """404 and 405 have the format of all other errors, with the nearest path or the allowed methods."""
    async with http_before(nats_url, fleet) as http:
        for answer, status, words in (
            (await http.client.get("/zzz"), 404, "the path '/zzz' is unknown; /docs"),
            (await http.client.get("/v1/modells"), 404, "did you mean /v1/models?"),
            (await http.client.get("/" + "x" * 5000), 404, "x…"),
            (await http.client.delete("/v1/models"), 405, "allowed: GET, HEAD"),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert words in answer.json()["error"]["message"]
