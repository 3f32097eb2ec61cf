"""The instructions of a child request at each event: its attempts, its workers and its end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollbus.bus.protocol.attempt import events as on
from rollbus.bus.protocol.attempt.machine import (
    HAND_OVER_S,
    HANDED_TO_ONE,
    OUT,
    PREFILL_WAIT_S,
    QUEUE_MISSING_S,
    TIMED,
    UNPUBLISHED,
    AttemptMachine,
    RequestState,
)
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk, ChunkError, End, FinishReason
from rollbus.schemas.errors import ErrorCode, RequestError, RequestFailed, request_error
from rollbus.schemas.limits import MAX_ATTEMPTS
from rollbus.schemas.messages import KvTransfer, RequestKey, decode_request, encode
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
    assert request.workers == tuple(f"w{number}" for number in range(MAX_ATTEMPTS))


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


def test_a_worker_cannot_send_back_a_request_of_which_it_sent_tokens() -> None:
    """A placed request with tokens fails if its worker has no slot for it: another worker would repeat the tokens."""
    request = machine()
    request.handle(possible(direct_to="w0"), 1.0)
    request.handle(on.Offered("w0", "one"), 2.0)
    job = Job("w0", request.key, request.stream.asked, is_prefill=False)
    job.chunk(2)
    job.chunk(0, ChunkError(ErrorCode.QUEUE_FULL, "full"))
    told = [kinds(request.add(each, 3.0)[1]) for each in job.wire if each is not None]
    assert told == [[on.ClearSuspicion], [on.Retract, on.Fail]]


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


# A child request under lost, duplicated and reordered events: it ends once, and it has each token once.


class Attempts(RuleBasedStateMachine):
    """One request, three workers, and a queue that may lose or repeat messages."""

    @initialize(keep=st.booleans(), attempt=st.sampled_from([0, 3]))
    def submit(self, keep: bool, attempt: int) -> None:
        """Open the call."""
        self.request = machine(keep=keep, attempt=attempt, session_id="s")
        self.now = 0.0
        self.queue: list[tuple[RequestKey, GenerateRequest]] = []
        self.handed: dict[str, tuple[RequestKey, GenerateRequest, bool]] = {}
        self.answers: list[on.Event] = []
        self.jobs: list[Job] = []
        self.wakes: list[float] = []
        self.delivered: list[int] = []
        self.num_ends = 0
        self.has_left = False
        self.error: RequestError | None = None
        self.seen_events: list[on.Event] = []
        self.num_published: dict[int, int] = {}

    # Helpers: the environment of the machine.

    def send(self, event: on.Event) -> Sequence[on.Instruction]:
        """Let the machine handle an event, and execute its instructions."""
        instructions = self.request.handle(event, self.now)
        self.seen_events.append(event)
        self.execute(instructions)
        return instructions

    def execute(self, instructions: Sequence[on.Instruction]) -> None:
        for instruction in instructions:
            was_over = self.num_ends > 0 or self.has_left
            assert not was_over or isinstance(instruction, on.AbortAttempt)
            match instruction:
                case on.Publish(worker, kv):
                    self.publish(worker, kv)
                case on.WakeAt(time):
                    assert self.now < time <= self.now + HAND_OVER_S
                    self.wakes.append(time)
                case on.AbortAttempt(worker, key):
                    for job in self.jobs:
                        job.is_over |= (job.worker, job.key) == (worker, key)
                case on.Deliver(chunks):
                    self.deliver(chunks)
                case on.Complete():
                    self.num_ends += 1
                case on.Fail(error):
                    self.num_ends += 1
                    self.error = error

    def publish(self, worker: str | None, kv: KvTransfer | None) -> None:
        key, request = self.request.key, decode_request(self.request.payload())
        assert request.prompt_len == PROMPT_LEN + len(self.delivered)
        self.num_published[key.attempt] = self.num_published.get(key.attempt, 0) + 1
        if worker is None:
            self.queue.append((key, request))
            self.answers.append(on.Stored(key.attempt))
        else:
            self.handed[worker] = (key, request, kv is not None and kv.is_prefill)

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            tokens = np.frombuffer(chunk.token_ids_data, "<i4").tolist()
            assert tokens == [PROMPT_LEN + len(self.delivered) + i for i in range(len(tokens))]
            self.delivered += tokens

    def receive(self, job: Job, chunk: Chunk | None) -> None:
        """Handle an offer or a chunk as a client does."""
        request, life = self.request, (job.worker, "one")
        is_current = request.is_open and request.stream.attempt == job.key.attempt
        is_refusal = chunk is not None and chunk.error is not None and request.worker is None
        if not is_current:
            if chunk is None or chunk.end is None:
                job.is_over = True
            return
        if not is_refusal:
            answer = self.send(on.Offered(*life))
            if (request.worker, request.incarnation) != life:
                assert on.AbortAttempt(job.worker, job.key) in answer
                return
        if chunk is not None:
            delivered, instructions = request.add(chunk, self.now)
            self.deliver(delivered)
            self.execute(instructions)

    # Rules: the events.

    @rule(direct=st.sampled_from([None, "w0"]), prefill=st.sampled_from([None, 0, 2]), served=st.booleans())
    def can_publish(self, direct: str | None, prefill: int | None, served: bool) -> None:
        """Let the client check its waiting requests."""
        self.send(possible(direct_to=direct, prefill=prefill, served=served))

    @precondition(lambda self: self.request.state is RequestState.AWAITING_PREFILL)
    @rule(worker=st.sampled_from([None, "w1", "w2"]))
    def decide(self, worker: str | None) -> None:
        """Report that a prefill worker has room, or that none has room in time."""
        self.send(on.PrefillDecided(worker, None if worker is None else "connector"))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), is_lost=st.booleans())
    def answer(self, data: st.DataObject, is_lost: bool) -> None:
        """Deliver a confirmation of the queue in any order, or lose it."""
        answer = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if not is_lost:
            self.send(answer)

    @rule(data=st.data())
    def answer_with_an_error(self, data: st.DataObject) -> None:
        """Report that the queue rejected the current or an earlier attempt, or that its publication failed."""
        attempt = data.draw(st.integers(0, self.request.stream.attempt))
        code = data.draw(st.sampled_from([ErrorCode.NO_WORKERS, ErrorCode.QUEUE_FULL, None]))
        before = self.request.state
        event = on.PublishFailed(attempt) if code is None else on.NotStored(attempt, failure(code), may_come=True)
        self.send(event)
        if code is None and before is not self.request.state:
            self.num_published[attempt] -= 1

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS), is_kept=st.booleans())
    def pull(self, data: st.DataObject, worker: str, is_kept: bool) -> None:
        """Let a worker pull any message. The queue may deliver it again later."""
        index = data.draw(st.integers(0, len(self.queue) - 1))
        key, request = self.queue[index] if is_kept else self.queue.pop(index)
        self.jobs.append(Job(worker, key, request, is_prefill=False, wire=[None]))

    @precondition(lambda self: self.handed)
    @rule(data=st.data(), fate=st.sampled_from(["lost", "taken", *REFUSALS]))
    def receive_direct(self, data: st.DataObject, fate: str) -> None:
        """Let a worker accept a direct request, reject it, or never receive it."""
        worker = data.draw(st.sampled_from(sorted(self.handed)))
        key, request, is_prefill = self.handed.pop(worker)
        if fate != "lost":
            job = Job(worker, key, request, is_prefill, wire=[None] if fate == "taken" else [])
            self.jobs.append(job)
            if fate != "taken":
                job.chunk(0, ChunkError(ErrorCode(fate), "refused"))

    @precondition(lambda self: any(not job.is_over for job in self.jobs))
    @rule(data=st.data(), num_tokens=st.integers(1, 3), code=st.sampled_from([None] * 6 + [*SPOKEN_OF_WORKER]))
    def make(self, data: st.DataObject, num_tokens: int, code: ErrorCode | None) -> None:
        """Let a worker generate tokens, or end its copy with an error."""
        job = data.draw(st.sampled_from([job for job in self.jobs if not job.is_over]))
        job.chunk(num_tokens, None if code is None else ChunkError(code, "ended"))

    @precondition(lambda self: any(job.wire for job in self.jobs))
    @rule(data=st.data(), is_doubled=st.booleans())
    def deliver_next(self, data: st.DataObject, is_doubled: bool) -> None:
        """Deliver the next offer or chunk of any worker. An offer may be delivered twice."""
        job = data.draw(st.sampled_from([job for job in self.jobs if job.wire]))
        chunk = job.wire.pop(0)
        self.receive(job, chunk)
        if is_doubled and chunk is None:
            self.receive(job, chunk)

    @rule(worker=st.sampled_from(WORKERS), is_suspect=st.booleans(), unreadable=st.booleans())
    def lose(self, worker: str, is_suspect: bool, unreadable: bool) -> None:
        """Lose a worker or its link with all messages on their way."""
        for job in self.jobs:
            if job.worker == worker:
                job.wire.clear()
                job.is_over = True
        if self.request.worker == worker:
            self.send(on.Lost(failure(), is_suspect=is_suspect, unreadable_at=worker if unreadable else None))
        elif self.request.handed_to == worker:
            self.send(on.WorkerSilent(failure()))

    @precondition(lambda self: self.request.state is RequestState.QUEUED)
    @rule()
    def lose_in_queue(self) -> None:
        """Report that the queue was deleted."""
        self.queue.clear()
        self.send(on.Lost(failure()))

    @rule()
    def release(self) -> None:
        """Report that the other suspects have been tried."""
        self.send(on.SuspectReleased())

    @rule(step=st.sampled_from([0.0, 0.3, HAND_OVER_S]))
    def pass_time(self, step: float) -> None:
        """Advance the time. An alarm may fire too early, and also for ended requests."""
        self.now += step
        due = [time for time in self.wakes if time <= self.now]
        self.wakes = [time for time in self.wakes if time > self.now]
        for _ in [*due, None]:
            self.send(on.TimePassed())

    @precondition(lambda self: len(self.seen_events) > 8)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Deliver an answer to an earlier attempt again."""
        old = [event for event in self.seen_events if isinstance(event, on.Stored | on.NotStored)]
        if old and (event := data.draw(st.sampled_from(old))).attempt < self.request.stream.attempt:
            before = self.request.state
            assert self.send(event) == ()
            assert self.request.state is before

    @precondition(lambda self: len(self.seen_events) > 20)
    @rule(is_abort=st.booleans())
    def leave(self, is_abort: bool) -> None:
        """Let the caller leave, or abort the request."""
        was_open = self.request.is_open
        self.send(on.Aborted() if is_abort else on.Stopped())
        self.has_left |= was_open

    # Invariants.

    @invariant()
    def the_request_ends_once(self) -> None:
        """Assert that the request has ended exactly if it reported its end once."""
        assert self.num_ends + self.has_left == (not self.request.is_open)
        if self.num_ends and self.error is None:
            assert len(self.delivered) == NUM_TOKENS
        # Links preserve the order of each worker's chunks, so no chunk contradicts another.
        assert self.error is None or self.error.code is not ErrorCode.PROTOCOL_ERROR

    @invariant()
    def each_open_state_has_a_deadline(self) -> None:
        """Assert that each open state has a deadline."""
        request = self.request
        if not request.is_open:
            return
        limits = dict.fromkeys(TIMED, max(HAND_OVER_S, QUEUE_MISSING_S)) | {
            RequestState.AWAITING_PREFILL: PREFILL_WAIT_S
        }
        assert request.deadline <= min(DEADLINE_S, request.since + limits.get(request.state, math.inf))
        if request.state in TIMED:
            assert request.deadline in self.wakes

    @invariant()
    def the_worker_is_known_while_the_request_runs(self) -> None:
        """Assert that the worker is known exactly while it runs the request.

        Assert that each attempt is published at most once.
        """
        is_at_worker = self.request.state in (RequestState.RUNNING, RequestState.PREFILLING)
        assert not self.request.is_open or (self.request.worker is not None) == is_at_worker
        assert (self.request.handed_to is not None) == (self.request.state in HANDED_TO_ONE)
        assert set(self.num_published.values()) <= {0, 1}
        assert self.request.stream.num_attempts <= MAX_ATTEMPTS

    def teardown(self) -> None:
        """Assert that the request finishes if no further fault happens."""
        if not hasattr(self, "request"):
            return
        for _ in range(10):
            if not self.request.is_open:
                return
            self.settle()
        raise AssertionError(f"{self.request} has not ended")

    def settle(self) -> None:
        """Give the request to a worker that serves it until it ends."""
        self.send(on.SuspectReleased())
        self.now += PREFILL_WAIT_S
        self.send(on.TimePassed())
        self.send(on.PrefillDecided(None))
        if self.request.state in OUT:
            self.send(on.Lost(failure()))
        self.queue.clear()
        self.send(possible())
        if self.queue:
            key, request = self.queue.pop()
            job = Job("well", key, request, is_prefill=False, wire=[None])
            job.chunk(NUM_TOKENS)
            for item in job.wire:
                self.receive(job, item)


Attempts.TestCase.settings = settings(stateful_step_count=60)
TestAttempts = pytest.mark.slow(Attempts.TestCase)
