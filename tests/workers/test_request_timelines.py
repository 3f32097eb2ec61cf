"""The timelines of a worker's requests: changes of their tokens, their ends, and requests that were rejected."""

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import TokenBatch
from rollbus.schemas.errors import ErrorCode, RequestError, RequestRejected
from rollbus.schemas.limits import MAX_TIMELINE_EVENTS
from rollbus.schemas.messages import RequestKey, RequestMessage, encode
from rollbus.schemas.presence import ClientState
from rollbus.schemas.telemetry import RequestTimeline
from rollbus.workers.requests.incoming import IncomingRequest
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.table import Instructions
from tests.workers.links_support import LATE, NOW, Ear, capabilities, make_links, queued, request_of, step

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
    links = make_links()
    ear = Ear(links)
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
    links = make_links()
    ear = Ear(links)
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
    links = make_links()
    ear = Ear(links)
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
    links = make_links()
    ear = Ear(links)
    message = queued() if is_queued else None
    links.reject(ear.origin("r", message), RequestRejected(code=ErrorCode.QUEUE_FULL, message="by hand"), NOW)

    timeline = timeline_of(links)
    assert timeline.lane == ("normal" if is_queued else None)
    assert [event.event for event in timeline.events] == (["published"] if is_queued else []) + ["ended"]
    assert timeline.events[-1].reason == "queue_full"
    assert "in_flight=0 ended=0 refused=1" in repr(links.requests.timelines)


def test_a_second_delivery_does_not_end_the_timeline_of_a_running_request() -> None:
    """If a second delivery goes back to the queue, the timeline of the running request stays open."""
    links = make_links()
    ear = Ear(links)
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
