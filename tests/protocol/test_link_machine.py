"""A link over a channel that loses, duplicates and reorders in both directions delivers each frame once, in order."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.link_receiver import FollowedLinks, FrameVerdict, LinkReceiver
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import ChunkError, FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import Frame, RequestKey, decode_frame, decode_link_message, encode
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.rows import expected_rows
from tests.support.scenarios import Scenario, make_scenario

pytestmark = pytest.mark.slow

ERROR = ChunkError(ErrorCode.WORKER_STOPPED, "stopped")
SHAPES = {0: None, 1: (2, 2), 2: (64, 64)}
"""Layers and top-k: no routed experts, 4 bytes per row, and 4 KiB per row, which soon exceeds the initial credit."""


@dataclass(slots=True)
class Request:
    """A request at both ends: the engine's planned output, and the client's received output."""

    scenario: Scenario
    link: tuple[str, int]
    stream: ResponseStream
    num_steps: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    is_over: bool = False
    """True if the engine or the worker has ended the request."""
    is_given_up: bool = False
    """True if the client lost its position on the link and does not read the request any more."""

    def next_step(self) -> RequestStep:
        """Return the engine's next step."""
        step = self.scenario.steps[self.num_steps]
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        self.num_rows += 0 if step.routed_experts is None else len(step.routed_experts)
        self.is_over = step.finish_reason is not None
        return step

    def abort(self) -> RequestStep:
        """Return the engine's last step after an abort."""
        self.is_over = True
        return RequestStep(key="k", token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ABORT)

    @property
    def version(self) -> int:
        """The weight version of the last step."""
        return self.scenario.versions[max(self.num_steps - 1, 0)]

    def check(self) -> None:
        """Assert that the client has a prefix of the engine's output. Without an error, it must have all of it."""
        end = self.stream.end
        if end is None:
            return
        if end.error is None:
            assert end.num_tokens == self.num_tokens
            assert self.scenario.routing is None or end.num_rows == expected_rows(
                self.scenario.request.prompt_len,
                self.scenario.request.routed_experts_prompt_start,
                self.num_tokens,
            )
        got = self.stream.arrays()
        for name in ("token_ids", "weight_versions", "logprobs", "routed_experts"):
            expected = self.scenario.arrays[name]
            if got[name] is not None and expected is not None:
                np.testing.assert_array_equal(got[name], expected[: len(got[name])])


class LinkMachine(RuleBasedStateMachine):
    """A worker, a client, and the messages on their way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_requests = 0
        self.requests: dict[RequestKey, Request] = {}
        self.to_client: list[bytes] = []
        self.to_worker: list[bytes] = []
        self.links = FollowedLinks("c")
        self.receiver = LinkReceiver("c")
        self.has_forgotten = False
        self.followed: set[int] = set()
        """Incarnations of the worker whose frames the client has received."""
        self.received = self.window = 0
        """Bytes received on the current link, and the largest window that the client granted there."""

    @initialize(max_frame_bytes=st.sampled_from([1500, 6000, 60_000, 2**20]))
    def begin(self, max_frame_bytes: int) -> None:
        """Start with a `max_payload` of any server."""
        self.max_frame_bytes = max_frame_bytes
        self.open_link("w0", 0)

    def open_link(self, incarnation: str, link: int) -> None:
        """Start a link at the worker and drop the state of the earlier link."""
        self.sender = LinkSender(
            incarnation=incarnation, link=link, client_incarnation="c", max_frame_bytes=self.max_frame_bytes
        )
        self.frames: list[bytes] = []
        self.acked = self.offset = 0
        self.credit = INITIAL_CREDIT_BYTES
        self.confirmed: list[RequestKey] = []

    @property
    def link(self) -> tuple[str, int]:
        """The worker's current link."""
        return self.sender.incarnation, self.sender.link

    @property
    def running(self) -> list[Request]:
        """The requests that the engine runs."""
        return [request for request in self.requests.values() if request.link == self.link and not request.is_over]

    def key_of(self, request: Request) -> RequestKey:
        """Return the wire key of a request."""
        return next(key for key, other in self.requests.items() if other is request)

    def pick(self, index: int) -> tuple[RequestKey, Request]:
        """Return one of the running requests."""
        request = self.running[index % len(self.running)]
        return self.key_of(request), request

    def new_request(self, scenario: Scenario) -> RequestKey:
        """Publish another request."""
        key = RequestKey(f"r{self.num_requests}")
        self.num_requests += 1
        self.requests[key] = Request(
            scenario, self.link, ResponseStream(scenario.request, child=0, attempt=0, keep=True)
        )
        return key

    # Events at the worker.

    @rule(seed=st.integers(0, 2**32), shape=st.sampled_from([0, 1, 1, 2]), num_steps=st.integers(1, 12))
    def open(self, seed: int, shape: int, num_steps: int) -> None:
        """Accept a request."""
        rng = np.random.default_rng(seed)
        routing = None
        if (dims := SHAPES[shape]) is not None:
            routing = RoutedExpertsInfo(num_layers=dims[0], top_k=dims[1], num_experts=9, dtype="u1")
        prompt_len = int(rng.integers(1, 40))
        scenario = make_scenario(
            rng,
            prompt_len=prompt_len,
            cuts=np.cumsum(rng.integers(1, 4, num_steps)).tolist(),
            start=int(rng.integers(0, prompt_len + 1)),
            routing=routing,
            widths=([None, 0, 2][seed % 3], [None, None, 1][seed % 5 % 3]),
        )
        key = self.new_request(scenario)
        self.sender.open(key, scenario.writer(self.max_frame_bytes - 500, key))

    @precondition(lambda self: self.running)
    @rule(indices=st.lists(st.integers(0, 20), min_size=1, max_size=8))
    def step(self, indices: list[int]) -> None:
        """Let the engine run some steps."""
        for index in indices:
            if self.running:
                key, request = self.pick(index)
                step = request.next_step()
                self.sender.encode_step(key, step, request.version)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        """Let the engine abort a request, as after a client's abort."""
        key, request = self.pick(index)
        self.sender.encode_step(key, request.abort(), request.version)

    @precondition(lambda self: self.sender.keys)
    @rule(index=st.integers(0, 20))
    def fail(self, index: int) -> None:
        """End a request with an error, also a request whose last step waits for credit."""
        key = list(self.sender.keys)[index % len(self.sender.keys)]
        self.requests[key].is_over = True
        self.sender.fail(key, ERROR, 1)

    @rule()
    def reject(self) -> None:
        """Reject a request."""
        key = self.new_request(make_scenario(np.random.default_rng(0), prompt_len=1, cuts=[1]))
        self.requests[key].is_over = True
        self.sender.reject(key, ERROR, 1)

    @rule()
    def seal(self) -> None:
        """Send the next frame, and assert that credit and size permit it."""
        data = self.sender.seal()
        if data is None:
            return
        frame = decode_frame(data)
        has_data = any(
            chunk.token_ids_data or chunk.prompt_logprobs or (chunk.routed_experts and chunk.routed_experts.data)
            for chunk in frame.chunks
        )
        assert frame.number == len(self.frames)
        assert not has_data or self.offset < self.credit
        assert len(data) <= self.max_frame_bytes or len(frame.chunks) == 1
        self.frames.append(data)
        self.offset += len(data)
        self.to_client.append(data)

    @rule()
    def heartbeat(self) -> None:
        """Send a heartbeat with the number of the next frame."""
        self.to_client.append(self.sender.heartbeat())

    @rule(is_new_life=st.booleans())
    def restart(self, is_new_life: bool) -> None:
        """Start a new link in the same or the next incarnation."""
        incarnation, link = self.link
        if is_new_life:
            self.open_link(f"w{int(incarnation[1:]) + 1}", 0)
        else:
            self.open_link(incarnation, link + 1)

    # Events on the channel.

    @precondition(lambda self: self.to_client)
    @rule(index=st.integers(0, 20), fate=st.sampled_from(["arrive", "arrive", "doubled", "lost"]), first=st.booleans())
    def carry_frame(self, index: int, fate: str, first: bool) -> None:
        """Deliver, duplicate or lose any frame on its way."""
        at = 0 if first else index % len(self.to_client)
        data = self.to_client[at] if fate == "doubled" else self.to_client.pop(at)
        if fate != "lost":
            self.client_receives(data)

    @precondition(lambda self: self.to_worker)
    @rule(index=st.integers(0, 20), fate=st.sampled_from(["arrive", "arrive", "doubled", "lost"]))
    def carry_message(self, index: int, fate: str) -> None:
        """Deliver, duplicate or lose any message on its way."""
        at = index % len(self.to_worker)
        data = self.to_worker[at] if fate == "doubled" else self.to_worker.pop(at)
        if fate != "lost":
            self.worker_receives(data)

    @rule(seconds=st.sampled_from([0.001, 0.1, 0.3]))
    def wait(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds

    # Events at the client.

    @rule(window=st.sampled_from([1, 300, 5000, 2**20]))
    def send_link_message(self, window: int) -> None:
        """Acknowledge frames, grant credit and request missing frames."""
        self.window = max(self.window, window)
        message = self.receiver.message(window=window, now=self.now)
        assert self.received + window <= message.credit <= self.received + self.window
        self.to_worker.append(encode(message))

    @rule()
    def reset_client(self) -> None:
        """Let the client lose its position on the link."""
        self.links = FollowedLinks("c")
        self.receiver = LinkReceiver("c")
        self.received = self.window = 0
        self.followed.clear()
        self.has_forgotten = True
        for request in self.requests.values():
            request.is_given_up = True

    def client_receives(self, data: bytes) -> None:
        """Handle a frame as a client does."""
        frame = decode_frame(data)
        life = int(frame.incarnation[1:])
        if life not in self.followed and life < max(self.followed, default=0):
            # Incarnations do not overlap: if the client received no frame of an incarnation before the next one
            # started, it receives none later.
            return
        self.followed.add(life)
        before = self.receiver.incarnation, self.receiver.link
        receiver, ended = self.links.receiver_of(frame, {frame.incarnation})
        if receiver is None:
            assert life < max(self.followed)
            return
        self.receiver = receiver
        verdict = receiver.receive(frame, len(data), self.now)
        after = self.receiver.incarnation, self.receiver.link
        assert verdict is FrameVerdict.STALE or life == max(self.followed)
        assert bool(ended) == (before not in ((None, None), after))
        if before != after:
            self.received = self.window = 0
        if verdict is FrameVerdict.ACCEPTED:
            self.received += len(data)
            self.client_handles(frame)

    def client_handles(self, frame: Frame) -> None:
        """Handle the content of a frame."""
        for chunk in frame.chunks:
            request = self.requests[RequestKey(chunk.request_id, chunk.attempt, chunk.child)]
            if request.is_given_up:
                continue
            assert request.link == (frame.incarnation, frame.link) == (self.receiver.incarnation, self.receiver.link)
            request.stream.add(chunk)
            request.check()

    def worker_receives(self, data: bytes) -> None:
        """Handle a message as a worker does."""
        message = decode_link_message(data)
        progress = self.sender.receive(message)
        if (message.incarnation, message.link) != self.link:
            assert not progress.resend
            assert not progress.confirmed
            return
        self.acked = max(self.acked, message.acked)
        self.credit = max(self.credit, message.credit)
        self.confirmed += progress.confirmed
        if progress.resend:
            assert progress.resend == self.frames[self.acked :]
            self.to_client += progress.resend
        # Reordered messages can look like a lost position too. This does not happen between real peers.
        if progress.needs_new_link and self.has_forgotten:
            self.has_forgotten = False
            self.restart(is_new_life=False)

    def teardown(self) -> None:
        """Assert that over a reliable channel all accepted output arrives, and that both ends release their buffers."""
        if not hasattr(self, "sender"):
            return
        self.to_client.clear()
        self.to_worker.clear()
        for request in self.running:
            self.sender.encode_step(self.key_of(request), request.abort(), request.version)
        for _ in range(2000):
            self.now += 1
            before = -1
            while before < len(self.frames):
                before = len(self.frames)
                self.seal()
            if self.sender.needs_heartbeat:
                self.heartbeat()
            for data in self.pop_all(self.to_client):
                self.client_receives(data)
            self.send_link_message(2**16)
            for data in self.pop_all(self.to_worker):
                self.worker_receives(data)
            if self.sender.is_idle:
                break

        assert self.sender.is_idle
        assert (self.sender.held_bytes, self.sender.needs_heartbeat) == (0, False)
        assert self.confirmed == [key for data in self.frames for key in decode_frame(data).admitted]
        for request in self.requests.values():
            assert request.link != self.link or request.is_given_up or request.stream.end is not None

    def pop_all(self, channel: list[bytes]) -> list[bytes]:
        """Remove and return all data on its way, in order."""
        data, channel[:] = list(channel), []
        return data


LinkMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestLink = LinkMachine.TestCase
