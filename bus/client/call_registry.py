"""The caller's side of a client that is connected: it opens calls, hands them to the bus thread and takes what comes.

All of this belongs to the caller's loop. Nothing here waits for the bus thread where it can be avoided: a request for a
model that somebody serves is opened without a round trip.
"""

import asyncio
import os
import weakref
from collections.abc import Iterable
from contextlib import AsyncExitStack

from ...schemas.errors import BusBroken, ErrorCode, InvalidRequest, NoWorkers, RequestFailed, RequestRejected
from ...schemas.request import GenerateRequest
from ..tracing.spans import TracingStats
from ..tracing.switch import make_tracer
from .calls import Call, CallResult, Inbox
from .config import ClientConfig
from .fleet import Fleet
from .loop_thread import FORKED, LoopThread
from .runtime import ClientRuntime, ClientStats, open_client_runtime

__all__ = ["CallRegistry"]


class CallRegistry:
    """The live calls of one client, and the thread that carries them. `start` it before use, `close` it after."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.tracer = make_tracer(config.tracing, service_name="rollbus-client")
        self._thread = LoopThread(f"rollbus-{config.client}", open_client_runtime(config), self._fail_all)
        self._inbox = Inbox(self._thread.call_in_owner_loop)
        self._calls: dict[str, Call] = {}
        self._failure: BaseException | None = None
        # Set by `start`.
        self._runtime: ClientRuntime
        self.fleet: Fleet

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<CallRegistry calls={len(self._calls)} unread={self.unread_bytes} {self._thread!r}>"

    @property
    def thread(self) -> LoopThread[ClientRuntime]:
        """The bus thread."""
        return self._thread

    @property
    def runtime(self) -> ClientRuntime:
        """What lives on the bus thread."""
        return self._runtime

    @property
    def config(self) -> ClientConfig:
        """How the client is set up."""
        return self._config

    @property
    def num_calls(self) -> int:
        """Calls that were opened and not dropped."""
        return len(self._calls)

    @property
    def unread_bytes(self) -> int:
        """Of results that no caller has taken."""
        return self._inbox.unread.num_bytes

    def stats(self) -> ClientStats:
        """A copy of the counters."""
        return self._runtime.stats(self.unread_bytes, TracingStats() if self.tracer is None else self.tracer.stats)

    async def start(self) -> None:
        """Connect.

        Cancellation: leaves nothing behind.

        Raises:
            BusBroken: no server answers.
        """
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self._close_tracer)
            self._runtime = await self._thread.start()
            unless_started.pop_all()
        self.fleet = Fleet(self._config.subjects.fleet, self._thread, self._runtime)
        _started.add(self)

    async def close(self) -> None:
        """Fail what is open, have it aborted in the engines, and end the thread.

        Cancellation: raised once that is done; it takes a few seconds at most.

        Raises:
            Exception: what had ended the thread before.
        """
        try:
            await self._thread.stop()
        finally:
            await self._close_tracer()

    async def _close_tracer(self) -> None:
        if self.tracer is not None:
            # It waits for the collector, if that is slow.
            await asyncio.to_thread(self.tracer.close)

    async def open(self, request: GenerateRequest, *, streams: bool) -> Call:
        """Have `request` published; the caller must `remove` the call when it is done with it.

        Waits only where nobody seems to serve the model.

        Raises:
            RequestRejected: nothing was published.
            BusClosed: the client belongs to the process that this one was forked from.
            BusBroken: the connection was lost for good.
        """
        self._thread.check_process()
        if self._failure is not None:
            raise BusBroken(f"the client has failed: {self._failure!r}") from self._failure
        if self._runtime.nats.lost is not None:
            raise self._runtime.nats.lost
        request_id = request.request_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message="this client has a live request of this id",
                request_id=request_id,
            )
        call = Call(request, self._inbox, streams, self.tracer)
        self._calls[request_id] = call
        try:
            call.model = await self._resolve_model(call)
            call.is_submitted = True
        finally:
            if not call.is_submitted:
                del self._calls[request_id]
        self._thread.post(self._runtime.coordinator.submit, call)
        if call.is_aborted:
            self._thread.post(self._runtime.coordinator.abort, [request_id])
        return call

    async def _resolve_model(self, call: Call) -> str:
        snapshot = self._runtime.watcher.snapshot
        model = call.request.model
        if snapshot.is_served(model):
            return snapshot.resolve_model(model)
        try:
            return await self._thread.run(self._runtime.watcher.resolve_model(model))
        except NoWorkers:
            if not call.is_aborted:
                raise
            # It is not published any more: it ends as aborted.
            return model or ""

    def remove(self, call: Call) -> None:
        """Forget `call`; what is still open of it is aborted at its worker. Safe to repeat."""
        request_id = call.request.request_id
        if self._calls.get(request_id) is call:
            del self._calls[request_id]
            call.abandon()
            self._thread.post(self._runtime.coordinator.remove, call)

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls where they stand; see `Client.abort`."""
        unique_ids = list(dict.fromkeys(request_ids))
        aborted = []
        for request_id in unique_ids:
            call = self._calls.get(request_id)
            if call is not None and not call.is_submitted:
                call.is_aborted = True
                aborted.append(request_id)
        aborted += await self._thread.run(self._abort(unique_ids))
        return [request_id for request_id in unique_ids if request_id in aborted]

    async def stop(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Have these calls, which are submitted, end soon with what they have.

        Waits for the bus thread, and for no worker.

        Returns:
            Of those that were open: how many tokens each child has.
        """
        return await self._thread.run(self._stop(list(request_ids)))

    async def _stop(self, request_ids: list[str]) -> dict[str, list[int]]:
        return self._runtime.coordinator.stop(request_ids)

    async def newest_version(self, model: str, lora: str | None) -> int | None:
        """The newest weights of `model`, or version of its adapter, that a live worker has; None: that is not known."""
        return await self._thread.run(self._newest_version(model, lora))

    async def _newest_version(self, model: str, lora: str | None) -> int | None:
        return self._runtime.watcher.table.newest_version(model, lora)

    async def _abort(self, request_ids: list[str]) -> list[str]:
        return self._runtime.coordinator.abort(request_ids)

    def _fail_all(self, error: BaseException | None) -> None:
        """The thread has ended: nobody else ends what it had not ended."""
        self._failure = error
        self._end_calls("the client was closed" if error is None else f"the client has failed: {error!r}")
        for call in self._calls.values():
            call.notify()

    def _end_calls(self, message: str) -> None:
        for request_id, call in self._calls.items():
            if call.result is None:
                call.result = CallResult(
                    (), RequestFailed(code=ErrorCode.CLIENT_CLOSED, message=message, request_id=request_id)
                )

    def leave_to_parent(self) -> None:
        """End the calls of this copy without a word to anybody; to be called in a process that was just forked.

        Their callers are not notified: that runs the code of others, in the midst of `os.fork`.
        """
        self._thread.abandon()
        self._end_calls(FORKED)


_started: weakref.WeakSet[CallRegistry] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for registry in list(_started):
        registry.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def check_ids(request_ids: Iterable[str]) -> list[str]:
    """The ids to abort, as a list.

    Raises:
        InvalidRequest: there are none, or they are one string, whose characters nobody means.
    """
    if isinstance(request_ids, str):
        raise InvalidRequest(field="request_ids", problem="is a string", allowed="a list of request ids")
    ids = list(request_ids)
    if not ids:
        raise InvalidRequest(field="request_ids", problem="is empty", allowed="at least one request id")
    return ids
