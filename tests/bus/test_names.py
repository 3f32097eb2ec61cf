"""The model of requests that name none: fixed by the first of them, and known from the stored desired states."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import connected, publish
from rollbus.bus.nats.jetstream import ApiError, ask
from rollbus.bus.nats.server import Server
from rollbus.bus.protocol.fleet.command_result import CommandIncomplete
from rollbus.bus.queue.streams import stream_name
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, InvalidRequest, NoWorkers, RequestError, RequestRejected, RequestTimeout
from rollbus.schemas.limits import MAX_DELIVERIES
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import wire_id
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests import admission
from tests.control.support import write_checkpoint
from tests.support.fleet import StartServed, presence, synthetic_worker, until_worker
from tests.support.hand_client import hand_client
from tests.support.hand_worker import (
    MODEL,
    HandWorker,
    chunk,
    failure,
    hand_worker,
    request,
    session_worker,
    worker_by_hand,
)
from tests.support.invariants import observing
from tests.support.requests import endless, error_of, greedy, short, start_stream
from tests.support.waits import SOON_S, until, until_true


def asked(**fields: object) -> GenerateRequest:
    """Return a request for three tokens."""
    return greedy(1, 3, **fields)


@contextlib.asynccontextmanager
async def client(nats_url: str, fleet: str) -> AsyncIterator[rollbus.Client]:
    """Connect a client."""
    async with asyncio.timeout(SOON_S), rollbus.connect(nats_url, fleet=fleet) as rb:
        yield rb


async def test_a_lost_model_is_not_replaced_by_another(nats_url: str, fleet: str) -> None:
    """A client fixes its model at the first request without one. If its workers are gone, it gets an error.

    It gets no tokens of the other model, and continues with its own model when a worker is back.
    """
    async with client(nats_url, fleet) as rb:
        async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"):
            await rb.fleet.wait_for_workers(model="a")
            assert (await rb.complete(asked())).model == "a"
            async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
                await rb.fleet.wait_for_workers(model="b")
                assert (await rb.complete(asked())).model == "a"
                await rb.fleet.drain(["wa"])
                with pytest.raises(NoWorkers, match="no live worker serves a"):
                    await rb.complete(asked())
                await rb.fleet.resume(workers=["wa"])
                await rb.fleet.wait_for_workers(model="a")
                assert (await rb.complete(asked())).model == "a"
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await rb.fleet.wait_for_workers(model="b")
            with pytest.raises(NoWorkers, match="no live worker serves a"):
                await rb.complete(asked())
            async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"):
                await rb.fleet.wait_for_workers(model="a")
                assert (await rb.complete(asked())).model == "a"


async def test_a_new_client_gets_the_list_of_all_known_models(nats_url: str, fleet: str) -> None:
    """A client that names no model gets the list if several models are known, also if one of them has no workers.

    The error names the command that forgets a model. A request that names its model is not affected.
    """
    async with synthetic_worker(nats_url, fleet, worker_id="wa", model="a"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="a")
        await rb.fleet.resume()  # stores a state, by which the model stays known
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest) as caught:
            await rb.complete(asked())
        assert (caught.value.field, caught.value.problem) == ("model", "is missing")
        assert caught.value.allowed == "one of a, b (without workers: a; `rollbus forget-model a` forgets a model)"
        with pytest.raises(NoWorkers, match="no live worker serves a"):
            await rb.complete(asked(model="a"))
        with pytest.raises(InvalidRequest, match="model is 'c'; allowed: one of a, b"):
            await rb.complete(asked(model="c"))
        assert (await rb.complete(asked(model="b"))).model == "b"


async def test_without_a_known_model_nothing_is_fixed(nats_url: str, fleet: str) -> None:
    """A client of an empty fleet gets `no_workers` and takes the first model that comes."""
    async with client(nats_url, fleet) as rb:
        with pytest.raises(NoWorkers):
            await rb.complete(asked())
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await rb.fleet.wait_for_workers()
            assert (await rb.complete(asked())).model == "b"


async def test_a_queue_makes_its_model_known(nats_url: str, fleet: str) -> None:
    """`make-queue` makes a model known: a request and an update that name none do not take another one."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest, match="one of a, b"):
            await rb.complete(asked())
        with pytest.raises(InvalidRequest, match="model is missing; allowed: one of a, b"):
            await rb.fleet.update_weights("/weights", version=2)
        assert (await rb.fleet.state()).desired == {}
        await rb.fleet.pause()


async def test_models_in_every_state_of_their_workers_count(nats_url: str, fleet: str) -> None:
    """A model counts although its only worker starts, and although no state of it is stored."""
    async with (
        worker_by_hand(nats_url, fleet, pulls=False) as worker,
        synthetic_worker(nats_url, fleet, worker_id="wb", model="b"),
        client(nats_url, fleet) as rb,
    ):
        await worker.announce(WorkerState.STARTING)
        await rb.fleet.wait_for_workers(model="b")
        await until_true(lambda: len(rb.fleet.workers) == 2)
        with pytest.raises(InvalidRequest, match="one of b, m"):
            await rb.complete(asked())


async def test_a_forgotten_model_needs_no_name_any_more(nats_url: str, fleet: str) -> None:
    """`forget_model` deletes the queue and the state of a model without workers. Then the other model is the only one.

    A model with a worker, or with requests in its queue, is not forgotten.
    """
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers(model="b")
        with pytest.raises(InvalidRequest, match="model 'b' has workers: wb"):
            await rb.fleet.forget_model("b")
        async with connected(nats_url, name="test") as nats:
            subjects = Subjects(fleet)
            await nats.request(subjects.request("x", "a", "low"), b"?")
            with pytest.raises(InvalidRequest, match="model 'a' has 1 requests in its queue"):
                await rb.fleet.forget_model("a")
            await ask(nats, f"STREAM.PURGE.{stream_name(subjects, 'a', 'low')}")
            assert await rb.fleet.forget_model("a")
            assert not await rb.fleet.forget_model("a")
            for lane in ("low", "resume"):
                with pytest.raises(ApiError, match="stream not found"):
                    await ask(nats, f"STREAM.INFO.{stream_name(subjects, 'a', lane)}")
        assert await rb.fleet.known_models() == ("b",)
        assert (await rb.complete(asked())).model == "b"


async def test_a_result_names_its_model_and_its_continuation_keeps_it(nats_url: str, fleet: str) -> None:
    """Each sample of a result names the model, and so does the request that continues it."""
    async with synthetic_worker(nats_url, fleet, model="a"), client(nats_url, fleet) as rb:
        await rb.fleet.wait_for_workers()
        request = replace(asked(), sampling=SamplingParams(max_tokens=3, n=2))
        result = await rb.complete(request)
        assert [(sample.model, sample.lora) for sample in (result, *result.siblings)] == [("a", None)] * 2
        [failed] = [one async for one in rb.complete_many([asked(model="a", lora="none", timeout_s=0.01)])]
        assert (failed.model, failed.lora) == ("a", "none")
        assert failed.request.continuing(failed).model == "a"


# Ids of the caller's own choice: kept in every result, and found by every command that names them.


SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)
NAMES = ["gsm8k/test.1", "a b=c", "日本-😀", "x:y", "r" * 512]


@pytest.mark.parametrize("placement", [True, False])
async def test_results_have_the_ids_that_the_caller_chose(one_worker: StartServed, placement: bool) -> None:
    """Results, samples, chunks and traces have the caller's id, with and without the queue."""
    async with one_worker(options={"placement": placement}) as (rb, *_):
        for name in NAMES:
            assert (await rb.complete(short(name))).request_id == name
            assert {chunk.request_id async for chunk in rb.generate(short(name))} == {name}
            trace = await rb.fleet.timelines(name)
            assert trace.request_id == name
            assert {(each.request_id, each.given_id) for each in trace.timelines} == {(wire_id(name), name)}


async def test_an_abort_by_the_caller_id_ends_the_request(one_worker: StartServed) -> None:
    """Clients and admins abort a request by the id that its caller chose, and the error of a second one names it."""
    async with one_worker(config=SLOW) as (rb, *_), asyncio.TaskGroup() as tasks:
        ways: tuple[Callable[[list[str]], Awaitable[Any]], ...] = (rb.abort, rb.fleet.abort)
        for name, abort in itertools.product(NAMES, ways):
            stream = await start_stream(tasks, rb, endless(name))
            with pytest.raises(RequestRejected, match="already in use") as double:
                await rb.complete(short(name))
            assert (double.value.code, double.value.request_id) == (ErrorCode.DUPLICATE_REQUEST, name)
            ended = await abort([name])
            assert name in (ended if isinstance(ended, list) else next(iter(ended.applied.values())).request_ids or ())
            await stream.reading
        with pytest.raises(CommandIncomplete, match="none has") as nothing:
            await rb.fleet.abort(NAMES)
    assert set(nothing.value.ledger.not_found) == set(NAMES)


async def test_equal_ids_of_two_scopes_are_two_requests(one_worker: StartServed) -> None:
    """Requests with one id and different scopes run at once, and a trace by the id has both."""
    async with one_worker() as (rb, *_):
        requests = [short("1", id_scope=scope) for scope in ("a", "b")]
        results = [result async for result in rb.complete_many(requests)]
        trace = await rb.fleet.timelines("1")

    assert [result.request_id for result in results] == ["1", "1"]
    assert len({each.request_id for each in trace.timelines}) == 2


# The weights with which a request may be served: at least its minimum version, and within its lag since submission.


async def announce(worker: HandWorker, version: int, target: int | None) -> None:
    """Publish presence of a worker with this weight version and target version."""
    own: dict[str, Any] = {"worker": worker.name, "incarnation": worker.incarnation, "model": MODEL, "lease_s": 60.0}
    said = presence(weight_version=version, target_version=target, **own)
    await publish(worker.nats, worker.subjects.presence(worker.name), encode_json(said))


@pytest.mark.proves("P81")
@pytest.mark.usefixtures("unhurried")
async def test_only_workers_with_the_required_weights_serve(nats_url: str, fleet: str) -> None:
    """Of workers with versions 1 and 2, only the second serves requests for version 2, in their first attempt.

    The client sends them directly to this worker. Through the queue, about half of them would first reach the older
    worker.
    """
    async with (
        synthetic_worker(nats_url, fleet, worker_id="old", weight_version=1) as (old, _),
        synthetic_worker(nats_url, fleet, worker_id="new", weight_version=2),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        wanted = [request(request_id=f"r{i}", min_weight_version=2) for i in range(20)]
        results = [generation async for generation in rb.complete_many(wanted)]
        assert rb.stats().direct == len(wanted)

    assert old.stats().intake.too_new == 0
    assert {result.worker_ids for result in results} == {("new",)}
    assert {result.attempts for result in results} == {1}
    assert {int(version) for result in results for version in result.weight_versions} == {2}


async def test_a_request_that_waits_for_weights_is_no_poison_request(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for weights runs once a worker has them, however often the queue delivered it before."""
    monkeypatch.setattr(admission, "WEIGHTS_ARE_COMING_S", 0.01)
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=1) as (worker, _),
    ):
        await client.until_serving("w")
        worker._links.versions.target_version = 2
        await client.enqueue(request(request_id="r", min_weight_version=2))
        await until_true(lambda: worker.stats().intake.too_new > MAX_DELIVERIES)
        assert not client.chunks["r"]
        worker._links.versions.weight_version = 2
        await client.until_ended("r")

    assert client.error_of("r") is None
    assert {chunk.weight_version for chunk in client.chunks["r"]} == {2}


async def test_the_timeout_error_states_the_required_and_the_newest_version(one_worker: StartServed) -> None:
    """If no worker gets the weights in time, the error states the required version and the newest available version."""
    async with one_worker(weight_version=1) as (rb, *_):
        with pytest.raises(
            RequestTimeout, match=r"waits for a worker with weight version 2; the newest .* worker is 1"
        ) as e:
            await rb.complete(request(min_weight_version=2, timeout_s=0.3))

    assert e.value.stage == "admission"


async def test_a_timeout_with_available_weights_does_not_mention_weights(nats_url: str, fleet: str) -> None:
    """The timeout of a request whose weights are available does not mention weights."""
    async with hand_worker(nats_url, fleet) as (worker, rb):
        for fields in ({}, {"min_weight_version": 0}):
            with pytest.raises(RequestTimeout, match=r"not finished within 0\.05 s \(request"):
                await rb.complete(request(timeout_s=0.05, model="m", **fields))
            await worker.take()


@pytest.mark.proves("P81")
async def test_a_worker_rejects_a_queued_request_beyond_its_lag(nats_url: str, fleet: str) -> None:
    """A worker rejects a queued request whose target version advanced by more than its lag.

    It runs the other requests.
    """
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=5),
    ):
        await client.until_serving("w")
        await client.enqueue(request(request_id="old", max_weight_lag=1), target_version=3)
        await client.enqueue(request(request_id="fresh", max_weight_lag=2), target_version=3)
        await client.enqueue(request(request_id="resumed", max_weight_lag=0), attempt=1)
        await client.enqueue(request(request_id="unknown", max_weight_lag=1))
        await client.until_ended("old", "fresh", "resumed", "unknown")

    errors = {name: client.error_of(name) for name in ("old", "fresh", "resumed", "unknown")}
    assert errors == {"old": ErrorCode.TOO_STALE, "fresh": None, "resumed": None, "unknown": ErrorCode.INVALID_REQUEST}


async def test_an_attempt_without_output_contains_the_target_version(nats_url: str, fleet: str) -> None:
    """An attempt without output contains the target version at submission. A resumed attempt contains none."""
    async with session_worker(nats_url, fleet) as (worker, rb, session), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, 7)
        await until_worker(rb, worker.name, lambda one: one.target_version == 7)
        completing = tasks.create_task(
            error_of(rb.complete(request(1, session_id=session, max_weight_lag=1)), RequestError)
        )
        direct = await worker.take()
        await announce(worker, 8, 9)
        await worker.frame(0, failure(direct.key, 0, ErrorCode.QUEUE_FULL))
        queued = await worker.take()
        await worker.frame(1, failure(queued.key, 0, ErrorCode.WORKER_STOPPED), admitted=(queued.key,))
        resumed = await worker.take()
        await worker.frame(2, failure(resumed.key, 0, ErrorCode.TOO_STALE), admitted=(resumed.key,))
        error = await completing

    assert [taken.message.target_version for taken in (direct, queued, resumed)] == [7, 7, None]
    assert (error.code, error.retryable) == (ErrorCode.TOO_STALE, False)


async def test_a_request_with_a_lag_waits_until_workers_know_the_target_version(nats_url: str, fleet: str) -> None:
    """Workers that return first read their target version. Until then, a request with a lag waits."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, None)
        await rb.fleet.state()
        tasks.create_task(finished(rb.complete(request(1, max_weight_lag=1, timeout_s=5))))
        tasks.create_task(finished(rb.complete(request(1, timeout_s=5))))
        other = await worker.take()
        await announce(worker, 6, 7)
        waited = await worker.take()
        for number, taken in enumerate((other, waited)):
            await worker.frame(number, chunk(taken.key, 0, 1, total=1), admitted=(taken.key,))

    assert [taken.message.target_version for taken in (other, waited)] == [None, 7]


async def test_requests_that_wait_during_an_update_run_or_become_too_stale(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path
) -> None:
    """Three requests wait during an update: one required it, one allows it, and one becomes too stale."""
    old, new = (write_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    roots = (str(tmp_path),)
    async with (
        observing(nats_url, fleet) as observer,
        one_worker(model_path=str(old), weight_roots=roots) as (rb, *_),
        asyncio.TaskGroup() as tasks,
    ):
        early = tasks.create_task(rb.complete(request(1, min_weight_version=1)))
        await rb.complete(request(1))  # until then, the worker has received the earlier request
        await rb.fleet.pause()
        patient = tasks.create_task(rb.complete(request(1, max_weight_lag=1)))
        stale = tasks.create_task(error_of(rb.complete(request(1, max_weight_lag=0)), RequestError))
        await until(lambda: waiting(rb), 3)
        await rb.fleet.update_weights(new, version=1)
        await rb.fleet.resume()
        generations = [await early, await patient]
        error = await stale
        await observer.check_at_rest()

    assert [generation.weight_versions.tolist() for generation in generations] == [[1], [1]]
    assert (error.code, "from version 0 to 1" in error.message) == (ErrorCode.TOO_STALE, True)


async def waiting(rb: rollbus.Client) -> int:
    """Return the number of requests in the queue."""
    return sum(depth.waiting + depth.in_hand for depth in (await rb.fleet.state()).queues)


async def test_a_session_request_skips_a_worker_with_older_weights(nats_url: str, fleet: str) -> None:
    """A session's worker without the required weights gets no request.

    If it rejects a request itself, the queue follows.
    """
    async with session_worker(nats_url, fleet) as (worker, rb, session), asyncio.TaskGroup() as tasks:
        await announce(worker, 6, 6)
        await rb.fleet.state()
        tasks.create_task(finished(rb.complete(request(1, session_id=session, min_weight_version=7, timeout_s=5))))
        passed = await worker.take()
        await worker.frame(0, chunk(passed.key, 0, 1, total=1), admitted=(passed.key,))
        tasks.create_task(finished(rb.complete(request(1, session_id=session, min_weight_version=6, timeout_s=5))))
        direct = await worker.take()
        await worker.frame(1, failure(direct.key, 0, ErrorCode.WEIGHTS_TOO_OLD))
        queued = await worker.take()
        await worker.frame(2, chunk(queued.key, 0, 1, total=1), admitted=(queued.key,))

    assert [taken.queued is None for taken in (passed, direct, queued)] == [False, True, False]


async def finished(awaitable: Awaitable[Generation]) -> None:
    """Wait for a request that must finish normally."""
    assert (await awaitable).finish_reason == "length"
