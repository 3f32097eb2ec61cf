"""The history of the last hour that the service keeps."""

import asyncio

import pytest

from rollbus.bus.client.config import Durations
from rollbus.bus.protocol.telemetry.rates import FIELDS
from rollbus.frontend.http.live import fleet as live_fleet
from rollbus.frontend.http.live.events import QueueWaits
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.live_support import watching
from tests.http.support import Serve, http_before
from tests.support.fleet import synthetic_worker
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import SOON_S

PATH = "/v1/rl/history"
BODY = {"token_ids": [1], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a point to the history every tenth of a second."""
    monkeypatch.setattr(live_fleet, "STEP_S", 0.1)


async def test_the_history_is_kept_without_viewers(serve: Serve) -> None:
    """Without viewers too, the history has the load by fleet, model and worker, and the queue wait of requests."""
    async with serve(config=SyntheticConfig(step_s=0.001)) as http:
        (worker,) = http.rb.fleet.workers
        async with asyncio.timeout(SOON_S):
            await http.client.post("/inference/v1/generate", json=BODY)
            while True:
                answer = (await http.client.get(PATH, params={"worker": worker.worker})).json()
                if any(answer["fleet"]["tokens_per_s"]) and any(answer["fleet"]["queue_wait_s"]):
                    break
    assert list(answer["models"]) == ["synthetic"]
    for series in (answer["fleet"], answer["models"]["synthetic"], answer["workers"][worker.worker]):
        assert tuple(series) == FIELDS
        assert any(series["tokens_per_s"])
        assert {len(points) for points in series.values()} == {answer["number"]}
    assert not any(answer["workers"][worker.worker]["queue_wait_s"])


async def test_since_selects_the_new_points(serve: Serve) -> None:
    """`since` selects points by the number in the events. An unknown worker gives 404, and a wrong number 400."""
    async with serve() as http, watching(http) as stream:
        before = (await stream.until("fleet", lambda event: event["history_number"]))["history_number"]
        number = (await stream.until("fleet", lambda event: event["history_number"] > before))["history_number"]
        new = (await http.client.get(PATH, params={"since": before})).json()
        assert len(new["fleet"]["waiting"]) == new["number"] - before >= number - before
        assert new["workers"] == {}
        unknown = await http.client.get(PATH, params={"worker": "zzz"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_worker")
        for since in ("-1", "x", "1.5", 2**60):
            wrong = await http.client.get(PATH, params={"since": since})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")


async def test_the_stream_continues_while_nats_is_down_and_points_are_unknown(nats_url: str, fleet: str) -> None:
    """While NATS is down, the stream continues with the problem and the last known workers, until NATS is back.

    Points of that time are unknown instead of repeating the last values.
    """
    async with (
        synthetic_worker(nats_url, fleet),
        tcp_proxy(nats_url) as proxy,
        http_before(proxy.url, fleet) as http,
        watching(http) as stream,
    ):
        await stream.until("fleet", lambda event: event["bus_up"] and event["history_number"] and event["workers"])
        proxy.cut()
        event = await stream.until("fleet", lambda event: not event["bus_up"])
        assert (event["problem"], len(event["workers"])) == ("the connection to NATS is down", 1)
        down = event["history_number"]
        later = await stream.next("fleet")
        assert (later["bus_up"], later["history_number"]) == (False, down)
        await proxy.restore()
        await stream.until("fleet", lambda event: event["bus_up"] and event["problem"] is None)
        await stream.until("fleet", lambda event: event["history_number"] > down)
        found = (await http.client.get(PATH, params={"since": down})).json()["fleet"]["in_flight"]
    assert found[0] is None
    assert found[-1] == 0.0


def test_the_queue_wait_covers_the_requests_since_the_last_point() -> None:
    """The queue wait of a point covers only the requests since the last point."""
    waits, seconds = QueueWaits(), (0,) * 17
    nobody, _ = waits.step({})
    assert nobody != nobody  # noqa: PLR0124 - NaN
    assert waits.step({"m": Durations((2, *seconds), 4.0)}) == (2.0, {"m": 2.0})
    fleet, models = waits.step({"m": Durations((2, *seconds), 4.0), "n": Durations((1, *seconds), 0.5)})
    assert (fleet, models["n"]) == (0.5, 0.5)
    assert models["m"] != models["m"]
