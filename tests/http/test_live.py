"""The events that viewers of the fleet receive."""

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any

import pytest

from rollbus.bus.client.client import FleetWatch
from rollbus.frontend.follow import Heard
from rollbus.frontend.http import server
from rollbus.frontend.http.live import fleet as live_fleet
from rollbus.frontend.http.live import viewers
from rollbus.frontend.http.live.viewers import Viewer
from rollbus.frontend.http.settings import Settings
from tests.http.live_support import PATH, watching
from tests.http.support import http_before, http_service
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S
from tests.support.tcp_proxy import tcp_proxy

TOKENS = Settings(token="data", admin_token="admin")


async def test_the_stream_sends_events_with_workers_queues_and_models(nats_url: str, fleet: str) -> None:
    """The first event describes the format. Then events with workers, queues and models follow repeatedly."""
    async with http_service(nats_url, fleet, weight_version=3) as http, watching(http) as stream:
        event = await stream.until("fleet", lambda event: event["queues"])
        later = await stream.next("fleet")
        (known,) = (await http.rb.fleet.state()).workers

    hello = stream.hello
    assert (hello["v"], hello["fleet"], hello["may_act"], hello["may_trace"]) == (1, fleet, True, True)
    (worker,) = stream.workers(event)
    assert worker["worker"] == known.worker
    assert (worker["model"], worker["state"], worker["weight_version"]) == ("synthetic", "serving", 3)
    assert (worker["slots"], worker["role"], worker["staging"]) == (known.capabilities.max_num_seqs, "both", None)
    assert (event["bus_up"], event["problem"], event["queue_problems"]) == (True, None, {})
    assert {line["lane"]: line["waiting"] for line in event["queues"]} == dict.fromkeys(
        ("resume", "high", "normal", "low"), 0
    )
    assert event["models"] == [
        {
            "model": "synthetic",
            "epoch": 0,
            "pause": None,
            "paused_since": None,
            "weight_version": None,
            "label": None,
            "behind": [],
            "stops": [],
            "transfers": [],
        }
    ]
    assert later["at"] > event["at"]
    assert hello["history_step_s"] == 5


async def test_an_event_shows_mode_and_time_of_a_pause(nats_url: str, fleet: str) -> None:
    """An event shows mode and time of a pause, and no pause after the resume."""
    async with http_service(nats_url, fleet) as http, watching(http) as stream:
        await http.rb.fleet.pause(mode="wait")
        event = await stream.until("fleet", lambda event: event["models"] and event["models"][0]["pause"])
        (model,) = event["models"]
        assert (model["pause"], model["epoch"]) == ("wait", 1)
        assert abs(model["paused_since"] - event["at"]) < SOON_S
        await stream.until("fleet", lambda event: stream.workers(event)[0]["state"] == "paused")
        await http.rb.fleet.resume()
        event = await stream.until("fleet", lambda event: event["models"][0]["epoch"] == 2)
        assert (event["models"][0]["pause"], event["models"][0]["paused_since"]) == (None, None)


async def test_viewing_requires_the_data_token_and_commands_the_admin_token(nats_url: str, fleet: str) -> None:
    """The data token permits watching. Only with the admin token, the first event permits commands."""
    async with http_before(nats_url, fleet, TOKENS) as http:
        for wrong in (None, "x"):
            headers = {} if wrong is None else {"Authorization": f"Bearer {wrong}"}
            answer = await http.client.get(PATH, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        for token, may_act in (("data", False), ("admin", True)):
            async with watching(http, token=token) as stream:
                assert (stream.hello["may_act"], stream.hello["may_trace"]) == (may_act, may_act)


@pytest.mark.parametrize("query", ["?zzz=1", "?fleet=a&fleet=b"])
async def test_a_malformed_query_gives_400(nats_url: str, fleet: str, query: str) -> None:
    """A wrong query gives 400 with the parameter."""
    async with http_before(nats_url, fleet) as http:
        answer = await http.client.get(f"{PATH}{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert answer.json()["error"]["param"] in query


async def test_a_viewer_beyond_the_limit_gets_503(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One viewer too many gives 503, until another viewer leaves."""
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 2)
    async with http_before(nats_url, fleet) as http, watching(http):
        async with watching(http):
            answer = await http.client.get(PATH)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_viewers")
            assert "allowed: 2" in answer.json()["error"]["message"]
        while (await http.client.send(http.client.build_request("GET", PATH), stream=True)).status_code == 503:
            pass


async def test_places_are_kept_for_admins(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers with the data token cannot take all places, and the 503 states how an admin gets a place."""
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 2)
    monkeypatch.setattr(viewers, "KEPT_FOR_ADMINS", 1)
    async with http_before(nats_url, fleet, TOKENS) as http, watching(http, token="data"):
        answer = await http.client.get(PATH, headers={"Authorization": "Bearer data"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_viewers")
        assert "allowed: 1, and 1 more with the token of admins" in answer.json()["error"]["message"]
        async with watching(http, token="admin") as stream:
            assert stream.hello["may_act"]


async def test_an_error_of_the_view_stops_neither_service_nor_stream(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error in the view is logged. The service continues, and its viewers receive events again."""
    update, faults = Heard.update, [ZeroDivisionError("once")]

    async def fail_once(self: Heard, watch: FleetWatch) -> None:
        if faults:
            raise faults.pop()
        await update(self, watch)

    monkeypatch.setattr(Heard, "update", fail_once)
    monkeypatch.setattr(live_fleet, "RESTART_S", 0.0)
    async with http_service(nats_url, fleet) as http, watching(http) as stream:
        await stream.next("fleet")
        assert (await http.client.get("/health")).status_code == 200
    assert not faults
    assert "view.failed part=fleet" in caplog.text


async def test_the_stream_continues_while_nats_is_down(nats_url: str, fleet: str) -> None:
    """While NATS is down, the stream continues with the problem and the last known workers, until NATS is back."""
    async with (
        synthetic_worker(nats_url, fleet),
        tcp_proxy(nats_url) as proxy,
        http_before(proxy.url, fleet) as http,
        watching(http) as stream,
    ):
        await stream.until("fleet", lambda event: event["bus_up"] and event["workers"])
        proxy.cut()
        event = await stream.until("fleet", lambda event: not event["bus_up"])
        assert event["problem"] == "the connection to NATS is down"
        assert len(event["workers"]) == 1
        await proxy.restore()
        await stream.until("fleet", lambda event: event["bus_up"] and event["problem"] is None)


async def test_streams_end_with_the_service(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams end with the service immediately, also if a viewer reads nothing."""
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 10 * SOON_S)
    async with contextlib.AsyncExitStack() as readers:
        async with http_before(nats_url, fleet) as http:
            stream = await readers.enter_async_context(watching(http))
            host, port = http.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            readers.callback(writer.close)
            writer.write(f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await stream.next("fleet")
        with pytest.raises(EOFError):
            await stream.until("fleet", lambda _: False)


async def test_a_slow_viewer_gets_the_newest() -> None:
    """While one event is being sent, only the newest event of each name waits."""
    sent: asyncio.Queue[bytes] = asyncio.Queue()
    reads = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.put_nowait(message["body"])
        await reads.wait()

    viewer = Viewer()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(SOON_S):
        tasks.create_task(viewer.send_to(send))
        viewer.offer("fleet", b"1")
        assert await sent.get() == b"1"
        for number in range(2, 1000):
            viewer.offer("fleet", b"%d" % number)
            viewer.offer("ping", b"p")
        reads.set()
        assert [await sent.get(), await sent.get()] == [b"999", b"p"]
        viewer.end()
        assert await sent.get() == b""
