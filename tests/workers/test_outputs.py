"""The way of batched tokens: to the links immediately, or batched for requests that are not streamed."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.states import WorkerEvent
from rollbus.bus.protocol.stream import link_sender
from rollbus.bus.protocol.stream.engine_step import TokenBatch
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestError
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import LinkMessage, RequestKey
from rollbus.schemas.presence import ClientState, WorkerPresence
from rollbus.workers.config import WorkerConfig
from rollbus.workers.lifecycle import WorkerLifecycle
from rollbus.workers.requests.links import REMEMBER_S
from rollbus.workers.requests.publisher import OutboundPublisher
from rollbus.workers.requests.table import RequestOrigin
from tests.support.nats_server import opened
from tests.workers.links_support import (
    LATE,
    MAX_PAYLOAD,
    NOW,
    Ear,
    capabilities,
    linked,
    make_links,
    queued,
    request_of,
    step,
)


def batch_of(*names: str, token: int = 5, row: int | None = None) -> TokenBatch:
    """Return one token for each request, without log probabilities, and with a row at `row` if it is given."""
    return TokenBatch(
        keys=list(names),
        token_ids=np.full(len(names), token, np.int32),
        routed_experts=None if row is None else np.full((len(names), 4, 8), token, np.uint8),
        routed_experts_starts=None if row is None else np.full(len(names), row, np.int64),
    )


def tokens(ear: Ear, request_id: str) -> list[list[int]]:
    """Return the received tokens by chunk."""
    return [chunk.token_ids.tolist() for chunk in ear.chunks(request_id) if chunk.num_tokens]


def test_streamed_tokens_leave_with_their_step_and_batched_tokens_at_the_flush() -> None:
    """Streamed tokens leave with their step, and batched tokens at the flush, also from the same engine batch.

    Tokens of an unknown request are counted as late.
    """
    links, ear = linked()
    whole, _ = ear.offer("whole", gathers=True)
    streamed, _ = ear.offer("streamed")
    for token in (1, 2, 3):
        links.add_steps([batch_of(whole, streamed, "gone", token=token)], NOW)
        ear.hear()

    assert (tokens(ear, "streamed"), tokens(ear, "whole")) == ([[1], [2], [3]], [])
    assert (links.dispatcher.is_gathering, links.stats.late_steps, links.stats.generated_tokens) == (True, 3, 6)
    links.flush()
    ear.hear()
    assert (tokens(ear, "whole"), links.dispatcher.is_gathering) == ([[1, 2, 3]], False)


def test_the_end_of_a_request_flushes_its_batched_tokens() -> None:
    """The end of a request flushes its batched tokens before its last step, whose totals count all of them."""
    links, ear = linked()
    name, _ = ear.offer("r", gathers=True, routing=True)
    links.add_steps([step(name, rows=(0, 2))], NOW)
    for i in range(4):
        links.add_steps([batch_of(name, row=2 + i)], NOW)
    links.add_steps([step(name, rows=(6, 7), end=True)], NOW)
    ear.hear()

    end = ear.chunks("r")[-1].end
    assert (end.num_tokens, end.num_rows, links.dispatcher.is_gathering) == (6, 7, False)


def test_the_first_token_of_an_unstreamed_request_leaves_with_those_behind_it() -> None:
    """The first token of an unstreamed request leaves with the tokens behind it, at the flush if there are none."""
    links, ear = linked()
    alone, _ = ear.offer("alone", gathers=True)
    more, _ = ear.offer("more", gathers=True)
    ended, _ = ear.offer("ended", gathers=True)
    links.add_steps([step(name) for name in (alone, more, ended)], NOW)
    links.add_steps([batch_of(more, token=7)], NOW)
    links.add_steps([step(ended, end=True)], NOW)
    ear.hear()
    assert (tokens(ear, "alone"), tokens(ear, "more"), tokens(ear, "ended")) == ([], [], [[7, 7]])
    assert links.dispatcher.is_gathering
    links.flush()
    ear.hear()
    assert (tokens(ear, "alone"), tokens(ear, "more"), links.dispatcher.is_gathering) == ([[7]], [[7, 7]], False)


def test_the_first_token_of_a_later_attempt_leaves_at_once() -> None:
    """The first token of a later attempt leaves at once: with it the client knows that this engine has survived it."""
    links, ear = linked()
    origin = RequestOrigin(ear.client, ear.incarnation, RequestKey("r", 1), queued())
    name = links.offer(origin, request_of(request_id="r"), capabilities(), NOW, gathers=True)
    links.add_steps([step(name)], NOW)
    ear.hear()
    assert tokens(ear, "r") == [[7]]


def test_tokens_keep_the_version_with_which_they_were_generated() -> None:
    """Tokens keep the version with which they were generated, also if they leave under a later version."""
    links, ear = linked()
    name, _ = ear.offer("r", gathers=True)
    links.add_steps([batch_of(name, token=1)], NOW)
    links.versions.weight_version = 1
    links.add_steps([batch_of(name, token=2)], NOW)
    links.versions.weight_version = 2
    links.flush()
    ear.hear()

    assert [(chunk.token_ids.tolist(), chunk.weight_version) for chunk in ear.chunks("r")] == [([1], 0), ([2], 1)]


def test_batched_tokens_of_an_aborted_request_leave_and_those_of_a_failed_or_fenced_one_do_not() -> None:
    """The batched tokens of an aborted request leave before its end. Those of a failed or fenced one are discarded."""
    links, ear = linked()
    failed, _ = ear.offer("failed", gathers=True)
    unwanted, _ = ear.offer("unwanted", gathers=True)
    links.add_steps([batch_of(failed, unwanted)], NOW)
    links.fail([failed], RequestError(code=ErrorCode.TIMEOUT, message="late"))
    links.on_link_message("alice", ear.message([RequestKey("unwanted")]), NOW)
    links.flush()
    ear.hear()
    assert (tokens(ear, "failed"), tokens(ear, "unwanted"), links.dispatcher.is_gathering) == ([], [[5]], False)
    assert ear.chunks("unwanted")[-1].end.num_tokens == 1

    fenced, _ = ear.offer("fenced", gathers=True)
    links.add_steps([batch_of(fenced)], NOW)
    links.fence("w2", NOW, max_payload=1_000_000)
    assert not links.dispatcher.is_gathering


def test_batched_rows_at_a_wrong_position_end_only_their_requests() -> None:
    """Rows at a wrong position end only their requests, as `protocol_error`, and the engine aborts them."""
    links, ear = linked()
    wrong, _ = ear.offer("wrong", gathers=True, routing=True)
    right, _ = ear.offer("right", routing=True)
    links.add_steps([step(wrong, rows=(0, 2)), step(right, rows=(0, 2))], NOW)
    links.add_steps([batch_of(wrong, row=2)], NOW)
    todo = links.add_steps([batch_of(wrong, row=9)], NOW)
    links.add_steps([batch_of(right, row=2)], NOW)
    ear.hear()

    assert todo.abort == [wrong]
    assert [chunk.error.code for chunk in ear.chunks("wrong") if chunk.error] == [ErrorCode.PROTOCOL_ERROR]
    assert tokens(ear, "right") == [[7, 5]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"routed_experts": np.full((1, 8, 4), 5, np.uint8)},
        {"routed_experts": np.full((1, 4, 4), 5, np.uint16)},
        {"token_ids": np.empty(0, np.int32)},
        {"logprobs": np.empty(0, np.float32)},
        {"routed_experts_starts": None},
    ],
)
def test_a_streamed_token_with_wrong_arrays_ends_its_request(wrong: dict[str, Any]) -> None:
    """A streamed token whose row or arrays have another shape than the model's ends its request."""
    links, ear = linked()
    name, _ = ear.offer("r", routing=True)
    links.add_steps([step(name, rows=(0, 2))], NOW)
    todo = links.add_steps([msgspec.structs.replace(batch_of(name, row=2), **wrong)], NOW)
    ear.hear()

    assert todo.abort == [name]
    assert [chunk.error.code for chunk in ear.chunks("r") if chunk.error] == [ErrorCode.PROTOCOL_ERROR]


# The bytes that a worker holds for clients that do not read: counted and bounded.


def test_above_the_budget_links_of_lost_clients_are_removed_first() -> None:
    """Above the budget, links of lost clients are removed, the longest lost first, so that live clients are served."""
    links = make_links(max_held_bytes=30_000)
    ears = [Ear(links, client=name, incarnation=f"{name}1") for name in ("alice", "bob", "carol")]
    for at, ear in enumerate(ears[:2]):
        name, _ = ear.offer("r")
        links.add_steps([step(name, 3000)], NOW)
        ear.hear()
        links.expire(LATE + at)
    name, _ = ears[2].offer("r")
    links.add_steps([step(name, 3000)], NOW)
    ears[2].hear()
    links.on_presence(ears[2].presence(), LATE + 2)
    held = links.outbound.held_bytes
    links.expire(LATE + 3)

    assert held > 30_000 > links.outbound.held_bytes
    assert [link.client for link in links.outbound.links()] == ["bob", "carol"]


@pytest.mark.proves("P61")
def test_above_twice_the_budget_the_request_with_the_largest_backlog_ends() -> None:
    """A client that does not read cannot fill a worker: the largest backlog ends as `over_budget`.

    Other requests continue.
    """
    links = make_links(max_held_bytes=INITIAL_CREDIT_BYTES * 2)
    ear = Ear(links)
    large, _ = ear.offer("large")
    small, _ = ear.offer("small")
    ear.hear()
    rounds = 0
    aborted: list[str] = []
    while not aborted and rounds < 1000:
        rounds += 1
        todo = links.add_steps([step(large, 2000), step(small, 10)], NOW)
        aborted += todo.abort
        ear.hear()

    assert aborted == [large]
    assert links.outbound.held_bytes <= 4 * INITIAL_CREDIT_BYTES
    assert links.stats.over_budget == 1
    links.add_steps([step(small, end=True)], NOW)
    links.on_link_message("alice", ear.message(), NOW)
    ear.hear()
    last = ear.chunks("large")[-1]
    assert last.error.code is ErrorCode.OVER_BUDGET
    assert sum(chunk.num_tokens for chunk in ear.chunks("small")) == rounds * 10 + 1


def test_a_client_with_endless_credit_harms_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that grants credit without acknowledging frames gets few frames, and only its own requests end."""
    monkeypatch.setattr(link_sender, "MAX_UNACKED_BYTES", 2 * INITIAL_CREDIT_BYTES)
    links = make_links(max_held_bytes=INITIAL_CREDIT_BYTES * 2)
    greedy, other = Ear(links), Ear(links, client="bob", incarnation="b1")
    large, _ = greedy.offer("large")
    small, _ = other.offer("small")
    links.on_link_message("alice", LinkMessage(1, [], "a1", "w1", 0, 0, 1 << 60), NOW)
    aborted = []
    for _ in range(1000):
        aborted += links.add_steps([step(large, 2000), step(small)], NOW).abort
        for route in links.outbound.sendable():
            while links.next_frame(route) is not None:
                pass

    assert aborted == [large]
    assert len(links.requests) == 1
    assert links.outbound.held_bytes < 5 * INITIAL_CREDIT_BYTES


def test_the_held_bytes_equal_the_sum_over_all_links() -> None:
    """The sum that is compared with the budget always equals the bytes of all links."""
    links = make_links()
    ears = [Ear(links, client=f"c{number}", incarnation="i") for number in range(4)]
    sums = []

    def compare() -> None:
        held_bytes = sum(link.held_bytes for link in links.outbound.links())
        sums.append((links.outbound.held_bytes, held_bytes))

    names = [ear.offer("r")[0] for ear in ears]
    compare()
    for ear in ears:
        ear.hear()
        compare()
    links.add_steps([step(name, 100_000) for name in names], NOW)
    compare()
    ears[0].hear()
    compare()
    links.on_link_message("c0", ears[0].message([RequestKey("r")]), NOW)
    compare()
    links.fail([names[1]], InvalidRequest(field="f", problem="p", allowed="a"))
    compare()
    links.on_presence(ears[2].presence(ClientState.CLOSED), NOW)
    compare()
    links.expire(LATE)
    compare()
    ears[3].hear()
    links.expire(LATE + REMEMBER_S + 1)
    compare()
    links.fence("w2", NOW, max_payload=MAX_PAYLOAD)
    compare()

    assert all(counted == held_bytes for counted, held_bytes in sums)
    assert max(sums)[0] > 1_000_000
    assert sums[-1][0] == 0


# The acks that a worker sends to the queue, and the moment when it stops sending.


pytestmark = pytest.mark.slow

REPLY_TO = "rb.v1.f.plain.alice.x"


def describe() -> WorkerPresence:
    """Fail, because these tests publish no presence."""
    raise NotImplementedError


def make_life(nats: Connection) -> WorkerLifecycle:
    """Return the lifecycle of a worker that serves."""
    config = WorkerConfig(nats_url="", model="m")
    life = WorkerLifecycle(
        config,
        nats,
        describe=describe,
        on_fenced=lambda: None,
        on_changed=lambda: None,
        on_duplicate=lambda _error: None,
    )
    life.transition(WorkerEvent.READY)
    return life


async def test_a_fence_during_a_round_of_acks_skips_the_remaining_acks(nats_url: str) -> None:
    """A worker that is fenced while it sends acks skips the remaining acks, although it serves again."""
    spoken = []

    class Message:
        """A message whose ack takes so long that the worker is fenced and returns meanwhile."""

        async def in_progress(self) -> None:
            spoken.append(self)
            life.fence("test")
            life.transition(WorkerEvent.CONFIRMED)

        nak = in_progress

    async with opened(nats_url) as nats:
        life = make_life(nats)
        sending = OutboundPublisher(nats, life, make_links(), on_broken=lambda _route: None)
        for answer in ("in_progress", "nak"):
            spoken.clear()
            await sending.publish_all([getattr(message, answer) for message in (Message(), Message(), queued())])

            assert len(spoken) == 1
            assert life.may_publish()


class Wire:
    """A connection that calls `on_frame` while it sends a frame, and stores the published subjects."""

    max_payload = 1024**2
    pending_data_size = 0

    def __init__(self) -> None:
        self.is_connected = True
        self.published: list[str] = []
        self.on_frame: Callable[[], None] = lambda: None
        self.was_sent = asyncio.Event()

    async def publish(self, subject: str, *_: object) -> None:
        """Store the subject of a message."""
        self.published.append(subject)
        if subject == REPLY_TO:
            self.on_frame()
            self.was_sent.set()


@pytest.mark.parametrize("event", ["nothing", "fence", "outage"])
async def test_a_plain_request_is_acked_directly_after_its_last_frame(event: str) -> None:
    """The queue removes a plain request after its last frame, unless the worker is fenced or disconnected before."""
    wire = Wire()
    nats = cast(Connection, wire)
    life = make_life(nats)
    links = make_links()
    sending = OutboundPublisher(nats, life, links, on_broken=lambda _route: None)

    def fence() -> None:
        life.fence("test")
        life.transition(WorkerEvent.CONFIRMED)

    def lose_connection() -> None:
        wire.is_connected = False

    wire.on_frame = {"nothing": lambda: None, "fence": fence, "outage": lose_connection}[event]
    message = queued(nats=nats)
    origin = RequestOrigin("alice", "", RequestKey("r"), message, REPLY_TO)
    name = links.offer(origin, request_of(), capabilities(routing=False), NOW)
    links.add_steps([step(name, end=True)], NOW)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(sending.publish_frames()), tasks.create_task(sending.publish_acks())]
        sending.wake()
        await wire.was_sent.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        # The outage ends here, after which an unsent ack is too late.
        wire.is_connected = True
        sending.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        for task in background:
            task.cancel()

    acks = [subject for subject in wire.published if subject.startswith("$JS.ACK")]
    assert len(acks) == (event == "nothing")
