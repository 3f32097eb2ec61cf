"""Commands as raw JSON, and what one worker makes of them."""

import pytest

from schemas.chunk import FinishReason
from schemas.control import AckStatus
from schemas.errors import ControlCode, ErrorCode
from schemas.messages import Frame
from schemas.presence import WorkerState
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_controller import hand_controller
from tests.workers.control_requests import (
    PROMPT_LEN,
    SLOW,
    endless,
    request_for,
    stream_of,
    until_left,
    until_state,
)

pytestmark = pytest.mark.slow


async def test_a_kept_stream_goes_on_where_it_was(nats_url: str, fleet: str) -> None:
    """After pause(keep) and resume a stream is that of an undisturbed run; in between nothing is published (I4)."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(request_for(400, "undisturbed"))
        await client.until_ended("undisturbed")
        await client.enqueue(request_for(400, "paused"))
        await client.until(lambda: len(client.chunks["paused"]) > 20)
        paused = await boss.applied("pause", mode="keep")
        await client.enqueue(request_for(3, "queued"))
        await until_state(client, "w", WorkerState.PAUSED)
        presence = client.presences["w"]
        await until_left(client, 1)
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


async def test_a_waiting_pause_is_applied_when_nothing_is_in_flight(nats_url: str, fleet: str) -> None:
    """pause(wait) is accepted at once and applied behind the last chunk of what was in flight."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(request_for(300, "r"))
        await client.until(lambda: client.chunks["r"])
        paused = await boss.applied("pause", mode="wait")
        resumed = await boss.applied("resume")

        assert client.ended("r")
        assert paused.in_flight == 0
        assert [ack.status for ack in boss.acks(paused.id)][:2] == [AckStatus.ACCEPTED, AckStatus.PROGRESS]
        assert boss.chunks_between(paused, boss.acks(resumed.id)[0]) == 0


async def test_an_aborting_pause_ends_streams_with_what_they_have(nats_url: str, fleet: str) -> None:
    """pause(abort) ends each stream with `abort` and the rows of the tokens delivered; then nothing is in flight."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW) as (_, engine),
    ):
        await client.until_serving("w")
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


async def test_a_pause_that_waits_too_long_fails_and_still_takes_nothing(nats_url: str, fleet: str) -> None:
    """When its time is over, pause(wait) has failed and says how much is in flight, which goes on; nothing is taken."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        failed = await boss.do("pause", mode="wait", timeout_s=0.3)
        assert failed.error is not None
        assert (failed.status, failed.error.code, failed.in_flight) == (AckStatus.FAILED, ControlCode.TIMEOUT, 1)
        assert "1 requests are in flight" in failed.error.message

        await until_state(client, "w", WorkerState.PAUSED)
        await client.enqueue(request_for(3, "queued"))
        count = len(client.chunks["r"])
        await client.until(lambda: len(client.chunks["r"]) > count + 20)
        await until_left(client, 1)
        again = await boss.do("pause", mode="wait", timeout_s=0.3)
        assert again.status is AckStatus.FAILED
        await boss.applied("pause", mode="abort")
        assert client.chunks["r"][-1].finish_reason is FinishReason.ABORT
        await boss.applied("resume")
        await client.until_ended("queued")


async def test_a_resume_ends_a_pause_that_still_waits(nats_url: str, fleet: str) -> None:
    """A crossing resume does not wait for the pause before it: that one is stale, and the worker serves."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        pause = await boss.command("pause", mode="wait", timeout_s=600)
        await boss.until(lambda: any(ack.stage == "pausing" for ack in boss.acks(pause)))
        await boss.applied("resume")

        assert [ack.status for ack in boss.finals(pause)] == [AckStatus.STALE]
        await client.enqueue(request_for(3, "s"))
        await client.until_ended("s")
        assert not client.ended("r")


async def test_a_paused_worker_goes_from_one_mode_to_another(nats_url: str, fleet: str) -> None:
    """keep, then wait: what was frozen is finished; keep, then abort: it is ended."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(request_for(300, "r"))
        await client.until(lambda: client.chunks["r"])
        await boss.applied("pause", mode="keep")
        assert not client.ended("r")
        await boss.applied("pause", mode="wait")
        await client.until_ended("r")
        await boss.applied("resume")
        await client.enqueue(endless("s"))
        await client.until(lambda: client.chunks["s"])
        await boss.applied("pause", mode="keep")
        await boss.applied("pause", mode="abort")
        await client.until_ended("s")

        assert client.chunks["r"][-1].finish_reason is FinishReason.LENGTH
        assert client.chunks["s"][-1].finish_reason is FinishReason.ABORT


async def test_a_repeated_command_has_one_effect_and_one_answer(nats_url: str, fleet: str) -> None:
    """Under one id a command is recorded once and answered with the same words, however often it comes."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        for _ in range(3):
            await boss.command("pause", id="p")
        await boss.final("p")
        for _ in range(2):
            await boss.command("pause", id="p")
        await boss.until(lambda: len(boss.finals("p")) >= 3)

        assert (await boss.desired()).epoch == 1


async def test_a_flush_says_what_the_engine_says(nats_url: str, fleet: str) -> None:
    """A cache that requests in flight hold is a failure; with `preempt`, or with nothing in flight, it is flushed."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await boss.applied("flush_cache")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        failed = await boss.do("flush_cache")
        await boss.applied("flush_cache", preempt=True)
        await client.until_serving("w")

        assert failed.error is not None
        assert (failed.status, failed.error.code) == (AckStatus.FAILED, ControlCode.CACHE_IN_USE)
        assert not client.ended("r")


async def test_a_pause_may_clear_the_cache(nats_url: str, fleet: str) -> None:
    """clear_cache with `keep` takes the cache from what is frozen; where the engine refuses, the pause has failed."""
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
        await until_state(client, "b", WorkerState.PAUSED)

        assert finals["a"].status is AckStatus.APPLIED
        assert finals["b"].error is not None
        assert finals["b"].error.code is ControlCode.CACHE_IN_USE


async def test_requests_are_aborted_by_their_ids(nats_url: str, fleet: str) -> None:
    """`abort` ends what it names, of whichever client, also while all is frozen; the answer says what was there."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_client(nats_url, fleet, name="other", incarnation="o1") as other,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
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


async def test_a_sleeping_worker_hands_over_and_wakes_with_its_weights(nats_url: str, fleet: str) -> None:
    """`sleep` gives requests in flight to others; after `wake` the same weights serve."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(request_for(20, "before"))
        await client.until_ended("before")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        await boss.applied("sleep")
        await client.until_ended("r")
        await until_state(client, "w", WorkerState.ASLEEP)
        await boss.applied("flush_cache")
        await boss.applied("pause")
        await until_state(client, "w", WorkerState.ASLEEP)
        await boss.applied("wake")
        await until_state(client, "w", WorkerState.PAUSED)
        await boss.applied("resume")
        await client.enqueue(request_for(20, "after"))
        await client.until_ended("after")

        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert stream_of(client.chunks["after"]) == stream_of(client.chunks["before"])


async def test_a_frozen_engine_is_not_dead(nats_url: str, fleet: str) -> None:
    """The engine's time limit stands still under pause(keep), however long that is; heartbeats and leases go on."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW, engine_timeout_s=1.5),
    ):
        await client.until_serving("w")
        await client.enqueue(request_for(300, "r"))
        await client.until(lambda: client.chunks["r"])
        await boss.applied("pause")
        uptime_s, life = client.presences["w"].uptime_s, client.presences["w"].incarnation
        await client.until(lambda: client.presences["w"].uptime_s > uptime_s + 2.5)
        await boss.applied("resume")
        await client.until_ended("r")

        assert client.error_of("r") is None
        assert client.presences["w"].incarnation == life


async def test_time_limits_and_aborts_of_clients_hold_under_a_pause(nats_url: str, fleet: str) -> None:
    """A plain request past its deadline, and one that its client stops, end while the engine is frozen."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        plain = request_for(4_000_000, "plain", timeout_s=1.0)
        await client.enqueue(plain, incarnation="", reply_to=f"{client.subjects.plain(client.name)}x")
        await client.until(lambda: client.chunks["r"])
        await boss.applied("pause")
        await client.abort("w", client.offers[0][1])
        await client.until_ended("r")
        await client.until(lambda: client.presences["w"].in_flight == 0)

        assert client.presences["w"].state is WorkerState.PAUSED
        await boss.applied("pause", mode="wait")
