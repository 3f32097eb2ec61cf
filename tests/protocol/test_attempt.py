"""The instructions of a child request at each event: its attempts, its workers and its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollbus.bus.protocol.attempt import events as on
from rollbus.bus.protocol.attempt.machine import QUEUE_MISSING_S, UNPUBLISHED, AttemptMachine, RequestState
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk, ChunkError, End, FinishReason
from rollbus.schemas.errors import ErrorCode, RequestError, RequestFailed, request_error
from rollbus.schemas.limits import MAX_ATTEMPTS
from rollbus.schemas.messages import RequestKey, decode_request, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

PROMPT_LEN, NUM_TOKENS, DEADLINE_S = 5, 7, 1000.0
WORKERS = ("w0", "w1", "w2")
SPOKEN_OF_WORKER = (ErrorCode.WORKER_STOPPED, ErrorCode.OVER_BUDGET, ErrorCode.KV_TRANSFER_FAILED)
SPOKEN_OF_REQUEST = (ErrorCode.ENGINE_ERROR, ErrorCode.UNSUPPORTED)
REFUSALS = (ErrorCode.QUEUE_FULL, ErrorCode.WEIGHTS_TOO_OLD, *SPOKEN_OF_REQUEST)


def machine(*, keep: bool = True, attempt: int = 0, session_id: str | None = None) -> AttemptMachine:
    """Return a request for `NUM_TOKENS` tokens that was just submitted."""
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(PROMPT_LEN)),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, logprobs=None),
        session_id=session_id,
    )
    stream = ResponseStream(request, child=0, attempt=attempt, keep=keep)
    return AttemptMachine(stream, encode(request), now=0.0, deadline=DEADLINE_S)


def failure(code: ErrorCode = ErrorCode.WORKER_LOST) -> RequestError:
    """Return an error of the request."""
    return request_error(code, "for a reason", request_id="r")


def possible(*, direct_to: str | None = None, prefill: int | None = None, served: bool = True) -> on.PublishingPossible:
    """Return the event that the client can publish."""
    return on.PublishingPossible(10_000, served, direct_to=direct_to, num_prefill_workers=prefill)


def kinds(instructions: Sequence[on.Instruction]) -> list[type[on.Instruction]]:
    """Return the types of the instructions."""
    return [type(instruction) for instruction in instructions]


def published(*, keep: bool = True) -> AttemptMachine:
    """Return a request that the queue stores."""
    found = machine(keep=keep)
    assert kinds(found.handle(possible(), 1.0)) == [on.Publish]
    assert found.handle(on.Stored(0), 2.0) == ()
    return found


def running(*, worker: str = "w0") -> AttemptMachine:
    """Return a request that a worker runs."""
    found = published()
    assert found.handle(on.Offered(worker, "one"), 3.0) == (on.RecordAdmission(2.0),)
    return found


@dataclass
class Job:
    """A worker's copy of one attempt or phase, whose token ids are their positions."""

    worker: str
    key: RequestKey
    request: GenerateRequest
    is_prefill: bool
    wire: list[Chunk | None] = field(default_factory=list)
    """Chunks on their way to the client, in the order of the link. None stands for the offer."""
    num_chunks: int = 0
    num_tokens: int = 0
    is_over: bool = False

    def chunk(self, num_tokens: int, error: ChunkError | None = None) -> None:
        """Send more tokens or an error."""
        left = (self.request.sampling.max_tokens or 0) - self.num_tokens
        first, count = self.request.prompt_len + self.num_tokens, 0 if error else min(num_tokens, left)
        self.num_tokens += count
        self.is_over = error is not None or count == left
        end = None
        if self.is_over:
            reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
            params = b"blocks" if self.is_prefill and error is None else None
            end = End(reason, self.num_tokens, 0, kv_params=params, error=error)
        tokens = np.arange(first, first + count, dtype="<i4")
        request_id, attempt, child = self.key.request_id, self.key.attempt, self.key.child
        chunk = Chunk(
            request_id=request_id,
            attempt=attempt,
            child=child,
            chunk_index=self.num_chunks,
            weight_version=1,
            token_ids_data=tokens.tobytes(),
            end=end,
        )
        self.wire.append(chunk)
        self.num_chunks += 1


@pytest.mark.proves("P52")
def test_a_request_whose_workers_are_lost_has_a_bounded_number_of_attempts() -> None:
    """After the sixteenth lost worker, the request fails with the error of that loss."""
    request = running()
    for number in range(1, MAX_ATTEMPTS):
        instructions = request.handle(on.Lost(failure(), is_over=True), float(number))
        assert instructions == (on.Retract(), on.CountLoss(is_retried=True), on.Schedule())
        request.handle(possible(), float(number))
        request.handle(on.Offered(f"w{number}", "one"), float(number))
    last = failure(ErrorCode.ENGINE_DEAD)

    assert request.handle(on.Lost(last, is_over=True), 99.0) == (
        on.CountLoss(is_retried=False), on.Retract(), on.Fail(last)
    )  # fmt: skip
    assert request.workers == [f"w{number}" for number in range(MAX_ATTEMPTS)]


def test_the_client_aborts_the_attempt_at_a_worker_whose_lease_expired() -> None:
    """If the lease of a worker expires, the client aborts the attempt there, because the worker may only be slow."""
    request = running()
    key = request.key

    assert request.handle(on.Lost(failure()), 4.0) == (
        on.Retract(), on.AbortAttempt("w0", key), on.CountLoss(is_retried=True), on.Schedule()
    )  # fmt: skip
    assert request.handle(on.Offered("w0", "one"), 5.0) == (on.AbortAttempt("w0", request.key),)


def test_the_first_attempt_is_published_although_no_worker_serves() -> None:
    """The first attempt is published without a present worker, and the queue reports missing workers.

    Later attempts wait for a worker.
    """
    request = machine()
    assert kinds(request.handle(possible(served=False), 1.0)) == [on.Publish]
    request.handle(on.Lost(failure()), 2.0)

    assert request.handle(possible(served=False), 3.0) == (on.Schedule(),)
    assert kinds(request.handle(possible(), 4.0)) == [on.Publish]


def test_the_client_publishes_again_if_the_queue_is_missing() -> None:
    """If the queue is missing although workers exist, the client publishes again under the next number.

    It does so because a worker creates the queue.
    """
    request = machine()
    request.handle(possible(), 1.0)
    missing = on.NotStored(0, failure(ErrorCode.NO_WORKERS), may_come=True)

    assert request.handle(missing, 2.0) == (on.WakeAt(2.0 + QUEUE_MISSING_S),)
    assert request.handle(on.TimePassed(), 2.1) == (on.WakeAt(2.0 + QUEUE_MISSING_S),)
    assert kinds(request.handle(on.TimePassed(), 2.0 + QUEUE_MISSING_S)) == [on.Retract, on.Schedule]
    assert (request.stream.attempt, request.stream.num_attempts) == (1, 1)


def test_an_oversized_message_is_published_without_its_kv_parameters() -> None:
    """An oversized message is published without its KV transfer parameters.

    A decode worker can compute the prompt itself. An oversized message without them fails the request.
    """
    request = machine()
    assert kinds(request.handle(possible(prefill=1), 1.0)) == [on.JoinPrefillQueue]
    request.handle(on.PrefillDecided("p", "connector"), 1.0)
    job = Job("p", request.key, decode_request(request.payload()), is_prefill=True)
    request.handle(on.Offered("p", "one"), 1.0)
    job.chunk(1)
    assert job.wire[0] is not None
    request.add(job.wire[0], 1.0)
    [publish] = request.handle(possible(), 2.0)
    assert isinstance(publish, on.Publish)
    assert publish.kv is not None

    assert request.handle(on.Oversized(10, 9), 2.0) == (on.Publish(None, None),)
    assert kinds(request.handle(on.Oversized(10, 9), 2.0)) == [on.Retract, on.Fail]


def test_two_workers_with_unreadable_frames_end_the_request() -> None:
    """After unreadable frames of one worker, another worker gets the request.

    After unreadable frames of a second worker, the request fails.
    """
    request = running()
    error = RequestFailed(code=ErrorCode.PROTOCOL_ERROR, message="bad", request_id="r")
    request.handle(on.Lost(error, unreadable_at="w0"), 4.0)
    assert request.state in UNPUBLISHED
    request.handle(possible(), 5.0)
    request.handle(on.Offered("w1", "one"), 6.0)

    assert kinds(request.handle(on.Lost(error, unreadable_at="w1"), 7.0)) == [on.Retract, on.AbortAttempt, on.Fail]


def test_a_late_answer_to_an_earlier_attempt_is_ignored() -> None:
    """A late answer of the queue or the connection to an earlier attempt does not change the current attempt."""
    request = machine()
    request.handle(possible(), 1.0)
    request.handle(on.Lost(failure()), 2.0)
    request.handle(possible(), 3.0)

    assert request.handle(on.Stored(0), 4.0) == ()
    assert request.handle(on.NotStored(0, failure(ErrorCode.QUEUE_FULL), may_come=True), 4.0) == ()
    assert request.handle(on.PublishFailed(0), 4.0) == ()
    assert request.state is RequestState.PUBLISHING


@pytest.mark.proves("P51")
def test_a_second_worker_that_offers_an_attempt_gets_an_abort() -> None:
    """The first worker that offers an attempt keeps it, and a second worker gets an abort.

    A second incarnation of the first worker gets none, because the abort would reach both.
    """
    request = running()

    assert request.handle(on.Offered("w1", "one"), 4.0) == (on.AbortAttempt("w1", request.key),)
    assert request.handle(on.Offered("w0", "two"), 4.0) == ()
    assert (request.worker, request.incarnation) == ("w0", "one")


def test_an_ended_request_answers_each_offer_with_an_abort() -> None:
    """An ended request answers each offer with an abort, also an offer of its former worker.

    It ignores all other events.
    """
    request = running()
    key = request.key
    assert request.handle(on.Stopped(), 4.0) == (on.Retract(), on.AbortAttempt("w0", key))

    assert request.handle(on.Offered("w0", "one"), 5.0) == (on.AbortAttempt("w0", key),)
    late: list[on.Event] = [
        possible(), on.PrefillDecided("p"), on.Oversized(2, 1), on.PublishFailed(0), on.Stored(0),
        on.NotStored(0, failure(), may_come=True), on.WorkerSilent(failure()), on.Lost(failure()),
        on.SuspectReleased(), on.TimePassed(), on.Failed(failure()), on.Stopped(), on.Aborted(),
    ]  # fmt: skip
    assert [request.handle(event, 6.0) for event in late] == [()] * len(late)
