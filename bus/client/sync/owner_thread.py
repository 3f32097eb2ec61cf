"""A client for programs without asyncio: its owner's event loop turns on a thread, to which any thread hands calls."""

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
"""For clients that are open when the interpreter exits: longer than closing one takes, also without a server."""
CLOSED: Final = "this client was closed"

R = TypeVar("R")


class OwnerThread:
    """Enters a client on a daemon thread, runs coroutines there, and leaves the client. Start it once.

    If the interpreter exits while it runs, it leaves the client too, so that no engine works for nobody.

    Args:
        client: not connected yet.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self._entered: Future[None] = Future()
        # Set by the thread as its last act, with what ended it.
        self._ended: Future[None] = Future()
        # Set by `start`.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._holding: asyncio.Task[None]
        # The rest belongs to the thread. Bounded by the callers: each waits for one call.
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._leave = asyncio.Event()
        self._has_left = False

    def __repr__(self) -> str:
        """One line with the client and the calls."""
        return f"<OwnerThread {self._client!r} calls={self.num_calls}>"

    @property
    def num_calls(self) -> int:
        """Coroutines that run there."""
        return len(self._tasks)

    def start(self) -> None:
        """Connect. Blocks; an interrupted caller (Ctrl-C) leaves no thread behind.

        Raises:
            Exception: whatever entering the client raised; the thread has ended.
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
        """Run `coroutine` on the thread and return its result. Blocks; several threads may call it at once.

        If the caller is interrupted (Ctrl-C), `coroutine` is cancelled, and has `CLEAN_UP_S` to clean up.

        Raises:
            BusClosed: the client was closed, or belongs to the process that this one was forked from.
            RuntimeError: this is one of the client's own threads, which would wait for itself.
            Exception: whatever `coroutine` raised.
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
        """Run `coroutine`, which cleans up, without waiting for it, before all that is handed over later.

        Finalizers may call it, also on the client's own threads. Nothing runs where the client was closed, or belongs
        to another process.
        """
        if self._is_forked or not self._post(self._start, coroutine, Future()):
            coroutine.close()

    def stop(self) -> None:
        """Leave the client and end the thread. Blocks; does nothing in a forked process.

        If the caller is interrupted, the thread has ended all the same when this raises; how long leaving takes is the
        client's to bound.

        Raises:
            RuntimeError: as `run`.
            Exception: whatever leaving the client raised.
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
        """Have the client left, without waiting for it."""
        self._post(self._leave.set)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_caller(self) -> None:
        if self._is_forked:
            raise BusClosed(FORKED)
        if threading.current_thread() is self._thread or registry_of(self._client).thread.is_current:
            raise RuntimeError("a callback of this client may not call the client: its thread would wait for itself")

    def _post(self, function: Any, *args: Any) -> bool:
        """Have `function(*args)` called on the thread; False: it has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed.
            return False
        return True

    # From here on: the thread's own.

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
                # Calls of a client that was closed end by themselves; the runner cancels those that do not.
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
    """Give a thread what became of a task that has ended."""
    if task.cancelled():
        outcome.set_exception(BusClosed(CLOSED))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


_running: set[OwnerThread] = set()
"""Those whose threads have not ended. Threads change it: take a copy, which the interpreter's lock makes whole."""


@atexit.register
def _stop_at_exit() -> None:
    # A forked process has copies of its parent's, whose locks may be taken for ever.
    threads = [thread for thread in tuple(_running) if not thread._is_forked]
    for thread in threads:
        thread.request_stop()
    wait([thread._ended for thread in threads], EXIT_S)
