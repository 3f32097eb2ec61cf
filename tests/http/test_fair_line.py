"""Users of one HTTP service share the capacity of the fleet, so many requests of one user do not delay others."""

import asyncio
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.frontend.http.calls import Admission
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.metrics import Metrics
from rollbus.frontend.http.service import MIN_AHEAD, Turns, room_of
from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.metrics_doc import NoClient
from tests.http.support import Http, http_before
from tests.http.test_safety import becomes
from tests.support.gated_engine import GatedEngine, running
from tests.support.patience import SOON_S

PATH = "/inference/v1/generate"
ROOM = 1 + MIN_AHEAD
"""The capacity of a fleet that runs one request at a time."""
FLOOD = 30


def turns_of(room: int) -> Turns:
    """Return the turns of models that run so many samples at a time."""
    return Turns(list, room, Metrics(NoClient()))  # type: ignore[arg-type]


async def order_of(asked: list[tuple[str, rollbus.GenerateRequest]], room: int = 1) -> list[str]:
    """Return the users in the order of their turns, if their requests arrive in this order while another one runs."""
    turns = turns_of(room)
    order: list[str] = []

    async def take_turn(user: str, request: rollbus.GenerateRequest) -> None:
        async with turns.turn(user, request):
            order.append(user)

    async with asyncio.TaskGroup() as tasks, turns.turn("first", sampled(room)):
        for user, request in asked:
            tasks.create_task(take_turn(user, request))
            await asyncio.sleep(0)
    assert not any(vars(turns)[name] for name in ("_waiting", "_open", "_by_request"))
    return order


def sampled(n: int = 1, priority: int = 0) -> rollbus.GenerateRequest:
    """Return a request for so many samples."""
    sampling = rollbus.SamplingParams(n=n)
    return rollbus.GenerateRequest(prompt_token_ids=[1], model="m", sampling=sampling, priority=priority)


async def test_users_take_turns() -> None:
    """Users take turns, however many requests of one user were added before those of another."""
    assert await order_of([(user, sampled()) for user in "aaaaabbc"]) == list("abcabaaa")


async def test_the_most_urgent_request_of_a_user_is_first() -> None:
    """The requests of one user run by priority, then in order of arrival."""
    requests = [sampled(priority=priority) for priority in (0, 5, 0, -1)]
    turns = turns_of(1)
    order: list[str] = []

    async def take_turn(request: rollbus.GenerateRequest) -> None:
        async with turns.turn("a", request) as turn:
            order.append(turn.request.request_id)

    async with asyncio.TaskGroup() as tasks, turns.turn("a", sampled()):
        for request in requests:
            tasks.create_task(take_turn(request))
            await asyncio.sleep(0)
    assert order == [requests[at].request_id for at in (3, 0, 2, 1)]


async def test_a_request_starts_as_soon_as_there_is_room_for_a_sample() -> None:
    """A request for many samples starts as soon as there is room for one. Ends that are reported twice count once."""
    turns = turns_of(2)
    async with turns.turn("a", sampled()) as first, turns.turn("b", sampled(9)) as large, asyncio.TaskGroup() as tasks:

        async def take_turn() -> None:
            async with turns.turn("c", sampled()):
                pass

        last = tasks.create_task(take_turn())
        for _ in range(2):
            first.end()
            await asyncio.sleep(0)
            assert not last.done()
        large.end()
        await last


async def test_a_request_that_leaves_the_line_takes_no_place() -> None:
    """Nothing is kept of requests that are cancelled while they wait, and later requests have their turns."""
    turns = turns_of(1)

    async def take_turn(user: str) -> str:
        async with turns.turn(user, sampled()):
            return user

    async with asyncio.TaskGroup() as tasks, turns.turn("first", sampled()):
        waiting = [tasks.create_task(take_turn(user)) for user in "aabbc"]
        await asyncio.sleep(0)
        for leaving in (waiting[1], waiting[2], waiting[4]):
            leaving.cancel()
    assert [task.cancelled() for task in waiting] == [False, True, True, False, True]
    assert not any(vars(turns)[name] for name in ("_waiting", "_open", "_by_request"))


def test_a_later_user_gets_a_share_of_a_full_limit() -> None:
    """If one user fills the limit, a second user may still have half as many samples in flight, and no more."""
    admission = Admission(4)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.admitted(user="a"))
        for user, count in (("a", 1), ("b", 3)):
            with pytest.raises(HttpError, match="429 busy"), admission.admitted(count, user):
                pass
        stack.enter_context(admission.admitted(2, user="b"))
        with pytest.raises(HttpError, match=r"6 requests are open, 2 of them from this user; allowed: 4, 2 for each"):
            stack.enter_context(admission.admitted(user="b"))
        stack.enter_context(admission.admitted(user="c"))
    assert admission.in_flight == 0
    with admission.admitted(4, user="b"):
        pass


@pytest.mark.parametrize("by", ["address", "proxy", "token"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_flood_of_requests_does_not_delay_another_user(
    nats_url: str, fleet: str, by: str, stream: bool
) -> None:
    """The second user's request runs after the few in the fleet, and before most of those that wait in the service."""
    engine = GatedEngine("steps", config=SyntheticConfig(max_num_seqs=1))
    settings = Settings(token="data", admin_token="admin") if by == "token" else Settings()
    body = {"token_ids": [1], "stream": stream, "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    order: list[str] = []

    async def ask(client: httpx.AsyncClient, user: str) -> None:
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 200
        order.append(user)

    async with (
        running(nats_url, fleet, engine),
        http_before(nats_url, fleet, settings) as http,
        another_user(http, by) as other,
        asyncio.TaskGroup() as tasks,
    ):
        await http.own.fleet.wait_for_workers()
        assert room_of(http.own.fleet.workers, "synthetic") == ROOM
        if by == "token":
            http.client.headers["Authorization"] = "Bearer data"
        for _ in range(FLOOD):
            tasks.create_task(ask(http.client, "flooding"))
        await becomes(http, "rollbus_http_generations_waiting", FLOOD - ROOM, model="synthetic")
        asked = tasks.create_task(ask(other, "other"))
        await becomes(http, "rollbus_http_generations_waiting", FLOOD - ROOM + 1, model="synthetic")
        engine.gates["steps"].set()
        await asked
        assert len(order) < FLOOD
    assert order.index("other") < 2 * ROOM
    assert len(order) == FLOOD + 1


def another_user(http: Http, by: str) -> httpx.AsyncClient:
    """Return a client with another local address, a client behind a proxy, or a client with another token."""
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2" if by == "address" else "127.0.0.1")
    headers = {"proxy": {"X-Forwarded-For": "192.0.2.1"}, "token": {"Authorization": "Bearer admin"}}.get(by)
    return httpx.AsyncClient(transport=transport, base_url=http.url, headers=headers, timeout=None)


async def test_a_request_waits_no_longer_than_its_timeout() -> None:
    """A request that waits too long fails like one in the fleet's queue. Otherwise, it keeps the rest of its time."""
    waiting = turns_of(1)
    prompt = rollbus.GenerateRequest(prompt_token_ids=[1], model="m")
    async with waiting.turn("a", prompt) as turn:
        assert turn.request is prompt
        with pytest.raises(rollbus.RequestTimeout, match="waited behind other requests") as failed:
            async with waiting.turn("b", replace(prompt, timeout_s=0.01)):
                pass
        assert failed.value.stage == "admission"
        asyncio.get_running_loop().call_later(0.01, turn.end)
        async with waiting.turn("b", replace(prompt, timeout_s=SOON_S)) as later:
            assert 0 < (later.request.timeout_s or 0) < SOON_S


async def test_a_waiting_request_of_a_disconnected_client_is_never_sent(nats_url: str, fleet: str) -> None:
    """If the client of a waiting request disconnects, the request never reaches the fleet."""
    engine = GatedEngine("steps", config=SyntheticConfig(max_num_seqs=1))
    body: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    async with running(nats_url, fleet, engine), http_before(nats_url, fleet) as http, asyncio.TaskGroup() as tasks:
        await http.own.fleet.wait_for_workers()
        asked = [tasks.create_task(http.client.post(PATH, json=body)) for _ in range(ROOM)]
        await becomes(http, "rollbus_http_generations_in_flight", ROOM, model="synthetic")
        leaving = tasks.create_task(http.client.post(PATH, json=body))
        await becomes(http, "rollbus_http_generations_waiting", 1, model="synthetic")
        leaving.cancel()
        await becomes(http, "rollbus_http_generations_waiting", 0, model="synthetic")
        published = http.own.stats().requests
        engine.gates["steps"].set()
        await asyncio.wait(asked)
        assert http.own.stats().requests == published == ROOM


async def test_a_client_that_does_not_read_its_stream_blocks_no_request(nats_url: str, fleet: str) -> None:
    """A turn ends when the fleet has finished the request, even if its client has not read the response."""
    config = SyntheticConfig(max_num_seqs=1, num_layers=64, top_k=8, max_model_len=100_000)
    engine = GatedEngine(config=config)
    large = {"token_ids": [7] * 40_000, "stream": True, "sampling_params": {"max_tokens": 1}}
    async with running(nats_url, fleet, engine), http_before(nats_url, fleet) as http, asyncio.TaskGroup() as tasks:
        await http.own.fleet.wait_for_workers()
        unread = [http.client.stream("POST", PATH, json=large) for _ in range(ROOM)]
        entered = [tasks.create_task(stream.__aenter__()) for stream in unread]
        await asyncio.wait(entered)
        assert [task.result().status_code for task in entered] == [200] * ROOM
        few = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert (await http.client.post(PATH, json=few)).status_code == 200
        for stream in unread:
            await stream.__aexit__(None, None, None)
