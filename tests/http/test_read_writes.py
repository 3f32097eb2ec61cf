"""After an ack, the next request sees what the ack says, also if presence arrives late or at another service."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx

import rollbus
from rollbus.bus.client.client import runtime_of
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.fleet.presence import LostWorker, Survivor
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import DesiredState, LoadLora
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import WeightSource
from tests.http.control_support import ControlHttp, control_http
from tests.http.support import http_before
from tests.support.connections import opened
from tests.support.requests import greedy
from tests.support.waits import until_true

LATE_S = 0.4
"""Seconds by which presence is late: more than a ping waits, and less than an answer does."""
NEVER_S = 3600.0


@contextlib.contextmanager
def late_presence(client: rollbus.Client, late_s: float = LATE_S) -> Iterator[None]:
    """Deliver all presence to this client late, in order."""
    watcher = runtime_of(client).watcher
    update = watcher.table.update

    def deliver(presence: WorkerPresence) -> None:
        update(presence, time.monotonic())
        watcher.expire()

    def update_later(presence: WorkerPresence, _now: float) -> LostWorker | Survivor | None:
        asyncio.get_running_loop().call_later(late_s, deliver, presence)
        return None

    with mock.patch.object(watcher.table, "update", update_later):
        yield


async def ask(client: httpx.AsyncClient, model: str) -> tuple[int, str | None]:
    """Request a token. Return the status and the error code."""
    answer = await client.post(
        "/inference/v1/generate", json={"model": model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    )
    return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]


async def load(c: ControlHttp, name: str = "math") -> None:
    """Load the adapter through the first service."""
    status, ledger = await c.post("/v1/rl/load_lora_adapter", {"name": name, "path": str(c.root / "adapter")})
    assert status == 200, ledger


async def test_a_request_after_an_acked_load_has_its_adapter(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A request after the ack of a load is served by the adapter, and after the ack of an unload it is 404."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        with late_presence(c.http.own):
            await load(c)
            found = await ask(c.http.client, "math")
            listed = await c.http.client.get("/v1/models/math")
            unloaded, _ = await c.post("/v1/rl/unload_lora_adapter", {"name": "math"})
            gone = await ask(c.http.client, "math")
            again, _ = await c.post("/v1/rl/unload_lora_adapter", {"name": "math"})

    assert (found, listed.status_code) == ((200, None), 200)
    assert (unloaded, gone, again) == (200, (404, ErrorCode.UNKNOWN_MODEL), 404)


async def test_another_service_reads_the_record_before_it_refuses(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A service whose presence is older than another service's ack serves the new adapter, in all routes.

    An adapter that is recorded and not loaded yet is 503, and a name that nobody recorded is 404.
    """
    async with control_http(nats_url, fleet, tmp_path) as c, http_before(nats_url, fleet) as other:
        await other.own.fleet.wait_for_workers()
        with late_presence(other.own):
            await load(c)
            assert await ask(other.client, "math") == (200, None)
            await load(c, "chess")
            assert (await other.client.get("/v1/models/chess")).status_code == 200
        await until_true(lambda: len(other.own.fleet.workers[0].loras) == 2)
        with late_presence(other.own, NEVER_S):
            await load(c, "poetry")
            assert await ask(other.client, "poetry") == (503, ErrorCode.NO_WORKERS)
            assert await ask(other.client, "nobody") == (404, ErrorCode.UNKNOWN_MODEL)


async def test_an_adapter_of_a_base_without_workers_has_no_workers(nats_url: str, fleet: str) -> None:
    """An adapter that is recorded for a base without workers is 503, because its workers may come."""
    async with opened(nats_url) as nats, http_before(nats_url, fleet) as http:
        command = LoadLora(name="math", source=WeightSource(path="/x"), version=1)
        await DesiredStore(nats, Subjects(fleet)).record("base", command)
        assert await ask(http.client, "math") == (503, ErrorCode.NO_WORKERS)
        assert await ask(http.client, "base") == (503, ErrorCode.NO_WORKERS)
        assert await ask(http.client, "nobody") == (404, ErrorCode.UNKNOWN_MODEL)


async def test_unknown_names_share_reads_of_the_states(nats_url: str, fleet: str) -> None:
    """Requests with unknown names that arrive together share reads, and the next read waits for its time."""
    reads: list[str] = []
    read_all = DesiredStore.read_all

    async def noted(store: DesiredStore) -> dict[str, DesiredState]:
        reads.append("read")
        return await read_all(store)

    async with http_before(nats_url, fleet) as http:
        ask_for = http.own.fleet.models_with_adapter
        with (
            mock.patch.object(DesiredStore, "read_all", noted),
            mock.patch("rollbus.bus.client.models.READ_S", NEVER_S),
        ):
            await ask_for("first")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATE_S), asyncio.TaskGroup() as tasks:
                    for number in range(40):
                        tasks.create_task(ask_for(f"nobody-{number}"))

    assert reads == ["read"]


async def test_reads_of_the_applied_state_show_what_was_acked(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """After an ack, each service answers with the new state. If presence does not arrive, the answer says `stale`."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c, http_before(nats_url, fleet) as other:
        await other.own.fleet.wait_for_workers(2)
        with late_presence(other.own):
            assert (await c.post("/pause"))[0] == 200
            paused = (await other.client.get("/is_paused")).json()
            assert (await c.post("/resume"))[0] == 200
            resumed = (await other.client.get("/is_paused")).json()
            body = {"path": str(c.root / "two"), "version": 7}
            assert (await c.post("/v1/rl/update_weights", body))[0] == 200
            versions = (await other.client.get("/v1/rl/weight_version")).json()
            await load(c)
            loras = (await other.client.get("/v1/loras")).json()
        with late_presence(other.own, NEVER_S):
            assert (await c.post("/pause"))[0] == 200
            paths = (
                "/is_paused",
                "/is_sleeping",
                "/v1/rl/weight_version",
                "/weight_info",
                "/v1/loras",
                "/v1/rl/health",
            )
            async with asyncio.TaskGroup() as tasks:
                reads = [tasks.create_task(other.client.get(path)) for path in paths]
            stale = [read.result().json() for read in reads]

    assert (paused, resumed) == ({"is_paused": True}, {"is_paused": False})
    assert (versions["workers"], versions["is_uniform"]) == ({"w0": 7, "w1": 7}, True)
    assert loras["adapters"][0]["workers"] == {"w0": 1, "w1": 1}
    assert not {"stale"} & (versions.keys() | loras.keys())
    assert [answer["stale"] for answer in stale] == [True] * len(paths)


async def test_a_client_sees_its_own_commands_at_once(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """After `pause`, `resume`, `update_weights` and `load_lora` return, the client's view of the fleet has them."""
    async with control_http(nats_url, fleet, tmp_path, 2) as c:
        rb = c.http.rb
        with late_presence(rb):
            await rb.fleet.pause()
            assert {worker.state for worker in rb.fleet.workers} == {WorkerState.PAUSED}
            assert {worker.state for worker in (await rb.fleet.state()).workers} == {WorkerState.PAUSED}
            await rb.fleet.resume()
            assert {worker.state for worker in rb.fleet.workers} == {WorkerState.SERVING}
            await rb.fleet.update_weights(c.root / "two", version=7)
            assert {worker.weight_version for worker in rb.fleet.workers} == {7}
            await rb.fleet.load_lora("math", c.root / "adapter", version=3)
            assert [[lora.version for lora in worker.loras] for worker in rb.fleet.workers] == [[3], [3]]
            generation = await rb.complete(greedy(2, 2, lora="math"))
            assert not (await rb.fleet.state()).stale

    assert (generation.lora, len(generation.token_ids)) == ("math", 2)
