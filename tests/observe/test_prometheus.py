"""A real Prometheus with the files of deploy/prometheus scrapes a service and answers the dashboard's queries."""

import asyncio
import contextlib
import json
import math
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbus.bus.client import presence
from rollbus.frontend.http import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import http_before, http_service
from tests.observe.exposed import worked_metrics
from tests.observe.shipped import ALERTS, LEGEND, PROMETHEUS, queries, rules
from tests.support.waits import HANGS_AFTER_S, SOON_S

PERIOD_S = 0.2
"""Seconds between two queries to Prometheus."""
WITHOUT_DATA = {
    "Firing alerts A": "none fires",
    "Progress of staging A": "nothing is staged",
    "Staging time A": "nothing was staged",
    "Bytes of a published version A": "nothing is published",
    "Bytes of a published version B": "nothing is published",
    "Store of published weights A": "nothing is published",
    "Store of published weights B": "nothing is published",
    "Open generations B": "nothing has waited in the service",
    "annotation New weights": "no update",
}
"""Queries without a result in a fleet that only serves requests, with the reason."""
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: Debian's package prometheus has it"
)


@contextlib.asynccontextmanager
async def prometheus(folder: Path, target: str, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start Prometheus with the shipped files. Only target, path of the token and scrape period differ."""
    (folder / "token").write_text(token)
    shutil.copy(ALERTS, folder)
    shipped = PROMETHEUS.read_text()
    # A scrape asks the workers, and may take as long as the interval. On a busy machine, tests wait longer for them.
    interval = f"{math.ceil(2 * presence.PING_WAIT_S)}s"
    for old, new in (("frontend:8080", target), ("/run/secrets/http-token", "token"), ("15s", interval)):
        assert old in shipped
        shipped = shipped.replace(old, new)
    (folder / "prometheus.yml").write_text(shipped)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *command, f"--web.listen-address={address}", stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=HANGS_AFTER_S) as client:
            while not await is_ready(client):
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(PERIOD_S)
            yield client
    finally:
        process.kill()
        await process.wait()


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Return True if Prometheus serves."""
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    """Return the series that answer a query now."""
    answer = (await client.post("/api/v1/query", data={"query": query})).json()
    assert answer["status"] == "success", json.dumps(answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


async def test_a_prometheus_answers_every_query(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Prometheus loads the files, scrapes with the token, has healthy rules, and has data for this fleet's queries.

    The data have the labels of the legends.
    """
    settings = Settings(token="data")
    async with http_service(
        nats_url, fleet, settings, worker_id="w", config=SyntheticConfig(prefix_cache=True)
    ) as http:
        http.client.headers["Authorization"] = "Bearer data"
        async with prometheus(tmp_path, http.url.removeprefix("http://"), "data") as client:
            waiting = {where: query for where, query, _ in queries() if where not in WITHOUT_DATA}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    while waiting:
                        await worked_metrics(http)
                        waiting = {where: query for where, query in waiting.items() if not await ask(client, query)}
            answers = {where: await ask(client, query) for where, query, _ in queries()}
            legends = {where: set(LEGEND.findall(legend)) for where, _, legend in queries()}
            groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]

    assert [*waiting] == []
    assert answers.keys() >= WITHOUT_DATA.keys()
    assert {
        where for where, found in answers.items() for each in found if not legends[where] <= {*each["metric"]}
    } == set()
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert loaded.keys() == {rule.get("alert") or rule["record"] for rule in rules()}
    assert {rule["health"] for rule in loaded.values()} <= {"ok", "unknown"}
    assert {rule.get("state") for rule in loaded.values()} <= {None, "inactive"}


async def test_with_a_wrong_token_up_is_zero(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With a wrong token, `up` is 0, which makes RollbusServiceDown fire."""
    async with (
        http_before(nats_url, fleet, Settings(token="data")) as http,
        prometheus(tmp_path, http.url.removeprefix("http://"), "another") as client,
    ):
        while not (found := await ask(client, 'up{job="rollbus", fleet="default"}')):
            pass
        targets = (await client.get("/api/v1/targets")).json()["data"]["activeTargets"]

    assert [series["value"][1] for series in found] == ["0"]
    assert "401" in targets[0]["lastError"]
