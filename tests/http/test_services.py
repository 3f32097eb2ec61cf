"""A request that waits at one HTTP service is found and aborted at each; nobody but a service is asked or believed."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import rollbus
from rollbus.bus.auth import permissions
from rollbus.bus.nats.connection import publish, publish_permitted, subscribe_permitted
from rollbus.bus.nats.server import Server
from rollbus.bus.subjects import Subjects
from rollbus.frontend.http import Settings
from rollbus.frontend.http.app import make_app
from rollbus.frontend.http.control.services import MAX_ANSWERING, MAX_BYTES, MAX_SERVICES, Services
from rollbus.frontend.http.server import listen, serving
from rollbus.frontend.http.service import Service
from rollbus.schemas.errors import PermissionDenied
from rollbus.schemas.messages import encode_json
from rollbus.schemas.telemetry import ServiceMessage, WaitingRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.auth.support import FLEET, guarded
from tests.http.test_turns import ROOM
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import opened
from tests.support.waits import HANGS_AFTER_S, until_true

pytestmark = pytest.mark.slow

ENDLESS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 10_000, "ignore_eos": True}}
SLOW = SyntheticConfig(step_s=0.01, max_num_seqs=1)
"""A worker that runs one request at a time, so that the service has room for `ROOM`."""


@contextlib.asynccontextmanager
async def service(server: Server | str, fleet: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Run an HTTP service, and yield a client of it."""
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with (
        rollbus.connect(server, fleet=fleet) as rb,
        serving(rb, Settings(), listening),
        httpx.AsyncClient(base_url=url, timeout=HANGS_AFTER_S) as client,
    ):
        await rb.fleet.wait_for_workers()
        yield client


async def ask(client: httpx.AsyncClient, name: str) -> str:
    """Send a request that ends only by an abort, and return its finish reason."""
    answer = await client.post("/inference/v1/generate", json={**ENDLESS, "request_id": name})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["finish_reason"])


async def waiting_at(client: httpx.AsyncClient, /, **query: Any) -> dict[str, dict[str, Any]]:
    """Return the waiting requests of the list by id."""
    answer = await client.get("/v1/rl/request_list", params=query)
    return {each["request_id"]: each for each in answer.json()["waiting"]["requests"]}


@contextlib.asynccontextmanager
async def flooded(first: httpx.AsyncClient, second: httpx.AsyncClient) -> AsyncIterator[asyncio.Task[str]]:
    """Let the request `last` wait for its turn at the first service, until the second one lists it."""
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(ask(first, f"other-{number}")) for number in range(ROOM)]

        async def others_are_open() -> bool:
            # One runs, and the others are in the queue of the model or on their way there.
            listed = (await first.get("/v1/rl/request_list")).json()
            return len(listed["timelines"]) + len(listed["waiting"]["requests"]) >= ROOM

        while not await others_are_open():
            pass
        last = tasks.create_task(ask(first, "last"))
        while (await waiting_at(second)).get("last", {}).get("stage") != "turn":
            assert not last.done()
        yield last
        await second.post("/abort_requests", json={})
        assert {await each for each in others} == {"abort"}


async def test_a_request_that_waits_at_one_service_is_listed_shown_and_aborted_at_the_other(
    nats_url: str, fleet: str
) -> None:
    """List, history and abort of the other service find the request by its id; the requests of others go on."""
    async with (
        synthetic_worker(nats_url, fleet, config=SLOW),
        service(nats_url, fleet) as first,
        service(nats_url, fleet) as second,
        flooded(first, second) as last,
    ):
        listed = await waiting_at(second)
        few = (await second.get("/v1/rl/request_list", params={"limit": 1})).json()["waiting"]
        of_client, of_model = await waiting_at(second, client="c"), await waiting_at(second, model="synthetic")
        shown = await second.get("/v1/rl/requests/cmpl-last")
        unknown = await second.get("/v1/rl/requests/none")
        aborted = await second.post("/v1/rl/abort", json={"request_ids": ["cmpl-last"]})
        assert await last == "abort"
        again = await second.post("/v1/rl/abort", json={"request_ids": ["last"]})
        left = await waiting_at(second)

    assert (len(few["requests"]), few["left_out"]) == (1, len(listed) - 1)
    assert listed["last"]["model"] == "synthetic"
    assert {each["stage"] for name, each in listed.items() if name != "last"} == {"queue"}
    assert (of_client, of_model.keys()) == ({}, listed.keys())
    [found] = shown.json()["waiting"]["requests"]
    assert (shown.status_code, shown.json()["timelines"], found["stage"]) == (200, [], "turn")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")
    assert (aborted.status_code, aborted.json()["aborted"], aborted.json()["not_found"]) == (200, 1, [])
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
    assert len(left) == ROOM - 1


async def test_a_service_rejects_what_is_no_message_and_counts_no_flood(
    nats_url: str, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, messages that are too large, answers that nobody asked for and a flood of names change nothing."""
    subjects = Subjects(fleet)
    stray = WaitingRequest(request_id="x", wire_id="x")
    bad = [b"", b"\xc1", b"[]", b'{"v": 2}', b'{"asks": "stop"}', b" " * (MAX_BYTES + 1)]
    bad += [msgspec.json.encode({"id": "q", "waiting": [{**msgspec.structs.asdict(stray), "seconds": -1}]})]
    async with (
        synthetic_worker(nats_url, fleet, config=SLOW),
        service(nats_url, fleet) as first,
        service(nats_url, fleet) as second,
        opened(nats_url) as nats,
        flooded(first, second) as last,
    ):
        for data in [*bad, encode_json(ServiceMessage(id="q", waiting=(stray,), left_out=2**60))]:
            await publish(nats, subjects.service("stranger"), data)
        for number in range(2 * MAX_SERVICES):
            await publish(nats, subjects.service(f"stranger-{number}"), encode_json(ServiceMessage()))
        await nats.confirm(timeout_s=HANGS_AFTER_S)
        shown = await second.get("/v1/rl/requests/last")
        assert not last.done()

    waiting = shown.json()["waiting"]
    assert [each["request_id"] for each in waiting["requests"]] == ["last"]
    assert 0 < len(waiting["silent"]) <= MAX_SERVICES
    assert "services.rejected" in caplog.text


async def test_only_services_ask_and_answer_each_other_with_users(tmp_path: Path) -> None:
    """Services of different accounts find each other's requests. Nobody else can abort them, not even an admin."""
    order = encode_json(ServiceMessage(id="forged", asks="abort"))
    subject = Subjects(FLEET).service("front2")
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0", config=SLOW),
        service(guard.login("front")) as first,
        service(guard.login("front2")) as second,
        flooded(first, second) as last,
    ):
        for name in ("alice", "carol", "w1", "boss", "eye", "front"):
            async with guard.connected(name) as nats:
                headers = nats.signatures.headers(subject, order)
                with pytest.raises(PermissionDenied):
                    await publish_permitted(nats, subject, order, headers)
                # JetStream answers without a permission check, but only in the account of the sender.
                with contextlib.suppress(PermissionDenied):
                    await publish(nats, "$JS.API.INFO", b"", reply=subject)
                    await nats.confirm(timeout_s=HANGS_AFTER_S)
        async with guard.connected("front2") as nats, guard.connected("boss") as boss:
            # Whoever breaks into the server has the subject, but no signature of a service.
            for headers in ({}, boss.signatures.headers(subject, order), nats.signatures.headers(subject, b"{}")):
                await publish(nats, subject, order, headers=headers)
            await nats.confirm(timeout_s=HANGS_AFTER_S)
        shown = await second.get("/v1/rl/requests/last")
        assert not last.done()
        aborted = await second.post("/v1/rl/abort", json={"request_ids": ["last"]})
        assert await last == "abort"

    assert [each["service"] for each in shown.json()["waiting"]["requests"]] == ["front"]
    assert aborted.json()["aborted"] == 1


async def test_a_burst_of_questions_is_bounded_and_messages_after_the_end_have_no_effect(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of questions that arrive together, 16 are answered. A service that has ended ignores what still arrives."""
    num_asked, may_answer = 0, asyncio.Event()

    async def waiting(own: Service, model: str | None, ids: Collection[str] | None) -> list[WaitingRequest]:
        nonlocal num_asked
        num_asked += 1
        await may_answer.wait()
        return []

    def ask_many(services: Services, name: str) -> None:
        for number in range(2 * MAX_ANSWERING):
            services._receive("stranger", ServiceMessage(id=f"{name}-{number}", asks="list"))

    monkeypatch.setattr(Service, "waiting", waiting)
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        services: Services = make_app(rb, Settings()).state.service.services
        async with services.serving():
            for name in ("first", "second"):
                ask_many(services, name)
                await until_true(lambda: num_asked >= MAX_ANSWERING)
                await asyncio.sleep(0)
                assert num_asked == MAX_ANSWERING
            may_answer.set()
        ask_many(services, "late")
    assert num_asked == MAX_ANSWERING


async def test_a_service_says_that_it_ends_and_is_not_waited_for(nats_url: str, fleet: str) -> None:
    """A service that ends is neither asked nor awaited, also if it was asked before. Each service says that it ends."""
    told: list[bytes] = []
    async with opened(nats_url) as nats, rollbus.connect(nats_url, fleet=fleet) as rb:
        await subscribe_permitted(nats, Subjects(fleet).services, lambda message: told.append(message.data))
        services: Services = make_app(rb, Settings()).state.service.services
        async with services.serving(), asyncio.TaskGroup() as tasks:
            for name in ("first", "second", "third"):
                services._receive(name, ServiceMessage())
            services._receive("first", ServiceMessage(ends=True))
            asked = tasks.create_task(services.find("abort", None, ["x"]))
            await until_true(lambda: services._questions)
            for message in (ServiceMessage(ends=True), ServiceMessage(id=next(iter(services._questions)))):
                services._receive("second" if message.ends else "third", message)
            assert (await asked).silent == ()
        await until_true(lambda: encode_json(ServiceMessage(ends=True)) in told)


async def test_users_of_an_earlier_release_find_what_waits_at_their_own_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the permission, a service says so in its log and in its 404, and serves on."""
    rules = tuple(rule for rule in permissions.SUBJECT_RULES if not rule.subject.startswith("service."))
    monkeypatch.setattr(permissions, "SUBJECT_RULES", rules)
    caplog.set_level(logging.WARNING)
    async with (
        guarded(tmp_path) as guard,
        guard.worker("w0", config=SLOW),
        service(guard.login("front")) as first,
        service(guard.login("front2")) as second,
    ):
        await until_true(lambda: caplog.text.count("services.not_connected") == 2)
        async with flooded(first, first):
            elsewhere = await second.post("/v1/rl/abort", json={"request_ids": ["last"]})
            here = await first.post("/v1/rl/abort", json={"request_ids": ["last"]})

    assert (elsewhere.status_code, here.status_code, here.json()["aborted"]) == (404, 200, 1)
    assert "find waiting requests at HTTP services" in caplog.text or "may not subscribe" in caplog.text
