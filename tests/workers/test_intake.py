"""The requests that a worker accepts: as many as it has slots, each once, and only from live clients."""

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.bus.protocol.queue.pull_plan import MAX_OVER
from rollbus.bus.queue.puller import QueuedRequest, QueuePuller
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestRejected
from rollbus.schemas.limits import MAX_DELIVERIES
from rollbus.schemas.messages import KvTransfer, RequestKey, RequestMessage, encode
from rollbus.schemas.presence import Capabilities, ClientState
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests.admission import (
    ADAPTER_S,
    MAX_TOO_NEW_S,
    WEIGHTS_ARE_COMING_S,
    Versions,
    check_lag,
    check_request,
    wait_for_weights_s,
)
from rollbus.workers.requests.incoming import IncomingRequest
from rollbus.workers.worker import Worker
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.hand_client import MODEL, HandClient, hand_client
from tests.support.requests import endless, short
from tests.support.waits import SOON_S, until_true
from tests.workers.support import StartHeard

ENDLESS = SyntheticConfig(step_s=0.01, max_num_seqs=2, max_model_len=10_000_000)


async def test_a_worker_accepts_as_many_requests_as_slots(nats_url: str, fleet: str) -> None:
    """Of five requests, two workers with two slots each accept four. The fifth waits in the queue for a slot."""
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, config=ENDLESS, worker_id="a") as (a, _),
        synthetic_worker(nats_url, fleet, config=ENDLESS, worker_id="b") as (b, _),
    ):
        await client.until_serving("a", "b")
        for number in range(5):
            await client.enqueue(endless(f"r{number}"))
        await client.until(lambda: len(client.offers) == 4)
        await client.until_left(1)

        assert (a.presence().in_flight, b.presence().in_flight) == (2, 2)
        assert (a.presence().free_slots, b.presence().free_slots) == (0, 0)
        worker, key = client.offers[0]
        await client.abort(worker, key)
        await client.until(lambda: len(client.offers) == 5)
        assert client.offers[4][0] == worker
        assert client.ended(key.request_id)


@pytest.mark.proves("P46")
async def test_an_unconfirmed_request_stays_with_its_worker_until_the_worker_is_lost(nats_url: str, fleet: str) -> None:
    """An unconfirmed request stays with its worker beyond `ack_wait`. When that worker is gone, another gets it."""
    async with (
        hand_client(nats_url, fleet, answers=False) as client,
        asyncio.TaskGroup() as tasks,
        contextlib.AsyncExitStack() as survivor,
    ):
        async with contextlib.AsyncExitStack() as first:
            a, _ = await first.enter_async_context(
                synthetic_worker(nats_url, fleet, config=ENDLESS, worker_id="a", lease_s=30.0)
            )
            await client.until_serving("a")
            await client.enqueue(endless("r"))
            await client.until(lambda: client.offers)
            await survivor.enter_async_context(synthetic_worker(nats_url, fleet, config=ENDLESS, worker_id="b"))
            await client.until_serving("b")
            presence = tasks.create_task(announce_for_ever(client))
            await asyncio.sleep(6.0)  # longer than the queue waits for an ack

            assert [worker for worker, _ in client.offers] == ["a"]
            assert a.presence().in_flight == 1
        await client.until(lambda: len(client.offers) == 2)
        assert client.offers[1] == ("b", RequestKey("r"))
        presence.cancel()


async def announce_for_ever(client: HandClient) -> None:
    """Publish the client's presence as a real client does."""
    while True:
        await client.announce()
        await asyncio.sleep(1.0)


@pytest.mark.proves("P50")
async def test_a_direct_request_without_a_free_slot_is_rejected_immediately(heard_worker: StartHeard) -> None:
    """A worker accepts direct requests while it has a slot, and then rejects them immediately as `queue_full`."""
    async with heard_worker(config=ENDLESS) as (client, worker, _):
        await until_queue_is_empty(worker)
        for number in range(3):
            await client.hand_over(endless(f"r{number}"), "w")
        await client.until_ended("r2")

        assert client.error_of("r2") == ErrorCode.QUEUE_FULL
        assert [key.request_id for _, key in client.offers] == ["r0", "r1"]
        assert worker.stats().intake.placements_refused == 1


async def until_queue_is_empty(worker: Worker) -> None:
    """Wait until the worker has found every lane of the queue empty."""
    await until_true(lambda: worker.debug_state()["lanes_waiting"] == "")


@pytest.mark.proves("P47")
async def test_a_request_that_was_delivered_too_often_is_a_poison_request(nats_url: str, fleet: str) -> None:
    """A request that was delivered too often without a client's confirmation is rejected as `poison_request`."""
    given: asyncio.Queue[QueuedRequest] = asyncio.Queue(2)
    async with hand_client(nats_url, fleet) as client, asyncio.timeout(SOON_S):
        await client.enqueue(short("r"))
        puller = QueuePuller(client.nats, client.subjects, MODEL, room=lambda: 1, on_request=given.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(puller.run())
            for _ in range(MAX_DELIVERIES):
                await (await given.get()).nak()
                puller.wake()
            pulling.cancel()
        async with synthetic_worker(nats_url, fleet, worker_id="a") as (worker, _):
            await client.until_ended("r")

            assert client.error_of("r") == ErrorCode.POISON_REQUEST
            assert worker.stats().intake.poison == 1
            await client.until_left(0)


async def test_rejected_requests_do_not_delay_other_requests(nats_url: str, fleet: str) -> None:
    """Rejected requests, and requests of closed clients, leave the queue immediately, not a few per heartbeat."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_client(nats_url, fleet, name="dead") as dead,
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(max_num_seqs=2), worker_id="a") as (worker, _),
        # At two requests per heartbeat, this would take minutes.
        asyncio.timeout(SOON_S),
    ):
        await client.until_serving("a")
        await dead.announce(ClientState.CLOSED)
        for number in range(150):
            await dead.enqueue(short(f"r{number}"))
            await client.enqueue(short(f"r{number}", lora="none"))
        await client.complete(short("good"))

        assert (worker.stats().intake.gone, worker.stats().links.rejected) == (150, 150)


@pytest.mark.proves("P39")
async def test_a_request_without_an_id_or_with_another_client_is_discarded(heard_worker: StartHeard) -> None:
    """Requests without an id, or with another client than in their subject, leave the queue and are counted."""
    async with heard_worker() as (client, worker, _):
        await client.enqueue(short("r"), client="mallory")
        await client.nats.jetstream().publish(client.subjects.request(client.name, MODEL, "high"), b"\x93")
        await client.complete(short("s"))

        assert worker.stats().intake.bad == 2
        await client.until_left(0)


def test_a_worker_remembers_no_group_with_a_long_name() -> None:
    """The name of a group is bounded before its request is validated: the worker remembers a thousand of them."""
    request = msgspec.Raw(msgspec.msgpack.encode({"request_id": "r", "group_id": "g" * 257}))
    data = encode(RequestMessage(client="eve", incarnation="1", request=request))
    assert IncomingRequest.decode("eve", data).group() == (None, False)


@pytest.mark.proves("P40")
async def test_the_lane_of_resumes_takes_only_what_was_begun(heard_worker: StartHeard) -> None:
    """A first attempt in the lane `resume` is rejected, unless it is the decode phase of a prefilled request."""
    async with heard_worker() as (client, *_):
        await client.enqueue(short("new"), lane="resume")
        await client.enqueue(short("prefill"), lane="resume", kv=KvTransfer())
        await client.enqueue(short("later"), lane="resume", attempt=1)
        await client.enqueue(short("decode"), lane="resume", kv=KvTransfer(params=b"x", connector="other"))
        await client.until_ended("new", "prefill", "later", "decode")

        ids = ("new", "prefill", "later", "decode")
        assert [client.error_of(each) for each in ids] == [ErrorCode.INVALID_REQUEST] * 2 + [None] * 2
        error = client.chunks["new"][-1].error
        assert (error.field, error.problem) == ("attempt", "is 0 in the lane resume")


@pytest.mark.proves("P61")
async def test_a_worker_with_too_many_unread_results_pulls_no_requests(
    nats_url: str, fleet: str, heard_worker: StartHeard
) -> None:
    """A worker that holds more than its budget for a client without credit pulls no requests until it may send."""
    config = SyntheticConfig(max_num_seqs=4, max_model_len=10_000_000, num_layers=256, top_k=32)
    async with (
        # The budget is smaller than the initial credit, so unacknowledged frames exceed it immediately.
        heard_worker(answers=False, config=config, max_held_bytes=200_000) as (client, worker, engine),
        hand_client(nats_url, fleet, name="other") as other,
        asyncio.TaskGroup() as tasks,
    ):
        presence = tasks.create_task(announce_for_ever(client))
        await client.enqueue(endless("r"))
        await client.until(lambda: worker.stats().links.over_budget)
        for number in range(8):
            await other.enqueue(short(f"s{number}"))
        await client.until(lambda: client.presences["w"].held_bytes > 200_000)

        assert worker.presence().free_slots == 0
        assert is_idle(engine)
        # These requests come from pulls that were already under way.
        assert len(other.offers) <= MAX_OVER
        client.answers = True
        await client.answer("w")
        await client.until_ended("r")
        await other.until_ended(*(f"s{number}" for number in range(8)))
        assert client.error_of("r") == ErrorCode.OVER_BUDGET
        presence.cancel()


# Requests that a worker's weights and adapters fit: the worker rejects other requests or leaves them in the queue.


CAPABILITIES = Capabilities(
    engine="synthetic", engine_version="1", max_model_len=64, vocab_size=100, max_num_seqs=1, max_logprobs=5, dtype="f"
)


def request(
    *, min_weight_version: int | None = None, max_weight_lag: int | None = None, lora: str | None = None
) -> GenerateRequest:
    """Return a request with only these requirements."""
    return GenerateRequest(
        prompt_token_ids=[1], min_weight_version=min_weight_version, max_weight_lag=max_weight_lag, lora=lora
    )


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 10_000))
def test_a_request_starts_only_with_its_version_or_a_later_version(
    wanted: int, have: int, target: int, num_delivered: int
) -> None:
    """With the version or a later one, a request starts. Otherwise the queue delivers it again within half a minute."""
    wait_s = wait_for_weights_s(request(min_weight_version=wanted), Versions(have, target), num_delivered)

    assert (wait_s == 0.0) == (have >= wanted)
    assert wait_s <= MAX_TOO_NEW_S


def test_a_request_waits_briefly_for_expected_weights_and_longer_for_others() -> None:
    """If the worker will get the weights, a request waits a quarter of a second per delivery.

    Otherwise it waits one second, and then twice as long each time, up to four seconds.
    """
    wanted = request(min_weight_version=5)

    assert wait_for_weights_s(wanted, Versions(4, 5), 100) == WEIGHTS_ARE_COMING_S
    assert [wait_for_weights_s(wanted, Versions(4, 4), count) for count in (1, 2, 3, 6, 99)] == [1, 2, 4, 4, 4]
    assert wait_for_weights_s(request(), Versions(4, 5), 1) == 0


@pytest.mark.proves("P81")
@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_a_request_is_too_stale_if_the_target_version_rose_by_more_than_its_lag(
    lag: int, submitted: int, target: int, attempt: int
) -> None:
    """A request is too stale if the target version has risen by more than its lag since its submission."""
    waited, versions = request(max_weight_lag=lag), Versions(0, target)
    if target - submitted <= lag:
        check_lag(waited, attempt=attempt, submitted_target=submitted, versions=versions)
        return
    with pytest.raises(RequestRejected, match=f"from version {submitted} to {target} .* max_weight_lag={lag}") as e:
        check_lag(waited, attempt=attempt, submitted_target=submitted, versions=versions)
    assert (e.value.code, e.value.retryable) == (ErrorCode.TOO_STALE, False)


def test_a_request_with_a_lag_needs_a_target_version_at_submission() -> None:
    """A first attempt with `max_weight_lag` but without the target version at its submission is an invalid request."""
    with pytest.raises(InvalidRequest, match="max_weight_lag is 2 in a message without target_version"):
        check_lag(request(max_weight_lag=2), attempt=0, submitted_target=None, versions=Versions(0, 0))
    check_lag(request(), attempt=0, submitted_target=None, versions=Versions(0, 99))
    # A later attempt continues with any weights.
    check_lag(request(max_weight_lag=0), attempt=1, submitted_target=None, versions=Versions(0, 99))


def test_a_request_with_an_adapter_that_is_not_loaded_is_rejected() -> None:
    """A request with an adapter that is not loaded is rejected with the names of the loaded adapters."""
    versions = Versions(0, 0, {"b": 1, "a": 7})
    check_request(request(lora="a"), CAPABILITIES, versions)
    with pytest.raises(RequestRejected, match=r"lora 'c' is not loaded on this worker; loaded: a, b$") as e:
        check_request(request(lora="c"), CAPABILITIES, versions)
    assert e.value.code is ErrorCode.UNSUPPORTED
    with pytest.raises(RequestRejected, match="loaded: none"):
        check_request(request(lora="c"), CAPABILITIES, Versions(0, 0))


def test_a_request_with_a_desired_adapter_returns_to_the_queue() -> None:
    """If the adapter is desired in the fleet, the queue delivers the request again, with longer and longer waits.

    A request that was sent directly to the worker is rejected as `queue_full`.
    """
    versions = Versions(3, 3, {"a": 1}, frozenset({"a", "b"}))
    waits = [wait_for_weights_s(request(lora="b"), versions, count) for count in (1, 2, 3, 99)]
    assert waits == [0.25, 0.5, 1.0, 8.0]
    with pytest.raises(RequestRejected, match="lora 'b' is desired in the fleet and not loaded on this worker") as e:
        check_request(request(lora="b"), CAPABILITIES, versions)
    assert e.value.code is ErrorCode.QUEUE_FULL
    for name in ("a", "c", None):
        assert wait_for_weights_s(request(lora=name), versions, 1) == 0
    assert wait_for_weights_s(request(lora="b", min_weight_version=4), versions, 2) == 2
    assert wait_for_weights_s(request(lora="a", min_weight_version=4), Versions(3, 4, {"a": 1}), 2) == 0.25


def test_a_direct_request_to_a_worker_with_older_weights_returns_to_the_client() -> None:
    """A request that was sent directly to a worker with older weights returns to its client."""
    check_request(request(min_weight_version=3), CAPABILITIES, Versions(3, 3))
    with pytest.raises(RequestRejected, match="weight version 2 is older than min_weight_version=3") as e:
        check_request(request(min_weight_version=3), CAPABILITIES, Versions(2, 3))
    assert (e.value.code, e.value.retryable) == (ErrorCode.WEIGHTS_TOO_OLD, True)


def test_versions_of_an_adapter_under_the_models_name_count_for_the_model() -> None:
    """A request for the model uses the adapter with its name, from its record on, and compares with its version."""
    versions = Versions(1, 1, {"other": 8}, model="m")
    assert (versions.adapter_of(None), versions.adapter_of("other")) == (None, "other")
    versions.base_adapter_version, versions.desired_loras = 7, frozenset({"m"})
    lora = versions.adapter_of(None)
    assert lora == "m"
    assert wait_for_weights_s(request(lora=lora), versions, 1) == ADAPTER_S
    versions.loras["m"] = 6
    assert wait_for_weights_s(request(lora=lora, min_weight_version=6), versions, 1) == 0
    assert wait_for_weights_s(request(lora=lora, min_weight_version=7), versions, 1) == WEIGHTS_ARE_COMING_S
    assert wait_for_weights_s(request(lora=lora, min_weight_version=8), versions, 1) == 1
    assert wait_for_weights_s(request(lora="other", min_weight_version=2), versions, 1) == 1
    check_lag(request(lora=lora, max_weight_lag=1), attempt=0, submitted_target=5, versions=versions)
    with pytest.raises(RequestRejected, match="from version 4 to 6"):
        check_lag(request(lora=lora, max_weight_lag=1), attempt=0, submitted_target=4, versions=versions)
    versions.base_adapter_version = None
    assert versions.adapter_of(None) == "m"
    del versions.loras["m"]
    assert versions.adapter_of(None) is None


# Floods of messages that any client may publish: the worker keeps its lease, serves, and names the sender.


FLOOD = textwrap.dedent("""
    import json, socket, sys, time
    host, port, subject, data = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
    nats = socket.create_connection((host, port))
    nats.sendall(b'CONNECT {"verbose":false}\\r\\n')
    message = b"PUB %b %d\\r\\n%b\\r\\n" % (subject.encode(), len(data), data)
    while True:
        nats.sendall(message * 300)
        time.sleep(0.01)
""")
"""Publishes 30,000 messages a second, until it is killed."""


@contextlib.asynccontextmanager
async def flooding(url: str, subject: str, data: str) -> AsyncIterator[None]:
    """Flood a subject from another process."""
    host, _, port = url.removeprefix("nats://").partition(":")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, host, port, subject, data)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.proves("P63")
@pytest.mark.parametrize("kind", ["named", "ping", "direct", "presence"])
async def test_a_flood_fences_no_worker_and_its_sender_is_named(nats_url: str, fleet: str, kind: str) -> None:
    """While a program publishes 30,000 messages a second, the worker keeps its lease and serves.

    Its presence names the subject, which has the name of the sender.
    """
    subjects = Subjects(fleet)
    subject = {
        "named": subjects.ping_by("mallory"),
        "ping": subjects.ping,
        "direct": subjects.direct("mallory", "w"),
        "presence": subjects.client("mallory"),
    }[kind]
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w", lease_s=2.0) as (worker, _),
        rollbus.connect(nats_url, fleet=fleet) as rb,
        asyncio.timeout(3 * SOON_S),
    ):
        await rb.fleet.wait_for_workers(1)
        async with flooding(nats_url, subject, "x" * 20):
            await until_true(lambda: worker.presence().last_error)
            until_s, number = worker.presence().uptime_s + 2.5, 0
            while worker.presence().uptime_s < until_s:  # longer than the lease
                await rb.complete(short(f"r{number}"))
                number += 1
            problem = worker.presence().last_error or ""
            async with rollbus.connect(nats_url, fleet=fleet) as late:
                await late.complete(short("late"))

    assert subject in problem
    assert worker.stats().times_fenced == 0
