"""A client's links to the workers: it receives frames, and sends frame acks, credit and aborts. On the bus thread.

Two classes beside the links distrust workers: `ResultCheck` rejects false output, `SilenceChecks` moves requests away.

Invariant: the chunks of a frame reach their calls before the frame is acknowledged. Credit depends on received bytes,
not on bytes that callers have read, so a caller that does not read delays no other caller.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from ...schemas.chunk import Chunk
from ...schemas.control import DesiredState, Recorded, Resume, UnloadLora, Wake, lora_register
from ...schemas.decoding import WIRE_VERSION
from ...schemas.errors import BusBroken, ErrorCode, RemoteProtocolError, RollbusError
from ...schemas.limits import MAX_WEIGHT_VERSION
from ...schemas.messages import Frame, FrameHeader, LinkMessage, RequestKey, decode_frame, decode_frame_header, encode
from ...schemas.presence import WorkerPresence, WorkerState
from ..control.store import DesiredStore
from ..logs import RejectionCount
from ..nats.connection import Connection, publish
from ..nats.library import Msg
from ..protocol.attempt import events as on
from ..protocol.attempt.suspects import BUSY_FACTOR, SILENT_S, Engine, SilenceWatch
from ..protocol.fleet.desired import WEIGHTS, effective
from ..protocol.fleet.presence import PresenceTable
from ..protocol.stream.link_receiver import FollowedLinks, FrameVerdict, LinkReceiver
from ..protocol.stream.response_stream import Announced, announced_by, are_within, problem_of
from ..subjects import Subjects
from .coordinator import AttemptCoordinator, ChildRequest
from .presence import PresenceWatcher

logger = logging.getLogger(__name__)

READ_S: Final = 1.0
"""Seconds for a read of the desired state. Frames wait meanwhile. It takes a round trip."""
CONFIRMED_S: Final = 1.5
"""Seconds since a majority of the servers of a cluster confirmed the server that answers the read: more than the second
between two heartbeats of a leader. Versions are not checked by an older answer."""
UNREADABLE_S: Final = 10.0
"""Seconds without another read after one that failed. Versions are not checked meanwhile, and workers get no new ones:
a version is recorded before a worker loads it."""
ENDED_S: Final = 60.0
"""Seconds after the record of an adapter's end, or of a rollback, in which frames of its version may arrive, also if
clocks differ. That version is in no state then."""
NOT_CHECKED: Final = (MAX_WEIGHT_VERSION, MAX_WEIGHT_VERSION)
SILENCE_ROUND_S: Final = 1.0
"""Seconds between two checks for silent workers."""
STATE_READ_S: Final = 5.0
"""Seconds between two reads of a model's desired state while a worker with requests of this client does not serve."""
MAX_BEHIND_S: Final = 600.0
"""Seconds for which a worker may apply a recorded command, or receive weights before the next one. After that, its
silence counts, also if it says meanwhile that it serves."""
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


class ResultCheck:
    """Rejects output that a worker cannot have: ids outside its vocabulary, and versions that were never recorded.

    A version above the announced one may be news, because presence and frames use different subscriptions. Then the
    client reads the desired state once, which has each version before a worker serves it.
    """

    def __init__(self, table: PresenceTable, store: DesiredStore, coordinator: AttemptCoordinator) -> None:
        self._table = table
        self._store = store
        self._coordinator = coordinator
        self._unreadable_until = 0.0
        # The desired state that was read last.
        self._last_model: str | None = None
        self._last_state: DesiredState | None = None
        self._rejected = RejectionCount()

    def is_plausible(self, worker: str, frame: Frame) -> bool:
        """Return True if all chunks are within what the worker announced. It is called for each frame."""
        presence = self._table.get(worker)
        return presence is not None and presence.incarnation == frame.incarnation and are_within(frame.chunks, presence)

    async def without_false(self, worker: str, frame: Frame) -> Frame:
        """Return the frame without false chunks, and fail their requests as `protocol_error`."""
        engine = worker, frame.incarnation
        announced: dict[tuple[str, str], Announced] = {}
        has_read: set[str] = set()
        false: list[Chunk] = []
        for chunk in frame.chunks:
            child = self._coordinator.find(chunk.request_id, chunk.attempt, chunk.child)
            # Chunks of other requests are dropped later.
            if child is None or (child.worker is not None and child.engine != engine):
                continue
            use = _use_of(child)
            if use not in announced:
                announced[use] = self._limits_of(engine, *use)
            if problem_of(chunk, announced[use]) is None:
                continue
            problem = await self._problem(engine, child, chunk, has_read)
            announced.clear()  # presence may have arrived meanwhile
            if problem is not None:
                false.append(chunk)
                self._reject(worker, frame.incarnation, chunk, problem)
        return replace(frame, chunks=[chunk for chunk in frame.chunks if chunk not in false]) if false else frame

    def _reject(self, worker: str, incarnation: str, chunk: Chunk, problem: str) -> None:
        self._rejected.warn(logger, "chunk.rejected worker=%s so_far=%s error=%s", worker, problem)
        # The request may have ended while the desired state was read.
        key = RequestKey(chunk.request_id, chunk.attempt, chunk.child)
        self._coordinator.fail_false((worker, incarnation), key, f"worker {worker} sent {problem}")

    async def _problem(self, engine: Engine, child: ChildRequest, chunk: Chunk, has_read: set[str]) -> str | None:
        model, lora = _use_of(child)

        def problem(recorded: tuple[int, int]) -> str | None:
            now = self._limits_of(engine, model, lora)
            # Tokens may arrive after the presence of a rollback or of an unloaded adapter.
            return problem_of(chunk, Announced(now.vocab_size, *map(max, now[1:], recorded, child.stream.versions)))

        if model == self._last_model and problem(_recorded_versions(self._last_state, engine[0], lora)) is None:
            # A read for each frame would hold up the frames of all workers.
            return None
        if model in has_read or await self._read(model):
            has_read.add(model)
            return problem(_recorded_versions(self._last_state, engine[0], lora))
        return problem(NOT_CHECKED)

    def _limits_of(self, engine: Engine, model: str, lora: str) -> Announced:
        """Return what the worker announced. If that is not known: what any worker of the model announced."""
        own = self._table.get(engine[0])
        if own is None or own.incarnation != engine[1]:
            return announced_by(self._table.workers(model), lora)
        found = announced_by((own,), lora)
        if own.capabilities is not None:
            return found
        return found._replace(vocab_size=announced_by(self._table.workers(model), lora).vocab_size)

    async def _read(self, model: str) -> bool:
        """Read the desired state. Return False if it cannot be read."""
        if time.monotonic() < self._unreadable_until:
            return False
        try:
            async with asyncio.timeout(READ_S):
                # A server that is cut off from its cluster would answer with an old state.
                confirmed_s = await self._store.confirmed_s()
                if confirmed_s > CONFIRMED_S:
                    raise BusBroken(f"the leader of the desired states was last confirmed {confirmed_s:.1f} s ago")
                self._last_state = await self._store.read(model)
        except (RollbusError, TimeoutError) as error:
            self._unreadable_until = time.monotonic() + UNREADABLE_S
            logger.warning("version.check_failed model=%s error=%r", model, error)
            return False
        self._last_model = model
        return True


def _use_of(child: ChildRequest) -> tuple[str, str]:
    """Return the model of a request and its adapter. Without an adapter, one with the model's name may answer."""
    model = child.open_call.model
    return model, child.stream.asked.lora or model


def _recorded_versions(state: DesiredState | None, worker: str, lora: str) -> tuple[int, int]:
    """Return the recorded versions of the weights and of this adapter; 0: none."""
    registers = {} if state is None else effective(state, worker)
    return _greatest_of(registers.get(WEIGHTS)), _greatest_of(registers.get(lora_register(lora)))


def _greatest_of(recorded: Recorded | None) -> int:
    """Return the greatest version of which frames may arrive after this command."""
    if recorded is None:
        return 0
    command = recorded.command
    ends = getattr(command, "allow_rollback", isinstance(command, UnloadLora))
    return MAX_WEIGHT_VERSION if ends and abs(time.time() - recorded.at) < ENDED_S else getattr(command, "version", 0)


@dataclass(slots=True)
class _WorkerLink:
    followed: FollowedLinks
    received_at: float


class ClientLinks:
    """One link for each worker that sends frames to this client.

    Args:
        identity: name and incarnation of this client.
        coordinator: handles the content of frames, and lost ones.
        incarnations_of: returns the incarnations that publish presence as a worker.
    """

    def __init__(
        self,
        nats: Connection,
        subjects: Subjects,
        identity: tuple[str, str],
        coordinator: AttemptCoordinator,
        incarnations_of: Callable[[str], Collection[str]] = lambda _worker: (),
    ) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client, self._incarnation = identity
        self._coordinator = coordinator
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

    async def receive(self, message: Msg) -> None:
        """Process a message with a frame."""
        worker = message.subject.rpartition(".")[2]
        try:
            frame = decode_frame(message.data)
        except RemoteProtocolError as exc:
            self._receive_unreadable(worker, message.data, exc)
            return
        self._coordinator.stats.frames += 1
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
        self._coordinator.stats.bad_messages += 1
        self._rejected.warn(logger, "frame.rejected worker=%s so_far=%s error=%s", worker, error)
        header, now = decode_frame_header(data), time.monotonic()
        message = f"worker {worker} sent a frame that cannot be decoded: {error}"
        if header is not None:
            receiver = self._receiver(worker, header, now)
            receivers = [] if receiver is None else [receiver]
        else:
            link = self._links.get(worker)
            receivers = [] if link is None else list(link.followed.receivers)
        for receiver in receivers:
            verdict = receiver.receive_unreadable(header, len(data), now)
            if verdict is FrameVerdict.SKIPPED and header is not None:
                (key,) = header.keys
                self._coordinator.fail_false((worker, header.incarnation), key, message)
            elif verdict is FrameVerdict.BROKEN:
                logger.error("link.broken worker=%s link=%r error=%s", worker, receiver, error)
                self._write_now(worker)
                self._coordinator.retry_unreadable((worker, receiver.incarnation or ""), header, message)
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
            self._coordinator.mark_lost(worker, incarnation, f"worker {worker} started a new link")
        return receiver

    def _acknowledge(self, worker: str, receiver: LinkReceiver) -> None:
        if receiver.is_ack_due(self._window):
            self._write_now(worker)
        elif receiver.has_unacked:
            self._soon[worker] = None
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._write_delayed)
        if len(self._links) > MAX_LINKS:
            self._remove(next(iter(self._links)))

    def _count(self, verdict: FrameVerdict) -> None:
        self._coordinator.stats.duplicate_frames += verdict is FrameVerdict.DUPLICATE
        self._coordinator.stats.missing_frames += verdict is FrameVerdict.GAP
        self._coordinator.stats.stale_frames += verdict is FrameVerdict.STALE

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
                self._coordinator.stats.resends_asked += messages[-1].resend
            abort = []
        return messages or [LinkMessage(WIRE_VERSION, abort, client_incarnation=self._incarnation)]


class SilenceChecks:
    """Moves requests away from workers that offered to run them and send no tokens."""

    def __init__(
        self, nats: Connection, watcher: PresenceWatcher, store: DesiredStore, coordinator: AttemptCoordinator
    ) -> None:
        self._nats = nats
        self._watcher = watcher
        self._coordinator = coordinator
        self._store = store
        # The models of the workers that do not serve now, with the time of the last read.
        self._states: dict[str, tuple[float, DesiredState | None]] = {}
        # By worker with open requests: the recorded epoch, and since when the worker says that it is busy with weights.
        self._behind_since: dict[str, tuple[int, float]] = {}
        self.watch = SilenceWatch()
        coordinator.silent = self.watch.avoided

    def named(self, workers: Sequence[WorkerPresence]) -> tuple[WorkerPresence, ...]:
        """Return the presence of these workers, where the last error of silent workers is their silence."""
        error = "it offered to run requests of this client and sent no tokens of them"
        avoided = self.watch.avoided
        return tuple(replace(one, last_error=error) if one.worker in avoided else one for one in workers)

    async def run(self) -> None:
        """Check until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(SILENCE_ROUND_S)
            offered = self._coordinator.open_children(lambda child: child.worker is not None)
            suspended = await self._suspended({child.engine[0] for child in offered})
            now = time.monotonic()
            elapsed_s, checked_at = now - checked_at, now
            if not self._nats.is_connected or elapsed_s > 2 * SILENCE_ROUND_S + STATE_READ_S:
                # This process did not read, so it cannot judge.
                suspended = {child.engine[0] for child in offered}
            waiting_since = now - BUSY_FACTOR * SILENT_S
            live = [
                child
                for child in offered
                # A worker without a free slot may let followers of a group wait, behind those of other clients.
                if child.is_open and child.worker is not None and (child.has_begun or child.heard_at < waiting_since)
            ]
            for worker in list(self.watch.avoided):
                if (presence := self._watcher.table.get(worker)) is not None:
                    self.watch.forget(worker, presence.incarnation)
            self._move(self.watch.check(live, suspended, elapsed_s, now), now)

    def _move(self, children: Sequence[ChildRequest], now: float) -> None:
        for worker, count in Counter(child.engine[0] for child in children).items():
            logger.warning("worker.silence_detected worker=%s requests=%s", worker, count)
        for child in children:
            silent_s = now - child.heard_at
            message = f"worker {child.worker} offered to run the request and sent no token of it for {silent_s:.0f} s"
            child.avoids_queue = True
            self._coordinator.send(child, on.Lost(child.open_call.failure(ErrorCode.WORKER_LOST, message)))

    async def _suspended(self, workers: set[str]) -> set[str]:
        """Return the workers that the recorded state keeps from generating, not those that only say so."""
        found, models = set(), set()
        self._behind_since = {worker: since for worker, since in self._behind_since.items() if worker in workers}
        for worker in workers:
            presence = self._watcher.table.get(worker)
            if presence is None or presence.state is WorkerState.SERVING:
                continue
            models.add(presence.model)
            try:
                state = await self._state(presence.model)
            except RollbusError as exc:
                logger.debug("silence.check_failed worker=%s error=%s", worker, exc)
                found.add(worker)
                continue
            if state is not None and is_stopped(state, presence):
                found.add(worker)
            elif presence.transfer is not None or (state is not None and presence.epoch < state.epoch):
                now, recorded = time.monotonic(), 0 if state is None else state.epoch
                epoch, since = self._behind_since.get(worker, (recorded, now))
                if epoch != recorded:
                    since = now
                self._behind_since[worker] = recorded, since
                if now - since < MAX_BEHIND_S:
                    found.add(worker)
        # Workers choose the names of their models, and may change them.
        self._states = {model: read for model, read in self._states.items() if model in models}
        return found

    async def _state(self, model: str) -> DesiredState | None:
        read_at, state = self._states.get(model, (-STATE_READ_S, None))
        if time.monotonic() - read_at >= STATE_READ_S:
            state = await self._store.read(model)
            self._states[model] = time.monotonic(), state
        return state


def is_stopped(state: DesiredState, presence: WorkerPresence) -> bool:
    """Return True if a recorded command pauses or drains this worker, or puts it to sleep."""
    registers = effective(state, presence.worker)
    return any(
        register in registers and not isinstance(registers[register].command, Resume | Wake)
        for register in ("pause", "sleep")
    )
