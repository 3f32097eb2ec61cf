"""A client's links to the workers: it receives frames, and sends frame acks, credit and aborts. On the bus thread.

Invariant: the chunks of a frame reach their calls before the frame is acknowledged. Credit depends on received bytes,
not on bytes that callers have read, so a caller that does not read delays no other caller.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from nats.aio.msg import Msg

from ...schemas.errors import BusBroken, RemoteProtocolError
from ...schemas.frame_header import FrameHeader, decode_frame_header
from ...schemas.messages import Frame, LinkMessage, RequestKey, decode_frame, encode
from ...schemas.wire_version import WIRE_VERSION
from ..logs import RejectionCount
from ..nats.connection import Connection, publish
from ..protocol.link.link_receiver import FrameVerdict, LinkReceiver
from ..protocol.link.worker_links import FollowedLinks
from ..subjects import Subjects
from .exchange import AttemptCoordinator
from .losses import Losses
from .result_check import ResultCheck

__all__ = ["ClientLinkStats", "ClientLinks"]

logger = logging.getLogger(__name__)

ACK_DELAY_S: Final = 0.02
"""Seconds that a frame may wait for a common ack with later frames, a few engine steps."""
TOTAL_WINDOW_BYTES: Final = 32 * 1024**2
"""Bytes that all workers together may have in transit: half of a subscription's buffer."""
MAX_WINDOW_BYTES: Final = 1024**2
"""Bytes for one worker: a few milliseconds of routed experts. Tokens wait behind the bytes in transit."""
MIN_WINDOW_BYTES: Final = 64 * 1024
"""Minimum bytes for one worker, for any number of workers: the tokens of one step of hundreds of requests."""
MAX_KEYS_PER_MESSAGE: Final = 256
"""Aborts in one message: 40 KiB with the longest ids, below any server's `max_payload`."""
MAX_ABORTS: Final = 65_536
"""Maximum number of pending aborts for one worker, more than its requests of one client. If an abort is left out, the
client sends it when the next chunk of the request arrives."""
MAX_SILENCE_S: Final = 10.0
"""Seconds, two leases, for which the client still writes to a worker without presence."""
MAX_LINKS: Final = 16_384
"""Maximum number of workers with a link, far above any fleet. Beyond it, the most silent worker is removed."""


@dataclass(slots=True)
class ClientLinkStats:
    """Counters of frames, as in `ClientStats`."""

    frames: int = 0
    duplicate_frames: int = 0
    missing_frames: int = 0
    stale_frames: int = 0
    resends_asked: int = 0
    bad_messages: int = 0


@dataclass(slots=True)
class _WorkerLink:
    followed: FollowedLinks
    received_at: float


class ClientLinks:
    """One link for each worker that sends frames to this client.

    Args:
        identity: name and incarnation of this client.
        coordinator: handles the content of frames.
        losses: marks requests as lost.
        incarnations_of: returns the incarnations that publish presence as a worker.
    """

    def __init__(
        self,
        nats: Connection,
        subjects: Subjects,
        identity: tuple[str, str],
        coordinator: AttemptCoordinator,
        losses: Losses,
        incarnations_of: Callable[[str], Collection[str]] = lambda _worker: (),
    ) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client, self._incarnation = identity
        self._coordinator = coordinator
        self._losses = losses
        self._incarnations_of = incarnations_of
        self.check: ResultCheck | None = None
        """Finds chunks that their worker cannot have made; None: they are not checked."""
        # The least recently heard worker first.
        self._links: dict[str, _WorkerLink] = {}
        # Requests to abort, by worker: requests in flight, and offers of requests that are not open.
        self._aborts: dict[str, dict[RequestKey, None]] = {}
        # Workers to write to now, and soon. These dictionaries and the aborts are ordered sets.
        self._due: dict[str, None] = {}
        self._soon: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woken = asyncio.Event()
        self._rejected = RejectionCount()
        self.stats = ClientLinkStats()

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<ClientLinks {self._client} links={len(self._links)}>"

    async def receive(self, message: Msg) -> None:
        """Process a message with a frame."""
        worker = message.subject.rpartition(".")[2]
        try:
            frame = decode_frame(message.data)
        except RemoteProtocolError as exc:
            self._receive_unreadable(worker, message.data, exc)
            return
        self.stats.frames += 1
        if frame.chunks and self.check is not None and not self.check.is_plausible(worker, frame):
            frame = await self.check.without_false(worker, frame)
        now = time.monotonic()
        receiver = self._receiver(worker, frame, now)
        if receiver is None:
            self._count(FrameVerdict.STALE)
            return
        verdict = receiver.receive(frame, len(message.data), now)
        if verdict is FrameVerdict.ACCEPTED:
            self._coordinator.handle_frame(worker, frame)
        else:
            self._count(verdict)
        self._acknowledge(worker, receiver)

    def _receive_unreadable(self, worker: str, data: bytes, error: RemoteProtocolError) -> None:
        """Handle a frame that cannot be decoded. Mark it as missing if its link is known."""
        self.stats.bad_messages += 1
        if so_far := self._rejected.add():
            logger.warning("frame.rejected worker=%s so_far=%s error=%s", worker, so_far, error)
        header, now = decode_frame_header(data), time.monotonic()
        if header is not None:
            receiver = self._receiver(worker, header, now)
            receivers = [] if receiver is None else [receiver]
        else:
            link = self._links.get(worker)
            receivers = [] if link is None else list(link.followed.receivers)
        for receiver in receivers:
            verdict = receiver.receive_unreadable(header, len(data), now)
            if verdict is FrameVerdict.SKIPPED and header is not None:
                self._losses.fail_unreadable(worker, header, str(error))
            elif verdict is FrameVerdict.BROKEN:
                logger.error("link.broken worker=%s link=%r error=%s", worker, receiver, error)
                self._write_now(worker)
                self._losses.retry_unreadable((worker, receiver.incarnation or ""), header, str(error))
            else:
                self._count(verdict)
            self._acknowledge(worker, receiver)

    def _receiver(self, worker: str, frame: Frame | FrameHeader, now: float) -> LinkReceiver | None:
        """Return the receiver of `frame` after ending the links that it replaces, or None if the frame is stale."""
        if frame.client_incarnation != self._incarnation:
            return None
        # Move the link to the end of the order.
        link = self._links.pop(worker, None) or _WorkerLink(FollowedLinks(self._incarnation), now)
        self._links[worker] = link
        link.received_at = now
        receiver, ended = link.followed.receiver_of(frame, self._incarnations_of(worker))
        for incarnation in ended:
            self._losses.mark_lost(worker, incarnation, f"worker {worker} started a new link")
        return receiver

    def _acknowledge(self, worker: str, receiver: LinkReceiver) -> None:
        if receiver.is_ack_due(self._window):
            self._write_now(worker)
        elif receiver.has_unacked:
            self._write_soon(worker)
        if len(self._links) > MAX_LINKS:
            self._remove(next(iter(self._links)))

    def _count(self, verdict: FrameVerdict) -> None:
        self.stats.duplicate_frames += verdict is FrameVerdict.DUPLICATE
        self.stats.missing_frames += verdict is FrameVerdict.GAP
        self.stats.stale_frames += verdict is FrameVerdict.STALE

    @property
    def _window(self) -> int:
        """Bytes that one worker may have in transit."""
        return max(min(TOTAL_WINDOW_BYTES // max(len(self._links), 1), MAX_WINDOW_BYTES), MIN_WINDOW_BYTES)

    def abort(self, worker: str, key: RequestKey) -> None:
        """Make `worker` abort a request."""
        aborts = self._aborts.setdefault(worker, {})
        if len(aborts) < MAX_ABORTS:
            aborts[key] = None
        self._write_now(worker)

    def repeat_acks(self) -> None:
        """Send all link acks again, because earlier ones may be lost."""
        for worker in self._links:
            self._write_now(worker)

    def prune(self, find_presence: Callable[[str], object]) -> None:
        """Remove workers without presence (None) whose last frame is older than `MAX_SILENCE_S`."""
        for worker, link in self._links.items():
            link.followed.prune(self._incarnations_of(worker))
        silent_since = time.monotonic() - MAX_SILENCE_S
        for worker, link in list(self._links.items()):
            if link.received_at > silent_since:
                break
            if find_presence(worker) is None:
                self._remove(worker)

    def _remove(self, worker: str) -> None:
        self._links.pop(worker, None)
        self._aborts.pop(worker, None)
        self._due.pop(worker, None)
        self._soon.pop(worker, None)

    def _write_now(self, worker: str) -> None:
        self._due[worker] = None
        self._woken.set()

    def _write_soon(self, worker: str) -> None:
        self._soon[worker] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._write_delayed)

    def _write_delayed(self) -> None:
        self._timer = None
        self._due.update(self._soon)
        self._soon.clear()
        self._woken.set()

    async def run(self) -> None:
        """Write due messages to workers until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write to all workers with due messages."""
        due, self._due = self._due, {}
        for worker in due:
            self._soon.pop(worker, None)
            try:
                await self._write(worker)
            except BusBroken as exc:
                # Acks are repeated. A missing abort is sent again when the next chunk of the request arrives.
                logger.warning("link.write_failed worker=%s error=%s", worker, exc)

    async def _write(self, worker: str) -> None:
        aborts = list(self._aborts.pop(worker, {}))
        for first in range(0, max(len(aborts), 1), MAX_KEYS_PER_MESSAGE):
            for message in self._messages(worker, aborts[first : first + MAX_KEYS_PER_MESSAGE]):
                await publish(self._nats, self._subjects.link(self._client, worker), encode(message))

    def _messages(self, worker: str, abort: list[RequestKey]) -> Sequence[LinkMessage]:
        link = self._links.get(worker)
        messages: list[LinkMessage] = []
        for receiver in () if link is None else link.followed.receivers:
            if receiver.is_broken:
                messages += receiver.break_messages(abort)
            else:
                messages.append(receiver.message(window=self._window, now=time.monotonic(), abort=abort))
                self.stats.resends_asked += messages[-1].resend
            abort = []
        return messages or [LinkMessage(WIRE_VERSION, abort, client_incarnation=self._incarnation)]
