"""Routes that describe the service and its engines to clients of vLLM and OpenAI, and to browsers."""

import asyncio
import json
import platform
import re
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema_rs
import openai
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http.app import ADMIN, DATA, OPEN, make_app
from rollbus.frontend.http.control import DATA_ROUTES, NOT_SERVED_ROUTES
from rollbus.frontend.http.docs import document
from rollbus.frontend.http.status import parallel_config
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Control, Http, Serve, client_of, make_byte_level, save
from tests.support.waits import SOON_S, until


async def test_versions_load_and_settings(serve: Serve) -> None:
    """The routes give engine versions under vLLM's names and the workers' presence, and nothing of the environment.

    `/workers` has this service once, by the name in the request, because a command reaches the whole fleet.
    """
    async with serve(weight_version=3) as http:
        client = http.client
        version = (await client.get("/version")).json()
        text = (await client.get("/server_info")).json()
        as_json = (await client.get("/server_info", params={"config_format": "json"})).json()
        wrong = await client.get("/server_info", params={"config_format": "yaml"})
        pings = [await client.get("/ping"), await client.post("/ping")]
        named = (await client.get("/workers", headers={"Host": "localhost:8000"})).json()
        [own] = (await client.get("/workers")).json()["workers"]
        aborted = await client.post(f"{own['url']}/abort_requests", json={})
        load = await client.get(f"{own['url']}/load?include_inflight=true&inflight_limit=100")
        (model,) = (await client.get("/v1/models")).json()["data"]
        state = (await client.get("/v1/rl/state")).json()
        [worker] = (await http.rb.fleet.state()).workers
    assert version == {"version": "1", "engines": ["synthetic 1"], "rollbus": rollbus.__version__}
    assert text["vllm_config"].startswith(f"{worker.worker}: model='synthetic'")
    assert as_json["vllm_config"][worker.worker]["world_size"] == 1
    assert (text["vllm_env"], text["system_env"]["python"]) == ({}, platform.python_version())
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")
    assert [(ping.status_code, ping.content) for ping in pings] == [(200, b""), (200, b"")]
    known = {"models": ["synthetic"], "workers": [worker.worker], "is_healthy": True, "load": 0}
    assert named == {"workers": [{"url": "http://localhost:8000", **known}], "total": 1}
    assert own == {"url": http.url, **known}
    assert (aborted.json()["aborted"], load.json()) == (0, {"server_load": 0})
    assert (model["id"], model["max_model_len"]) == ("synthetic", worker.capabilities.max_model_len)
    assert (state["ready"], state["in_flight"], state["workers"][0]["weight_version"]) == (True, 0, 3)


def test_engines_that_agree_have_one_parallel_config() -> None:
    """The sizes are in the settings if all engines announce the same."""
    one = "vllm-0.30.0 cuda-NVIDIA-H100 tp2-pp3-dp4 bfloat16 kv-auto"
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}
    assert parallel_config([one, one]) == {
        **sizes,
        "world_size": 6,
        "world_size_across_dp": 24,
        "nnodes": 1,
        "node_rank": 0,
    }
    for other in (one.replace("tp2", "tp4"), "synthetic 1"):
        assert parallel_config([one, other]) is None
    assert parallel_config([]) is None


async def test_one_model_is_retrieved(control: Control) -> None:
    """`models.retrieve` of the OpenAI client finds names with slashes, and an unknown model is a `NotFoundError`."""
    async with control(models=("org/model-1.5",)) as c, client_of(c.http) as client:
        found = await client.models.retrieve("org/model-1.5")
        [listed] = (await client.models.list()).data
        with pytest.raises(openai.NotFoundError, match=r"'org/other' is unknown; allowed: org/model-1\.5"):
            await client.models.retrieve("org/other")
    assert found.model_dump(exclude={"created"}) == listed.model_dump(exclude={"created"})


# Routes that only read.


async def test_a_service_without_workers_is_alive_and_not_ready(serve_fleet: Serve) -> None:
    """A service without a fleet is alive and not ready. It has no models, no series of workers, and no release."""
    async with serve_fleet() as http:
        names = ("/health", "/ping", "/ready", "/version", "/v1/models", "/server_info", "/metrics")
        found = {name: await http.client.get(name) for name in (*names, "/v1/rl/request_list")}
        refused = await http.client.post("/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}})
    assert {name: answer.status_code for name, answer in found.items() if answer.status_code != 200} == {
        "/ready": 503,
        "/version": 503,
        "/v1/rl/request_list": 503,
    }
    assert found["/ready"].json() == {"ready": False}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
    assert found["/v1/models"].json() == {"object": "list", "data": []}
    assert found["/server_info"].json()["vllm_config"] == ""
    assert "rollbus_worker_in_flight{" not in found["/metrics"].text


async def test_data_routes_require_a_token(serve: Serve) -> None:
    """Data routes require the data token or the admin token, and `/health` requires none."""
    async with serve(Settings(token="data", admin_token="admin")) as http:

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


async def test_unknown_routes_and_methods_are_json_errors(serve_fleet: Serve) -> None:
    """404 and 405 have the format of all other errors, with the nearest path or the allowed methods."""
    async with serve_fleet() as http:
        for answer, status, words in (
            (await http.client.get("/zzz"), 404, "the path '/zzz' is unknown; /docs"),
            (await http.client.get("/v1/modells"), 404, "did you mean /v1/models?"),
            (await http.client.get("/" + "x" * 5000), 404, "x…"),
            (await http.client.delete("/v1/models"), 405, "allowed: GET, HEAD"),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert words in answer.json()["error"]["message"]


# The OpenAPI document describes the served routes, and requests that it allows never give 500.


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


async def test_the_document_lists_exactly_the_served_routes(serve_fleet: Serve) -> None:
    """The document lists exactly the served routes, with their methods and tokens."""
    settings = Settings(token="data", admin_token="admin")
    async with serve_fleet(settings) as http:
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

    without = {key for key in {**DATA, **ADMIN} if key[0] == "POST" and served[key].body is served[key].query is None}
    assert without == {key for key in {**NOT_SERVED_ROUTES, **DATA_ROUTES} if key[0] == "POST"}
    made = operations(document(OPEN, DATA, ADMIN, Settings()))
    assert set(made) == set(map(documented, served))
    assert all(("requestBody" in made[documented(key)]) == (route.body is not None) for key, route in served.items())
    assert all(operation["summary"] for operation in made.values())
    assert len({operation["operationId"] for operation in made.values()}) == len(made)


def test_schemas_are_valid() -> None:
    """All schemas are valid JSON Schema of the dialect of OpenAPI 3.1, and each reference has a target."""
    made = document(OPEN, DATA, ADMIN, Settings())
    schemas = made["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(made))) <= set(schemas)


def try_out(http: Http, operation: Any, *, is_admin: bool) -> None:
    """Send requests that the document allows, and requests that it forbids. This call blocks."""

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


async def test_schemathesis_finds_no_server_error(serve: Serve, tmp_path: Path) -> None:
    """Requests drawn from the document get responses as documented, and never 5xx."""
    config = SyntheticConfig(max_model_len=256)
    settings = Settings(max_body_bytes=1 << 20, tokenizer=save(make_byte_level(), tmp_path))
    async with serve(settings, config=config) as http:
        # `/ready` waits only some seconds for the tokenizer, whose library takes longer to load on a busy machine.
        await until(lambda: _status(http, "/ready"), 200)
        described = schemathesis.openapi.from_dict((await http.client.get("/openapi.json")).json())
        # The routes that pause or drain the fleet come last.
        for table in (OPEN, DATA, ADMIN):
            for method, path in sorted(set(map(documented, table)) - {ENDLESS}):
                # Routes that are not served answer 501.
                may_fail = table is ADMIN or (method, path) in set(map(documented, DATA_ROUTES))
                await asyncio.to_thread(try_out, http, described[path][method], is_admin=may_fail)
        assert (await http.client.get("/health")).status_code == 200
