"""The OpenAPI document describes the served routes, and requests that it allows never give 500."""

import asyncio
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from rollbus.frontend.http.app import ADMIN, DATA, OPEN, make_app
from rollbus.frontend.http.control import DATA_ROUTES, NOT_SERVED_ROUTES
from rollbus.frontend.http.docs import document
from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import Http, http_before, http_service
from tests.support.patience import SOON_S
from tests.support.waits import until

EXAMPLES = 5
"""The number of examples for each route."""
ENDLESS = ("GET", "/v1/rl/events")
"""A route whose response ends only if its client disconnects."""


def operations(described_as: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the operations by method and path."""
    return {
        (method.upper(), path): operation
        for path, methods in described_as["paths"].items()
        for method, operation in methods.items()
    }


def documented(key: tuple[str, str]) -> tuple[str, str]:
    """Return a route as the document names it, because OpenAPI has no parameters with slashes."""
    method, path = key
    return method, path.replace(":path}", "}")


async def test_the_document_lists_exactly_the_served_routes(nats_url: str, fleet: str) -> None:
    """The document lists exactly the served routes, with their methods and tokens."""
    settings = Settings(token="data", admin_token="admin")
    async with http_before(nats_url, fleet, settings) as http:
        served = {
            documented((method, route.path))
            for route in make_app(http.own, settings).routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD"
        }
        found = operations((await http.client.get("/openapi.json")).json())
        assert set(found) == served
        tokens = {key: [set(each) for each in operation.get("security", ())] for key, operation in found.items()}
        for table, wanted in ((OPEN, []), (DATA, [{"token"}, {"admin_token"}]), (ADMIN, [{"admin_token"}])):
            assert all(tokens[documented(key)] == wanted for key in table)
        for method, path in DATA:
            assert (await http.client.request(method, path)).status_code == 401


def test_the_document_has_the_body_of_each_post_route() -> None:
    """The document has the body of each POST route, and no routes that do not exist."""
    served = {**OPEN, **DATA, **ADMIN}

    without = {key for key in {**DATA, **ADMIN} if key[0] == "POST" and served[key].body is None}
    assert without == {key for key in {**NOT_SERVED_ROUTES, **DATA_ROUTES} if key[0] == "POST"}
    made = operations(document(OPEN, DATA, ADMIN, Settings()))
    assert set(made) == set(map(documented, served))
    assert all(("requestBody" in made[documented(key)]) == (route.body is not None) for key, route in served.items())
    assert all(operation["summary"] for operation in made.values())
    assert len({operation["operationId"] for operation in made.values()}) == len(made)


def test_schemas_are_valid() -> None:
    """All schemas are valid JSON Schema of the dialect of OpenAPI 3.1, and each reference has a target."""
    made = document(OPEN, DATA, ADMIN, Settings())
    names = set(made["components"]["schemas"])
    for schema in made["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)

    def check(part: object) -> None:
        if isinstance(part, dict):
            if "$ref" in part:
                assert part["$ref"].removeprefix("#/components/schemas/") in names
            for each in part.values():
                check(each)
        elif isinstance(part, list):
            for each in part:
                check(each)

    check(made)


def try_out(http: Http, described_as: dict[str, Any], path: str, method: str, *, is_admin: bool) -> None:
    """Send requests that the document allows, and requests that it forbids. This call blocks."""
    operation = schemathesis.openapi.from_dict(described_as)[path][method]

    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def run(case: schemathesis.Case[Any]) -> None:
        response = case.call(base_url=http.url, timeout=SOON_S)
        if is_admin:
            # If no worker applies a command, the response is 502 by design.
            assert response.status_code != 500
        else:
            case.validate_response(response, checks=[not_a_server_error])
        conformance = [status_code_conformance, content_type_conformance, response_schema_conformance]
        case.validate_response(response, checks=conformance)

    run()


async def _status(http: Http, path: str) -> int:
    return (await http.client.get(path)).status_code


async def test_schemathesis_finds_no_server_error(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Requests drawn from the document get responses as documented, and never 5xx."""
    config = SyntheticConfig(max_model_len=256)
    settings = Settings(max_body_bytes=1 << 20, tokenizer=save(make_byte_level(), tmp_path))
    async with http_service(nats_url, fleet, settings, config=config) as http:
        # `/ready` waits only some seconds for the tokenizer, whose library takes longer to load on a busy machine.
        await until(lambda: _status(http, "/ready"), 200)
        described_as = (await http.client.get("/openapi.json")).json()
        # The routes that pause or drain the fleet come last.
        for table in (OPEN, DATA, ADMIN):
            for method, path in sorted(set(map(documented, table)) - {ENDLESS}):
                # Routes that are not served answer 501.
                may_fail = table is ADMIN or (method, path) in set(map(documented, DATA_ROUTES))
                await asyncio.to_thread(try_out, http, described_as, path, method, is_admin=may_fail)
        assert (await http.client.get("/health")).status_code == 200
