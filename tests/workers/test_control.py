"""Commands as raw JSON, and their effects on one worker."""

import pytest

from rollbus.schemas.acks import AckStatus
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ControlCode, ErrorCode
from rollbus.schemas.messages import Frame
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_control import hand_controller
from tests.support.requests import PROMPT_LEN, endless, greedy, short
from tests.workers.support import SLOW, StartControlled, stream_of


@pytest.mark.proves("P21", "P77")
async def test_a_stream_kept_by_a_pause_equals_an_undisturbed_stream(controlled_worker: StartControlled) -> None:
    """After pause(keep) and resume, a stream equals that of an undisturbed run.

    Between them, the worker publishes no tokens (I4).
    """
    async with controlled_worker() as (client, boss, *_):
        await client.complete(greedy(1, 100, request_id="undisturbed"))
        await client.enqueue(greedy(1, 100, request_id="paused"))
        await client.until(lambda: len(client.chunks["paused"]) > 20)
        paused = await boss.applied("pause", mode="keep")
        await client.enqueue(short("queued"))
        await client.until_state("w", WorkerState.PAUSED)
        presence = client.presences["w"]
        await client.until_left(1)
        assert (presence.pause_mode, presence.in_flight, presence.free_slots, presence.epoch) == ("keep", 1, 0, 1)
        assert not client.chunks["queued"]

        resumed = await boss.applied("resume")
        await client.until_ended("paused", "queued")

    assert stream_of(client.chunks["paused"]) == stream_of(client.chunks["undisturbed"])
    assert paused.in_flight == 1
    assert boss.chunks_between(paused, boss.acks(resumed.id)[0]) == 0
    before = boss.said[: boss.said.index(paused)]
    frames = [said for said in before if isinstance(said, Frame) and not said.is_heartbeat]
    assert paused.frames == {"hand/h1": len(frames)}


@pytest.mark.proves("P77")
async def test_pause_wait_is_applied_when_no_request_is_in_flight(controlled_worker: StartControlled) -> None:
    """pause(wait) is accepted immediately and applied after the last chunk of the requests in flight."""
    async with controlled_worker() as (client, boss, *_):
        await client.begin(greedy(1, 300, request_id="r"))
        paused = await boss.applied("pause", mode="wait")
        resumed = await boss.applied("resume")

        await client.until_ended("r")
        assert paused.in_flight == 0
        assert [ack.status for ack in boss.acks(paused.id)][:2] == [AckStatus.ACCEPTED, AckStatus.PROGRESS]
        assert boss.chunks_between(paused, boss.acks(resumed.id)[0]) == 0


@pytest.mark.proves("P77")
async def test_pause_abort_ends_each_stream_with_its_tokens_and_rows(controlled_worker: StartControlled) -> None:
    """pause(abort) ends each stream with `abort` and the rows of its tokens. No request is in flight then."""
    async with controlled_worker() as (client, boss, _, engine):
        for request_id in ("a", "b"):
            await client.enqueue(endless(request_id))
        await client.until(lambda: len(client.chunks["a"]) > 20 and len(client.chunks["b"]) > 20)
        paused = await boss.applied("pause", mode="abort")
        await client.until_ended("a", "b")

        assert is_idle(engine)
        assert paused.in_flight == 0
        for request_id in ("a", "b"):
            chunks = client.chunks[request_id]
            token_ids, _, num_rows = stream_of(chunks)
            assert chunks[-1].finish_reason is FinishReason.ABORT
            assert num_rows == PROMPT_LEN + len(token_ids) // 4 - 1


async def test_pause_wait_fails_at_its_timeout_and_the_worker_accepts_no_requests(
    controlled_worker: StartControlled,
) -> None:
    """When its time is over, pause(wait) fails with the number of requests in flight.

    These requests continue, and the worker accepts no others.
    """
    async with controlled_worker() as (client, boss, *_):
        await client.begin(endless("r"))
        failed = await boss.do("pause", mode="wait", timeout_s=0.3)
        assert (failed.status, failed.error.code, failed.in_flight) == (AckStatus.FAILED, ControlCode.TIMEOUT, 1)
        assert "1 requests are in flight" in failed.error.message

        await client.until_state("w", WorkerState.PAUSED)
        await client.enqueue(short("queued"))
        count = len(client.chunks["r"])
        await client.until(lambda: len(client.chunks["r"]) > count + 20)
        await client.until_left(1)
        again = await boss.do("pause", mode="wait", timeout_s=0.3)
        assert again.status is AckStatus.FAILED
        await boss.applied("pause", mode="abort")
        # Client and controller use separate connections, so messages to one prove nothing about the other.
        await client.until_ended("r")
        assert client.chunks["r"][-1].finish_reason is FinishReason.ABORT
        await boss.applied("resume")
        await client.until_ended("queued")


async def test_a_resume_makes_a_waiting_pause_stale(controlled_worker: StartControlled) -> None:
    """A crossing resume does not wait for the earlier pause: the pause becomes stale, and the worker serves."""
    async with controlled_worker() as (client, boss, *_):
        await client.begin(endless("r"))
        pause = await boss.command("pause", mode="wait", timeout_s=600)
        await boss.until(lambda: any(ack.stage == "pausing" for ack in boss.acks(pause)))
        await boss.applied("resume")

        assert [ack.status for ack in boss.finals(pause)] == [AckStatus.STALE]
        await client.complete(short("s"))
        assert not client.ended("r")


async def test_a_paused_worker_can_change_its_pause_mode(controlled_worker: StartControlled) -> None:
    """A wait after a keep finishes the paused requests. An abort after a keep aborts them."""
    async with controlled_worker() as (client, boss, *_):
        await client.begin(greedy(1, 300, request_id="r"))
        await boss.applied("pause", mode="keep")
        assert not client.ended("r")
        await boss.applied("pause", mode="wait")
        await client.until_ended("r")
        await boss.applied("resume")
        await client.begin(endless("s"))
        await boss.applied("pause", mode="keep")
        await boss.applied("pause", mode="abort")
        await client.until_ended("s")

        assert client.chunks["r"][-1].finish_reason is FinishReason.LENGTH
        assert client.chunks["s"][-1].finish_reason is FinishReason.ABORT


@pytest.mark.proves("P18", "P73")
async def test_a_repeated_command_is_recorded_once_and_gets_the_same_ack(controlled_worker: StartControlled) -> None:
    """A repeated command with one id is recorded once and gets the same ack each time."""
    async with controlled_worker() as (client, boss, *_):
        await client.begin(endless("r"))
        for _ in range(3):
            await boss.command("pause", id="p")
        await boss.final("p")
        for _ in range(2):
            await boss.command("pause", id="p")
        await boss.until(lambda: len(boss.finals("p")) >= 3)

        assert (await boss.desired()).epoch == 1


async def test_a_cache_flush_fails_while_requests_hold_the_cache(controlled_worker: StartControlled) -> None:
    """A flush fails if requests in flight hold the cache.

    It succeeds with `preempt`, or if no request is in flight.
    """
    async with controlled_worker() as (client, boss, *_):
        await boss.applied("flush_cache")
        await client.begin(endless("r"))
        failed = await boss.do("flush_cache")
        before = client.presences["w"].cache_epoch
        await boss.applied("flush_cache", preempt=True)
        # A flush of the cache makes the earlier announcements about it void.
        await client.until(lambda: client.presences["w"].cache_epoch > before)
        await client.until_serving("w")

        assert (failed.status, failed.error.code) == (AckStatus.FAILED, ControlCode.CACHE_IN_USE)
        assert not client.ended("r")


async def test_a_pause_with_clear_cache_removes_the_cache_of_paused_requests(nats_url: str, fleet: str) -> None:
    """clear_cache with `keep` removes the cache of paused requests. If the engine refuses, the pause fails."""
    faulty = SLOW.__class__.from_args({"step_s": 0.002, "faults": {"reset_cache": True}})
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="a", config=SLOW),
        synthetic_worker(nats_url, fleet, worker_id="b", config=faulty),
    ):
        await client.until_serving("a", "b")
        pause = await boss.command("pause", mode="keep", clear_cache=True)
        await boss.until(lambda: len(boss.finals(pause)) == 2)
        finals = {ack.worker: ack for ack in boss.finals(pause)}
        await client.until_state("b", WorkerState.PAUSED)

        assert finals["a"].status is AckStatus.APPLIED
        assert finals["b"].error.code is ControlCode.CACHE_IN_USE


async def test_requests_are_aborted_by_their_ids(nats_url: str, fleet: str, controlled_worker: StartControlled) -> None:
    """`abort` ends the named requests of all clients, also during a pause. The ack lists the aborted requests."""
    async with (
        controlled_worker() as (client, boss, *_),
        hand_client(nats_url, fleet, name="other", incarnation="o1") as other,
    ):
        for request_id in ("r", "s", "t"):
            await client.enqueue(endless(request_id))
        await other.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"] and client.chunks["s"] and client.chunks["t"])
        await other.until(lambda: other.chunks["r"])
        aborted = await boss.applied("abort", request_ids=["r", "unknown"])
        await client.until_ended("r")
        await other.until_ended("r")
        await boss.applied("pause")
        frozen = await boss.applied("abort", request_ids=["s"])
        await client.until_ended("s")

        assert (aborted.request_ids, aborted.in_flight, aborted.epoch) == (("r",), 2, None)
        assert (frozen.request_ids, frozen.in_flight) == (("s",), 1)
        assert not client.ended("t")
        for chunks in (client.chunks["r"], other.chunks["r"], client.chunks["s"]):
            token_ids, _, num_rows = stream_of(chunks)
            assert chunks[-1].finish_reason is FinishReason.ABORT
            assert num_rows == PROMPT_LEN + len(token_ids) // 4 - 1
        await boss.applied("resume")
        count = len(client.chunks["t"])
        await client.until(lambda: len(client.chunks["t"]) > count)


async def test_sleep_hands_over_requests_and_wake_restores_the_same_weights(controlled_worker: StartControlled) -> None:
    """`sleep` hands requests in flight to other workers. After `wake`, the worker serves the same weights."""
    async with controlled_worker() as (client, boss, *_):
        await client.complete(greedy(1, 20, request_id="before"))
        await client.begin(endless("r"))
        before = client.presences["w"].cache_epoch
        await boss.applied("sleep")
        await client.until_ended("r")
        await client.until_state("w", WorkerState.ASLEEP)
        assert client.presences["w"].cache_epoch > before
        await boss.applied("flush_cache")
        await boss.applied("pause")
        await client.until_state("w", WorkerState.ASLEEP)
        await boss.applied("wake")
        await client.until_state("w", WorkerState.PAUSED)
        await boss.applied("resume")
        await client.complete(greedy(1, 20, request_id="after"))

        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert stream_of(client.chunks["after"]) == stream_of(client.chunks["before"])


async def test_an_engine_paused_for_long_does_not_count_as_dead(controlled_worker: StartControlled) -> None:
    """The engine's time limit does not run during pause(keep), however long it is. Heartbeats and leases continue."""
    async with controlled_worker(engine_timeout_s=1.5) as (client, boss, *_):
        await client.begin(greedy(1, 300, request_id="r"))
        await boss.applied("pause")
        uptime_s, life = client.presences["w"].uptime_s, client.presences["w"].incarnation
        await client.until(lambda: client.presences["w"].uptime_s > uptime_s + 2.5)
        await boss.applied("resume")
        await client.until_ended("r")

        assert client.error_of("r") is None
        assert client.presences["w"].incarnation == life


async def test_deadlines_and_client_aborts_apply_during_a_pause(controlled_worker: StartControlled) -> None:
    """During a pause, a plain request ends at its deadline, and a request ends when its client aborts it."""
    async with controlled_worker() as (client, boss, *_):
        await client.enqueue(endless("r"))
        plain = greedy(1, 4_000_000, request_id="plain", timeout_s=1.0)
        await client.enqueue(plain, incarnation="", reply_to=f"{client.subjects.plain(client.name)}x")
        await client.until(lambda: client.chunks["r"])
        await boss.applied("pause")
        await client.abort("w", client.offers[0][1])
        await client.until_ended("r")
        # The first presence without requests may date from before the requests.
        await client.until_state("w", WorkerState.PAUSED)
        await client.until(lambda: client.presences["w"].in_flight == 0)

        assert client.presences["w"].state is WorkerState.PAUSED
        await boss.applied("pause", mode="wait")
