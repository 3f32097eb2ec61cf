"""A thread with an event loop of its own, for what must go on while its owner's loop is blocked.

Everything that runs on the thread belongs to one async context manager, the resident: it is entered and left there, and
with it every task ends. The owner hands over plain calls (`post`) and coroutines (`run`), in order.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, TypeVar

import uvloop

from ...schemas.errors import BusBroken, BusClosed

__all__ = ["CLEAN_UP_S", "FORKED", "LoopThread"]

logger = logging.getLogger(__name__)

CLEAN_UP_S: Final = 5.0
"""For coroutines to clean up that were cancelled, before the resident is left: they may need it for that."""

FORKED: Final = "this client belongs to the process that this one was forked from; connect another one here"

T = TypeVar("T")
R = TypeVar("R")


class LoopThread(Generic[T]):
    """Runs one async context manager on a daemon thread. Use it from one event loop, the owner's; start it once.

    Args:
        resident: entered and left on the thread; owns every task that lasts there.
        on_end: called in the owner's loop when a thread that had started has ended, with what ended it too early.
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
        # Awaited in the owner's loop, set from the thread by `call_in_owner_loop`.
        self._entered: asyncio.Future[T]
        self._ended: asyncio.Future[None]
        # Appended to by the owner only, taken from by the thread only. While `_is_woken` the thread will look again.
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        # What `run` was given, as long as it exists.
        self._runs: weakref.WeakSet[Coroutine[Any, Any, Any]] = weakref.WeakSet()
        # The rest belongs to the thread.
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._callback_error: BaseException | None = None
        # Written by the thread before `_ended` is set.
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<LoopThread {self._name} {'ended' if self._ended.done() else 'running'}>"

    @property
    def is_current(self) -> bool:
        """True if the caller runs on the thread."""
        return threading.current_thread() is self._thread

    def abandon(self) -> None:
        """Leave the thread to the process that this one was forked from, where alone it exists; to be called here.

        What its loop has open is the parent's: nothing may be posted, run or closed here any more.
        """
        self._is_abandoned = True

    def check_process(self) -> None:
        """Return if the thread is one of this process.

        Raises:
            BusClosed: it was abandoned.
        """
        if self._is_abandoned:
            raise BusClosed(FORKED)

    async def start(self) -> T:
        """Start the thread, enter the resident there and return what that gave.

        Cancellation: passed on; the thread has ended when this raises.

        Raises:
            Exception: whatever entering raised; the thread has ended.
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
        """Have `function(*args)` called on the thread, in the order of posting; many posts cost one wake-up.

        What it raises ends the thread, and `stop` raises it. Once the thread has ended, nothing is called any more.
        """
        if self._ended.done() or self._is_abandoned:
            return
        self._posts.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._wake_thread(self._wake.set)

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run `coroutine` on the thread, after all that was posted before, and return its result.

        Cancellation: passed on to `coroutine`, which may go on to clean up; `stop` gives it `CLEAN_UP_S` for that.

        Raises:
            BusClosed: the thread was stopped meanwhile, or before, or was abandoned.
            BusBroken: the thread has failed; the cause says with what.
            Exception: whatever `coroutine` raised.
        """
        self._add_run(coroutine)
        try:
            # The loop takes up what it is handed in order: a wake-up for posts comes first.
            running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        except RuntimeError:
            # The loop is closed: the thread has ended, or is about to.
            coroutine.close()
            await self._until_ended()
            raise self._why_ended() from None
        try:
            await asyncio.wait((running, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not running.cancelled():
                return running.result()
        finally:
            running.cancel()
        # It was cancelled there, or not taken up any more: the thread is ending.
        await self._until_ended()
        raise self._why_ended()

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run `coroutine` on the thread, for a caller on any thread, which may block for the result.

        The future is cancelled if the thread is stopped meanwhile.

        Raises:
            BusClosed: the thread has ended, or was abandoned.
        """
        self._add_run(coroutine)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise BusClosed("this client was closed") from None

    async def stop(self) -> None:
        """Leave the resident, after all that was posted before, and end the thread. Safe to repeat.

        Does nothing where the thread was abandoned.

        Cancellation: raised once the thread has ended; how long leaving takes is the resident's to bound.

        Raises:
            Exception: whatever ended the thread too early, or leaving raised.
        """
        if self._is_abandoned:
            return
        self.post(self.request_stop)
        await self._until_ended()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def request_stop(self) -> None:
        """Have the resident left; to be called on the thread."""
        self._is_stopping = True
        self._wake.set()

    def _add_run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._is_abandoned:
            coroutine.close()
        self.check_process()
        self._runs.add(coroutine)

    def _why_ended(self) -> Exception:
        if self._error is None:
            return BusClosed("this client was closed")
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
        # Nothing is left to do there but to return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    def _wake_thread(self, callback: Callable[[], object]) -> None:
        # The loop is closed when the thread has ended: nobody is left to be woken.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    # From here on: the thread's own.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_resident())
        except BaseException as error:  # noqa: BLE001
            # Boundary of the thread: nothing is above it; `start`, `run` and `stop` raise the error in the owner.
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
                await self._cancel_runs()

    async def _cancel_runs(self) -> None:
        """Cancel what `run` has not ended, and wait for it."""
        tasks = {task for task in asyncio.all_tasks() if task.get_coro() in self._runs}
        for task in tasks:
            # A second time would cut short the cleaning up after the first.
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLEAN_UP_S)

    def _call_posted(self) -> None:
        # First: what is posted from here on wakes the thread again.
        self._is_woken = False
        while self._posts:
            function, args = self._posts.popleft()
            function(*args)

    def _on_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" not in context or error is None:
            loop.default_exception_handler(context)
            return
        # A timer's callback failed. Nobody waits for it, so that it has to end the thread to be heard of.
        self._callback_error = error
        self._wake.set()

    def _cancel(self) -> None:
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()

    def call_in_owner_loop(self, callback: Callable[[], object]) -> None:
        """Have `callback` called in the owner's loop; to be called on the thread.

        Where that loop was closed without `stop`, nobody is left to be told, and the thread ends.
        """
        try:
            self._owner.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.warning("loop_thread.abandoned name=%s", self._name)
            self.request_stop()

    # Called by it in the owner's loop.

    def _on_entered(self, resident: T) -> None:
        if not self._entered.done():
            self._entered.set_result(resident)

    def _on_ended(self) -> None:
        self._ended.set_result(None)
        if not self._entered.done():
            self._entered.set_exception(self._error or BusClosed(f"{self._name} was stopped before it was ready"))
        elif not self._entered.cancelled():
            self._on_end(self._error)
