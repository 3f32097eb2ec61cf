"""Links without a bus: queued requests, engine steps, and a client that receives the frames."""

import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.link_receiver import FrameVerdict, LinkReceiver
from rollbus.bus.queue.puller import QueuedRequest
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.messages import Frame, LinkMessage, RequestKey, decode_frame
from rollbus.schemas.presence import Capabilities, ClientPresence, ClientState, RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.config import WorkerConfig
from rollbus.workers.requests.links import WorkerLinks
from rollbus.workers.requests.table import RequestOrigin
from tests.support import fleet

MAX_PAYLOAD = 8 * 1024 * 1024
ROUTING = RoutedExpertsInfo(num_layers=4, top_k=8, num_experts=64, dtype="u1")
ROW_BYTES = 32
NOW = 1000.0
LATE = NOW + 7.0
"""A time after a lease and its margin."""


def capabilities(*, routing: bool = True) -> Capabilities:
    """Return the capabilities of an engine whose rows have `ROW_BYTES`."""
    limits = {"max_model_len": 1_000_000, "vocab_size": 1000, "max_num_seqs": 8, "max_logprobs": 20}
    return fleet.capabilities(routed_experts=ROUTING if routing else None, **limits)


def make_links(**fields: object) -> WorkerLinks:
    """Return the links of a worker `w` in its incarnation `w1`."""
    config = WorkerConfig(nats_url="", model="m", worker_id="w", **fields)  # type: ignore[arg-type]
    return WorkerLinks(config, "w1", max_payload=MAX_PAYLOAD)


def queued(*, client: str = "alice", num_delivered: int = 1, nats: Connection | None = None) -> QueuedRequest:
    """Return one delivery of a queue message. Without a connection, the test can send no ack for it."""
    reply = f"$JS.ACK.stream.normal.{num_delivered}.1.1.1.0"
    message = Msg(cast(Client, None), subject=f"rb.v1.f.req.{client}.m.normal", reply=reply)
    return QueuedRequest(nats, message)


def request_of(prompt_len: int = 2, **fields: object) -> GenerateRequest:
    """Return a request with a prompt of this length."""
    sampling = SamplingParams(max_tokens=100_000)
    return GenerateRequest(prompt_token_ids=[1] * prompt_len, sampling=sampling, **fields)  # type: ignore[arg-type]


def step(name: str, num_tokens: int = 1, *, rows: tuple[int, int] | None = None, end: bool = False) -> RequestStep:
    """Return one engine step of a request.

    Args:
        rows: positions of the rows, as (first, past).
    """
    array = None if rows is None else np.ones((rows[1] - rows[0], 4, 8), np.uint8)
    return RequestStep(
        key=name,
        token_ids=np.full(num_tokens, 7, np.int32),
        routed_experts=array,
        routed_experts_start=0 if rows is None else rows[0],
        finish_reason=FinishReason.LENGTH if end else None,
    )


class Ear:
    """One incarnation of a client as a worker's links see it: it receives frames and sends messages on demand."""

    def __init__(self, links: WorkerLinks, *, client: str = "alice", incarnation: str = "a1") -> None:
        self.links = links
        self.client = client
        self.incarnation = incarnation
        self.receiver = LinkReceiver(incarnation)
        self.frames: list[Frame] = []
        """The accepted frames, without heartbeats."""

    def origin(self, request_id: str, message: QueuedRequest | None = None) -> RequestOrigin:
        """Return the origin of a request of this client."""
        return RequestOrigin(self.client, self.incarnation, RequestKey(request_id), message)

    def offer(
        self, request_id: str, *, prompt_len: int = 2, routing: bool = False, gathers: bool = False
    ) -> tuple[str, QueuedRequest]:
        """Offer a request from the queue, and return its engine name and its message."""
        message = queued(client=self.client)
        request = request_of(prompt_len, request_id=request_id)
        able = capabilities(routing=routing)
        if routing:
            self.links.dispatcher.experts.begin(able.routed_experts, NOW)
        return self.links.offer(self.origin(request_id, message), request, able, NOW, gathers=gathers), message

    def hear(self) -> list[Frame]:
        """Receive all frames that can be published now, and return the new frames."""
        before = len(self.frames)
        while routes := self.links.outbound.sendable():
            for route in routes:
                outgoing = self.links.next_frame(route)
                if outgoing is not None:
                    self.take(outgoing.data)
        return self.frames[before:]

    def take(self, data: bytes) -> Frame:
        """Receive one frame."""
        frame = decode_frame(data)
        if self.receiver.receive(frame, len(data), time.monotonic()) is FrameVerdict.ACCEPTED:
            self.frames.append(frame)
        return frame

    def message(self, abort: Sequence[RequestKey] = (), *, window: int = 1 << 30) -> LinkMessage:
        """Return a link message that acknowledges the received frames."""
        return self.receiver.message(window=window, now=time.monotonic(), abort=abort)

    def chunks(self, request_id: str) -> list[Chunk]:
        """Return the received chunks of a request."""
        return [chunk for frame in self.frames for chunk in frame.chunks if chunk.request_id == request_id]

    def presence(self, state: ClientState = ClientState.LIVE, lease_s: float = 5.0) -> ClientPresence:
        """Return a presence of this incarnation."""
        return ClientPresence(client=self.client, incarnation=self.incarnation, state=state, lease_s=lease_s)


def linked() -> tuple[WorkerLinks, Ear]:
    """Return the links of a worker, and a client that reads its link."""
    links = make_links()
    return links, Ear(links)
