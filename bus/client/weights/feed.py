"""One pass over a trainer's tensors: drawn and compared on one thread, while the event loop uploads what is whole."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from ....schemas.checks import describe
from ....schemas.errors import BusClosed, InvalidRequest
from .draft import Draft
from .packing import StoredObject

__all__ = ["NamedTensors", "TensorFeed"]

MAX_WAITING: Final = 2
"""Objects that wait for their upload: enough that one is always at hand, and little memory."""
STOP_S: Final = 5.0
"""For the drawing thread to see that the pass was stopped: it looks after each tensor."""

NamedTensors = Iterable[tuple[str, Any]] | Mapping[str, Any]


class TensorFeed:
    """The tensors of one publication. `draw` runs on a thread; all else belongs to the event loop that uploads.

    Args:
        named_tensors: (name, tensor), drawn once.

    Attributes:
        given_bytes: of tensors of torch or numpy that are given all at once; 0 for an iterator.
        compare_s: seconds that the thread took to read, compare, encode and hash.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        given: object = named_tensors
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            allowed = "an iterable of (name, tensor)"
            raise InvalidRequest(field="named_tensors", problem=f"is {describe(named_tensors)}", allowed=allowed)
        self._items: Iterable[object] = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        self.given_bytes = _bytes_of(self._items)
        self._room = threading.Semaphore(MAX_WAITING)
        self._has_begun = threading.Event()
        self._is_stopped = False
        self._failure: Exception | None = None
        # Set by `begin`.
        self._draft: Draft
        self._loop: asyncio.AbstractEventLoop
        self._objects: asyncio.Queue[StoredObject | None] = asyncio.Queue(MAX_WAITING + 2)
        self._ended = asyncio.Event()
        self._is_begun = False
        self.compare_s = 0.0

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<TensorFeed waiting={self._objects.qsize()} stopped={self._is_stopped}>"

    def begin(self, draft: Draft) -> None:
        """Let the thread go on, which waits for this."""
        self._draft, self._loop, self._is_begun = draft, asyncio.get_running_loop(), True
        self._has_begun.set()

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects of the pass, as they become whole.

        Raises:
            Exception: whatever a tensor was refused with, or the iterator raised.
        """
        while (stored := await self._objects.get()) is not None:
            self._room.release()
            yield stored
        if self._failure is not None:
            raise self._failure

    def halt(self) -> None:
        """End the pass after the tensor that is being compared. Any thread may call this; safe to repeat."""
        self._is_stopped = True
        self._has_begun.set()
        self._room.release()

    async def stop(self) -> bool:
        """End the pass, and wait until the thread has seen that; False: it has not, and may still compare a tensor."""
        self.halt()
        if self._is_begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._ended.wait()
        return not self._is_begun or self._ended.is_set()

    def draw(self) -> None:
        """Draw all tensors. Blocks; `objects` raises what fails here."""
        self._has_begun.wait()
        if not self._is_begun:
            return
        with _EndHandover(self._end):
            for item in self._items:
                if self._is_stopped:
                    return
                if not isinstance(item, tuple | list) or len(item) != 2:
                    allowed = "pairs of a name and a tensor"
                    raise InvalidRequest(field="named_tensors", problem=f"has {describe(item)}", allowed=allowed)
                self._pass_on(self._draft.add(*item))
            self._pass_on(self._draft.finish())

    def _end(self, failure: Exception | None) -> None:
        self._failure = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._on_drawn)

    def _pass_on(self, found: Iterator[StoredObject]) -> None:
        started = time.perf_counter()
        for stored in found:
            self.compare_s += time.perf_counter() - started
            self._room.acquire()
            if self._is_stopped:
                return
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._objects.put_nowait, stored)
            started = time.perf_counter()
        self.compare_s += time.perf_counter() - started

    def _on_drawn(self) -> None:
        self._objects.put_nowait(None)
        self._ended.set()


def _bytes_of(items: Iterable[object]) -> int:
    """Sum up what lies in memory; what is no pair of a name and a tensor is refused when it is drawn."""
    if not isinstance(items, Collection):
        return 0
    tensors = (item[1] for item in items if isinstance(item, tuple | list) and len(item) == 2)
    sizes = (getattr(tensor, "nbytes", 0) for tensor in tensors)
    return sum(size for size in sizes if isinstance(size, int))


class _EndHandover:
    """Hands what ends a block to another thread, which raises it. Only an interruption is raised in both.

    Args:
        end: called with what the block raised.
    """

    def __init__(self, end: Callable[[Exception | None], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Hand it over."""
        if error is None or isinstance(error, Exception):
            self._end(error)
            return True
        self._end(BusClosed("the thread that draws the tensors was interrupted"))
        return False
