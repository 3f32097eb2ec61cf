"""The events that viewers of the fleet receive."""

import asyncio
import contextlib
import gc
import json
import math
import tracemalloc
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import Mock

import pytest

from rollbus.bus.client.fleet_state import FleetWatch, HeardWorker
from rollbus.bus.protocol.telemetry.rates import SERIES_BYTES, STEP_S, FleetRates, History
from rollbus.frontend import follow
from rollbus.frontend.follow import Heard
from rollbus.frontend.http import Settings
from rollbus.frontend.http.live import fleet as live_fleet
from rollbus.frontend.http.live import viewers
from rollbus.frontend.http.live.events import encode_event, model_lines, worker_points, worker_row
from rollbus.frontend.http.live.viewers import Viewer
from rollbus.frontend.http.status import models
from rollbus.schemas.presence import WorkerCounters
from tests.http.live_support import PATH, watching
from tests.http.support import Serve
from tests.support.fleet import capabilities, presence
from tests.support.requests import greedy
from tests.support.waits import SOON_S

TOKENS = Settings(token="data", admin_token="admin")


async def test_the_stream_sends_events_with_workers_queues_and_models(serve: Serve, fleet: str) -> None:
    """The first event describes the format. Then events with workers, queues and models follow repeatedly."""
    async with serve(weight_version=3) as http, watching(http) as stream:
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


async def test_an_event_shows_mode_and_time_of_a_pause(serve: Serve) -> None:
    """An event shows mode and time of a pause, and no pause after the resume."""
    async with serve() as http, watching(http) as stream:
        await http.rb.fleet.pause(mode="wait")
        event = await stream.until("fleet", lambda event: event["models"] and event["models"][0]["pause"])
        (model,) = event["models"]
        assert (model["pause"], model["epoch"]) == ("wait", 1)
        assert abs(model["paused_since"] - event["at"]) < SOON_S
        await stream.until("fleet", lambda event: stream.workers(event)[0]["state"] == "paused")
        await http.rb.fleet.resume()
        event = await stream.until("fleet", lambda event: event["models"][0]["epoch"] == 2)
        assert (event["models"][0]["pause"], event["models"][0]["paused_since"]) == (None, None)


async def test_only_the_admin_token_permits_commands(serve_fleet: Serve) -> None:
    """The data token permits watching. Only with the admin token, the first event permits commands."""
    async with serve_fleet(TOKENS) as http:
        for token, may_act in (("data", False), ("admin", True)):
            async with watching(http, token=token) as stream:
                assert (stream.hello["may_act"], stream.hello["may_trace"]) == (may_act, may_act)


WRONG_QUERIES = ("zzz=1", "fleet=a&fleet=b", "worker=w0", "experts=", f"experts={'x' * 1000}", "experts=a&experts=b")


async def test_a_malformed_query_gives_400(serve_fleet: Serve) -> None:
    """A wrong query gives 400 with the parameter."""
    async with serve_fleet() as http:
        for query in WRONG_QUERIES:
            error = (answer := await http.client.get(f"{PATH}?{query}")).json()["error"]
            found = (answer.status_code, error["code"], error["param"])
            assert found == (400, "invalid_request", query.partition("=")[0])


async def test_a_viewer_beyond_the_limit_gets_503(serve_fleet: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """One viewer too many gives 503, until another viewer leaves."""
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 2)
    async with serve_fleet() as http, watching(http):
        async with watching(http):
            answer = await http.client.get(PATH)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_viewers")
            assert "allowed: 2" in answer.json()["error"]["message"]
        while (await http.client.send(http.client.build_request("GET", PATH), stream=True)).status_code == 503:
            pass


async def test_places_are_kept_for_admins(serve_fleet: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers with the data token cannot take all places, and the 503 states how an admin gets a place."""
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 2)
    monkeypatch.setattr(viewers, "KEPT_FOR_ADMINS", 1)
    async with serve_fleet(TOKENS) as http, watching(http, token="data"):
        answer = await http.client.get(PATH, headers={"Authorization": "Bearer data"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_viewers")
        assert "allowed: 1, and 1 more with the token of admins" in answer.json()["error"]["message"]
        async with watching(http, token="admin") as stream:
            assert stream.hello["may_act"]


async def test_an_error_of_the_view_stops_neither_service_nor_stream(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error in the view is logged. The service continues, and its viewers receive events again."""
    update, faults = Heard.update, [ZeroDivisionError("once")]

    async def fail_once(self: Heard, watch: FleetWatch) -> None:
        if faults:
            raise faults.pop()
        await update(self, watch)

    monkeypatch.setattr(Heard, "update", fail_once)
    monkeypatch.setattr(live_fleet, "RESTART_S", 0.0)
    async with serve() as http, watching(http) as stream:
        await stream.next("fleet")
        assert (await http.client.get("/health")).status_code == 200
    assert not faults
    assert "view.failed part=fleet" in caplog.text


async def test_no_number_of_a_worker_breaks_the_view_or_the_list_of_models() -> None:
    """A worker may announce any seconds. JSON has no integers as large."""
    odd = presence(uptime_s=1e300, loan_left_s=1e300, capabilities=capabilities())
    assert b",604800]" in encode_event("fleet", worker_row(HeardWorker(odd, 0.0), FleetRates(), 0.0))
    listed = await models(Mock(**{"rb.fleet.workers": (odd,)}), Mock())
    assert b'"created":0,' in listed.body


async def test_streams_end_with_the_service(serve_fleet: Serve) -> None:
    """Streams end with the service immediately, also if a viewer reads nothing."""
    async with contextlib.AsyncExitStack() as readers:
        async with serve_fleet(Settings(stop_timeout_s=10 * SOON_S)) as http:
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


# Commands of any controller in the events, and the clients of waiting requests.


async def test_a_command_of_another_controller_is_shown(serve: Serve) -> None:
    """A command of another controller appears with the ack of each worker, the newest command first."""
    async with serve() as http, watching(http) as stream:
        await stream.next("fleet")
        (worker,) = http.rb.fleet.workers
        while True:
            paused = await http.rb.fleet.pause()
            event = await stream.next("fleet")
            if event["commands"]:
                break
        resumed = await http.client.post("/v1/rl/resume")
        event = await stream.until(
            "fleet",
            lambda event: (
                [each["command"] for each in event["commands"][:2]] == ["resume", "pause"]
                and all(each["done"] for each in event["commands"])
            ),
        )
    newest, before = event["commands"][:2]
    assert (newest["id"], before["id"]) == (resumed.json()["id"], paused.id)
    assert before["epoch"] == paused.epochs["synthetic"]
    assert before["counts"] == {"applied": 1}
    assert before["workers"][worker.worker]["status"] == "applied"
    assert newest["controller"] != before["controller"]


async def test_an_event_has_the_waiting_requests_by_lane_and_client(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event has the waiting requests by lane and client."""
    monkeypatch.setattr(follow, "CLIENTS_S", 0.0)
    async with serve() as http, watching(http) as stream:
        await http.rb.fleet.pause()
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(http.rb.complete(greedy(1, 2))) for _ in range(3)]
            event = await stream.until(
                "fleet", lambda event: any(sum((line["clients"] or {}).values()) == 3 for line in event["queues"])
            )
            await http.rb.fleet.resume()
        assert all(task.result().error is None for task in waiting)
    by_lane = {line["lane"]: line["clients"] for line in event["queues"]}
    (client,) = by_lane.pop("normal")
    assert client in repr(http.rb)
    assert not any(by_lane.values())


# One hour of a large fleet in the live view: its memory does not grow.


HOUR_S = 3600
WARM_UP_S = 60
NUM_WORKERS = 4
"""One of them comes back under another name every ten minutes."""
CAN = capabilities()


class ScriptedWatch(FleetWatch):
    """A watch of simulated workers with one presence per second, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0

    async def workers(self) -> tuple[HeardWorker, ...]:
        """Return the current presence of all workers. Some workers start, end and restart."""
        return tuple(self._worker(number) for number in range(NUM_WORKERS))

    def _worker(self, number: int) -> HeardWorker:
        life = (self.now + number) // 600
        name = f"w{number:04d}" if number % 4 else f"w{number:04d}-{life}"
        counters = WorkerCounters(requests=self.now, generated_tokens=1000 * self.now, first_tokens=self.now)
        worker = presence(worker=name, incarnation=str(life), capabilities=CAN, counters=counters, in_flight=number % 4)
        return HeardWorker(worker, float(self.now))


@pytest.mark.slow
async def test_memory_does_not_grow_in_an_hour() -> None:
    """Apart from the kept points of known size, memory does not grow in an hour, even if a viewer never reads."""
    watch, heard, history, viewer = ScriptedWatch(), Heard(), History(), Viewer()
    tracemalloc.start()
    try:
        for second in range(1, HOUR_S + WARM_UP_S + 1):
            watch.now = second
            await heard.update(watch)
            rows = [worker_row(each, heard.rates, float(second)) for each in heard.workers.values()]
            lines = tuple(model_lines([each.presence for each in heard.workers.values()], {}))
            viewer.offer("fleet", encode_event("fleet", {"workers": rows, "models": lines}))
            if second % STEP_S == 0:
                history.add(second // STEP_S, *worker_points(heard, (), (math.nan, {})))
            if second == WARM_UP_S:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0] - history.num_bytes
        gc.collect()
        after = tracemalloc.get_traced_memory()[0] - history.num_bytes
    finally:
        tracemalloc.stop()
    event = viewer.__dict__["_pending"]["fleet"]
    assert len(json.loads(event.partition(b"data: ")[2])["workers"]) == NUM_WORKERS
    # The history keeps the points of each ended worker for an hour.
    assert history.num_bytes <= (2 + NUM_WORKERS + 7) * SERIES_BYTES
    assert after < 1.1 * before + 20_000 * NUM_WORKERS
