"""Users of one HTTP service share the capacity of the fleet, so many requests of one user do not delay others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http.calls import Admission
from rollbus.frontend.http.errors import HttpError, without_paths
from rollbus.frontend.http.metrics import Metrics
from rollbus.frontend.http.service import MIN_AHEAD, Turns, room_of
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.test_waiting import Announce, announcing
from tests.http.metrics_doc import NoClient
from tests.http.support import Http, Serve, http_before
from tests.http.test_edge import GENERATING, becomes
from tests.http.test_names import BODY, error_of
from tests.support.fleet import capabilities, synthetic_worker
from tests.support.hand_worker import GatedEngine, running
from tests.support.waits import SOON_S, busy_timeout, patient, until, until_true

PATH = "/inference/v1/generate"
ROOM = 1 + MIN_AHEAD
"""The capacity of a fleet that runs one request at a time."""
FLOOD = 30


def turns_of(room: int) -> Turns:
    """Return the turns of models that run so many samples at a time."""
    return Turns(list, room, Metrics(NoClient()))  # type: ignore[arg-type]


async def order_of(asked: list[tuple[str, rollbus.GenerateRequest]], leaving: tuple[int, ...] = ()) -> list[int]:
    """Return the requests in the order of their turns, if they arrive in this order while another one runs.

    Args:
        leaving: requests that are cancelled while they wait.
    """
    turns = turns_of(1)
    order: list[int] = []

    async def take_turn(at: int, user: str, request: rollbus.GenerateRequest) -> None:
        async with turns.turn(user, request):
            order.append(at)

    async with asyncio.TaskGroup() as tasks, turns.turn("first", sampled()):
        waiting = []
        for at, (user, request) in enumerate(asked):
            waiting.append(tasks.create_task(take_turn(at, user, request)))
            await asyncio.sleep(0)
        for at in leaving:
            waiting[at].cancel()
    assert [at for at, task in enumerate(waiting) if task.cancelled()] == [*leaving]
    assert not any(vars(turns)[name] for name in ("_waiting", "_open", "entered"))
    return order


def sampled(n: int = 1, priority: int = 0) -> rollbus.GenerateRequest:
    """Return a request for so many samples."""
    sampling = rollbus.SamplingParams(n=n)
    return rollbus.GenerateRequest(prompt_token_ids=[1], model="m", sampling=sampling, priority=priority)


async def test_users_take_turns() -> None:
    """Users take turns, however many requests of one user were added before those of another."""
    order = await order_of([(user, sampled()) for user in "aaaaabbc"])
    assert "".join("aaaaabbc"[at] for at in order) == "abcabaaa"


async def test_a_user_with_many_open_samples_waits_for_the_others() -> None:
    """Next is a request of the user with the fewest open samples, so that all get the same share."""
    turns, order = turns_of(4), list[str]()
    release = asyncio.Event()

    async def take_turn(user: str, n: int) -> None:
        async with turns.turn(user, sampled(n)):
            order.append(user)
            await release.wait()

    async with asyncio.TaskGroup() as tasks, turns.turn("first", sampled(4)) as first:
        for user, n in [("a", 2), ("a", 2), ("b", 1), ("b", 1)]:
            tasks.create_task(take_turn(user, n))
            await asyncio.sleep(0)
        first.end()
        await until_true(lambda: len(order) == 3)
        assert order == ["a", "b", "b"]
        release.set()


async def test_the_most_urgent_request_of_a_user_is_first() -> None:
    """The requests of one user run by priority, then in order of arrival."""
    assert await order_of([("first", sampled(priority=priority)) for priority in (0, 5, 0, -1)]) == [3, 0, 2, 1]


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
    # The turn of user a does not pass with its second request.
    assert await order_of([(user, sampled()) for user in "aabbc"], leaving=(1, 2, 4)) == [0, 3]


def test_a_later_user_gets_a_share_of_a_full_limit() -> None:
    """If one user fills the limit, a second user may still have half as many samples in flight, and no more."""
    admission = Admission(4)
    for _ in range(4):
        admission.add(1, "a")
    for user, count in (("a", 1), ("b", 3)):
        with pytest.raises(HttpError, match="429 busy"):
            admission.add(count, user)
    admission.add(2, "b")
    with pytest.raises(HttpError, match=r"6 requests are open, 2 of them from this user; allowed: 4, 2 for each"):
        admission.add(1, "b")
    admission.add(1, "c")
    for user, count in (("a", 4), ("b", 2), ("c", 1)):
        admission.remove(count, user)
    assert admission.in_flight == 0
    admission.add(4, "b")


@pytest.mark.parametrize(("by", "stream"), [("address", False), ("proxy", True), ("token", False)])
async def test_a_flood_of_requests_does_not_delay_another_user(
    serve_fleet: Serve, nats_url: str, fleet: str, by: str, stream: bool
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
        serve_fleet(settings) as http,
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


async def test_a_waiting_request_of_a_disconnected_client_is_never_sent(
    serve_fleet: Serve, nats_url: str, fleet: str
) -> None:
    """If the client of a waiting request disconnects, the request never reaches the fleet."""
    engine = GatedEngine("steps", config=SyntheticConfig(max_num_seqs=1))
    body: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    async with running(nats_url, fleet, engine), serve_fleet() as http, asyncio.TaskGroup() as tasks:
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


async def test_a_client_that_does_not_read_its_stream_blocks_no_request(
    serve_fleet: Serve, nats_url: str, fleet: str
) -> None:
    """A turn ends when the fleet has finished the request, even if its client has not read the response."""
    config = SyntheticConfig(max_num_seqs=1, num_layers=64, top_k=8, max_model_len=100_000)
    engine = GatedEngine(config=config)
    large = {"token_ids": [7] * 25_000, "stream": True, "sampling_params": {"max_tokens": 1}}
    async with running(nats_url, fleet, engine), serve_fleet() as http, asyncio.TaskGroup() as tasks:
        await http.own.fleet.wait_for_workers()
        unread = [http.client.stream("POST", PATH, json=large) for _ in range(ROOM)]
        entered = [tasks.create_task(stream.__aenter__()) for stream in unread]
        await asyncio.wait(entered)
        assert [task.result().status_code for task in entered] == [200] * ROOM
        few = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert (await http.client.post(PATH, json=few)).status_code == 200
        for stream in unread:
            await stream.__aexit__(None, None, None)


# HTTP requests wait a limited time for a worker that comes.


COUNT = 50


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Send a request for tokens to the synthetic model."""
    return await client.post("/inference/v1/generate", json={"model": "synthetic", **BODY, **fields})


@contextlib.asynccontextmanager
async def starting(
    nats_url: str, fleet: str, settings: Settings | None = None, **said: Any
) -> AsyncIterator[tuple[Http, Announce]]:
    """Serve a fleet whose only worker announces its presence and answers nothing. Yield the function that announces."""
    async with announcing(nats_url, fleet) as announce, http_before(nats_url, fleet, settings) as http:
        await announce(**said)
        await until_true(lambda: http.own.fleet.workers)
        yield http, announce


async def test_requests_wait_for_a_worker_that_starts(nats_url: str, fleet: str) -> None:
    """Requests with and without a stream wait for the only worker to start, and are answered whole."""
    async with starting(nats_url, fleet, incarnation="1") as (http, _), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(ask(http.client, stream=bool(i % 2))) for i in range(COUNT)]
        _, pending = await asyncio.wait(waiting, timeout=1.0)
        assert len(pending) == COUNT
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            answers = [await task for task in waiting]

    assert [answer.status_code for answer in answers] == [200] * COUNT
    assert sum(answer.text.count("data: [DONE]") for answer in answers) == COUNT / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.PAUSED])
async def test_after_the_limit_a_waiting_request_gives_503(
    serve: Serve, nats_url: str, fleet: str, state: WorkerState, *, stream: bool
) -> None:
    """Without a first byte within `max_wait_s`, the answer is 503 with `Retry-After`, and says what it waited for.

    This also holds for requests beyond the number that the service hands to the fleet.
    """
    settings = Settings(max_wait_s=0.6)
    if state is WorkerState.PAUSED:
        async with serve(settings) as http:
            await http.rb.fleet.pause(mode="keep")
            await until_true(lambda: http.own.fleet.workers[0].state is state)
            answers = [await ask(http.client, stream=stream)]
    else:
        async with starting(nats_url, fleet, settings, last_error="restart 3 of 5 in 8 s") as (http, _):
            answers = [await ask(http.client, stream=stream)]

    for answer in answers:
        status, code, message = error_of(answer)
        assert (status, code) == (503, ErrorCode.NO_WORKERS)
        assert int(answer.headers["Retry-After"]) > 0
        assert "0.6 s" in message
        assert f"is {state}" in message


async def test_the_wait_for_a_start_counts_in_the_timeout_of_a_request(nats_url: str, fleet: str) -> None:
    """A request whose timeout is shorter than `max_wait_s` gets 504 when it has passed."""
    async with starting(nats_url, fleet) as (http, _):
        in_body = await ask(http.client, timeout_s=0.3)
        in_header = await http.client.post("/inference/v1/generate", json=BODY, headers={"X-Request-Timeout": "0.3"})

    assert [error_of(answer)[:2] for answer in (in_body, in_header)] == [(504, ErrorCode.TIMEOUT)] * 2


async def test_a_flood_of_waiting_requests_ends_together(nats_url: str, fleet: str) -> None:
    """Requests that wait for their turn behind others have the same limit, counted from their arrival."""
    async with (
        starting(
            nats_url,
            fleet,
            Settings(max_wait_s=3.0, max_in_flight=4 * COUNT),
            state=WorkerState.PAUSED,
            start_left_s=None,
            capabilities=capabilities(max_num_seqs=1),
        ) as (http, _),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = [tasks.create_task(ask(http.client)) for _ in range(4 * COUNT)]
        # If each group of nine requests waited for its own time, this would take more than a minute.
        async with busy_timeout(patient(30)):
            answers = [await task for task in waiting]

    assert {error_of(answer)[:2] for answer in answers} == {(503, ErrorCode.NO_WORKERS)}


async def test_waiting_requests_count_in_the_limits_of_their_user(nats_url: str, fleet: str) -> None:
    """A request that waits for a worker to start counts as open: one more than allowed gives 429."""
    async with (
        starting(nats_url, fleet, Settings(max_in_flight=2), incarnation="1") as (http, _),
        asyncio.TaskGroup() as tasks,
    ):
        asked = [tasks.create_task(ask(http.client)) for _ in range(3)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [(await task).status_code for task in done] == [429]
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            assert [(await task).status_code for task in waiting] == [200, 200]


async def test_a_worker_that_is_given_up_ends_the_wait(nats_url: str, fleet: str) -> None:
    """When the supervisor starts the worker no more, the answer is 503 at once, with the last cause."""
    async with starting(nats_url, fleet, Settings(max_wait_s=3600)) as (http, announce), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(ask(http.client))
        await asyncio.wait([waiting], timeout=0.3)
        await announce(state=WorkerState.FAILED, start_left_s=0.0, last_error="no file /data/models/m/config.json")
        status, _, message = error_of(await waiting)

    # The message leaves out the directories of the worker's machine.
    assert (status, "w is not started again: no file config.json" in message) == (503, True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no file /a/b.c/config.json; log: /var/log/w.log", "no file config.json; log: w.log"),
        ("path='/data/m', 'Qwen/Qwen3' is no worker of nats://host:4222/x", "path='m', 'Qwen/Qwen3' is no worker of"),
        ("error:/a/b (/c/d/)", "error:b ()"),
        ("1/2 tokens/s", "1/2 tokens/s"),
    ],
)
def test_messages_have_no_directories(message: str, expected: str) -> None:
    """Absolute paths are reduced to their last component. Other slashes stay."""
    assert without_paths(message).startswith(expected)


async def has_open(http: Http, count: int) -> None:
    """Wait until the service has so many open requests."""

    async def load() -> object:
        return (await http.client.get("/load")).json()["server_load"]

    await until(load, count)


@pytest.mark.parametrize(("body", "stream"), [({}, False), ({"model": "synthetic"}, True)])
async def test_an_abort_of_all_ends_the_wait_for_a_start(
    nats_url: str, fleet: str, body: dict[str, Any], *, stream: bool
) -> None:
    """Requests that wait for their model's first worker end at once, with the answer of an aborted request."""
    asked: dict[str, Any] = {"n": 2, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    async with (
        starting(nats_url, fleet, Settings(max_wait_s=3600)) as (http, _),
        busy_timeout(SOON_S),
        asyncio.TaskGroup() as tasks,
    ):
        bodies = {path: {**GENERATING[path], "model": "synthetic", **asked} for path in GENERATING}
        generate = bodies["/inference/v1/generate"]
        generate["sampling_params"] = {"n": generate.pop("n")}
        waiting = {path: tasks.create_task(http.client.post(path, json=each)) for path, each in bodies.items()}
        await has_open(http, len(waiting))
        aborted = await http.client.post("/abort_requests", json=body)
        answers = {path: await task for path, task in waiting.items()}
        await has_open(http, 0)

    assert (aborted.status_code, aborted.json()["aborted"]) == (200, len(answers)), aborted.text
    for answer in answers.values():
        assert (answer.status_code, answer.headers["X-Request-Id"] in answer.text) == (200, True), answer.text
        if stream:
            *events, done = answer.text.removeprefix("data: ").split("\n\ndata: ")
            assert done.strip() == "[DONE]"
            found = [json.loads(event) for event in events]
            assert (found[-1]["choices"], found[-1]["usage"]["total_tokens"]) == ([], 0)
            choices = [choice for event in found for choice in event["choices"]]
        else:
            choices = answer.json()["choices"]
            assert answer.json()["usage"]["total_tokens"] == 0
        ended = [choice["index"] for choice in choices if choice["finish_reason"] == "abort"]
        assert ended == [0, 1]


async def test_an_abort_by_id_ends_only_that_wait(nats_url: str, fleet: str) -> None:
    """A request that waits for its model's first worker is found by its id. Others go on waiting."""
    async with starting(nats_url, fleet, incarnation="1") as (http, _), asyncio.TaskGroup() as tasks:
        mine, other = [tasks.create_task(ask(http.client, request_id=name)) for name in ("mine", "other")]
        await has_open(http, 2)
        aborted = await http.client.post("/v1/rl/abort", json={"request_ids": ["cmpl-mine"]})
        ended = await mine
        async with synthetic_worker(nats_url, fleet, worker_id="w", incarnation="1"):
            answer = await other

    assert (aborted.status_code, aborted.json()["aborted"], aborted.json()["not_found"]) == (200, 1, [])
    assert (ended.json()["request_id"], ended.json()["choices"][0]["finish_reason"]) == ("mine", "abort")
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_an_abort_by_id_ends_the_wait_for_a_turn(serve: Serve) -> None:
    """A request that waits behind the requests of others ends at once, and they go on."""
    config = SyntheticConfig(step_s=0.01, max_num_seqs=1)
    endless = {"sampling_params": {"max_tokens": 10_000, "ignore_eos": True}}
    async with serve(config=config) as http, busy_timeout(SOON_S), asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(ask(http.client, **endless)) for _ in range(12)]
        await has_open(http, len(others))
        last = tasks.create_task(ask(http.client, request_id="last", **endless))
        await has_open(http, len(others) + 1)
        aborted = await http.client.post("/v1/rl/abort", json={"request_ids": ["last"]})
        assert (await last).json()["choices"][0]["finish_reason"] == "abort"
        assert not any(task.done() for task in others)
        await http.client.post("/abort_requests", json={})

    assert (aborted.status_code, aborted.json()["aborted"], aborted.json()["not_found"]) == (200, 1, [])


async def test_two_waits_of_a_request_have_one_limit(nats_url: str, fleet: str) -> None:
    """The wait for a start counts in `max_wait_s` of the later wait for a pause: 503 comes before the timeout."""
    settings = Settings(max_wait_s=6.0)
    async with starting(nats_url, fleet, settings) as (http, announce), asyncio.TaskGroup() as tasks:
        # With a limit for each wait, the timeout would come first.
        waiting = tasks.create_task(ask(http.client, timeout_s=8.5))
        await asyncio.wait([waiting], timeout=4.5)
        for state in (WorkerState.SERVING, WorkerState.PAUSED):
            await announce(state=state, start_left_s=None, free_slots=0, capabilities=capabilities())

            async def state_of() -> object:
                return http.own.fleet.workers[0].state

            await until(state_of, state)
        answer = await waiting

    assert error_of(answer)[:2] == (503, ErrorCode.NO_WORKERS)
