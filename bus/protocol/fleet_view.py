"""Which workers live, as far as their announcements tell. Time is passed in; nothing here waits."""

from dataclasses import dataclass

from schemas.presence import WorkerPresence, WorkerState

__all__ = ["FleetView", "Gone"]


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker, or one of its incarnations, that is no more."""

    worker: str
    incarnation: str
    model: str
    reason: str
    is_final: bool = True
    """The worker itself is gone; False: it lives on as another incarnation."""


class FleetView:
    """The latest announcement of each live worker."""

    def __init__(self) -> None:
        self._seen: dict[str, WorkerPresence] = {}
        self._expires: dict[str, float] = {}

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        return f"<FleetView {' '.join(f'{name}:{p.state}' for name, p in sorted(self._seen.items())) or 'empty'}>"

    def update(self, presence: WorkerPresence, now: float) -> Gone | None:
        """Take an announcement; say what it ended: an older incarnation, or the worker itself."""
        previous = self._seen.get(presence.worker)
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED):
            self._forget(presence.worker)
            return Gone(presence.worker, presence.incarnation, presence.model, f"it is {presence.state}")
        self._seen[presence.worker] = presence
        self._expires[presence.worker] = now + presence.lease_s
        if previous is not None and previous.incarnation != presence.incarnation:
            reason = "it came back as a new incarnation"
            return Gone(previous.worker, previous.incarnation, previous.model, reason, is_final=False)
        return None

    def expire(self, now: float) -> list[Gone]:
        """Drop the workers whose lease has run out and name them."""
        late = [worker for worker, expires in self._expires.items() if expires <= now]
        gone = [
            Gone(worker, self._seen[worker].incarnation, self._seen[worker].model, "its lease expired")
            for worker in late
        ]
        for worker in late:
            self._forget(worker)
        return gone

    def renew_all(self, now: float) -> None:
        """Start every lease anew: while our own connection was down, nobody could be heard."""
        for worker, presence in self._seen.items():
            self._expires[worker] = now + presence.lease_s

    def workers(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Live workers by id, of one model or of all."""
        return tuple(p for _, p in sorted(self._seen.items()) if model is None or p.model == model)

    def serving(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Those of them that take requests."""
        return tuple(p for p in self.workers(model) if p.state is WorkerState.SERVING)

    def _forget(self, worker: str) -> None:
        self._seen.pop(worker, None)
        self._expires.pop(worker, None)
