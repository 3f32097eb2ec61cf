"""A service that stops while clients wait."""

import asyncio

import httpx
import pytest

from rollbus.frontend.http import server
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.control_support import in_flight
from tests.http.support import Http, http_before
from tests.support.fleet import StartServed, until_idle
from tests.support.patience import SOON_S

SLOW = SyntheticConfig(step_s=0.005)
LONG = {"token_ids": [1], "sampling_params": {"max_tokens": 60_000, "ignore_eos": True}}


async def test_a_stop_ends_waiting_requests_and_streams_and_keeps_commands(
    nats_url: str,
    fleet: str,
    one_worker: StartServed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Waiting requests get 503, streams are closed, and their requests aborted. A recorded command remains."""
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.2)
    async with one_worker(config=SLOW) as (rb, _, engine):
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(timeout=SOON_S) as client:
            async with http_before(nats_url, fleet) as http, in_flight(Http(http.url, http.client, rb, http.own)):
                await http.own.fleet.wait_for_workers()
                stream = await client.send(
                    client.build_request("POST", f"{http.url}/inference/v1/generate", json={**LONG, "stream": True}),
                    stream=True,
                )
                whole = tasks.create_task(client.post(f"{http.url}/inference/v1/generate", json=LONG))
                waiting = tasks.create_task(client.post(f"{http.url}/v1/rl/pause", json={"mode": "wait"}))
                while "pause" not in (await rb.fleet.state()).desired["synthetic"].registers:
                    pass
            for answer in (await whole, await waiting):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
            with pytest.raises(httpx.HTTPError):
                await stream.aread()
        state = await rb.fleet.state()
        while state.workers[0].state is not WorkerState.PAUSED:
            state = await rb.fleet.state()
        await rb.fleet.resume()
        await until_idle(engine, rb)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
