"""A client for programs without asyncio: its owner's event loop runs on a thread."""

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from ..client import Client

__all__ = ["BlockingClient"]


class BlockingClient:
    """Enters a client on a thread, and leaves it there.

    Args:
        client: not connected yet.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollbus-owner")
        self._entered: Future[None] = Future()
        # Set by `__enter__`.
        self._ended: Future[None]
        # Set by the thread before `_entered` is.
        self._loop: asyncio.AbstractEventLoop
        self._leave: asyncio.Event

    def __repr__(self) -> str:
        """One line with the client."""
        return f"<BlockingClient {self._client!r}>"

    def __enter__(self) -> Client:
        """Connect. Blocks; raises what entering the client does."""
        self._ended = self._executor.submit(asyncio.run, self._hold())
        self._executor.shutdown(wait=False)
        wait((self._entered, self._ended), return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()
        return self._client

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, and wait for that, which is bounded as leaving the client is."""
        self._loop.call_soon_threadsafe(self._leave.set)
        self._ended.result()

    async def _hold(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        async with self._client:
            self._entered.set_result(None)
            await self._leave.wait()
