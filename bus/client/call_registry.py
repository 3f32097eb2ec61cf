"""The caller's side of a connected client: it opens calls, submits them to the bus thread and returns results.

All methods belong to the caller's loop and avoid waiting for the bus thread. A request for a model with a serving
worker is opened without a round trip.
"""

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import AsyncExitStack

from ...schemas.errors import BusBroken, ErrorCode, InvalidRequest, NoWorkers, RequestFailed, RequestRejected
from ...schemas.request import GenerateRequest, wire_id
from ..protocol.fleet.presence import WaitLimit
from ..tracing.spans import TracingStats, make_tracer
from .calls import Call, CallResult, Inbox
from .config import ClientConfig
from .fleet import Fleet
from .generation import Generation, SampleOrigin
from .record.writer import RunRecorder
from .runtime import ClientRuntime, open_client_runtime
from .thread import FORKED, LoopThread
from .times import ClientStats


class CallRegistry:
    """The open calls of one client, and its bus thread. Call `start` before use and `close` afterwards."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        """Configuration of the client."""
        self.tracer = make_tracer(config.tracing, service_name="rollbus-client")
        self.thread = LoopThread(f"rollbus-{config.client}", open_client_runtime(config), self._fail_all)
        self._inbox = Inbox(self.thread.call_in_owner_loop)
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()
        self.recorder: RunRecorder | None = None
        """Record that the results of this client go to. None: no record was opened."""
        self._failure: BaseException | None = None
        # Set by `start`.
        self.runtime: ClientRuntime
        self.fleet: Fleet

    @property
    def num_calls(self) -> int:
        """Number of calls that were opened and not removed."""
        return len(self._calls)

    @property
    def unread_bytes(self) -> int:
        """Bytes of results that no caller has read."""
        return self._inbox.unread.num_bytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the calls which were not removed have received. Any thread may read it."""
        return self.runtime.coordinator.num_tokens

    def stats(self) -> ClientStats:
        """Return a copy of the counters."""
        return self.runtime.stats(self.unread_bytes, TracingStats() if self.tracer is None else self.tracer.stats)

    async def start(self) -> None:
        """Connect.

        Cancellation: leaves nothing open.

        Raises:
            BusBroken: no server answers.
        """
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self._close_tracer)
            self.runtime = await self.thread.start()
            unless_started.pop_all()
        self.fleet = Fleet(self.config.subjects.fleet, self.thread, self.runtime)
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

    async def open(self, request: GenerateRequest, *, streams: bool, wait_limit: WaitLimit | None = None) -> Call:
        """Submit `request`. The caller must `remove` the call afterwards.

        This waits only if no worker seems to serve the model or to start.

        Args:
            wait_limit: limit for the time without a serving worker before the first chunk. None: until the deadline.

        Raises:
            RequestRejected: the request was not published.
            BusClosed: the client belongs to the parent of this forked process, or to an event loop that has ended.
            BusBroken: the connection is permanently lost.
        """
        self.thread.check_usable()
        if self._failure is not None:
            raise BusBroken(f"the client has failed: {self._failure!r}") from self._failure
        if self.runtime.nats.lost is not None:
            raise self.runtime.nats.lost
        request_id = request.wire_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message=f"request id {request.request_id!r} is already in use by an open request of this client",
                request_id=request.request_id,
            )
        origin = SampleOrigin(self.config.incarnation, next(self._numbers), time.time())
        call = Call(request, self._inbox, streams, self.tracer, origin=origin)
        call.wait_limit = wait_limit
        call.other_loop = self.thread.other_loop()
        self._calls[request_id] = call
        try:
            call.model = await self._resolve_model(call)
            call.is_submitted = True
        finally:
            if not call.is_submitted:
                del self._calls[request_id]
        self.thread.post(self.runtime.coordinator.submit, call)
        if call.is_aborted:
            self.thread.post(self.runtime.coordinator.abort, [request_id])
        return call

    async def _resolve_model(self, call: Call) -> str:
        models = self.runtime.models
        model = models.fixed if call.request.model is None else call.request.model
        if model is not None and model in self.runtime.watcher.snapshot.awaited:
            return model
        try:
            return await self.thread.run(models.resolve(model, call))
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
            self.thread.post(self.runtime.coordinator.remove, call)

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls immediately with their present results; see `Client.abort`."""
        given = self._by_wire_id(request_ids)
        aborted = []
        for request_id in given:
            call = self._calls.get(request_id)
            if call is not None and not call.is_submitted:
                call.is_aborted = True
                aborted.append(request_id)
        aborted += await self.thread.call(self.runtime.coordinator.abort, list(given))
        return list(dict.fromkeys(given[request_id] for request_id in given if request_id in aborted))

    async def stop(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """End these submitted calls soon, with their present results.

        This waits for the bus thread, but not for a worker.

        Returns:
            Number of tokens of each child, by request id, for the calls that were open.
        """
        given = self._by_wire_id(request_ids)
        stopped = await self.thread.call(self.runtime.coordinator.stop, list(given))
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

    def newest_version(self, model: str | None, lora: str | None) -> int | None:
        """Return the newest version of `model`, or of its adapter, on any live worker. None if it is unknown."""
        return self.runtime.watcher.snapshot.newest_version(model, lora)

    async def paused_s(self) -> dict[str, float]:
        """Return the seconds for which each model has been paused since the client connected."""
        return await self.thread.call(self.runtime.pauses.paused_s)

    def start_record(self, folder: str | os.PathLike[str], experts: bool, max_buffered_bytes: int) -> RunRecorder:
        """Record the results from now on; see `Client.record`."""
        if self.recorder is not None and self.recorder.is_open:
            problem = f"is {os.fspath(folder)!r}, but this client records into {str(self.recorder.folder)!r}"
            raise InvalidRequest(field="folder", problem=problem, allowed="one open record; close the first")
        self.recorder = RunRecorder(folder, experts=experts, max_buffered_bytes=max_buffered_bytes)
        return self.recorder

    async def pop_result(self, call: Call) -> Generation:
        """Return the result of an ended call that was not streamed, and remove the call.

        If a record is open, this waits until the record has room for the result. Cancellation: changes nothing.
        """
        if self.recorder is not None:
            await self.recorder.wait_for_room()
        generation = call.generation()
        self.remove(call)
        if self.recorder is not None:
            self.recorder.add(generation, newest_version=self.newest_version(generation.model, generation.lora))
        return generation

    def _fail_all(self, error: BaseException | None) -> None:
        """Fail all open calls after the thread has ended, because the thread cannot."""
        self._failure = error
        self._end_calls("the client was closed" if error is None else f"the client has failed: {error!r}")
        for call in list(self._calls.values()):
            call.notify_caller()

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


_started: weakref.WeakSet[CallRegistry] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for registry in list(_started):
        registry.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def check_ids(request_ids: Iterable[str]) -> list[str]:
    """Return the ids to abort as a list.

    Raises:
        InvalidRequest: there are no ids, or `request_ids` is a single string.
    """
    if isinstance(request_ids, str):
        raise InvalidRequest(field="request_ids", problem="is a string", allowed="a list of request ids")
    ids = list(request_ids)
    if not ids:
        raise InvalidRequest(field="request_ids", problem="is empty", allowed="at least one request id")
    return ids
