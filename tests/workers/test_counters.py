"""The counters of a worker, and their announcement."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

import rollbus
from rollbus.bus.nats.connection import ConnectionStats
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.bus.protocol.telemetry.experts import PlaneLoad, merge_loads
from rollbus.bus.queue.puller import PullerStats
from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode, RequestError, RequestRejected
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES, MAX_TIMELINE_EVENTS
from rollbus.schemas.messages import RequestKey, RequestMessage, encode
from rollbus.schemas.presence import ClientState, RoutedExpertsInfo, WorkerCounters, WorkerPresence
from rollbus.schemas.rows import Rows
from rollbus.schemas.telemetry import RequestTimeline
from rollbus.workers.control.staging import StagerStats
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests.incoming import IncomingRequest
from rollbus.workers.requests.intake import IntakeStats
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.steps import ExpertCounter, WorkerLinkStats
from rollbus.workers.requests.table import Instructions
from rollbus.workers.worker import WorkerStats
from tests.support.fleet import synthetic_worker
from tests.support.waits import SOON_S
from tests.workers.links_support import (
    LATE,
    MAX_PAYLOAD,
    NOW,
    ROUTING,
    ROW_BYTES,
    Ear,
    capabilities,
    linked,
    make_links,
    queued,
    request_of,
    step,
)

PROMPT_LEN = 3


def test_a_worker_counts_the_tokens_and_rows_of_its_requests() -> None:
    """A worker counts the tokens and rows of its requests. Steps of other requests count as late."""
    links, ear = linked()
    name, _ = ear.offer("r", prompt_len=PROMPT_LEN, routing=True)
    links.add_steps(
        [step(name, 1, rows=(0, PROMPT_LEN)), step(name, 2, rows=(PROMPT_LEN, PROMPT_LEN + 2), end=True)], NOW
    )
    links.add_steps([step(name, 5)], NOW)

    stats = links.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.routing_bytes) == (PROMPT_LEN, 3, 5 * ROW_BYTES)
    assert stats.late_steps == 1


def test_the_seconds_of_weights_are_rounded_to_milliseconds() -> None:
    """Presence has the seconds of staging and of paused updates with three digits, and those of tokens with six."""
    stats = WorkerStats(
        intake=IntakeStats(), links=WorkerLinkStats(first_tokens_s=1.2345678), puller=PullerStats(), frames=0,
        frames_lost=0, bad_messages=0, bad_commands=0, times_fenced=0, connection=ConnectionStats(), credit_stalls=0,
        stagings=StagerStats(weights_staging_s=2.3456789, weights_paused_s=3.4567891),
    )  # fmt: skip
    counters = stats.counters()
    assert (counters.first_tokens_s, counters.weights_staging_s, counters.weights_paused_s) == (1.234568, 2.346, 3.457)


def test_times_of_tokens_are_added_up() -> None:
    """The time of a first token counts from the offer.

    The time of a later step counts once for each of its tokens, and steps without tokens count nothing.
    """
    links, ear = linked()
    (first, _), (second, _) = ear.offer("a"), ear.offer("b")
    links.add_steps([step(first, 0)], NOW + 1)
    links.add_steps([step(first, 2)], NOW + 3)
    links.add_steps([step(first, 4), step(second, 1)], NOW + 5)
    links.add_steps([step(first, 1, end=True)], NOW + 5.5)

    stats = links.stats
    assert (stats.first_tokens, stats.first_tokens_s) == (2, 3 + 5)
    assert (stats.next_tokens, stats.next_tokens_s) == (5, 2 + 0.5)
    assert stats.first_tokens + stats.next_tokens == stats.generated_tokens - 1


def test_stalls_of_removed_links_still_count() -> None:
    """A counter never falls: neither when a client is removed, nor when the worker has lost its lease."""
    links = make_links()
    seen = [links.outbound.credit_stalls]
    for client in ("alice", "bob"):
        ear = Ear(links, client=client)
        name, _ = ear.offer("r")
        for _ in range(3):
            links.add_steps([step(name, INITIAL_CREDIT_BYTES // 4)], NOW)
            ear.hear()
        seen.append(links.outbound.credit_stalls)
        links.expire(LATE)
        links.expire(LATE + 1000)
        seen.append(links.outbound.credit_stalls)
    ear = Ear(links, client="carol")
    name, _ = ear.offer("r")
    for _ in range(3):
        links.add_steps([step(name, INITIAL_CREDIT_BYTES // 4)], NOW)
        ear.hear()
    links.fence("w2", NOW, max_payload=MAX_PAYLOAD)

    assert seen == [0, 1, 1, 2, 2]
    assert links.outbound.credit_stalls == 3


async def test_a_worker_publishes_its_counters_and_counts_each_result_once(nats_url: str, fleet: str) -> None:
    """Each request is counted in one counter by its result. Another process of that name begins at 0."""
    config = SyntheticConfig(step_s=0.002)
    sampling = rollbus.SamplingParams(max_tokens=5, ignore_eos=True)
    prompt = [1] * PROMPT_LEN
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        async with synthetic_worker(nats_url, fleet, config=config, worker_id="w"):
            await rb.fleet.wait_for_workers()
            done = await rb.complete(rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
            long = rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=rollbus.SamplingParams(max_tokens=60_000))
            async with aclosing(rb.generate(long)) as chunks:
                await anext(chunks)
            with pytest.raises(rollbus.RequestRejected):
                await rb.complete(rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, lora="none"))
            first = await until_announced(rb, lambda worker: worker.counters is not None and worker.counters.aborted)
        async with synthetic_worker(nats_url, fleet, config=config, worker_id="w"):
            again = await until_announced(rb, lambda worker: worker.incarnation != first.incarnation)

    counters = first.counters
    assert (counters.requests, counters.ended, counters.aborted, counters.rejected) == (2, 1, 1, 1)
    assert counters.prompt_tokens == 2 * PROMPT_LEN
    assert counters.generated_tokens > 5
    assert counters.routing_bytes > done.routed_experts.nbytes
    assert counters.frames > 3
    assert (counters.first_tokens, counters.first_tokens + counters.next_tokens) == (2, counters.generated_tokens)
    assert min(counters.first_tokens_s, counters.next_tokens_s) > 0
    assert again.counters == WorkerCounters()


async def until_announced(rb: rollbus.Client, is_met: Callable[[WorkerPresence], object]) -> WorkerPresence:
    """Return the first presence of a worker for which `is_met` holds."""
    async with asyncio.timeout(SOON_S):
        while True:
            for worker in (await rb.fleet.state()).workers:
                if is_met(worker):
                    return worker


# The positions of engine steps that a worker counts. Each row names its position, so the counts show the rows.


EXPERT_COUNTER_PROMPT_LEN = 6


class Seen(NamedTuple):
    """The counts of one plane."""

    positions: list[int]
    """The positions whose rows were counted, repeated by their counts."""
    computed: int


class Rig:
    """Links that count, and a client whose request has a prompt of `PROMPT_LEN` tokens."""

    def __init__(self, *, routing: bool = True, gathers: bool = False) -> None:
        self.links = make_links()
        self.counter.begin(ROUTING, NOW)
        self.ear = Ear(self.links)
        self.name, _ = self.ear.offer("r", prompt_len=EXPERT_COUNTER_PROMPT_LEN, routing=routing, gathers=gathers)

    @property
    def counter(self) -> ExpertCounter:
        """The counter of the links."""
        return self.links.dispatcher.experts

    def add(self, *steps: RequestStep | TokenBatch) -> None:
        """Add steps as the engine's next step."""
        self.links.add_steps(steps, NOW)

    def seen(self, later_s: float = 5.0) -> dict[str, Seen]:
        """Return the counts by plane."""
        load = self.counter.load(0, "versions", NOW + later_s)
        assert load is not None
        window, left_out = merge_loads({"w": load})
        assert not left_out
        return {"prompt": _seen(window.prompt), "generated": _seen(window.generated)}


def _seen(plane: PlaneLoad) -> Seen:
    """Return the counts, and assert that every layer and choice has the same."""
    assert (plane.counts == plane.counts[0]).all()
    times = plane.counts[0] // ROUTING.top_k
    assert plane.seen == times.sum()
    return Seen(np.repeat(np.arange(len(times)), times).tolist(), plane.computed)


def rows(first: int, past: int) -> Rows:
    """Return the rows of these positions, each with the expert of its own number."""
    positions = np.arange(first, past, dtype=np.uint8)
    return np.broadcast_to(positions[:, None, None], (past - first, ROUTING.num_layers, ROUTING.top_k)).copy()


def made(
    name: str, num_tokens: int, first: int | None = None, past: int = 0, *, cached: int | None = None, end: bool = False
) -> RequestStep:
    """Return an engine step with the rows of these positions."""
    one = step(name, num_tokens, end=end)
    if first is not None:
        one.routed_experts, one.routed_experts_start = rows(first, past), first
    one.cached_tokens = cached
    return one


def batch_of(names: list[str], positions: list[int] | None) -> TokenBatch:
    """Return a batch with one token of each request, with the rows of these positions."""
    found = None if positions is None else np.concatenate([rows(position, position + 1) for position in positions])
    starts = None if positions is None else np.array(positions, np.int64)
    return TokenBatch(
        keys=names, token_ids=np.full(len(names), 7, np.int32), routed_experts=found, routed_experts_starts=starts
    )


@pytest.fixture(params=[False, True], ids=["streamed", "gathered"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Return a rig with a client that streams, and one whose results are not streamed."""
    return Rig(gathers=request.param)


def test_rows_of_the_prompt_and_of_generated_tokens_are_counted_separately(rig: Rig) -> None:
    """The first step has the rows of the prompt, and each later step has the row of the token before.

    The last token was never computed.
    """
    rig.add(made(rig.name, 1, 0, 6, cached=0))
    rig.add(batch_of([rig.name], [6]))
    rig.add(batch_of([rig.name], [7]))
    rig.add(made(rig.name, 1, 8, 9, end=True))

    assert rig.seen() == {"prompt": Seen([0, 1, 2, 3, 4, 5], 6), "generated": Seen([6, 7, 8], 3)}


def test_cached_prompt_positions_are_not_counted(rig: Rig) -> None:
    """Cached prompt positions are not counted, although the engine returns their rows."""
    rig.add(made(rig.name, 1, 0, 6, cached=4))
    rig.add(batch_of([rig.name], [6]))

    assert rig.seen() == {"prompt": Seen([4, 5], 2), "generated": Seen([6], 1)}


def test_several_tokens_in_a_step_count_each(rig: Rig) -> None:
    """Each token of a step counts, as with speculative decoding, also in the first step."""
    rig.add(made(rig.name, 3, 0, 8, cached=2))
    rig.add(made(rig.name, 2, 8, 10))

    assert rig.seen() == {"prompt": Seen([2, 3, 4, 5], 4), "generated": Seen([6, 7, 8, 9], 4)}


def test_requests_without_routing_count_as_computed_and_not_as_seen() -> None:
    """Requests without routing count as computed and not as seen, which shows the share that the counts cover."""
    rig = Rig()
    declined, _ = rig.ear.offer("declined", prompt_len=EXPERT_COUNTER_PROMPT_LEN, routing=False)
    rig.add(made(declined, 1, cached=1))
    rig.add(batch_of([declined], None))

    assert rig.seen() == {"prompt": Seen([], 5), "generated": Seen([], 1)}


def test_positions_below_start_count_as_computed_and_not_as_seen() -> None:
    """The rows begin with the request's `start`, so positions below it count as computed only."""
    rig = Rig()
    message = queued()
    request = request_of(EXPERT_COUNTER_PROMPT_LEN, request_id="s", routed_experts_prompt_start=4)
    name = rig.links.offer(rig.ear.origin("s", message), request, capabilities(), NOW)
    rig.add(made(name, 1, 4, 6, cached=2))
    rig.add(batch_of([name], [6]))

    assert rig.seen() == {"prompt": Seen([4, 5], 4), "generated": Seen([6], 1)}


def test_positions_recomputed_after_a_preemption_are_counted_again(rig: Rig) -> None:
    """After a preemption, six prompt and two generated positions count as computed again, without rows.

    The third generated position counts normally.
    """
    rig.add(made(rig.name, 1, 0, 6, cached=4))
    rig.add(batch_of([rig.name], [6]))
    rig.add(batch_of([rig.name], [7]))
    again = made(rig.name, 1, 8, 9)
    again.kv_recomputed = True
    rig.add(again)

    assert rig.seen() == {"prompt": Seen([4, 5], 2 + 6), "generated": Seen([6, 7, 8], 2 + 2 + 1)}


def test_a_prompt_is_counted_with_its_first_token(rig: Rig) -> None:
    """A prompt is counted with its first token, because new weights may restart requests before it."""
    rig.add(made(rig.name, 0, 0, 3, cached=1))
    rig.links.requests.restart_unbegun(None)
    rig.add(made(rig.name, 0, 0, 4, cached=2))
    rig.add(made(rig.name, 1, 4, 6))

    assert rig.seen() == {"prompt": Seen([2, 3, 4, 5], 4), "generated": Seen([], 0)}


def test_steps_of_ended_requests_are_not_counted(rig: Rig) -> None:
    """Steps of ended and of unknown requests are not counted."""
    other, _ = rig.ear.offer("other", prompt_len=EXPERT_COUNTER_PROMPT_LEN, routing=True)
    rig.add(made(rig.name, 1, 0, 6, cached=0), made(other, 1, 0, 6, cached=5))
    rig.add(made(rig.name, 1, 6, 7, end=True))
    rig.add(made(rig.name, 1, 7, 8))
    rig.add(batch_of([rig.name, other, "never"], [8, 6, 20]))

    assert rig.seen() == {"prompt": Seen([0, 1, 2, 3, 4, 5, 5], 7), "generated": Seen([6, 6], 2)}


def test_a_version_counts_from_its_first_step_on() -> None:
    """Steps before the first step of a new version count for the old one. A new incarnation begins at 0."""
    rig = Rig()
    rig.add(made(rig.name, 1, 0, 6, cached=0))
    rig.links.versions.weight_version = 7
    rig.add(made(rig.name, 1, 6, 7))
    load = rig.counter.load(0, "recent", NOW + 5.0)

    assert [(counts.weight_version, counts.generated_tokens.seen) for counts in load.counts] == [(7, 1), (0, 0)]
    assert [counts.prompt_tokens.seen for counts in load.counts] == [0, 6]
    rig.links.fence("w2", NOW + 6.0, max_payload=1 << 20)
    load = rig.counter.load(0, "recent", NOW + 12.0)
    assert not load.counts


def test_an_engine_without_routing_has_no_expert_load() -> None:
    """An engine without routing has no load.

    An engine that has not started, or that has too many experts, causes an error with that reason.
    """
    counter = ExpertCounter()
    with pytest.raises(ControlError, match="has not started") as caught:
        counter.load(0, "recent", NOW)
    assert caught.value.code is ControlCode.NOT_SERVING
    counter.begin(None, NOW)
    assert counter.load(0, "recent", NOW) is None
    counter.begin(RoutedExpertsInfo(num_layers=1024, top_k=1, num_experts=1024, dtype="<u2"), NOW)
    with pytest.raises(ControlError, match="1024 layers x 1024 experts; allowed for counting: 262144") as caught:
        counter.load(0, "recent", NOW)
    assert caught.value.code is ControlCode.UNSUPPORTED


# The timelines of a worker's requests: changes of their tokens, their ends, and requests that were rejected.


ENDS = {
    "engine": ("length", 3),
    "error": ("engine_error", 2),
    "abort": ("abort", 2),
    "closed": ("client_lost", 2),
    "silent": ("client_lost", 2),
    "broken": ("returned", 2),
    "fence": ("worker_fenced", 2),
}
"""The reason and the tokens of the end, by action."""


def timeline_of(links: WorkerLinks, request_id: str = "r") -> RequestTimeline:
    """Return the only timeline of a request."""
    [timeline], _ = links.requests.timelines.find(request_id)
    return timeline


def batch(*names: str) -> TokenBatch:
    """Return one token for each of these requests."""
    return TokenBatch(keys=list(names), token_ids=np.full(len(names), 7, np.int32))


@pytest.mark.parametrize("act", ENDS)
def test_the_timeline_of_each_ended_request_has_the_reason(act: str) -> None:
    """Each end of a request is in its timeline, with the reason and the tokens that its link received.

    No timeline remains open.
    """
    links, ear = linked()
    name, _ = ear.offer("r")
    links.add_steps([step(name, 2)], NOW)
    ear.hear()
    match act:
        case "engine":
            links.add_steps([step(name, 1, end=True)], NOW)
        case "error":
            links.fail([name], RequestError(code=ErrorCode.ENGINE_ERROR, message="by hand"))
        case "abort":
            links.on_link_message("alice", ear.message([RequestKey("r")]), NOW)
        case "closed":
            links.on_presence(ear.presence(), NOW)
            links.on_presence(ear.presence(ClientState.CLOSED), NOW)
        case "silent":
            links.on_presence(ear.presence(), NOW)
            links.expire(LATE)
        case "broken":
            [link] = links.outbound.links()
            links.break_link(link, Instructions())
        case _:
            links.fence("w2", NOW, max_payload=1 << 20)

    end = timeline_of(links).events[-1]
    assert (end.event, (end.reason, end.tokens)) == ("ended", ENDS[act])
    assert "in_flight=0 ended=1" in repr(links.requests.timelines)


def test_batched_tokens_count_under_their_version() -> None:
    """For batched tokens of two requests, each timeline has the number of tokens before the new version."""
    links, ear = linked()
    names = [ear.offer(request_id, gathers=True)[0] for request_id in ("r", "s")]
    links.add_steps([step(name) for name in names], NOW)
    links.add_steps([batch(*names)], NOW)
    links.add_steps([batch(names[0])], NOW)
    links.flush()
    links.versions.weight_version = 3
    links.add_steps([batch(*names)], NOW)
    links.add_steps([batch(*names)], NOW)
    links.add_steps([step(name, 1, end=True) for name in names], NOW)

    for request_id, before in (("r", 3), ("s", 2)):
        events = timeline_of(links, request_id).events
        changes = [(event.weight_version, event.tokens) for event in events if event.event == "weights"]
        assert changes == [(3, before)]
        assert events[-1].tokens == before + 3


def test_tokens_add_no_events_to_a_timeline() -> None:
    """A timeline has only changes, however many steps a request has, streamed or batched."""
    links, ear = linked()
    streamed, gathered = ear.offer("streamed")[0], ear.offer("gathered", gathers=True)[0]
    links.add_steps([step(streamed), step(gathered)], NOW)
    for _ in range(2 * MAX_TIMELINE_EVENTS):
        links.add_steps([batch(streamed, gathered)], NOW)
    links.add_steps([step(streamed, 1, end=True), step(gathered, 1, end=True)], NOW)

    for request_id in ("streamed", "gathered"):
        assert [event.event for event in timeline_of(links, request_id).events] == [
            "published", "offered", "prefilled", "first_token", "ended",
        ]  # fmt: skip
        assert timeline_of(links, request_id).events[-1].tokens == 2 * MAX_TIMELINE_EVENTS + 2


@pytest.mark.parametrize("is_queued", [True, False])
def test_the_timeline_of_a_rejected_request_ends_with_the_error_code(is_queued: bool) -> None:
    """A rejected request, queued or placed, ends with the error's code in its timeline."""
    links, ear = linked()
    message = queued() if is_queued else None
    links.reject(ear.origin("r", message), RequestRejected(code=ErrorCode.QUEUE_FULL, message="by hand"), NOW)

    timeline = timeline_of(links)
    assert timeline.lane == ("normal" if is_queued else None)
    assert [event.event for event in timeline.events] == (["published"] if is_queued else []) + ["ended"]
    assert timeline.events[-1].reason == "queue_full"
    assert "in_flight=0 ended=0 refused=1" in repr(links.requests.timelines)


def test_a_second_delivery_does_not_end_the_timeline_of_a_running_request() -> None:
    """If a second delivery goes back to the queue, the timeline of the running request stays open."""
    links, ear = linked()
    request = request_of(request_id="r")
    message = queued()
    asked = RequestMessage(client=ear.client, incarnation=ear.incarnation, request=msgspec.Raw(encode(request)))
    message.data = encode(asked)
    [origin] = IncomingRequest.origins_in(message)
    links.offer(origin, request, capabilities(), NOW)

    links.note_returned([message])

    assert "in_flight=1 ended=0 refused=0" in repr(links.requests.timelines)


def test_a_message_that_cannot_be_decoded_gets_no_timeline() -> None:
    """A message that cannot be decoded has no id, so it gets no timeline."""
    links = make_links()
    message = queued()
    message.data = b"\xc1"

    links.note_returned([message])

    assert "refused=0" in repr(links.requests.timelines)
