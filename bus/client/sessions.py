"""Which worker a session's next request should go to: the one that holds its prefix cache.

The worker that served the session last comes first. If that worker is gone, or this client never saw the session, all
clients choose the same worker by rendezvous hashing.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from ...schemas.presence import WorkerPresence
from ..protocol.queue.rendezvous import rendezvous

__all__ = ["Sessions"]

MAX_SESSIONS: Final = 65_536
"""Sessions that are remembered; of those not used for longest, the rendezvous finds a worker again."""


class Sessions:
    """The sessions of one client. Not a promise: a worker that is full or gone is passed over."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._workers)

    def remember(self, model: str, session_id: str, worker: str) -> None:
        """Remember who served the session last."""
        self._workers[model, session_id] = worker
        self._workers.move_to_end((model, session_id))
        if len(self._workers) > MAX_SESSIONS:
            self._workers.popitem(last=False)

    def choose(self, model: str, session_id: str, serving: Iterable[WorkerPresence]) -> WorkerPresence | None:
        """The worker for the session's next request, whether or not it has room; None if nobody serves.

        Args:
            serving: the workers that take requests for `model`.
        """
        by_id = {presence.worker: presence for presence in serving}
        if not by_id:
            return None
        last = self._workers.get((model, session_id))
        return by_id[last] if last in by_id else by_id[rendezvous(session_id, by_id)]
