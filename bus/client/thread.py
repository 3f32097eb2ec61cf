"""Threads with their own event loops: for work that continues while the owner's loop is blocked, or without asyncio.

All work on such a thread belongs to one async context manager, the resident, which is entered and left on the thread.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
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

FORKED: Final = "this client belongs to the process that forked this one; connect a new client in this process"
OWNER_ENDED: Final = (
    "the event loop that connected this client does not run any more; connect a new client in this loop"
)

T = TypeVar("T")
R = TypeVar("R")


class LoopThread(Generic[T]):
    """Runs one async context manager on a daemon thread. Use it while the owner's event loop runs. Start it once.

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
        self._owner: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        # The owner's loop awaits these. The thread sets them with `call_in_owner_loop`.
        self._entered: asyncio.Future[T]
        self._ended: asyncio.Future[None]
        # Only the owner appends and only the thread pops. While `_is_woken` is set, the thread will check again.
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        # Coroutines that were passed to `run`, while they exist.
        self._runs: weakref.WeakSet[Coroutine[Any, Any, Any]] = weakref.WeakSet()
        # Only the thread uses the fields below.
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._callback_error: BaseException | None = None
        # The thread sets it before it leaves the resident, which may close what coroutines use.
        self._is_leaving = False
        # The thread writes it before it sets `_ended`.
        self._error: BaseException | None = None

    @property
    def is_current(self) -> bool:
        """True if the caller runs on the thread."""
        return threading.current_thread() is self._thread

    def abandon(self) -> None:
        """Leave the thread to the parent process, the only process that has it. Call this in the forked process.

        The open files of its loop belong to the parent: nothing may be posted, run or closed here afterwards.
        """
        self._is_abandoned = True

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
        if not self._owner.is_running() and _is_in_loop():
            raise BusClosed(OWNER_ENDED)

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
        self._entered, self._ended = self._owner.create_future(), self._owner.create_future()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self._loop.close)
            self._thread.start()
            unless_started.pop_all()
        async with contextlib.AsyncExitStack() as unless_entered:
            unless_entered.push_async_callback(self._until_ended)
            unless_entered.callback(self._wake_thread, self._cancel)
            resident = await self._entered
            unless_entered.pop_all()
        return resident

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the thread, in the order of posting. Many posts cost one wake-up.

        An error of the function ends the thread, and `stop` raises the error. After the end of the thread, posts have
        no effect.
        """
        if self._ended.done() or self._is_abandoned:
            return
        self._posts.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._wake_thread(self._wake.set)

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run `coroutine` on the thread after all earlier posts, and return its result.

        Cancellation: also cancels `coroutine`, which may continue to clean up. `stop` waits `CLEAN_UP_S` for that.

        Raises:
            BusClosed: the thread was stopped or abandoned, or the owner's loop does not run any more.
            BusBroken: the thread has failed. The cause is the error.
            Exception: `coroutine` raised it.
        """
        self._add_run(coroutine, self.check_usable)
        if self.other_loop() is not None:
            # The thread reports its end to the owner's loop only.
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._run_for_owner(coroutine), self._owner)
            )
        return await self._run_for_owner(coroutine)

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call a plain function on the thread after all earlier posts, and return its result.

        Cancellation: the function may run anyway. Errors are those of `run`.
        """

        async def run() -> R:
            return function(*args)

        return await self.run(run())

    async def _run_for_owner(self, coroutine: Coroutine[Any, Any, R]) -> R:
        try:
            # The loop runs submitted callbacks in order, so a wake-up for posts comes first.
            running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        except RuntimeError:
            # The loop is closed: the thread has ended, or is about to end.
            coroutine.close()
            await self._until_ended()
            raise self._why_ended() from None
        try:
            await asyncio.wait((running, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not running.cancelled() and not self._found_closed(running.exception()):
                return running.result()
        finally:
            running.cancel()
        # The thread is ending: the coroutine was cancelled there, did not start, or found the resident closed.
        await self._until_ended()
        raise self._why_ended()

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run `coroutine` on the thread. The caller may be on any thread and may block for the result.

        The future is cancelled if the thread is stopped meanwhile.

        Raises:
            BusClosed: the thread has ended, or was abandoned.
        """
        self._add_run(coroutine, self.check_process)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise BusClosed(CLOSED) from None

    async def stop(self) -> None:
        """Leave the resident after all earlier posts, and end the thread. Calling this twice is allowed.

        This has no effect if the thread was abandoned. It works in another loop even if the owner's loop has ended.

        Cancellation: raised after the thread has ended. The resident bounds the time that leaving takes.

        Raises:
            Exception: the error that ended the thread, or that leaving raised.
        """
        if self._is_abandoned:
            return
        self.post(self.request_stop)
        if self._owner.is_running():
            await self._until_ended()
        else:
            # The thread can report its end only to the owner's loop.
            await asyncio.to_thread(self._thread.join)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def request_stop(self) -> None:
        """Ask the thread to leave the resident. Call this on the thread."""
        self._is_stopping = True
        self._wake.set()

    def _add_run(self, coroutine: Coroutine[Any, Any, Any], check: Callable[[], None]) -> None:
        with contextlib.ExitStack() as unless_usable:
            unless_usable.callback(coroutine.close)
            check()
            unless_usable.pop_all()
        self._runs.add(coroutine)

    def _found_closed(self, error: BaseException | None) -> bool:
        """Return True if a coroutine failed because the thread leaves the resident, perhaps after an error."""
        return self._is_leaving and isinstance(error, BusClosed)

    def _why_ended(self) -> Exception:
        if self._error is None:
            return BusClosed(CLOSED)
        failure = BusBroken(f"{self._name} failed: {self._error!r}")
        failure.__cause__ = self._error
        return failure

    async def _until_ended(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await asyncio.wait((self._ended,))
            except asyncio.CancelledError as exc:
                cancelled = exc
        # The thread has nothing left to do but return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    def _wake_thread(self, callback: Callable[[], object]) -> None:
        # The loop is closed after the end of the thread, so no wake-up is necessary.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_resident())
        except BaseException as error:  # noqa: BLE001
            # Boundary of the thread: no caller is above it. `start`, `run` and `stop` raise the error in the owner's
            # loop.
            self._error = error
        finally:
            self.call_in_owner_loop(self._on_ended)

    async def _run_resident(self) -> None:
        self._task = asyncio.current_task()
        if self._is_stopping:
            return
        self._loop.set_exception_handler(self._on_callback_error)
        async with self._resident as resident:
            self.call_in_owner_loop(lambda: self._on_entered(resident))
            try:
                while not self._is_stopping:
                    await self._wake.wait()
                    self._wake.clear()
                    self._call_posted()
                    if self._callback_error is not None:
                        raise self._callback_error
            finally:
                self._is_leaving = True
                await self._cancel_runs()

    async def _cancel_runs(self) -> None:
        """Cancel the coroutines of `run` that have not ended, and wait for them."""
        tasks = {task for task in asyncio.all_tasks() if task.get_coro() in self._runs}
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
        if "handle" not in context or error is None:
            loop.default_exception_handler(context)
            return
        # The callback of a timer failed. No task awaits it, so the error must end the thread to be reported.
        self._callback_error = error
        self._wake.set()

    def _cancel(self) -> None:
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()

    def call_in_owner_loop(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the owner's loop. Call this method on the thread.

        If the owner's loop was closed without `stop`, the thread ends.
        """
        try:
            self._owner.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.warning("loop_thread.abandoned name=%s", self._name)
            self.request_stop()

    # The thread calls the methods below in the owner's loop.

    def _on_entered(self, resident: T) -> None:
        if not self._entered.done():
            self._entered.set_result(resident)

    def _on_ended(self) -> None:
        self._ended.set_result(None)
        if not self._entered.done():
            self._entered.set_exception(self._error or BusClosed(f"{self._name} was stopped before it was ready"))
        elif not self._entered.cancelled():
            self._on_end(self._error)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class OwnerThread:
    """Enters a client on a daemon thread, runs coroutines there, and leaves the client. Start it once.

    If the interpreter exits while the thread runs, the thread leaves the client too, so that no engine generates tokens
    without a reader.

    Args:
        client: client that is not connected yet.
        is_inside: returns True on the client's own thread.
    """

    def __init__(self, client: AbstractAsyncContextManager[Any], is_inside: Callable[[], bool]) -> None:
        self._client = client
        self._is_inside = is_inside
        self._pid = os.getpid()
        self._entered: concurrent.futures.Future[None] = concurrent.futures.Future()
        # The thread sets this as its last action, with the error that ended the thread.
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._holding: asyncio.Task[None]
        # Only the thread uses the fields below. The number of callers bounds their size, because each caller waits for
        # one call.
        self._tasks: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
        self._leave = asyncio.Event()
        self._has_left = False

    @property
    def num_calls(self) -> int:
        """Number of coroutines that run on the thread."""
        return len(self._tasks)

    def start(self) -> None:
        """Connect. This blocks. If the caller is interrupted (Ctrl-C), no thread is left.

        Raises:
            Exception: entering the client raised it. The thread has ended.
        """
        self._loop = uvloop.new_event_loop()
        self._holding = self._loop.create_task(self._hold(), name="client.owner")
        self._thread = threading.Thread(target=self._run, name="rollbus-owner", daemon=True)
        _running.add(self)
        self._thread.start()
        try:
            _wait_for_one(self._entered, self._ended)
        finally:
            if not self._entered.done():
                self._post(self._holding.cancel)
                self._thread.join()
        if not self._entered.done():
            self._ended.result()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run `coroutine` on the thread and return its result. This blocks. Several threads may call it.

        If the caller is interrupted (Ctrl-C), `coroutine` is cancelled and has `CLEAN_UP_S` seconds to clean up.

        Raises:
            BusClosed: the client was closed, or this process is a fork of the client's process.
            RuntimeError: the caller is one of the client's own threads, which would wait for itself.
            Exception: `coroutine` raised it.
        """
        outcome: concurrent.futures.Future[R] = concurrent.futures.Future()
        with contextlib.ExitStack() as unless_handed_over:
            unless_handed_over.callback(coroutine.close)
            self._check_caller()
            if not self._post(self._start, coroutine, outcome):
                raise BusClosed(CLOSED)
            unless_handed_over.pop_all()
        try:
            _wait_for_one(outcome, self._ended)
        finally:
            if not outcome.done() and self._post(self._cancel, outcome):
                _wait_for_one(outcome, self._ended, timeout_s=CLEAN_UP_S)
        if not outcome.done():
            raise BusClosed(CLOSED)
        return outcome.result()

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a cleanup `coroutine` without waiting for it.

        Calls that are submitted later run after `coroutine` has started.

        Finalizers may call this, also on the client's own threads. If the client was closed or belongs to another
        process, `coroutine` does not run.
        """
        if self._is_forked or not self._post(self._start, coroutine, concurrent.futures.Future()):
            coroutine.close()

    def stop(self) -> None:
        """Leave the client and end the thread. This blocks. In a forked process it does nothing.

        If the caller is interrupted, this raises after the thread has ended. The client bounds the time that leaving
        takes.

        Raises:
            RuntimeError: as `run`.
            Exception: leaving the client raised it.
        """
        if self._is_forked:
            return
        self._check_caller()
        self.request_stop()
        try:
            concurrent.futures.wait((self._ended,))
        finally:
            self._thread.join()
        self._ended.result()

    def request_stop(self) -> None:
        """Ask the thread to leave the client, without waiting for it. In a forked process it does nothing."""
        if not self._is_forked:
            self._post(self._leave.set)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_caller(self) -> None:
        if self._is_forked:
            raise BusClosed(FORKED)
        if threading.current_thread() is self._thread or self._is_inside():
            raise RuntimeError(
                "a callback of this client may not call the client, because its thread would wait for itself"
            )

    def _post(self, function: Any, *args: Any) -> bool:
        """Schedule `function(*args)` on the thread. Return False if the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed.
            return False
        return True

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._holding.add_done_callback(lambda _: self._loop.stop())
                runner.get_loop().run_forever()
        finally:
            _running.discard(self)
            _settle(self._ended, self._holding)

    async def _hold(self) -> None:
        try:
            async with self._client:
                self._entered.set_result(None)
                await self._leave.wait()
        finally:
            self._has_left = True
            if self._tasks:
                # Calls of a closed client end without help. The runner cancels calls that do not end.
                await asyncio.wait(self._tasks.values(), timeout=CLEAN_UP_S)

    def _start(self, coroutine: Coroutine[Any, Any, R], outcome: concurrent.futures.Future[R]) -> None:
        if self._has_left:
            coroutine.close()
            outcome.set_exception(BusClosed(CLOSED))
            return
        task = self._tasks[outcome] = self._loop.create_task(coroutine)
        task.add_done_callback(partial(self._on_done, outcome))

    def _cancel(self, outcome: concurrent.futures.Future[Any]) -> None:
        if outcome in self._tasks:
            self._tasks[outcome].cancel()

    def _on_done(self, outcome: concurrent.futures.Future[R], task: asyncio.Task[R]) -> None:
        del self._tasks[outcome]
        _settle(outcome, task)


def _wait_for_one(*futures: concurrent.futures.Future[Any], timeout_s: float | None = None) -> None:
    concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)


def _settle(outcome: concurrent.futures.Future[R], task: asyncio.Task[R]) -> None:
    """Copy the outcome of an ended task to the future of the waiting thread."""
    if task.cancelled():
        outcome.set_exception(BusClosed(CLOSED))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


_running: set[OwnerThread] = set()
"""Owner threads that have not ended. Threads change the set: copy it first, which is atomic."""


@atexit.register
def _stop_at_exit() -> None:
    # A forked process has copies of its parent's threads, whose locks may stay locked forever.
    threads = [thread for thread in tuple(_running) if not thread._is_forked]
    for thread in threads:
        thread.request_stop()
    concurrent.futures.wait([thread._ended for thread in threads], EXIT_S)
