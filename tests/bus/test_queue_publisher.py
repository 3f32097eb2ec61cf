"""Each publication to the queue has one result, under any failure, and no request is stored twice."""

import json
from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import rollbus.bus.queue.publisher
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.queue.publisher import _result_of
from rollbus.bus.queue.streams import QueueLimits, ensure_queue, queue_depths, stream_name
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, LocalProtocolError
from rollbus.schemas.request import Lane
from tests.bus.queues import MODEL, Publishing, publishing, pulling
from tests.support.nats_server import change_config, require_binary
from tests.support.tcp_proxy import Direction, tcp_proxy
from tests.support.waits import until, until_true


async def waiting(client: Publishing, fleet: str) -> dict[Lane, int]:
    """Return the number of waiting requests in each lane."""
    return {depth.lane: depth.waiting for depth in await queue_depths(client.nats, Subjects(fleet), (MODEL,))}


async def test_a_stored_request_has_a_number(nats_url: str, fleet: str) -> None:
    """The result of a publication contains the sequence number of the request, which increases in each stream."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        results = [await client.publish(lane=lane) for lane in ("normal", "low", "resume", "high")]

    assert all(result.ok and result.code is None for result in results)
    assert [result.seq for result in results] == [1, 2, 1, 3]
    assert results[0].stream == results[3].stream != results[2].stream


@pytest.mark.proves("P41")
async def test_a_repeated_id_is_stored_once(nats_url: str, fleet: str) -> None:
    """A second publication with the same id gets the number of the first, also after the first was acked."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=0) as worker:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        first = await client.publish(msg_id="alice.1.r.0.0")
        again = await client.publish(msg_id="alice.1.r.0.0")
        other = await client.publish(msg_id="alice.1.r.1.0")

        assert (first.is_duplicate, again.is_duplicate, other.is_duplicate) == (False, True, False)
        assert (again.seq, other.seq) == (first.seq, first.seq + 1)

        worker.capacity = 2
        worker.puller.wake()
        await worker.take_all(2)
        await until(lambda: client.may_be_stored(first.seq), False)

        assert (await client.publish(msg_id="alice.1.r.0.0")).is_duplicate
        assert await waiting(client, fleet) == {"resume": 0, "high": 0, "normal": 0, "low": 0}


def test_a_publish_that_a_cluster_is_storing_is_repeated() -> None:
    """If a cluster is still storing the first publication, the client repeats it.

    The result of the first publication is known a little later.
    """
    answer = {"error": {"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}}
    message = Msg(cast(Client, None), data=json.dumps(answer).encode())

    assert _result_of(message) is None


@pytest.mark.proves("P43")
@pytest.mark.parametrize("limits", [QueueLimits(max_msgs=2), QueueLimits(max_bytes=3000)])
async def test_a_full_queue_rejects_new_requests_and_accepts_resumed_requests(
    nats_url: str, fleet: str, limits: QueueLimits
) -> None:
    """New requests beyond the limit are rejected immediately and can be published again.

    The lane `resume` has its own limit.
    """
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL, limits)
        results = [await client.publish(bytes(1000), lane=lane) for lane in ("normal", "high", "low", "normal")]

        assert [result.ok for result in results] == [True, True, False, False]
        assert {result.code for result in results[2:]} == {ErrorCode.QUEUE_FULL}
        assert "exceeded" in results[2].message
        assert not (await client.publish(bytes(1000), msg_id="again")).ok
        assert all([(await client.publish(bytes(1000), lane="resume")).ok for _ in range(10)])

        async with pulling(nats_url, fleet, capacity=100, limits=limits) as worker:
            await worker.take_all(12)
            while not (result := await client.publish(bytes(1000), msg_id="again")).ok:
                assert result.code is ErrorCode.QUEUE_FULL  # the server processes acks asynchronously
            assert not result.is_duplicate


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [({"sealed": True}, ErrorCode.UNKNOWN, "sealed"), ({"max_msg_size": 10}, ErrorCode.TOO_LARGE, "size exceeds")],
)
async def test_other_refusals_quote_the_server(
    nats_url: str, fleet: str, change: dict[str, object], code: ErrorCode, words: str
) -> None:
    """The result of any other rejection quotes the server's message."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        name = stream_name(Subjects(fleet), MODEL, "normal")
        config = (await ask(client.nats, f"STREAM.INFO.{name}"))["config"]
        await ask(client.nats, f"STREAM.UPDATE.{name}", config | change)
        result = await client.publish(bytes(100))

    assert (result.ok, result.code) == (False, code)
    assert words in result.message


async def test_a_request_above_the_limit_of_the_server_fails_locally(nats_url: str, fleet: str) -> None:
    """A request that exceeds the server's limit with its headers fails locally, and the connection stays usable."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        fits = client.nats.max_payload - 100
        for num_bytes in (client.nats.max_payload - 10, client.nats.max_payload + 1):
            with pytest.raises(LocalProtocolError, match="max_payload"):
                await client.send(bytes(num_bytes))

        assert (await client.publish(bytes(fits))).ok
        assert client.nats.counters().disconnects == 0
        assert not client.publisher.debug_state()["unanswered"]


@pytest.mark.proves("P42")
@pytest.mark.parametrize("in_hand", [False, True])
async def test_a_request_leaves_the_queue_at_its_deadline(nats_url: str, fleet: str, in_hand: bool) -> None:
    """After its time to live, a request leaves the queue, whether it waits or was pulled. Other requests stay."""
    async with publishing(nats_url, fleet) as client, pulling(nats_url, fleet, capacity=int(in_hand)) as worker:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        short = await client.publish(ttl_s=0.001)
        long = await client.publish(ttl_s=60.0)
        request = await worker.take() if in_hand else None

        async def held() -> int:
            name = stream_name(Subjects(fleet), MODEL, "normal")
            messages: int = (await ask(client.nats, f"STREAM.INFO.{name}"))["state"]["messages"]
            return messages

        await until(held, 1)

        # Clients may not read the position of a stream, so an expired request may count as stored while others wait.
        assert await client.may_be_stored(long.seq)
        if request is None:
            worker.capacity = 1
            worker.puller.wake()
            await worker.finish(await worker.take())
        await until(lambda: client.may_be_stored(short.seq), False)


@pytest.mark.proves("P41")
async def test_a_publication_without_an_answer_is_repeated(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer, the client repeats a publication under its id.

    The request has one result and is stored once.
    """
    monkeypatch.setattr(rollbus.bus.queue.publisher, "REPEAT_S", 0.5)
    async with (
        tcp_proxy(nats_url) as proxy,
        publishing(proxy.url, fleet) as client,
        publishing(nats_url, fleet) as sees,
    ):
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        proxy.freeze(Direction.TO_CLIENT)
        token = await client.send()
        forgotten = await client.send()
        client.publisher.remove(forgotten)
        await until_true(lambda: client.publisher.stats.repeats >= 2)
        proxy.thaw()
        result = await client.result(token)
        await client.publish()  # The server answers this after all earlier publications.

        assert result.ok
        assert list(map(len, client.results.values())) == [1, 1]
        assert (await waiting(sees, fleet))["normal"] == 3
        assert client.publisher.stats.repeats == 2
        assert client.publisher.stats.late_answers == 3


@pytest.mark.slow
async def test_a_slow_server_stores_every_request_once(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive faster than the server can store them are all stored in the end, once."""
    require_binary()
    change_config(monkeypatch, max_buffered_msgs=50)
    async with EmbeddedServer() as server, publishing(server.url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        tokens = [await client.send() for _ in range(500)]

        assert all([(await client.result(token)).ok for token in tokens])
        assert client.publisher.stats.repeats > 0
        assert (await waiting(client, fleet))["normal"] == 500


async def test_a_request_above_the_limit_after_a_reconnect_is_not_repeated(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reconnect to a server with a lower limit, a request above the limit fails and is not repeated."""
    async with tcp_proxy(nats_url) as proxy, publishing(proxy.url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        proxy.freeze(Direction.TO_CLIENT)
        token = await client.send(bytes(1000))
        monkeypatch.setattr(client.nats, "_max_payload", 1000)
        result = await client.result(token)
        proxy.thaw()

        assert (result.ok, result.code) == (False, ErrorCode.TOO_LARGE)


async def test_publishes_without_an_answer_are_bounded(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit of unconfirmed publications, further ones fail with `queue_full`."""
    monkeypatch.setattr(rollbus.bus.queue.publisher, "MAX_UNANSWERED", 2)
    async with tcp_proxy(nats_url) as proxy, publishing(proxy.url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        proxy.freeze(Direction.TO_CLIENT)
        tokens = [await client.send() for _ in range(3)]
        refused = await client.result(tokens[2])
        proxy.thaw()

        assert (refused.ok, refused.code) == (False, ErrorCode.QUEUE_FULL)
        assert all([(await client.result(token)).ok for token in tokens[:2]])
        assert (await client.publish()).ok


async def test_a_second_publication_with_a_waiting_token_replaces_the_first(nats_url: str, fleet: str) -> None:
    """A publication with a token that still waits replaces the earlier one: only the second has a result."""
    async with publishing(nats_url, fleet) as client:
        await ensure_queue(client.nats, Subjects(fleet), MODEL)
        for lane in ("normal", "resume"):
            await client.publisher.publish(
                token="t", model=MODEL, lane=lane, data=b"x", msg_id=f"alice.{lane}", ttl_s=60.0
            )
        result = await client.result("t")
        await client.publish()

        assert result.stream.endswith("~resume")
        assert len(client.results["t"]) == 1
