"""A thread with its own event loop: for work that continues while the owner's loop is blocked, or without asyncio.

All work on the thread belongs to one async context manager, the resident, which is entered and left on the thread.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Generic, TypeVar

import uvloop

from ...schemas.errors import BusBroken, BusClosed

logger = logging.getLogger(__name__)


CLEAN_UP_S: Final = 5.0
"""Seconds for the cleanup of cancelled coroutines. The resident is left only after that: the cleanup may need it."""

EXIT_S: Final = 10.0
"""Seconds to close open clients when the interpreter exits. Closing a client takes less time, also without a server."""
CLOSED: Final = "this client was closed"
CANCELLED: Final = "another thread ended this call"

FORKED: Final = "this client belongs to the process that forked this one; connect a new client in this process"
OWNER_ENDED: Final = (
    "the event loop that connected this client does not run any more; connect a new client in this loop"
)
OWN_THREAD: Final = "a callback of this client may not call the client, because its thread would wait for itself"

T = TypeVar("T")
R = TypeVar("R")


class LoopThread(Generic[T]):
    """Runs one async context manager on a daemon thread. Start it once.

    The owner has an event loop (`start`, `run`, `stop`) or none (`start_blocking`, `run_blocking`, `stop_blocking`).
    Use the thread while the owner's event loop runs. If the interpreter exits while a thread without such a loop runs,
    the thread leaves the resident, so that no engine generates tokens without a reader.

    Args:
        resident: entered and left on the thread. It owns every lasting task there.
        on_end: called in the owner's loop after a started thread has ended, with the error that ended it, or None.
    """

    def __init__(
        self,
        name: str,
        resident: AbstractAsyncContextManager[T],
        on_end: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._resident = resident
        self._on_end = on_end
        self._is_abandoned = False
        self._owner: asyncio.AbstractEventLoop | None = None
        self._launcher: threading.Thread
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        # The thread sets them. They are running, so that nobody who waits for them can cancel them.
        self._entered: Future[T] = Future()
        self._ended: Future[None] = Future()
        self._entered.set_running_or_notify_cancel()
        self._ended.set_running_or_notify_cancel()
        # Any thread appends and only the thread pops. While `_is_woken` is set, the thread will check again.
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        # Submitted coroutines, by the future of their result, until it is done.
        self._submitted: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        # Only the thread uses the fields below.
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._callback_error: BaseException | None = None
        # The thread sets it before it leaves the resident, which may close what coroutines use.
        self._is_leaving = False
        # The loop still runs for a moment after the resident was left, to close asynchronous generators.
        self._has_left = False
        # The thread writes them before it sets `_ended`.
        self._error: BaseException | None = None
        self.has_ended = False
        """True if the thread has ended, or belongs to another process."""

    @property
    def num_calls(self) -> int:
        """Number of coroutines that run on the thread."""
        return len(self._tasks)

    def abandon(self) -> None:
        """Leave the thread to the parent process, the only process that has it. Call this in the forked process.

        The open files of its loop belong to the parent: nothing is posted, run or closed here afterwards.
        """
        self._is_abandoned = self.has_ended = True

    def check_process(self) -> None:
        """Check that the thread belongs to this process.

        Raises:
            BusClosed: the thread was abandoned.
        """
        if self._is_abandoned:
            raise BusClosed(FORKED)

    def check_usable(self) -> None:
        """Check that the thread belongs to this process, and that the owner's loop can receive results.

        A caller in another loop would otherwise wait for ever, because the thread reports to the owner's loop.

        Raises:
            BusClosed: the thread was abandoned, or the caller is in another loop and the owner's loop does not run.
        """
        self.check_process()
        if self._owner is not None and not self._owner.is_running() and _is_in_loop():
            raise BusClosed(OWNER_ENDED)

    def check_caller(self) -> None:
        """Check that the caller may block until the thread has done something.

        Raises:
            BusClosed: the thread was abandoned.
            RuntimeError: the caller is this thread, or one that was started on it.
        """
        self.check_process()
        inner = [thread._thread for thread in tuple(_running) if thread._launcher is self._thread]
        if threading.current_thread() in (self._thread, *inner):
            raise RuntimeError(OWN_THREAD)

    def other_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the running loop if it is not the owner's. Call this in a loop."""
        loop = asyncio.get_running_loop()
        return None if loop is self._owner else loop

    async def start(self) -> T:
        """Start the thread, enter the resident there, and return the result of entering.

        Cancellation: also cancels entering. The thread has ended when this raises.

        Raises:
            Exception: entering raised it. The thread has ended.
        """
        self._owner = asyncio.get_running_loop()
        self._launch()
        async with contextlib.AsyncExitStack() as unless_entered:
            unless_entered.push_async_callback(self._until_ended)
            unless_entered.callback(self._wake_thread, self._cancel)
            resident = await asyncio.wrap_future(self._entered)
            unless_entered.pop_all()
        return resident

    def start_blocking(self) -> T:
        """Start the thread as `start` does. If the caller is interrupted (Ctrl-C), no thread is left."""
        self._launch()
        with contextlib.ExitStack() as unless_entered:
            unless_entered.callback(self._thread.join)
            unless_entered.callback(self._wake_thread, self._cancel)
            resident = self._entered.result()
            unless_entered.pop_all()
        return resident

    def _launch(self) -> None:
        self._launcher = threading.current_thread()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self._loop.close)
            unless_started.callback(_running.discard, self)
            _running.add(self)
            self._thread.start()
            unless_started.pop_all()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the thread, in the order of posting. Many posts cost one wake-up.

        An error of the function ends the thread, and `stop` raises the error. After the end of the thread, posts have
        no effect.
        """
        if self.has_ended:
            return
        self._posts.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._wake_thread(self._wake.set)

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Run `coroutine` on the thread after all earlier posts. The caller may be on any thread and may block.

        Cancelling the future cancels `coroutine`, which may continue to clean up. `stop` waits `CLEAN_UP_S` for that.
        If the thread ends meanwhile, the future has the errors of `run`.

        Raises:
            BusClosed: the thread was stopped or abandoned.
            BusBroken: the thread has failed. The cause is the error.
        """
        outcome: Future[R] = Future()
        outcome.add_done_callback(self._on_done)
        self._submitted[outcome] = coroutine
        # The loop runs submitted callbacks in order, so a wake-up for posts comes first.
        if not self._wake_thread(self._begin, outcome):
            self._submitted.pop(outcome, None)
            coroutine.close()
            self.check_process()
            # The loop is closed: the thread has ended, or is about to end.
            raise self._why_ended()
        return outcome

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run `coroutine` on the thread after all earlier posts, and return its result.

        Cancellation: also cancels `coroutine`, as in `submit`.

        Raises:
            BusClosed: the thread was stopped or abandoned, or the owner's loop does not run any more.
            BusBroken: the thread has failed. The cause is the error.
            Exception: `coroutine` raised it.
        """
        with contextlib.ExitStack() as unless_usable:
            unless_usable.callback(coroutine.close)
            self.check_usable()
            unless_usable.pop_all()
        return await asyncio.wrap_future(self.submit(coroutine))

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call a plain function on the thread after all earlier posts, and return its result.

        Cancellation: the function may run anyway. Errors are those of `run`.
        """

        async def run() -> R:
            return function(*args)

        return await self.run(run())

    def run_blocking(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run `coroutine` on the thread and return its result. This blocks. Several threads may call it.

        If the caller is interrupted (Ctrl-C), `coroutine` is cancelled and has `CLEAN_UP_S` seconds to clean up.

        Raises:
            RuntimeError: as `check_caller`.
            BusClosed, BusBroken, Exception: as `run`.
        """
        with contextlib.ExitStack() as unless_usable:
            unless_usable.callback(coroutine.close)
            self.check_caller()
            unless_usable.pop_all()
        outcome = self.submit(coroutine)
        try:
            concurrent.futures.wait((outcome,))
        finally:
            self.cancel(outcome, wait_s=CLEAN_UP_S)
        return outcome.result()

    def cancel(self, outcome: Future[Any], *, wait_s: float = 0.0) -> None:
        """Cancel a submitted coroutine, and wait until it has cleaned up. Its future then has a `BusClosed`.

        A future that is cancelled itself is done before the cleanup.
        """
        if not outcome.done() and self._wake_thread(self._cancel_task, outcome):
            concurrent.futures.wait((outcome,), wait_s)

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a cleanup `coroutine` without waiting for it.

        Calls that are submitted later run after `coroutine` has started.

        Finalizers may call this, also on the thread. If the thread has ended or belongs to another process, `coroutine`
        does not run.
        """
        with contextlib.suppress(BusClosed, BusBroken):
            self.submit(coroutine)

    async def stop(self) -> None:
        """Leave the resident after all earlier posts, and end the thread. Calling this twice is allowed.

        This has no effect if the thread was abandoned. It works in another loop even if the owner's loop has ended.

        Cancellation: raised after the thread has ended. The resident bounds the time that leaving takes.

        Raises:
            Exception: the error that ended the thread, or that leaving raised.
        """
        if not self._is_abandoned:
            self.request_stop()
            await self._until_ended()
            self._raise_error()

    def stop_blocking(self) -> None:
        """End the thread as `stop` does. If the caller is interrupted, this raises after the thread has ended.

        Raises:
            RuntimeError: as `run_blocking`.
            Exception: as `stop`.
        """
        if not self._is_abandoned:
            self.check_caller()
            self.request_stop()
            try:
                concurrent.futures.wait((self._ended,))
            finally:
                self._thread.join()
            self._raise_error()

    def request_stop(self) -> None:
        """Ask the thread to leave the resident after all earlier posts, without waiting for it."""
        self.post(self._stop)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _why_ended(self) -> Exception:
        if self._error is None:
            return BusClosed(CLOSED)
        failure = BusBroken(f"{self._name} failed: {self._error!r}")
        failure.__cause__ = self._error
        return failure

    async def _until_ended(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        ended = asyncio.wrap_future(self._ended)
        while not ended.done():
            try:
                await asyncio.wait((ended,))
            except asyncio.CancelledError as exc:
                cancelled = exc
        # The thread has nothing left to do but return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    def _wake_thread(self, callback: Callable[..., object], *args: Any) -> bool:
        """Call `callback(*args)` on the thread. Return False if the thread has ended or belongs to another process."""
        if self._is_abandoned:
            return False
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed.
            return False
        return True

    def _on_done(self, outcome: Future[Any]) -> None:
        if outcome.cancelled():
            self._wake_thread(self._cancel_task, outcome)
        else:
            self._submitted.pop(outcome, None)

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._run_resident())
                except BaseException as error:  # noqa: BLE001
                    # Boundary of the thread: no caller is above it. `start`, `run` and `stop` raise the error.
                    self._error = error
        finally:
            self.has_ended = True
            _running.discard(self)
            # The loop is closed, so no coroutine can be submitted any more.
            for outcome, coroutine in list(self._submitted.items()):
                coroutine.close()
                if outcome.set_running_or_notify_cancel():
                    outcome.set_exception(self._why_ended())
            if self._entered.done():
                self.call_in_owner_loop(partial(self._on_end, self._error))
            else:
                self._entered.set_exception(self._error or BusClosed(f"{self._name} was stopped before it was ready"))
            self._ended.set_result(None)

    async def _run_resident(self) -> None:
        self._task = asyncio.current_task()
        if self._is_stopping:
            return
        self._loop.set_exception_handler(self._on_callback_error)
        try:
            async with self._resident as resident:
                self._entered.set_result(resident)
                try:
                    while not self._is_stopping:
                        await self._wake.wait()
                        self._wake.clear()
                        self._call_posted()
                        if self._callback_error is not None:
                            raise self._callback_error
                finally:
                    self._is_leaving = True
                    await self._cancel_tasks()
        finally:
            self._has_left = True

    def _begin(self, outcome: Future[Any]) -> None:
        if outcome.cancelled():
            self._submitted.pop(outcome).close()
            return
        if self._has_left:
            # The generator of a stream would end here without its error. `_run` sets the reason.
            return
        task = self._tasks[outcome] = self._loop.create_task(self._submitted[outcome])
        task.add_done_callback(lambda _: self._end(outcome))

    def _end(self, outcome: Future[Any]) -> None:
        """Set the result of a submitted coroutine.

        If it ended because the thread has failed, `_run` sets the reason. If the thread was stopped, the caller gets it
        at once: leaving may take long.
        """
        task = self._tasks.pop(outcome)
        was_stopped = self._is_leaving and (task.cancelled() or isinstance(task.exception(), BusClosed))
        if was_stopped and (not self._is_stopping or self._callback_error is not None):
            return
        if not outcome.set_running_or_notify_cancel():
            # Nobody waits. asyncio logs the error of the task, if it has one.
            self._submitted.pop(outcome, None)
        elif task.cancelled():
            outcome.set_exception(BusClosed(CLOSED if was_stopped else CANCELLED))
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def _cancel_task(self, outcome: Future[Any]) -> None:
        if outcome in self._tasks:
            self._tasks[outcome].cancel()

    async def _cancel_tasks(self) -> None:
        """Cancel the submitted coroutines that have not ended, and wait for them."""
        tasks = set(self._tasks.values())
        for task in tasks:
            # Cancel only once. A second cancel would interrupt the cleanup of the first.
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLEAN_UP_S)

    def _call_posted(self) -> None:
        # Clear the flag first: later posts wake the thread again.
        self._is_woken = False
        while self._posts:
            function, args = self._posts.popleft()
            function(*args)

    def _on_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # Without an owner's loop, callbacks of the caller (`on_end`) run on this thread: their errors are logged.
        if self._owner is None or "handle" not in context or error is None:
            loop.default_exception_handler(context)
            return
        # The callback of a timer failed. No task awaits it, so the error must end the thread to be reported.
        self._callback_error = error
        self._wake.set()

    def _stop(self) -> None:
        self._is_stopping = True
        self._wake.set()

    def _cancel(self) -> None:
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()

    def call_soon_in_owner_loop(self, callback: Callable[[], object]) -> None:
        """Call `callback` as `call_in_owner_loop` does, but not before this thread's loop turns.

        Waking the owner lets it take the interpreter's lock, in the middle of what this thread does.
        """
        self._loop.call_soon(self.call_in_owner_loop, callback)

    def call_in_owner_loop(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the owner's loop, or here if the owner has none. Call this method on the thread.

        If the owner's loop was closed without `stop`, the thread ends.
        """
        if self._owner is None:
            callback()
            return
        try:
            self._owner.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.warning("loop_thread.abandoned name=%s", self._name)
            self._stop()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_running: set[LoopThread[Any]] = set()
"""Threads that have not ended. Threads change the set: copy it first, which is atomic."""


def _leave_all_to_parent() -> None:
    # The child has none of these threads, whose locks may stay locked forever.
    for thread in tuple(_running):
        thread.abandon()


os.register_at_fork(after_in_child=_leave_all_to_parent)


@atexit.register
def _stop_at_exit() -> None:
    threads = [thread for thread in tuple(_running) if thread._owner is None and not thread._is_abandoned]
    for thread in threads:
        thread.request_stop()
    concurrent.futures.wait([thread._ended for thread in threads], EXIT_S)
