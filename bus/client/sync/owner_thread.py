"""The event loop of a client for programs without asyncio. The loop runs on its own thread.

Any thread may submit calls.
"""

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, Final, TypeVar

import uvloop

from ....schemas.errors import BusClosed
from ..client import Client, registry_of
from ..loop_thread import CLEAN_UP_S, FORKED

__all__ = ["OwnerThread"]

EXIT_S: Final = 10.0
"""Seconds to close open clients when the interpreter exits. Closing a client takes less time, also without a server."""
CLOSED: Final = "this client was closed"

R = TypeVar("R")


class OwnerThread:
    """Enters a client on a daemon thread, runs coroutines there, and leaves the client. Start it once.

    If the interpreter exits while the thread runs, the thread leaves the client too, so that no engine generates tokens
    without a reader.

    Args:
        client: client that is not connected yet.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self._entered: Future[None] = Future()
        # The thread sets this as its last action, with the error that ended the thread.
        self._ended: Future[None] = Future()
        # Set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._holding: asyncio.Task[None]
        # Only the thread uses the fields below. The number of callers bounds their size, because each caller waits for
        # one call.
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._leave = asyncio.Event()
        self._has_left = False

    def __repr__(self) -> str:
        """Return one line with the client and the number of calls."""
        return f"<OwnerThread {self._client!r} calls={self.num_calls}>"

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
        outcome: Future[R] = Future()
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
        if self._is_forked or not self._post(self._start, coroutine, Future()):
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
            wait((self._ended,))
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
        if threading.current_thread() is self._thread or registry_of(self._client).thread.is_current:
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

    def _start(self, coroutine: Coroutine[Any, Any, R], outcome: Future[R]) -> None:
        if self._has_left:
            coroutine.close()
            outcome.set_exception(BusClosed(CLOSED))
            return
        task = self._tasks[outcome] = self._loop.create_task(coroutine)
        task.add_done_callback(partial(self._on_done, outcome))

    def _cancel(self, outcome: Future[Any]) -> None:
        if outcome in self._tasks:
            self._tasks[outcome].cancel()

    def _on_done(self, outcome: Future[R], task: asyncio.Task[R]) -> None:
        del self._tasks[outcome]
        _settle(outcome, task)


def _wait_for_one(*futures: Future[Any], timeout_s: float | None = None) -> None:
    wait(futures, timeout_s, FIRST_COMPLETED)


def _settle(outcome: Future[R], task: asyncio.Task[R]) -> None:
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
    wait([thread._ended for thread in threads], EXIT_S)
