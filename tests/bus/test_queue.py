"""The queue of a model in JetStream: its names, limits and depths."""

import asyncio
import functools
import re

import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.queue.publisher import QueueProbes
from rollbus.bus.queue.streams import QueueDepth, QueueLimits, ensure_queue, queue_depths, set_limits, stream_name
from rollbus.bus.subjects import LANES, Subjects
from rollbus.schemas.errors import BusBroken, InvalidRequest
from rollbus.schemas.request import Lane
from tests.bus.queues import MODEL, publishing, pulling
from tests.support.nats_server import change_config, require_binary
from tests.support.waits import until

AWKWARD = ["Qwen/Qwen3-0.6B", "a=b", "é *>~ .", "~resume", "x" * 256, "é" * 256]


def test_no_two_models_share_a_stream() -> None:
    """Streams of different fleets, models and kinds of lane have different names, which the server accepts."""
    hashed = stream_name(Subjects("f"), "é" * 256, "low").removeprefix("rb~f~~")
    models = [*AWKWARD, hashed, f"~{hashed}", "a", "a~resume", "b~a"]
    names = [
        stream_name(Subjects(fleet), model, lane)
        for fleet in ("f", "f" * 64, "f-b", "b")
        for model in models
        for lane in ("resume", "normal")
    ]

    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 255
    assert not any(set(" .*>/\\\t") & set(name) for name in names)
    assert stream_name(Subjects("f"), "a", "high") == stream_name(Subjects("f"), "a", "low")


async def test_any_model_name_has_a_queue(nats_url: str, fleet: str) -> None:
    """Requests reach the workers of any model name, and the metadata of the stream contain fleet and model."""
    async with publishing(nats_url, fleet) as client:
        for model in AWKWARD:
            async with pulling(nats_url, fleet, model=model) as worker:
                while not (result := await client.publish(model=model)).ok:  # until the worker has created the queue
                    assert result.code == "no_workers"
                request = await worker.take()
            info = await ask(client.nats, f"STREAM.INFO.{stream_name(Subjects(fleet), model, 'normal')}")
            assert (request.client, request.lane) == ("alice", "normal")
            assert info["config"]["metadata"].items() >= {"fleet": fleet, "model": model}.items()


async def test_creating_an_existing_queue_changes_nothing(nats_url: str, fleet: str) -> None:
    """Creating an existing queue keeps its requests, its limits and an operator's settings."""
    subjects = Subjects(fleet)
    name = stream_name(subjects, MODEL, "low")
    async with publishing(nats_url, fleet) as client:
        nats = client.nats
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(ensure_queue(nats, subjects, MODEL))
        await client.publish_all(b"a", b"b")
        config = (await ask(nats, f"STREAM.INFO.{name}"))["config"]
        changed = config | {"description": "ours", "max_msgs": 3}
        await ask(nats, f"STREAM.UPDATE.{name}", changed)
        await ensure_queue(nats, subjects, MODEL)
        await ensure_queue(nats, subjects, MODEL, QueueLimits(max_msgs=1, ack_wait_s=9.0))

        assert (await client.publish(b"c")).ok
        assert not (await client.publish(b"d")).ok
        assert (await ask(nats, f"STREAM.INFO.{name}"))["config"] == changed


async def test_a_queue_limit_below_the_stored_amount_is_refused(nats_url: str, fleet: str) -> None:
    """A limit below the stored amount would delete requests, so it is rejected with that amount.

    Other settings stay.
    """
    subjects = Subjects(fleet)
    name = stream_name(subjects, MODEL, "low")
    async with publishing(nats_url, fleet) as client:
        nats = client.nats
        await ensure_queue(nats, subjects, MODEL)
        before = (await ask(nats, f"STREAM.INFO.{name}"))["config"]
        await client.publish_all(b"a", b"b", b"c")
        for limit, refused in (("max_msgs", 2), ("max_bytes", 10), ("max_per_client", 2)):
            with pytest.raises(InvalidRequest, match=f"is {refused}, and {re.escape(name)} holds"):
                await set_limits(nats, subjects, MODEL, {limit: refused})
        assert (await ask(nats, f"STREAM.INFO.{name}"))["config"] == before
        await set_limits(nats, subjects, MODEL, {"max_msgs": 3, "max_per_client": 7})
        after = (await ask(nats, f"STREAM.INFO.{name}"))["config"]

        assert not (await client.publish(b"d")).ok

    assert after == before | {"max_msgs": 3, "max_msgs_per_subject": 7}


async def test_depths_count_waiting_and_pulled_requests(nats_url: str, fleet: str) -> None:
    """Each lane reports the numbers of waiting and pulled requests. A model without a queue has no rows."""
    subjects = Subjects(fleet)
    async with publishing(nats_url, fleet) as client:
        assert await queue_depths(client.nats, subjects, (MODEL,)) == ()

        await ensure_queue(client.nats, subjects, MODEL)
        for lane in LANES:
            await client.publish_all(b"1", b"2", lane=lane)
        async with pulling(nats_url, fleet, capacity=2) as worker:
            requests = [await worker.take(), await worker.take()]
            depths = await queue_depths(client.nats, subjects, ("nobody's", MODEL))

            def depth(lane: Lane, waiting: int, in_hand: int) -> QueueDepth:
                return QueueDepth(model=MODEL, lane=lane, waiting=waiting, in_hand=in_hand)

            assert depths == (depth("resume", 0, 2), depth("high", 2, 0), depth("normal", 2, 0), depth("low", 2, 0))

            worker.capacity = 0
            for request in requests:
                await request.ack()

            async def resumed() -> QueueDepth:
                return (await queue_depths(client.nats, subjects, (MODEL,)))[0]

            await until(resumed, depth("resume", 0, 0))


async def test_a_request_is_stored_until_it_is_acked(nats_url: str, fleet: str) -> None:
    """A request, even a large one, can be found by its number until it is acked."""
    subjects = Subjects(fleet)
    async with publishing(nats_url, fleet) as client:
        assert not await client.may_be_stored(1)

        await ensure_queue(client.nats, subjects, MODEL)
        result = await client.publish(bytes(7 * 1024 * 1024))
        # The server confirms a request before its consumer counts it.
        await until(lambda: client.may_be_stored(result.seq), True)
        assert not await client.may_be_stored(result.seq, "resume")
        async with pulling(nats_url, fleet) as worker:
            request = await worker.take()
            assert await client.may_be_stored(result.seq)
            await request.ack()

            await until(lambda: client.may_be_stored(result.seq), False)


async def test_the_error_states_that_the_server_has_no_jetstream(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JetStream, the error states this, and a publication finds no workers."""
    require_binary()
    change_config(monkeypatch)
    async with EmbeddedServer() as server, publishing(server.url, fleet) as client:
        with pytest.raises(BusBroken, match="no JetStream"):
            await ensure_queue(client.nats, Subjects(fleet), MODEL)
        with pytest.raises(BusBroken, match="no JetStream"):
            await queue_depths(client.nats, Subjects(fleet), (MODEL,))

        assert (await client.publish()).code == "no_workers"


async def test_a_queue_is_created_without_a_reservation_on_a_small_disk(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server cannot reserve the bytes, the queue is created without a reservation.

    It is full when the server is full.
    """
    require_binary()
    change_config(monkeypatch, max_file_store=4 * 1024 * 1024)
    async with EmbeddedServer() as server, publishing(server.url, fleet) as client:
        for model in ("one", "two"):
            await ensure_queue(client.nats, Subjects(fleet), model)
            await ensure_queue(client.nats, Subjects(fleet), model)

            assert (await client.publish(model=model)).ok
        results = [await client.publish(bytes(1024 * 1024), model="two") for _ in range(5)]

        assert results[0].ok
        assert results[-1].code == "queue_full"
        assert "insufficient resources" in results[-1].message


async def num_waiting(nats: Connection, subjects: Subjects, model: str) -> int:
    """Return the number of messages in a queue."""
    return sum(depth.waiting for depth in await queue_depths(nats, subjects, (model,)))


async def test_a_probe_names_the_limit_that_was_reached_and_its_remedy(
    fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that the server rejects because its space, or the queue's, is used is a problem with a remedy.

    The full share of one client is no problem of the queue.
    """
    require_binary()
    change_config(monkeypatch, max_file_store=4 * 1024 * 1024)
    subjects = Subjects(fleet)
    async with EmbeddedServer() as server, publishing(server.url, fleet) as client:
        probes = QueueProbes(client.nats, subjects)
        for model in ("share", "limit"):
            await ensure_queue(client.nats, subjects, model, QueueLimits(max_msgs=2, max_per_client=1))
            assert await probes.problems("x", [model]) == {}
            await until(functools.partial(num_waiting, client.nats, subjects, model), 0)
            assert (await client.publish(model=model, lane="high")).ok
        share = await probes.problems(client.name, ["share"])
        assert (await client.publish(model="limit", lane="low")).ok
        limit = await probes.problems("x", ["limit", "share"])
        await ensure_queue(client.nats, subjects, "space")
        while (await client.publish(bytes(512 * 1024), model="space")).ok:
            pass
        space = await probes.problems("x", ["space"])

    assert share == {}
    assert limit["limit"] == (
        "rejects requests: maximum messages exceeded (JetStream error 10077); "
        "start workers that empty the queue, or raise its limits with `rollbus make-queue`"
    )
    assert space["space"] == (
        "rejects requests: insufficient resources (JetStream error 10023); "
        "raise max_file_store in the configuration of nats-server, or delete data that nobody needs"
    )
