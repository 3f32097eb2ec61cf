"""Commands of any controller in the events, and the clients of waiting requests."""

import asyncio

import pytest

from rollbus.frontend import follow
from tests.http.live_support import watching
from tests.http.support import http_service
from tests.support.requests import greedy


async def test_a_command_of_another_controller_is_shown(nats_url: str, fleet: str) -> None:
    """A command of another controller appears with the ack of each worker, the newest command first."""
    async with http_service(nats_url, fleet) as http, watching(http) as stream:
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
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event has the waiting requests by lane and client."""
    monkeypatch.setattr(follow, "CLIENTS_S", 0.0)
    async with http_service(nats_url, fleet) as http, watching(http) as stream:
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
