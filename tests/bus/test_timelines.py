"""`rb.fleet.timelines`: the events that workers report about a request, and the users that may read them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

import rollbus
from rollbus import RequestTrace, SamplingParams, WorkerTimeline
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.messages import RequestMessage, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.telemetry import TimelineEvent
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.test_placement import fleet_of, group
from tests.control.support import ask, folders, serving
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.hand_control import controlled
from tests.support.requests import endless, greedy, short, sized, start_stream
from tests.support.waits import until
from tests.workers.links_support import queued

SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}
QUEUE = {"placement": False}
PLAIN_LIFE = ["published", "offered", "started", "prefilled", "first_token", "ended"]


def names(timeline: WorkerTimeline) -> list[str]:
    """Return the names of a timeline's events."""
    return [event.event for event in timeline.events]


def only(trace: RequestTrace) -> WorkerTimeline:
    """Return the only timeline of a trace."""
    [timeline] = trace.timelines
    return timeline


def find(timeline: WorkerTimeline, name: str) -> TimelineEvent:
    """Return the only event with this name."""
    [event] = [event for event in timeline.events if event.event == name]
    return event


async def test_the_timeline_of_a_queued_request_is_in_order_of_time(one_worker: StartServed) -> None:
    """The worker reports lane, queue, prompt, cache, tokens and end of a queued request, in order of time."""
    async with one_worker(options={"client": "alice", **QUEUE}, config=SyntheticConfig(prefix_cache=True)) as (rb, *_):
        request = sized(64, 5, request_id="r", priority=3, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
        await rb.complete(sized(64, 5))
        result = await rb.complete(request)
        trace = await rb.fleet.timelines("r")

    told = only(trace)
    assert (trace.workers_asked, trace.workers_answered, trace.silent, trace.left_out) == (1, 1, {}, 0)
    assert (told.client, told.attempt, told.child, told.lane) == ("alice", 0, 0, "low")
    assert (told.prompt_tokens, told.traceparent) == (64, request.traceparent)
    assert names(told) == PLAIN_LIFE
    assert [event.at for event in told.events[1:]] == sorted(event.at for event in told.events[1:])
    assert find(told, "offered").weight_version == 0
    assert find(told, "prefilled").tokens == 64
    assert find(told, "prefilled").cached_tokens == result.cached_tokens
    assert result.cached_tokens
    assert (find(told, "ended").tokens, find(told, "ended").reason) == (5, "length")


async def test_timelines_show_that_samples_wait_for_a_slot(nats_url: str, fleet: str) -> None:
    """Samples that wait at a worker of four slots are offered immediately and started later.

    On a slow machine, some samples go to the queue. These samples have one timeline for the direct
    message and one for the queue.
    """
    async with fleet_of(nats_url, fleet, 1) as (rb, _):
        await rb.complete(group(1, max_tokens=40))
        trace = await rb.fleet.timelines("g1")

    served = [timeline for timeline in trace.timelines if find(timeline, "ended").reason == "length"]
    sent_away = [timeline for timeline in trace.timelines if timeline not in served]
    starts = sorted(find(timeline, "started").at for timeline in served)
    assert [timeline.child for timeline in served] == list(range(8))
    assert {find(timeline, "ended").tokens for timeline in served} == {40}
    # The engine starts queued requests immediately, and then has more requests than slots.
    assert sent_away or starts[4] >= min(find(timeline, "ended").at for timeline in served)
    assert {find(timeline, "ended").reason for timeline in sent_away} <= {"queue_full"}


async def test_a_timeline_shows_a_pause_that_keeps_requests(one_worker: StartServed) -> None:
    """The timeline of a paused request shows the time and token count of the pause, then its resume and abort."""
    async with one_worker(options=QUEUE, config=SyntheticConfig.from_args(SLOW)) as (rb, *_), asyncio.TaskGroup() as go:
        stream = await start_stream(go, rb, endless("r"))
        await rb.fleet.pause()
        paused = only(await rb.fleet.timelines("r"))
        await rb.fleet.pause(clear_cache=True)
        await rb.fleet.resume()
        await rb.fleet.abort(["r"])
        told = only(await rb.fleet.timelines("r"))
        await stream.reading

    assert names(paused)[-2:] == ["first_token", "held"]
    assert names(told)[-3:] == ["held", "resumed", "ended"]
    held, ended = find(told, "held"), find(told, "ended")
    assert held.reason == "pause"
    assert 0 < held.tokens <= ended.tokens
    assert ended.reason == "abort"


async def test_a_timeline_shows_an_update_during_a_request(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The timeline shows that an update holds a request, and after how many tokens the new version begins."""
    one, two = folders(tmp_path)
    async with serving(nats_url, fleet, one, 1, step_s=0.01) as (rb, _), asyncio.TaskGroup() as tasks:
        stream = await start_stream(tasks, rb, ask(max_tokens=300, request_id="r"))
        await rb.fleet.update_weights(two, version=2)
        await stream.reading
        told = only(await rb.fleet.timelines("r"))

    weights = find(told, "weights")
    assert (find(told, "offered").weight_version, weights.weight_version) == (1, 2)
    assert weights.tokens == stream.versions.index(2)
    assert find(told, "held").reason == "weights"
    assert names(told).index("held") < names(told).index("resumed") < names(told).index("weights")
    assert find(told, "ended").tokens == 300


async def test_a_request_without_a_token_is_restarted(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If new weights arrive before the first token, the prompt is computed again with the new weights."""
    one, two = folders(tmp_path)
    async with (
        serving(nats_url, fleet, one, 1, step_s=0.02, prefill_step_tokens=1) as (rb, _),
        asyncio.TaskGroup() as tasks,
    ):
        call = tasks.create_task(rb.complete(ask(*range(1, 400), max_tokens=4, request_id="r")))

        async def last_event() -> str | None:
            trace = await rb.fleet.timelines("r")
            return names(only(trace))[-1] if trace.timelines else None

        await until(last_event, "started")
        await rb.fleet.update_weights(two, version=2)
        result = await call
        told = only(await rb.fleet.timelines("r"))

    assert set(result.weight_versions) == {2}
    assert [name for name in names(told) if name not in ("published", "offered")] == [
        "started", "held", "restarted", "resumed", "prefilled", "weights", "first_token", "ended",
    ]  # fmt: skip
    assert find(told, "weights").tokens == 0


async def test_a_request_that_arrives_after_the_pulls_stopped_has_a_timeline(one_worker: StartServed) -> None:
    """A request on its way to a worker that stopped pulling returns to the queue, and has a timeline too."""
    message = queued()
    asked = RequestMessage(client="alice", incarnation="a1", request=msgspec.Raw(encode(short("late"))))
    message.data = encode(asked)
    async with one_worker(options=QUEUE) as (rb, worker, _):
        worker._puller.on_given_back(message)
        told = only(await rb.fleet.timelines("late"))

    assert (told.client, told.lane, told.events[-1].reason) == ("alice", "normal", "returned")


async def test_after_the_end_of_a_worker_the_other_one_reports_attempt_1(nats_url: str, fleet: str) -> None:
    """After a worker has ended during a stream, the other reports attempt 1, which begins with the earlier tokens."""
    config = SyntheticConfig.from_args(SLOW)
    async with (
        rollbus.connect(nats_url, fleet=fleet, placement=False) as rb,
        synthetic_worker(nats_url, fleet, worker_id="a", config=config) as (a, _),
        synthetic_worker(nats_url, fleet, worker_id="b", config=config) as (b, _),
    ):
        await rb.fleet.wait_for_workers(2)
        stream = rb.generate(greedy(5, 400, request_id="r"))
        chunks = [await anext(stream)]
        first = only(await rb.fleet.timelines("r"))
        doomed = a if first.worker == "a" else b
        doomed.stop()
        chunks += [chunk async for chunk in stream]
        trace = await rb.fleet.timelines("r")

    [told] = [timeline for timeline in trace.timelines if timeline.attempt > 0]
    before = sum(chunk.num_tokens for chunk in chunks if chunk.attempt == 0)
    assert (first.attempt, first.prompt_tokens) == (0, 3)
    assert {first.worker, told.worker} == {"a", "b"}
    assert (told.attempt, told.lane) == (1, "resume")
    assert told.prompt_tokens == 3 + before
    assert find(told, "ended").tokens == 400 - before
    assert trace.silent == {}


async def test_workers_of_an_earlier_release_are_named(nats_url: str, fleet: str) -> None:
    """The trace names workers of an earlier release, which are not asked."""
    async with controlled(nats_url, fleet, "old") as control:
        with pytest.raises(InvalidRequest, match="request_id is 'a '"):
            await control.rb.fleet.timelines("a ")
        trace = await control.rb.fleet.timelines("r", timeout_s=0.1)

        assert control.count("read_request") == 0
    assert (trace.timelines, trace.workers_answered) == ((), 0)
    assert trace.silent == {"old": "the worker runs an earlier release, which does not answer this command"}


async def test_each_of_n_samples_has_its_own_timeline(one_worker: StartServed) -> None:
    """Each of n samples has its own timeline under the same request id."""
    request = GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling=SamplingParams(n=3, max_tokens=4, ignore_eos=True), request_id="r"
    )
    async with one_worker() as (rb, *_):
        await rb.complete(request)
        trace = await rb.fleet.timelines("r")

    assert [(timeline.child, timeline.attempt) for timeline in trace.timelines] == [(0, 0), (1, 0), (2, 0)]
    assert {find(timeline, "ended").tokens for timeline in trace.timelines} == {4}
