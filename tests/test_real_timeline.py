"""The timeline of one request on a vLLM worker is in the order of time and agrees with the client's numbers."""

import pytest

import rollbus
from rollbus import WorkerTimeline
from tests.support.real_fleet import WEIGHT_VERSION, greedy
from tests.support.streams import all_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LIFE = ["published", "offered", "started", "prefilled", "first_token", "ended"]


async def test_a_timeline_agrees_with_the_result(nats_url: str, real_fleet: str) -> None:
    """The timelines of a streamed request and of the same request without streaming agree with their results."""
    async with rollbus.connect(nats_url, fleet=real_fleet, client="alice", placement=False) as rb:
        streamed, whole = (greedy(200, 40, seed=7, request_id=f"timeline-{name}") for name in ("streamed", "whole"))
        chunks = await all_of(rb.generate(streamed))
        result = await rb.complete(whole)
        [first] = (await rb.fleet.timelines(streamed.request_id)).timelines
        [second] = (await rb.fleet.timelines(whole.request_id)).timelines

    for timeline in (first, second):
        check_event_order(timeline)
        assert (timeline.client, timeline.attempt, timeline.child, timeline.prompt_tokens) == ("alice", 0, 0, 200)
        assert timeline.events[1].weight_version == WEIGHT_VERSION
        assert timeline.events[3].tokens == 200
        assert timeline.events[-1].reason == "length"
    assert first.events[-1].tokens == sum(chunk.num_tokens for chunk in chunks) == 40
    assert second.events[-1].tokens == len(result.token_ids) == 40
    assert (first.worker,) == result.worker_ids
    end = chunks[-1].end
    assert end is not None
    assert first.events[3].cached_tokens == (end.cached_tokens or 0)
    assert second.events[3].cached_tokens == result.cached_tokens
    assert result.cached_tokens


def check_event_order(timeline: WorkerTimeline) -> None:
    """Assert that the events have the expected order by the clock of the worker, which runs on the server's machine."""
    assert [event.event for event in timeline.events] == LIFE
    times = [event.at for event in timeline.events]
    assert times == sorted(times)
    assert times[2] < times[4] < times[5]
