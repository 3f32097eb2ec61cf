"""How requests in a worker's hands end other than by their engine. Plain state, no I/O."""

from bus.protocol.states import HeldEvent
from schemas.chunk import ChunkError
from schemas.errors import ErrorCode, RequestError
from schemas.messages import RequestKey
from workers.held import Held, HeldRequests, Instructions
from workers.link_stats import LinkStats
from workers.routes import ClientLink, Routes
from workers.versions import Versions

__all__ = ["Endings"]


class Endings:
    """Ends requests; shares what it works on with `Links`.

    Args:
        held: the requests in hand.
        routes: the ways to their clients.
        versions: for terminal chunks.
    """

    def __init__(self, held: HeldRequests, routes: Routes, versions: Versions, stats: LinkStats) -> None:
        self._held = held
        self._routes = routes
        self._versions = versions
        self._stats = stats

    def fail(self, held: Held, error: RequestError) -> None:
        """End an open request with `error`."""
        held.route.fail(held.origin.key, ChunkError.of(error), self._versions.weight_version)
        self._routes.touch(held.route)
        self._held.end(held, HeldEvent.FINISHED)

    def fail_at(self, link: ClientLink, key: RequestKey, error: RequestError, todo: Instructions) -> None:
        """End a request with `error` that has a terminal chunk to be sent, whether or not the engine still has it."""
        held = self._held.find(link.client, link.incarnation, key)
        if held is not None and self._held.is_open(held):
            self.fail(held, error)
            todo.abort.append(held.name)
        else:
            link.fail(key, ChunkError.of(error), self._versions.weight_version)
            self._routes.touch(link)
        self._stats.failed += 1

    def stop(self, client: str, incarnation: str, key: RequestKey, todo: Instructions) -> None:
        """Stop a request that its client does not want here: nobody wants it from the queue either."""
        held = self._held.find(client, incarnation, key)
        is_open = held is not None and self._held.is_open(held)
        if held is not None and is_open:
            todo.abort.append(held.name)
        link = self._routes.find(client, incarnation)
        if link is None:
            # In plain mode the engine ends it: what was made until then is on its way.
            return
        if key in link.sender.keys:
            self._stats.stopped += 1
            link.sender.stop(key, self._versions.weight_version)
            self._routes.touch(link)
        if held is not None:
            if is_open:
                self._held.end(held, HeldEvent.STOPPED)
            self.settle(held, todo)

    def settle(self, held: Held, todo: Instructions) -> None:
        """Let the queue forget a request, if it still keeps it."""
        message = self._held.settle(held)
        if message is not None:
            todo.ack.append(message)

    def drop(self, link: ClientLink, todo: Instructions, *, is_wanted: bool = False) -> int:
        """Forget a link and all that it carries; returns how many requests that were.

        Args:
            is_wanted: what the queue still keeps is for another worker; else nobody waits for it.
        """
        requests = self._held.of(link.client, link.incarnation)
        for held in requests:
            if self._held.is_open(held):
                todo.abort.append(held.name)
                self._held.end(held, HeldEvent.STOPPED)
            message = self._held.settle(held)
            if message is not None and is_wanted:
                todo.nak.append((message, 0.0))
            elif message is not None:
                todo.ack.append(message)
        self._routes.drop(link)
        return len(requests)

    def keep_within(self, max_held_bytes: int, todo: Instructions) -> None:
        """End requests whose results nobody reads, those that hold most first, down to so many bytes in all."""
        excess = self._routes.held_bytes - max_held_bytes
        if excess <= 0:
            return
        unsent = [
            (link.sender.unsent_bytes(key), key, link) for link in self._routes.links() for key in link.sender.keys
        ]
        error = RequestError(
            code=ErrorCode.OVER_BUDGET, message=f"this worker holds more than {max_held_bytes} unread bytes"
        )
        for num_bytes, key, link in sorted(unsent, key=lambda item: item[0], reverse=True):
            if excess <= 0 or not num_bytes:
                break
            excess -= num_bytes
            self._stats.over_budget += 1
            self.fail_at(link, key, error, todo)
