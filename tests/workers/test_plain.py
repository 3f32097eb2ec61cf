"""Plain mode: a program without the client library publishes to the queue and reads frames from its own subject."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import subscribe
from rollbus.bus.queue.streams import ensure_queue
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import Frame, LinkMessage, RequestKey, decode_frame
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests.admission import check_reply_to
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.outbound import PlainOutbound
from rollbus.workers.requests.table import RequestOrigin
from tests.support.connections import opened
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import HandClient, hand_client
from tests.support.patience import SOON_S
from tests.support.requests import endless, greedy, short
from tests.support.worker_process import worker_process
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
    config = SyntheticConfig(step_s=0.002, max_model_len=10_000_000)
    async with (
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, config=config, worker_id="a"),
    ):
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
