"""If a frame does not decode, its requests resume or fail, and all other requests continue."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from rollbus.bus.nats.connection import publish
from rollbus.bus.protocol.stream import link_sender
from rollbus.bus.subjects import Subjects
from rollbus.schemas.errors import ErrorCode, RequestFailed
from rollbus.schemas.messages import Frame, RequestKey, encode
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.disagg import filtered
from tests.support.fleet import StartServed
from tests.support.hand_worker import HandWorker, chunk, hand_worker, request, worker_by_hand
from tests.support.invariants import observing
from tests.support.nats_server import NatsNoise, opened
from tests.support.requests import Load, error_of
from tests.support.waits import until_true

CONFIG = SyntheticConfig(step_s=0.002, max_num_seqs=16, vocab_size=VOCAB_SIZE)
JETSTREAM_ERROR = b'{"type":"io.nats.jetstream.api.v1.account_info_response","error":{"code":503}}'


def encode_with_bad_chunk(frame: Frame, key: RequestKey) -> bytes:
    """Return the frame with three bytes of token ids, which is no whole token, in the first chunk of `key`."""
    content = msgspec.msgpack.decode(encode(frame))
    for item in content[4]:
        if RequestKey(*item[:3]) == key:
            item[5] = b"abc"
            break
    return msgspec.msgpack.encode(content)


async def send(worker: HandWorker, number: int, *keys: RequestKey, bad: RequestKey, offers: bool = False) -> None:
    """Send frame `number` with the first token of each request, damaged in the chunk of `bad`."""
    content = [chunk(key, 0, 7) for key in keys]
    admitted = list(keys) if offers else []
    frame = Frame(1, worker.incarnation, number, admitted, content, worker.link, worker.client_incarnation)
    await publish(worker.nats, worker.subjects.frame(worker.client, worker.name), encode_with_bad_chunk(frame, bad))


@pytest.mark.proves("P58")
@pytest.mark.parametrize("offers", [True, False])
async def test_an_undecodable_frame_that_names_a_request_fails_this_request(
    nats_url: str, fleet: str, offers: bool
) -> None:
    """If an undecodable frame names one request, this request fails immediately and is aborted.

    The link continues without a resend.
    """
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(error_of(rb.complete(request(2)), RequestFailed))
        key = await worker.next_key()
        if not offers:
            await worker.frame(0, admitted=(key,))
        await send(worker, int(not offers), key, bad=key, offers=offers)
        error = await failing
        assert await worker.aborted() == [key]
        second = tasks.create_task(rb.complete(request(1)))
        other = await worker.next_key()
        await worker.frame(2 - offers, chunk(other, 0, 8, total=1), admitted=(other,))
        assert list((await second).token_ids) == [8]
        stats = rb.stats()

    assert error.code is ErrorCode.PROTOCOL_ERROR
    assert error.message.startswith("worker hand sent a frame that cannot be decoded: frame: token ids of 3 bytes")
    assert (stats.bad_messages, stats.resends_asked) == (1, 0)


async def test_an_undecodable_frame_does_not_end_a_request_of_another_worker(nats_url: str, fleet: str) -> None:
    """If an undecodable frame names another worker's request, the request continues, and the sender gets an abort."""
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        worker_by_hand(nats_url, fleet, "liar", pulls=False) as liar,
        asyncio.TaskGroup() as tasks,
    ):
        completing = tasks.create_task(rb.complete(request(2)))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(1)
        liar.client_incarnation = worker.client_incarnation
        await send(liar, 0, key, bad=key)
        assert await liar.aborted() == [key]
        await worker.frame(1, chunk(key, 1, 8, total=2))
        generation = await completing

    assert (list(generation.token_ids), generation.attempts) == ([7, 8], 1)


@pytest.mark.proves("P58")
async def test_requests_of_a_frame_that_never_decodes_are_resumed(nats_url: str, fleet: str) -> None:
    """After two unsuccessful resends, the link is broken, and all its requests get a new attempt."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        completing = [tasks.create_task(rb.complete(request(1))) for _ in range(3)]
        keys = [await worker.next_key() for _ in completing]
        await worker.frame(0, admitted=tuple(keys))
        await send(worker, 1, *keys[:2], bad=keys[0])
        for _ in range(2):
            assert (await worker.resend_wanted()).acked == 1
            await send(worker, 1, *keys[:2], bad=keys[0])
        again = [await worker.next_key() for _ in completing]
        # The client requests the start of the link from the worker, because only a new link helps.
        assert (await worker.resend_wanted()).acked == 0
        worker.link += 1
        await worker.frame(0, *(chunk(key, 0, 9, total=1) for key in again), admitted=tuple(again))
        generations = [await task for task in completing]
        stats = rb.stats()

    assert {(key.request_id, key.attempt) for key in again} == {(key.request_id, 1) for key in keys}
    assert {(tuple(generation.token_ids), generation.attempts) for generation in generations} == {((9,), 2)}
    assert (stats.attempts_lost, stats.bad_messages) == (3, 3)


def without_end(data: bytes) -> bytes:
    """Return the message without its last three bytes."""
    return data[:-3]


def wrong_shape(data: bytes) -> bytes:
    """Return a frame whose chunks have token ids with an invalid number of bytes."""
    content = msgspec.msgpack.decode(data)
    for item in content[4]:
        item[5] = b"abc"
    return msgspec.msgpack.encode(content)


@pytest.mark.parametrize("harm", [without_end, wrong_shape])
async def test_every_request_completes_after_one_undecodable_frame(
    nats_url: str, fleet: str, one_worker: StartServed, monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes]
) -> None:
    """After one undecodable frame, every request completes, also at the same worker, which opens a new link."""
    load = await Load.mixed(60, CONFIG)
    broken: list[Frame] = []

    def encode_badly(frame: Frame) -> bytes:
        data = encode(frame)
        # Requests that this frame offers would not count as lost, because the client has no earlier offer.
        if not broken and not frame.admitted and len({item.request_id for item in frame.chunks}) > 1:
            broken.append(frame)
            return harm(data)
        return data

    monkeypatch.setattr(link_sender, "encode", encode_badly)
    async with observing(nats_url, fleet) as observer, one_worker(config=CONFIG) as (rb, worker, _):
        results = await load.run(rb)
        stats = rb.stats()

        assert stats.bad_messages >= 3
        # A request of a session was sent to the worker directly and may be withdrawn before its offer arrives.
        named = {item.request_id for item in broken[0].chunks}
        assert stats.attempts_lost >= sum(not name.startswith("session") for name in named)
        assert {generation.attempts for generation in results} == {1, 2}
        assert worker.stats().links.links_broken == 1
        await observer.check_at_rest()


async def test_jetstream_answers_between_lost_frames_cause_no_lost_attempt(nats_url: str, fleet: str) -> None:
    """Thousands of JetStream answers on the subjects of frames, while frames are lost, cause no lost attempt."""
    load, junk = await Load.mixed(50, CONFIG), 2000
    noise = NatsNoise(r"\.frame\.", seed=1, drop=0.05)
    async with (
        observing(nats_url, fleet) as observer,
        filtered(nats_url, fleet, "one", CONFIG, client=noise.filter, workers=NatsNoise("none").filter) as (_, rb),
        opened(nats_url) as nats,
        asyncio.TaskGroup() as tasks,
    ):
        completing = tasks.create_task(load.run(rb))
        subject = Subjects(fleet).frame(rb._config.client, "w")
        for _ in range(junk):
            await publish(nats, subject, JETSTREAM_ERROR)
            await asyncio.sleep(0)
        results = await completing

        assert {generation.attempts for generation in results} == {1}
        assert rb.stats().missing_frames > 0
        # The last of these messages may arrive after the last result.
        await until_true(lambda: rb.stats().bad_messages > junk / 2)
        await observer.check_at_rest()
