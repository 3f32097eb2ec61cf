"""Carries what a worker says: frames to clients, words to queue and controllers. Nothing leaves without a lease."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from bus.connection import Connection, publish
from bus.queue.puller import QueuedRequest
from schemas.errors import BusBroken, LocalProtocolError
from workers.life import Life
from workers.links import Links
from workers.routes import Route

__all__ = ["Sending"]

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1024**2
"""Of what this side has published and the network has not taken: beyond it frames wait where they can still be merged,
and where what is urgent can go before them."""
DRAIN_S = 1.0
"""How long to wait for the network to take that before looking again."""


class Sending:
    """Publishes what the links have, one frame of each in turn, and settles messages of the queue.

    While the connection is down, or the worker may not speak, everything waits; a fence empties it.

    Args:
        on_broken: called with a route one of whose frames the server will never take.
    """

    def __init__(self, nats: Connection, life: Life, links: Links, *, on_broken: Callable[[Route], None]) -> None:
        self._nats = nats
        self._life = life
        self._links = links
        self._on_broken = on_broken
        self._frames_wanted = asyncio.Event()
        # Bounded by the requests in hand and the commands under way.
        self._words: deque[Callable[[], Awaitable[None]]] = deque()
        self._words_wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self.frames = 0
        """Frames published."""
        self.frames_lost = 0
        """Frames that could not be published; on a link they are sent again."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Sending frames={self.frames} lost={self.frames_lost} words={len(self._words)}>"

    def wake(self) -> None:
        """There may be something to send, or it may be possible to send it now."""
        self._changed.set()
        self._frames_wanted.set()
        if self._words:
            self._words_wanted.set()

    def settle(self, words: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Say `words`: about messages of the queue, or about commands."""
        self._words.extend(words)
        self.wake()

    async def wait_settled(self) -> None:
        """Wait until nothing waits to be said, or to be acknowledged by a client that lives."""
        while self._words or not self._links.routes.is_settled:
            self._changed.clear()
            await self._changed.wait()

    async def wait_connected(self) -> None:
        """Wait until what is sent can leave, as long as the lease lasts."""
        while not self._nats.is_connected and self._life.may_speak():
            self._changed.clear()
            await self._changed.wait()

    async def wait_sent(self) -> None:
        """Wait until nothing can be sent: what is left lacks credit, a connection or a lease."""
        while self._can_send() and self._links.routes.sendable():
            self._changed.clear()
            self._frames_wanted.set()
            await self._changed.wait()

    def clear(self) -> None:
        """Say nothing of what waits: the worker has given it up."""
        self._words.clear()

    def _can_send(self) -> bool:
        return self._nats.is_connected and self._life.may_speak()

    async def run_frames(self) -> None:
        """Publish frames until cancelled."""
        while True:
            await self._frames_wanted.wait()
            self._frames_wanted.clear()
            while self._can_send() and (routes := self._links.routes.sendable()):
                for route in routes:
                    await self._send_frame(route)
                await self._let_others_run()
            self._changed.set()

    async def _send_frame(self, route: Route) -> None:
        """Publish the next frame of `route`; sealed only now, when it can leave."""
        if not self._can_send():
            return
        incarnation = self._life.incarnation
        outgoing = self._links.next_frame(route)
        if outgoing is None:
            return
        try:
            await publish(self._nats, outgoing.subject, outgoing.data)
        except BusBroken as exc:
            self.frames_lost += 1
            logger.warning("frame.lost subject=%s error=%s", outgoing.subject, exc)
            return
        except LocalProtocolError as exc:
            self.frames_lost += 1
            logger.error("frame.refused subject=%s error=%s", outgoing.subject, exc)
            self._on_broken(route)
            return
        self.frames += 1
        if outgoing.message is not None and self._life.incarnation == incarnation:
            # Behind the frame on the same connection, or not at all: should the frame be lost, the queue repeats it.
            await self._say(outgoing.message.ack)

    async def _let_others_run(self) -> None:
        """A step that is ready goes before the next part of something large."""
        await asyncio.sleep(0)
        while self._nats.is_connected and self._nats.pending_data_size > MAX_UNSENT_BYTES:
            await self._nats.confirm(timeout_s=DRAIN_S)

    async def run_words(self) -> None:
        """Speak to queue and controllers until cancelled."""
        while True:
            await self._words_wanted.wait()
            self._words_wanted.clear()
            while self._words and self._can_send():
                await self._say(self._words.popleft())
            self._changed.set()

    async def keep(self, messages: Iterable[QueuedRequest]) -> None:
        """Tell the queue that this worker is at work on these."""
        await self._say_all([message.in_progress for message in messages])

    async def give_back(self, messages: Iterable[QueuedRequest]) -> None:
        """Let other workers have these at once."""
        await self._say_all([message.nak for message in messages])

    async def _say_all(self, words: Iterable[Callable[[], Awaitable[None]]]) -> None:
        incarnation = self._life.incarnation
        for word in words:
            # After a fence in the middle of this, the rest is of what the worker has given up.
            if not self._can_send() or self._life.incarnation != incarnation:
                return
            await self._say(word)

    async def _say(self, word: Callable[[], Awaitable[None]]) -> None:
        try:
            await word()
        except BusBroken as exc:
            # The queue hands a message out again, and whoever gets it finds out what it is; commands are repeated too.
            logger.warning("word.lost error=%s", exc)
