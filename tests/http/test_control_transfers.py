"""Transfers of weights over HTTP belong to the user of the token, and health names who stopped or holds workers."""

import pytest

import rollbus
from rollbus.frontend.http import Settings
from rollbus.schemas.acks import AckError
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.presence import WorkerState
from tests.http.support import Control, ControlHttp, Serve
from tests.support.fleet import until_state

CHUNK = {"update_info": {"seed": 4}}


async def until_transfer(c: ControlHttp) -> None:
    """Wait until the client of the service has heard of an open transfer."""
    await until_state(c.http.own, lambda state: state.workers[0].transfer is not None)


async def test_any_service_continues_the_transfer_of_a_user(control: Control, serve_fleet: Serve) -> None:
    """The owner is the user of the token and never the service, so another service finishes what one has begun.

    A finish without a chunk is 409 and changes nothing. A chunk of an earlier start is 409.
    """
    async with control() as c, serve_fleet(None) as second:
        early = await c.post("/finish_weight_update")
        _, first = await c.post("/start_weight_update")
        empty = await c.post("/finish_weight_update")
        _, again = await c.post("/start_weight_update")
        late = await c.post("/update_weights", {**CHUNK, "transfer": first["transfer"]})
        await until_transfer(c)
        _, health = await c.get("/v1/rl/health")
        epoch = {model: state.epoch for model, state in (await c.http.rb.fleet.state()).desired.items()}
        chunk = await second.client.post("/update_weights", json={**CHUNK, "transfer": again["transfer"]})
        finish = await second.client.post("/finish_weight_update", json={"transfer": again["transfer"]})

    codes = [(status, body["error"]["code"]) for status, body in (early, empty, late)]
    assert codes == [(409, "transfer_expired"), (409, "transfer_empty"), (409, "transfer_expired")]
    assert first["transfer"] != again["transfer"]
    [transfer] = health["transfers"]
    assert (transfer["id"], transfer["by"], transfer["workers"]) == (again["transfer"], "http:anyone", ["w0"])
    assert 0 < transfer["left_s"] <= 600
    assert epoch == {}
    assert [answer.status_code for answer in (chunk, finish)] == [200, 200]


async def test_a_transfer_of_a_client_is_held_until_an_admin_cancels_it(
    control: Control, nats_url: str, fleet: str
) -> None:
    """The start of another owner is 409 with the holder and the age of its transfer. An admin may cancel any."""
    settings = Settings(token="data", admin_token="secret")
    async with control(settings=settings) as c, rollbus.connect(nats_url, fleet=fleet, client="trainer") as trainer:
        c.http.client.headers["Authorization"] = "Bearer secret"
        await trainer.fleet.wait_for_workers()
        await trainer.fleet.start_weight_update()
        held = await c.post("/start_weight_update")
        cancelled = await c.post("/v1/rl/cancel_weight_update")
        nothing = await c.post("/v1/rl/cancel_weight_update")
        await until_state(c.http.own, lambda state: state.workers[0].state is WorkerState.SERVING)
        own = await c.post("/start_weight_update")
        with pytest.raises(rollbus.CommandIncomplete) as caught:
            await trainer.fleet.update_weight_chunk({"seed": 1})

    assert (held[0], held[1]["error"]["code"]) == (409, "transfer_held")
    assert "of trainer, opened 0 s ago" in held[1]["error"]["message"]
    assert (cancelled[0], own[0]) == (200, 200)
    assert (nothing[0], nothing[1]["error"]["code"]) == (409, "transfer_expired")
    error = caught.value.ledger.failed["w0"].error
    assert isinstance(error, AckError)
    assert error.code is ControlCode.TRANSFER_HELD
    assert "of http:admin" in error.message


async def test_commands_that_the_state_does_not_allow_are_409(control: Control) -> None:
    """A transfer into a sleeping engine, and a sleep or a resume during a transfer, are 409 and change nothing."""
    async with control() as c:
        await c.post("/sleep")
        asleep = [
            await c.post("/init_weight_transfer_engine", {"init_info": {}}),
            await c.post("/start_weight_update"),
            await c.post("/update_weights", CHUNK),
        ]
        woken = await c.post("/wake_up")
        started = await c.post("/start_weight_update")
        during = [await c.post("/sleep"), await c.post("/resume")]
        cancelled = await c.post("/v1/rl/cancel_weight_update")

    refused = [(status, body["error"]["code"]) for status, body in (*asleep, *during)]
    assert refused == [(409, "not_serving")] * 5
    assert [status for status, _ in (woken, started, cancelled)] == [200, 200, 200]


async def test_health_names_who_stopped_workers_and_since_when(control: Control) -> None:
    """A pause, drain or sleep outlives its caller, and health says who recorded it and when, until its counterpart."""
    async with control(2) as c:
        await c.post("/pause", {"mode": "keep"})
        await c.http.rb.fleet.drain(["w1"])
        _, health = await c.get("/v1/rl/health")
        await c.post("/resume")
        _, after = await c.get("/v1/rl/health")

    told = [(stop["worker"], stop["what"], stop["by"].partition(":")[0]) for stop in health["stops"]]
    assert told == [(None, "paused (keep)", "http"), ("w1", "drained", told[1][2])]
    assert told[1][2] not in {"http", ""}
    assert all(stop["since"] > 1.6e9 for stop in health["stops"])
    assert after["stops"] == []
