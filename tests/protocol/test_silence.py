"""When a worker that offered to run a request is silent."""

import pytest

from rollbus.bus.protocol.attempt import events as on
from rollbus.bus.protocol.attempt.machine import AttemptMachine, RequestState
from rollbus.bus.protocol.attempt.suspects import AVOID_S, BUSY_FACTOR, MAX_MOVES, SILENT_S, SilenceWatch
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.errors import ErrorCode, RequestFailed
from tests.support.requests import sized


def offered(prompt_len: int = 3, *, worker: str = "w", now: float = 0.0) -> AttemptMachine:
    """Return a request that a worker has offered to run."""
    request = AttemptMachine(
        ResponseStream(sized(prompt_len), child=0, attempt=0, keep=True), b"", now=now, deadline=1e9
    )
    request.handle(on.PublishingPossible(max_bytes=1 << 20, is_served=True), now)
    request.handle(on.Offered(worker, "life"), now)
    request.heard_at = now
    return request


def check(watch: SilenceWatch, *requests: AttemptMachine, now: float) -> list[AttemptMachine]:
    """Check requests whose workers serve."""
    return watch.check(requests, frozenset(), 1.0, now)


@pytest.mark.parametrize("prompt_len", [3, 50_000])
def test_a_worker_is_silent_after_two_minutes_and_a_second_for_a_thousand_prompt_tokens(prompt_len: int) -> None:
    """The limit is 120 s, and a second more for each 1,000 prompt tokens; then the worker is avoided."""
    watch, request, limit = SilenceWatch(), offered(prompt_len), SILENT_S + prompt_len / 1000

    assert check(watch, request, now=limit) == []
    assert not watch.avoided
    assert check(watch, request, now=limit + 0.1) == [request]
    assert set(watch.avoided) == {"w"}


def test_a_token_restarts_the_limit() -> None:
    """A request that gets tokens is moved only if the next token takes too long."""
    watch, request = SilenceWatch(), offered()
    request.has_token, request.heard_at = True, 100.0

    assert check(watch, request, now=100 + SILENT_S) == []
    assert check(watch, request, now=101 + SILENT_S) == [request]


def test_a_worker_that_sends_tokens_of_other_requests_has_ten_times_as_long() -> None:
    """An engine without free KV blocks holds some requests back: it has longer while it sends tokens of others."""
    watch, waiting, running = SilenceWatch(), offered(), offered()
    running.has_token = True
    for now in range(0, int(SILENT_S * BUSY_FACTOR), 10):
        running.heard_at = float(now)
        assert check(watch, waiting, running, now=now) == []
    running.heard_at = SILENT_S * BUSY_FACTOR + 1

    assert check(watch, waiting, running, now=running.heard_at) == [waiting]


def test_recorded_pauses_do_not_count() -> None:
    """The time in which the recorded state pauses the worker does not count."""
    watch, request = SilenceWatch(), offered()
    for now in range(1, 1000):
        assert watch.check([request], {"w"}, 1.0, float(now)) == []

    assert check(watch, request, now=999 + SILENT_S) == []
    assert check(watch, request, now=1000 + SILENT_S) == [request]


def test_after_two_moves_a_request_stays() -> None:
    """A request leaves two silent workers, and then stays until its deadline."""
    watch, request = SilenceWatch(), offered()
    for move in range(1, MAX_MOVES + 1):
        assert check(watch, request, now=move * 1000.0) == [request]
        request.heard_at = move * 1000.0

    assert check(watch, request, now=1e6) == []


def test_a_silent_worker_is_used_again_after_a_token_a_restart_or_ten_minutes() -> None:
    """The client avoids a silent worker until it sends a token, restarts, or ten minutes have passed."""
    watch, request = SilenceWatch(), offered()
    check(watch, request, now=1000.0)
    watch.forget("w", "life")
    assert set(watch.avoided) == {"w"}
    check(watch, now=999.0 + AVOID_S)
    assert set(watch.avoided) == {"w"}
    watch.forget("w", "next life")
    assert not watch.avoided

    check(watch, request, now=2000.0)
    check(watch, now=2000.0 + AVOID_S)
    assert not watch.avoided

    other = offered(now=3000.0)
    check(watch, other, now=4000.0)
    other.has_token, other.heard_at = True, 4001.0
    check(watch, other, now=4002.0)
    assert not watch.avoided


def test_a_request_that_only_an_avoided_worker_offered_leaves_the_queue() -> None:
    """If the client avoids the worker that took a queued request, the request is published again at once.

    This does not count as an attempt.
    """
    request = AttemptMachine(ResponseStream(sized(), child=0, attempt=0, keep=True), b"", now=0.0, deadline=1e9)
    request.handle(on.PublishingPossible(max_bytes=1 << 20, is_served=True), 0.0)
    request.handle(on.Stored(0), 0.0)
    error = RequestFailed(code=ErrorCode.WORKER_LOST, message="silent")
    instructions = request.handle(on.WorkerSilent(error), 1.0)

    assert request.state is RequestState.READY
    assert instructions == (on.Retract(error), on.Schedule())
    assert (request.stream.attempt, request.stream.num_attempts) == (1, 1)
