"""Plain mode: a program without the client library publishes to the queue and reads frames from its own subject."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import numpy as np
import pytest
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import subscribe
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.bus.queue.streams import ensure_queue
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import Frame, KvTransfer, LinkMessage, RequestKey, Sibling, decode_frame
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticKv
from rollbus.workers.requests.admission import check_reply_to
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.outbound import PlainOutbound
from rollbus.workers.requests.table import RequestOrigin
from rollbus.workers.worker import Worker
from tests.support.disagg import long
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import HandClient, hand_client
from tests.support.nats_server import opened
from tests.support.processes import worker_process
from tests.support.requests import endless, greedy, short
from tests.support.waits import SOON_S
from tests.workers.links_support import MAX_PAYLOAD, NOW, capabilities, make_links, queued, request_of, step
from tests.workers.support import StartHeard

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_nats.py"
PREFIX = "rb.v1.f.plain.hand."


def plain_origin(num_delivered: int = 1) -> RequestOrigin:
    """Return the origin of a plain request as the intake decodes it."""
    message = queued(client="hand", num_delivered=num_delivered)
    return RequestOrigin("hand", "", RequestKey("r", num_delivered - 1), message, f"{PREFIX}x")


def frames_of(links: WorkerLinks) -> list[Frame]:
    """Return all frames that can be published."""
    frames = []
    while routes := links.outbound.sendable():
        for route in routes:
            while outgoing := links.next_frame(route):
                frames.append(decode_frame(outgoing.data))
    return frames


def test_frames_need_no_credit_and_count_from_zero() -> None:
    """Each plain request numbers its own frames, and the first frame has the offer. No frame waits for an ack."""
    links = make_links()
    name = links.offer(plain_origin(), request_of(50_000, request_id="r"), capabilities(), NOW)
    links.add_steps([step(name, rows=(0, 50_000))], NOW)
    frames = frames_of(links)

    assert sum(chunk.routed_experts.shape[0] for f in frames for chunk in f.chunks if chunk.routed_experts) == 50_000
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert [frame.admitted for frame in frames if frame.admitted] == [[RequestKey("r")]]
    assert {(frame.link, frame.client_incarnation) for frame in frames} == {(0, "")}
    assert len(links.requests.messages) == 1


@pytest.mark.proves("P92")
def test_the_last_frame_of_a_plain_request_comes_with_its_queue_message() -> None:
    """The last frame of a plain request comes with its queue message. Then the worker holds nothing of the request."""
    links = make_links()
    name = links.offer(plain_origin(), request_of(request_id="r"), capabilities(routing=False), NOW)
    (route,) = links.outbound.sendable()
    first = links.next_frame(route)
    links.add_steps([step(name, end=True)], NOW)
    last = links.next_frame(route)

    assert first.message is None
    assert isinstance(route, PlainOutbound)
    assert last.message is route.message
    assert links.outbound.sendable() == []
    assert links.outbound.is_acknowledged
    assert (links.requests.messages, links.outbound.held_bytes) == ([], 0)


def test_a_plain_request_ends_at_its_deadline() -> None:
    """In plain mode the worker enforces `timeout_s`: it aborts the request and sends a terminal chunk."""
    links = make_links()
    request = request_of(request_id="r", timeout_s=10.0)
    name = links.offer(plain_origin(), request, capabilities(routing=False), NOW)

    assert links.expire(NOW + 9).abort == []
    assert links.expire(NOW + 11).abort == [name]
    (frame,) = frames_of(links)
    assert frame.chunks[-1].error.code is ErrorCode.TIMEOUT


def test_the_only_chunk_of_a_rejected_plain_request_has_the_reason() -> None:
    """The only chunk of an invalid plain request has the reason. Then its message leaves the queue."""
    links = make_links()
    links.reject(plain_origin(), InvalidRequest(field="f", problem="p", allowed="a"), NOW)
    (route,) = links.outbound.sendable()
    outgoing = links.next_frame(route)

    assert outgoing.message is not None
    (chunk,) = decode_frame(outgoing.data).chunks
    assert chunk.finish_reason is FinishReason.ERROR
    assert links.requests.messages == []


def test_a_second_delivery_to_the_same_worker_replaces_only_the_queue_message() -> None:
    """A plain request that is delivered again while it runs continues. The worker will ack the later message."""
    links = make_links()
    name = links.offer(plain_origin(), request_of(request_id="r"), capabilities(routing=False), NOW)
    again = plain_origin(num_delivered=2)

    assert links.add_redelivery(again) is not None
    assert links.requests.messages == [again.message]
    (route,) = links.outbound.sendable()
    links.add_steps([step(name, end=True)], NOW)
    outgoing = links.next_frame(route)
    assert outgoing.message is again.message


def test_a_fence_ends_plain_requests_too() -> None:
    """A worker that lost its lease publishes no more frames of a plain request, and sends no ack for its message."""
    links = make_links()
    name = links.offer(plain_origin(), request_of(request_id="r"), capabilities(), NOW)
    todo = links.fence("w2", NOW, max_payload=MAX_PAYLOAD)

    assert (todo.abort, todo.ack) == ([name], [])
    assert frames_of(links) == []


@pytest.mark.proves("P93")
@pytest.mark.parametrize(
    "reply_to", ["", "x", PREFIX, f"{PREFIX}a.", f"{PREFIX}.a", f"{PREFIX}a b", f"{PREFIX}*", f"{PREFIX}a\r\nPUB x"]
)
def test_replies_stay_below_the_clients_own_subject(reply_to: str) -> None:
    """Frames never reach another client's subjects, several subjects at once, or subjects of NATS itself."""
    check_reply_to(f"{PREFIX}a.B-1", PREFIX)
    with pytest.raises(RemoteProtocolError):
        check_reply_to(reply_to, PREFIX)


async def listen(client: HandClient) -> tuple[str, asyncio.Queue[Frame]]:
    """Subscribe to a plain subject of `client`, and return the subject and the queue of its frames."""
    reply_to = f"{client.subjects.plain(client.name)}x"
    frames: asyncio.Queue[Frame] = asyncio.Queue(100_000)

    async def take(message: Msg) -> None:
        frames.put_nowait(decode_frame(message.data))

    await subscribe(client.nats, reply_to, take)
    return reply_to, frames


async def until_end(frames: asyncio.Queue[Frame]) -> list[Frame]:
    """Receive frames up to the frame with a terminal chunk."""
    taken: list[Frame] = []
    while not taken or not any(chunk.is_terminal for chunk in taken[-1].chunks):
        taken.append(await frames.get())
    return taken


@pytest.mark.proves("P92")
async def test_a_plain_request_is_served_and_kept_until_its_end(nats_url: str, fleet: str) -> None:
    """All tokens arrive in frames numbered from 0. The queue keeps the request until the terminal chunk is sent."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with hand_client(nats_url, fleet) as client, synthetic_worker(nats_url, fleet, config=config, worker_id="a"):
        reply_to, frames = await listen(client)
        await client.enqueue(endless("r"), incarnation="", reply_to=reply_to)
        first = await frames.get()

        assert first.admitted == [RequestKey("r")]
        assert await client.left_in_queue() == 1
        await client.say("a", LinkMessage(WIRE_VERSION, [RequestKey("r")]))
        rest = await until_end(frames)
        assert [frame.number for frame in [first, *rest]] == list(range(len(rest) + 1))
        chunks = [chunk for frame in [first, *rest] for chunk in frame.chunks]
        assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
        assert chunks[-1].finish_reason is FinishReason.ABORT
        await client.until_left(0)


async def test_a_request_that_ends_with_its_first_step_wakes_the_puller(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of a request of one token goes back to the queue at its end, not when the worker next looks."""
    monkeypatch.setattr("rollbus.workers.worker.HEARTBEAT_S", 3600.0)
    config = SyntheticConfig(step_s=0.05, max_num_seqs=1)
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, config=config, worker_id="a") as (worker, _),
    ):
        await client.until_serving("a")
        reply_to, frames = await listen(client)
        wake, free_slots = worker._puller.wake, list[int]()

        def note() -> None:
            free_slots.append(worker._runner.num_free)
            wake()

        monkeypatch.setattr(worker._puller, "wake", note)
        for number in range(3):
            await client.enqueue(greedy(1, 1, request_id=f"r{number}"), incarnation="", reply_to=reply_to)
            await until_end(frames)

            assert free_slots[-1] == 1


@pytest.mark.proves("P92")
async def test_a_plain_request_starts_over_when_its_worker_dies(nats_url: str, fleet: str) -> None:
    """If the worker dies, the next worker serves the request from its first token on, as the next attempt."""
    async with hand_client(nats_url, fleet) as client:
        reply_to, frames = await listen(client)
        async with worker_process(nats_url, fleet, "--worker-id", "a", engine_args={"step_s": 0.05}) as process:
            await client.until_serving("a")
            await client.enqueue(greedy(1, 100, request_id="r"), incarnation="", reply_to=reply_to)
            while (await frames.get()).number < 5:
                pass
            process.kill()
        async with synthetic_worker(nats_url, fleet, worker_id="b"):
            chunks = [chunk for frame in await until_end(frames) for chunk in frame.chunks if chunk.attempt == 1]

    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    assert sum(chunk.num_tokens for chunk in chunks) == 100


@pytest.mark.proves("P93")
async def test_a_request_with_a_foreign_reply_to_is_discarded_and_counted(heard_worker: StartHeard) -> None:
    """A request whose `reply_to` is not a subject of its client leaves the queue unserved."""
    async with heard_worker() as (client, worker, _):
        await client.enqueue(short("r"), incarnation="", reply_to=client.subjects.frame("other", "w"))
        await client.until_left(0)

        assert worker.stats().intake.bad == 1
        assert worker.stats().links.requests == 0


async def test_the_plain_mode_example_prints_the_whole_result(nats_url: str, fleet: str) -> None:
    """The 40-line program prints tokens, log probabilities, the shape of the routed experts, and the end."""
    model = "Qwen/Qwen3-30B.A3B"
    config = SyntheticConfig(num_layers=3, top_k=2)
    async with (
        opened(nats_url) as nats,
        synthetic_worker(nats_url, fleet, config=config, model=model),
        asyncio.timeout(SOON_S),
    ):
        await ensure_queue(nats, Subjects(fleet), model)
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), nats_url, fleet, model, stdout=PIPE, stderr=PIPE
        )
        stdout, stderr = await program.communicate()

    assert stderr.decode() == ""
    *lines, last = stdout.decode().splitlines()
    columns = [line.split("\t") for line in lines]
    assert sum(len(json.loads(ids)) for ids, _, _ in columns) == 8
    assert sum(len(json.loads(logprobs)) for _, logprobs, _ in columns) == 8
    shapes = [json.loads(shape) for _, _, shape in columns if shape != "None"]
    assert sum(rows for rows, _, _ in shapes) == 3 + 8 - 1
    assert {tuple(shape[1:]) for shape in shapes} == {(3, 2)}
    assert last == "finish_reason=length tokens=8 rows=10 error=None"


# Prefill and decode phases on a worker: the phases that it accepts, and the KV that its engine may use.


PREFILL = SyntheticConfig(role="prefill")
DECODE = SyntheticConfig(role="decode")


async def answer_to(client: HandClient, request: GenerateRequest, worker: str, kv: KvTransfer | None) -> str | None:
    """Send a request directly to a worker, and return the error code with which it ended."""
    await client.hand_over(request, worker, kv=kv)
    await client.until_ended(request.request_id)
    return client.error_of(request.request_id)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
async def test_a_worker_accepts_only_the_phases_of_its_role(heard_worker: StartHeard, role: str) -> None:
    """Prefill workers accept only prefill phases, and other workers accept all other requests.

    Each rejection names the worker's role.
    """
    config = SyntheticConfig.from_args({"role": role})
    async with heard_worker(config=config) as (client, *_):
        leg = await answer_to(client, long("leg", max_tokens=1), "w", KvTransfer())
        whole = await answer_to(client, long("whole", max_tokens=1), "w", None)

        refused, taken = ("whole", "leg") if role == "prefill" else ("leg", "whole")
        assert {"leg": leg, "whole": whole} == {refused: ErrorCode.UNSUPPORTED, taken: None}
        error = client.chunks[refused][-1].error
        assert f"this worker's role is {role}" in error.message


async def test_a_prefill_phase_with_more_than_one_token_is_rejected(heard_worker: StartHeard) -> None:
    """A prefill phase with more than one token is rejected by name.

    The last chunk of an accepted prefill phase has the KV transfer parameters.
    """
    async with heard_worker(config=PREFILL, worker_id="p") as (client, *_):
        assert await answer_to(client, long("two", max_tokens=2), "p", KvTransfer()) == ErrorCode.INVALID_REQUEST
        error = client.chunks["two"][-1].error
        assert error.field == "sampling.max_tokens"

        assert await answer_to(client, long("one", max_tokens=1), "p", KvTransfer()) is None
        end = client.chunks["one"][-1].end
        assert msgspec.msgpack.decode(end.kv_params, type=SyntheticKv).num_tokens == 100


async def test_each_sample_of_a_prefill_message_has_its_own_kv(heard_worker: StartHeard) -> None:
    """KV can be read only once, so three samples of one message are three prefill phases.

    Their prompt is computed once.
    """
    config = SyntheticConfig(role="prefill", prefix_cache=True)
    async with heard_worker(config=config, worker_id="p") as (client, worker, _):
        await client.hand_over(
            long("leg", max_tokens=1), "p", kv=KvTransfer(), siblings=[Sibling(child) for child in (1, 2)]
        )
        await client.until(lambda: sum(chunk.is_terminal for chunk in client.chunks["leg"]) == 3)

        ends = {chunk.child: chunk.end for chunk in client.chunks["leg"] if chunk.end is not None}
        assert [end.kv_params is not None for end in ends.values()] == [True] * 3
        assert sorted(ends) == [0, 1, 2]
        counters = worker.presence().counters
        # Six blocks of 16 of the 100 tokens are cached for two of the three samples.
        assert (counters.placed, counters.prompt_tokens) == (3, 300)
        assert (counters.cached_prompt_tokens, counters.recomputed_prompt_tokens) == (2 * 96, 100 + 2 * 4)


async def test_a_prefill_worker_does_not_pull_from_the_queue(
    nats_url: str, fleet: str, heard_worker: StartHeard
) -> None:
    """A prefill worker does not pull from the queue: a decode worker that starts later serves the request."""
    async with heard_worker(config=PREFILL, worker_id="p") as (client, *_):
        await client.enqueue(long("r", max_tokens=1))
        # This request makes a round trip through the worker after the queued request.
        await answer_to(client, long("leg", max_tokens=1), "p", KvTransfer())
        await client.until_left(1)
        assert client.presences["p"].free_slots == 256
        async with synthetic_worker(nats_url, fleet, config=DECODE, worker_id="d"):
            await client.until_ended("r")
        assert {worker for worker, key in client.offers if key.request_id == "r"} == {"d"}


async def kv_of_engine(
    worker: Worker, engine: SyntheticEngine, client: HandClient, kv: KvTransfer
) -> KvTransfer | None:
    """Send a decode phase directly to the worker, and return the KV parameters that its engine received."""
    seen: list[KvTransfer | None] = []
    add = engine.add

    async def noting(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        seen.append(kv)
        await add(key, request, None)

    engine.add = noting  # type: ignore[method-assign]
    assert await answer_to(client, long("r"), "d", kv) is None
    assert worker.stats().intake.kv_unused == (seen[0] is None)
    return seen[0]


@pytest.mark.proves("P24")
@pytest.mark.parametrize(
    ("handover", "is_used"),
    [
        ({}, True),
        ({"connector": "another"}, False),
        ({"connector": None}, False),
        ({"weight_version": 3}, False),
        ({"weight_version": None}, False),
        ({"lora_version": 1}, False),
    ],
)
async def test_only_kv_of_the_same_weights_and_connector_is_used(
    heard_worker: StartHeard, handover: dict[str, object], is_used: bool
) -> None:
    """KV of other weights or of another connector is computed again and counted. The request ends normally."""
    kv = KvTransfer(**{"params": b"x", "connector": "synthetic", "weight_version": 4, **handover})  # type: ignore[arg-type]
    async with heard_worker(config=DECODE, worker_id="d", weight_version=4) as (client, worker, engine):
        assert (await kv_of_engine(worker, engine, client, kv) is not None) == is_used


async def test_a_request_that_the_engine_rejects_with_kv_ends_as_kv_transfer_failed(heard_worker: StartHeard) -> None:
    """If the engine rejects a request with KV, it ends as `kv_transfer_failed`, which clients retry.

    Without KV, the request ends with the engine's error.
    """
    kv = KvTransfer(params=b"x", connector="synthetic", weight_version=0)
    async with heard_worker(config=DECODE, worker_id="d") as (client, _, engine):

        async def refuse(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
            raise InvalidRequest(field="kv.params", problem="cannot be read", allowed="a msgpack map")

        engine.add = refuse  # type: ignore[method-assign]
        assert await answer_to(client, long("with"), "d", kv) == ErrorCode.KV_TRANSFER_FAILED
        assert await answer_to(client, long("without"), "d", None) == ErrorCode.INVALID_REQUEST


async def test_a_worker_of_both_roles_computes_the_kv_again(heard_worker: StartHeard) -> None:
    """A worker of both roles has no connector, so it computes the KV again: slower, but correct."""
    kv = KvTransfer(params=b"x", connector="synthetic", weight_version=0)
    async with heard_worker(worker_id="d") as (client, worker, engine):
        assert await kv_of_engine(worker, engine, client, kv) is None


async def test_kv_parameters_that_fit_into_no_frame_are_omitted(heard_worker: StartHeard) -> None:
    """KV parameters that fit into no frame are omitted without harm to the link.

    The decode phase then computes the prompt again.
    """
    async with heard_worker(config=PREFILL, worker_id="p") as (client, worker, engine):
        step = engine._step

        def large() -> list[RequestStep | TokenBatch]:
            steps = split(step())
            for made in steps:
                made.kv_params = b"x" * 200_000 if made.finish_reason is FinishReason.LENGTH else None
            return [*steps]

        engine._step = large  # type: ignore[method-assign]
        assert await answer_to(client, long("r", max_tokens=1), "p", KvTransfer()) is None
        end = client.chunks["r"][-1].end
        assert end.kv_params is None
        assert worker.stats().links.kv_too_large == 1
        np.testing.assert_array_equal([end.num_tokens, end.num_rows], [1, 100])
