"""A connected client: its calls in the caller's loop; connection, presence, requests and links on the bus thread.

The methods of the first half belong to the caller's loop and avoid waiting for the bus thread. A request for a model
with a serving worker is opened without a round trip.
"""

import asyncio
import itertools
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from typing import Final

from ...schemas.errors import (
    BusBroken,
    BusClosed,
    ErrorCode,
    NoWorkers,
    PermissionDenied,
    RemoteProtocolError,
    RequestFailed,
    RequestRejected,
)
from ...schemas.messages import decode_client_presence, encode_json
from ...schemas.options import DEFAULT_LEASE_S
from ...schemas.presence import ClientPresence, ClientState, WorkerPresence
from ...schemas.request import GenerateRequest, wire_id
from ..control.controller import Controller
from ..control.updates import Updates
from ..logs import RejectionCount, warning_of
from ..nats.connection import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S, Connection, check_permitted, publish, subscribe
from ..nats.library import Msg, SlowConsumerError
from ..objects.uploads import Uploads
from ..protocol.fleet.leases import LEASE_MARGIN_S
from ..protocol.fleet.presence import LostWorker, WaitLimit
from ..subjects import CLIENT_CONNECTION
from ..tracing.spans import TracingStats, make_tracer
from .calls import Call, CallResult, Inbox, SharedInbox, call_in
from .config import ClientConfig, ClientStats
from .coordinator import AttemptCoordinator
from .dispatch import RequestDispatcher
from .generation import Generation, SampleKey
from .links import ClientLinks, ResultCheck, SilenceChecks
from .presence import ModelNames, PauseWarnings, PresenceWatcher
from .record_writer import RunRecorder
from .thread import FORKED, LoopThread

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
"""Seconds between two presence messages, and between two link messages if there is nothing else to send."""
LEASE_S: Final = DEFAULT_LEASE_S
"""The lease of this client in seconds."""
UNHEARD_S: Final = DEFAULT_LEASE_S + LEASE_MARGIN_S
"""Seconds. A live worker publishes presence several times within this time after an offer."""
LEASE_CHECK_S: Final = 0.5
"""Seconds between two checks of the workers' leases, a tenth of a lease."""


class Runtime:
    """The parts of one client and its open calls. Call `start` before use and `close` afterwards."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.nats = nats = Connection(
            config.server,
            name=f"{CLIENT_CONNECTION}{config.client}",
            on_reconnect=self._restart_leases,
            on_error=self._handle_error,
        )
        self.tracer = make_tracer(config.tracing, service_name="rollbus-client")
        self.thread = LoopThread(f"rollbus-{config.client}", self._run(), self._fail_all)
        # The caller's side.
        self.inbox = Inbox(self.thread.call_soon_in_owner_loop)
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()
        self._failure: Exception | None = None  # set when the thread has ended
        self.recorder: RunRecorder | None = None
        """Record that the results of this client go to. None: no record was opened."""
        # The bus thread's side.
        self._started_at = time.monotonic()
        self._outage_s = 0.0
        self._rejected = RejectionCount()
        self.coordinator = AttemptCoordinator()
        self.watcher = PresenceWatcher(
            nats,
            config.subjects,
            self._on_worker_lost,
            self._on_fleet_change,
            self.coordinator.on_worker_survival,
            self._on_worker_heard,
        )
        self.watcher.client = config.client
        self.controller = Controller(nats, config.subjects, config.client, self.watcher)
        self.models = ModelNames(nats, config, self.watcher, self.controller.store)
        self.updates = Updates(self.controller, Uploads(config.server, config.subjects))
        table, identity = self.watcher.table, (config.client, config.incarnation)
        self.links = ClientLinks(nats, config.subjects, identity, self.coordinator, table.incarnations_of)
        self.links.check = ResultCheck(table, self.controller.store, self.coordinator)
        self.dispatcher = RequestDispatcher(nats, config, self.watcher, self.coordinator)
        self.pauses = PauseWarnings(self.watcher, self.coordinator, self.controller.store)
        self.silence = SilenceChecks(nats, self.watcher, self.controller.store, self.coordinator)
        self.dispatcher.placement.silent = self.silence.watch.avoided
        self.coordinator.connect(self.dispatcher, self.links.abort)

    @property
    def num_calls(self) -> int:
        """Number of calls that were opened and not removed."""
        return len(self._calls)

    @property
    def unread_bytes(self) -> int:
        """Bytes of results that no caller has read."""
        return self.inbox.unread_bytes

    def stats(self) -> ClientStats:
        """Return a copy of the counters. Any thread may call this."""
        counted = self.coordinator.stats
        return replace(
            counted,
            placed=dict(counted.placed),
            prefill_fallbacks=dict(counted.prefill_fallbacks),
            retries=dict(counted.retries),
            republished=self.dispatcher.publisher.stats.repeats,
            dropped_msgs=self.nats.counters().dropped_msgs,
            unread_bytes=self.unread_bytes,
            queue_waits=self.dispatcher.queue_waits.copy(),
            **asdict(TracingStats() if self.tracer is None else self.tracer.stats),
        )

    def debug_state(self) -> dict[str, int]:
        """Return counts of what the client holds, for tests. The names are not stable."""
        return self.coordinator.debug_state() | self.dispatcher.debug_state()

    async def start(self) -> None:
        """Connect.

        Cancellation: leaves nothing open.

        Raises:
            BusBroken: no server answers, or the server does not permit this user to be a client.
        """
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self._close_tracer)
            await self.thread.start()
            unless_started.pop_all()
        _started.add(self)

    async def close(self) -> None:
        """Fail all open calls, abort them in the engines, and end the thread.

        Cancellation: raised after the close is complete, which takes a few seconds at most.

        Raises:
            Exception: the error that had ended the thread earlier.
        """
        try:
            await self.thread.stop()
        finally:
            if self.recorder is not None:
                await asyncio.to_thread(self.recorder.close)
            await self._close_tracer()

    async def _close_tracer(self) -> None:
        if self.tracer is not None:
            # Closing waits for the collector, which may be slow.
            await asyncio.to_thread(self.tracer.close)

    async def open(
        self,
        request: GenerateRequest,
        *,
        streams: bool,
        wait_limit: WaitLimit | None = None,
        inbox: SharedInbox | None = None,
    ) -> Call:
        """Submit `request`. The caller must `remove` the call afterwards.

        This waits only if no worker seems to serve the model or to start.

        Args:
            wait_limit: limit for the time without a serving worker before the first chunk. None: until the deadline.
            inbox: inbox that gets the chunks. None: the call keeps them for its own reader.

        Raises:
            RequestRejected: the request was not published.
            BusClosed: the client belongs to the parent of this forked process, or to an event loop that has ended.
            BusBroken: the connection is permanently lost.
        """
        self.thread.check_usable()
        if self.nats.lost is not None:
            raise self.nats.lost
        key = SampleKey(self.config.incarnation, next(self._numbers), 0)
        call = Call(request, self.inbox if inbox is None else inbox, streams, self.tracer, key)
        request_id = call.wire_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message=f"request id {request.request_id!r} is already in use by an open request of this client",
                request_id=request.request_id,
            )
        call.wait_limit = wait_limit
        call.other_loop = self.thread.other_loop()
        self._calls[request_id] = call
        try:
            # Only now: a call that the end of the thread does not find here would never end.
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            model = self.models.fixed if request.model is None else request.model
            # Without an await if a worker serves the model or starts.
            call.model = model if model in self.watcher.snapshot.awaited else await self._resolve_model(call, model)
            call.is_submitted = True
        finally:
            if not call.is_submitted:
                del self._calls[request_id]
        self.thread.post(self.coordinator.submit, call)
        if call.is_aborted:
            self.thread.post(self.coordinator.abort, [request_id])
        return call

    async def _resolve_model(self, call: Call, model: str | None) -> str:
        try:
            return await self.thread.run(self.models.resolve(model, call))
        except NoWorkers:
            if not call.is_aborted:
                raise
            # The call ends as aborted without a publication.
            return model or ""

    def remove(self, call: Call) -> None:
        """Remove `call`, and abort its open children at their workers. Calling this twice is allowed."""
        request_id = call.wire_id
        if self._calls.get(request_id) is call:
            del self._calls[request_id]
            call.abandon()
            self.thread.post(self.coordinator.remove, call)

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls immediately with their present results; see `Client.abort`."""
        given = self._by_wire_id(request_ids)
        aborted = []
        for request_id in given:
            call = self._calls.get(request_id)
            if call is not None and not call.is_submitted:
                call.is_aborted = True
                aborted.append(request_id)
        aborted += await self.thread.call(self.coordinator.abort, list(given))
        return list(dict.fromkeys(given[request_id] for request_id in given if request_id in aborted))

    async def stop(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """End these submitted calls soon, with their present results.

        This waits for the bus thread, but not for a worker.

        Returns:
            Number of tokens of each child, by request id, for the calls that were open.
        """
        given = self._by_wire_id(request_ids)
        stopped = await self.thread.call(self.coordinator.stop, list(given))
        return {given[request_id]: num_tokens for request_id, num_tokens in stopped.items()}

    def _by_wire_id(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Return the callers' ids by the ids of their calls. An id with scopes may have several open calls."""
        given = {wire_id(request_id): request_id for request_id in request_ids}
        others = {request_id for name, request_id in given.items() if name not in self._calls}
        if others:
            for name, call in list(self._calls.items()):
                if call.request.id_scope is not None and call.request.request_id in others:
                    given[name] = call.request.request_id
        return given

    async def pop_result(self, call: Call) -> Generation:
        """Return the result of an ended call that was not streamed, and remove the call.

        If a record is open, this waits until the record has room for the result. Cancellation: changes nothing.
        """
        if self.recorder is not None:
            await self.recorder.wait_for_room()
        generation = call.generation()
        self.remove(call)
        if self.recorder is not None:
            newest = self.watcher.snapshot.newest_version(generation.model, generation.lora)
            self.recorder.add(generation, newest_version=newest)
        return generation

    def _fail_all(self, error: BaseException | None) -> None:
        """Fail all open calls after the thread has ended, because the thread cannot."""
        why = "the client was closed" if error is None else f"the client has failed: {error!r}"
        self._failure = BusClosed(why) if error is None else BusBroken(why)
        self._failure.__cause__ = error
        self._end_calls(why)
        for call in list(self._calls.values()):
            asyncio.get_running_loop().call_soon(call_in, call.other_loop, call.notify)

    def _end_calls(self, message: str) -> None:
        # Copies: callers in the loops of other threads open and remove calls meanwhile.
        for call in list(self._calls.values()):
            if call.result is None:
                failure = RequestFailed(
                    code=ErrorCode.CLIENT_CLOSED, message=message, request_id=call.request.request_id
                )
                call.result = CallResult((), failure)

    def leave_to_parent(self) -> None:
        """End the calls of this copy without sending anything. Call this in a process that was just forked.

        The callers are not notified, because that would run their code inside `os.fork`.
        """
        self.thread.abandon()
        self._end_calls(FORKED)

    # On the bus thread.

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def _on_worker_lost(self, gone: LostWorker) -> None:
        self.dispatcher.placement.remove_worker(gone)
        self.coordinator.mark_worker_lost(gone)
        self.controller.collector.mark_lost(gone)

    def _on_worker_heard(self, presence: WorkerPresence) -> None:
        self.dispatcher.placement.update(presence)
        self.dispatcher.wake()

    def _on_fleet_change(self) -> None:
        self.dispatcher.wake()
        self.pauses.update_paused()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Connect, run all parts until the block ends, and publish the final presence.

        Cancellation: the final presence is still published, in bounded time. The same holds if a task fails.
        """
        await self.nats.open(CONNECT_TIMEOUT_S)
        self._started_at = time.monotonic()
        try:
            await self._subscribe()
            try:
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(self.links.run(), name="client.links"),
                        tasks.create_task(self.dispatcher.run(), name="client.dispatch"),
                        tasks.create_task(self.dispatcher.publisher.run(), name="client.publish_again"),
                        tasks.create_task(self.dispatcher.check_deadlines(), name="client.check_deadlines"),
                        tasks.create_task(self._check_leases(), name="client.leases"),
                        tasks.create_task(self.pauses.run(), name="client.pauses"),
                        tasks.create_task(self.silence.run(), name="client.silence"),
                    ]
                    yield
                    for task in background:
                        task.cancel()
            except Exception as exc:
                # Boundary of the client: also after a defect in a task, the calls that wait in the owner's thread must
                # end.
                self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, f"the client has failed: {exc!r}")
                raise
            finally:
                await self._leave()
        finally:
            await self.nats.shut()

    async def _subscribe(self) -> None:
        """Subscribe to all subjects of this client, and publish its presence."""
        await subscribe(self.nats, self.config.subjects.presences, self.watcher.receive)
        await subscribe(self.nats, self.config.subjects.frames_to(self.config.client), self.links.receive)
        await subscribe(self.nats, self.config.subjects.client(self.config.client), self._on_newer_client)
        await self.controller.collector.start()
        await self.dispatcher.publisher.start()
        await check_permitted(self.nats)
        # One connection keeps the order: the server has the subscriptions before any request can cause an answer.
        await self._publish_presence(ClientState.LIVE)
        await self.watcher.restart_watch()

    def _on_newer_client(self, message: Msg) -> None:
        """Fail all calls if a client that connected later uses this name. For workers, this incarnation has ended."""
        try:
            presence = decode_client_presence(message.data)
        except RemoteProtocolError as exc:
            self._rejected.warn(logger, "presence.rejected subject=%s so_far=%s error=%s", message.subject, exc)
            return
        is_other = presence.incarnation != self.config.incarnation and presence.state is not ClientState.CLOSED
        if is_other and presence.uptime_s < self._uptime_s:
            logger.error("client.superseded client=%s by=%s", self.config.client, presence.incarnation)
            reason = f"another client with the name {self.config.client} connected; client names must be unique"
            self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, reason)

    async def _check_leases(self) -> None:
        """Renew this client's lease, check the workers' leases and repeat link acks, until cancelled."""
        is_beat = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(LEASE_CHECK_S)
            waited_s = time.monotonic() - before
            if not self.nats.is_connected:
                # Pause the lease timers: the client receives no presence.
                self._handle_outage(waited_s)
                continue
            if waited_s > 2 * LEASE_CHECK_S:
                # The process was frozen. Presence that arrived meanwhile is not processed yet.
                await self._restart_leases()
                continue
            self.watcher.expire()
            self.coordinator.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic() - UNHEARD_S)
            self.coordinator.check_suspects()
            is_beat = not is_beat
            if is_beat:
                await self._send_heartbeat()

    def _handle_outage(self, waited_s: float) -> None:
        """Mark all workers lost after an outage of lease plus margin plus `worker_grace_s`.

        A worker that dies while the server is reachable is marked lost after the same time. Time in which this process
        was frozen does not count, because the process may not have tried to reconnect.
        """
        if waited_s > 2 * LEASE_CHECK_S:
            self.dispatcher.restart_timers()
            return
        self._outage_s += waited_s
        if self._outage_s >= UNHEARD_S + self.config.worker_grace_s:
            self.watcher.remove_all(f"NATS has not answered for {self._outage_s:.0f} s")
            self.coordinator.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic())
            self.dispatcher.fail_unserved(has_grace=False)

    @property
    def _is_observer(self) -> bool:
        """True if the client has credentials and has sent no request, so that no worker has anything of it.

        In that case the client publishes no presence, because presence would take the name away from a running client
        with the same credentials.
        """
        return self.config.server.credentials is not None and not self.coordinator.stats.requests

    async def _send_heartbeat(self) -> None:
        if self._is_observer:
            return
        await self._publish_presence(ClientState.LIVE)
        self.links.prune(self.watcher.table.get)
        self.links.repeat_acks()

    async def _restart_leases(self) -> None:
        """Continue after an outage of the connection or this process. Restart all leases: no presence was received."""
        logger.info("client.resumed client=%s", self.config.client)
        self._outage_s = 0.0
        self.dispatcher.restart_timers()
        # If the connection is down again, the next reconnect restarts the leases.
        with warning_of(BusBroken, logger, "client.resume_failed client=%s error=%s", self.config.client):
            await self._send_heartbeat()
            await self.watcher.restart_watch()

    def _handle_error(self, error: Exception) -> None:
        """Handle an error that the connection reports."""
        if isinstance(error, PermissionDenied):
            self.coordinator.fail_all(ErrorCode.PERMISSION_DENIED, str(error))
        elif isinstance(error, BusBroken):
            self.coordinator.fail_all(ErrorCode.FRAMES_LOST, str(error))
        elif not isinstance(error, SlowConsumerError):
            # Dropped frames are requested again. A message that a handler failed on would fail again.
            self.coordinator.mark_all_lost(f"a message could not be handled: {error!r}")

    async def _leave(self) -> None:
        """Fail all open calls, and publish the final presence."""
        self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, "the client was closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # This replaces all aborts: workers abort all requests of this incarnation of the client.
                await self._publish_presence(ClientState.CLOSED)
        except TimeoutError:
            logger.warning("client.final_presence_failed client=%s", self.config.client)

    async def _publish_presence(self, state: ClientState) -> None:
        if self._is_observer:
            return
        presence = ClientPresence(
            client=self.config.client,
            incarnation=self.config.incarnation,
            state=state,
            lease_s=LEASE_S,
            uptime_s=round(self._uptime_s, 3),
        )
        with warning_of(BusBroken, logger, "presence.publish_failed error=%s"):
            await publish(self.nats, self.config.subjects.client(self.config.client), encode_json(presence))


_started: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for runtime in list(_started):
        runtime.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
