"""Which workers live, as far as their announcements tell. Time is passed in; nothing here waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from bus.protocol.lease import MAX_LEASE_S
from schemas.errors import InvalidRequest, NoWorkers
from schemas.presence import Role, WorkerPresence, WorkerState

__all__ = ["LEASE_MARGIN_S", "MAX_WORKERS", "FleetSnapshot", "FleetView", "Gone", "takes_whole"]

LEASE_MARGIN_S: Final = 1.0
"""A worker whose lease ran out is given this long beyond it: by then it has fenced itself, by whichever clock."""
MAX_WORKERS: Final = 16_384
"""Workers that are followed; far above any fleet. Of more than that the others are not seen until one is gone."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker, or one of its incarnations, that is no more."""

    worker: str
    incarnation: str
    model: str
    reason: str
    is_final: bool = True
    """The worker itself is gone; False: it lives on, or comes back, as another incarnation."""


@dataclass(frozen=True)
class FleetSnapshot:
    """Which workers live, and what they are doing. Made anew when that changes; any thread may read it."""

    workers: tuple[WorkerPresence, ...]
    """By id. What else they announced may be older than the snapshot."""

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The models that some worker takes requests for, now or soon, sorted: it may be paused or updating."""
        present = (worker for worker in self.workers if worker.state.is_present)
        return tuple(sorted({worker.model for worker in present if takes_whole(worker)}))

    @cached_property
    def prefillers(self) -> Mapping[str, tuple[str, ...]]:
        """By model that serving workers of role `decode` have: the serving prefill workers whose KV they can read."""
        readable: dict[str, set[str | None]] = {}
        for worker in self.workers:
            if _serves_as(worker, "decode"):
                readable.setdefault(worker.model, set()).add(_connector_of(worker))
        return {
            model: tuple(
                worker.worker
                for worker in self.workers
                if worker.model == model and _serves_as(worker, "prefill") and _connector_of(worker) in connectors
            )
            for model, connectors in readable.items()
        }

    @cached_property
    def context_lens(self) -> Mapping[str, int]:
        """By model that serving workers have: the shortest context of any of them."""
        lens: dict[str, int] = {}
        for worker in self.workers:
            if worker.state is WorkerState.SERVING and worker.capabilities is not None:
                length = worker.capabilities.max_model_len
                lens[worker.model] = min(lens.get(worker.model, length), length)
        return lens

    def is_served(self, model: str | None) -> bool:
        """Some worker takes requests for `model`, or for any, now or soon."""
        return bool(self.served) if model is None else model in self.served

    def resolve_model(self, model: str | None) -> str:
        """The model that a request for `model` goes to; None means the fleet's only one.

        Raises:
            NoWorkers: no worker serves it.
            InvalidRequest: no model was named and the fleet serves several, or only others.
        """
        if model is None and len(self.served) > 1:
            raise InvalidRequest(field="model", problem="is missing", allowed=f"one of {', '.join(self.served)}")
        if model is None and self.served:
            return self.served[0]
        if model is not None and model in self.served:
            return model
        if model is not None and self.served and all(worker.model != model for worker in self.workers):
            raise InvalidRequest(field="model", problem=f"is {model!r}", allowed=f"one of {', '.join(self.served)}")
        raise NoWorkers(message=f"no live worker serves {model or 'any model'}{self.others(model)}")

    def others(self, model: str | None) -> str:
        """What the workers of `model`, or all, are doing that do not serve; in brackets, empty if there are none."""
        others = [
            f"{worker.worker} is {worker.state if takes_whole(worker) else 'there for prefill alone'}"
            for worker in self.workers
            if not (worker.state is WorkerState.SERVING and takes_whole(worker)) and model in (None, worker.model)
        ]
        return f" ({', '.join(others)})" if others else ""


class FleetView:
    """The latest announcement of each live worker."""

    def __init__(self) -> None:
        self._seen: dict[str, WorkerPresence] = {}
        self._expires: dict[str, float] = {}
        self._snapshot: FleetSnapshot | None = None

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        return f"<FleetView {' '.join(f'{name}:{p.state}' for name, p in sorted(self._seen.items())) or 'empty'}>"

    def update(self, presence: WorkerPresence, now: float) -> Gone | None:
        """Take an announcement; say what it ended: an older incarnation, or the worker itself."""
        previous = self._seen.get(presence.worker)
        if presence.state in (WorkerState.STOPPED, WorkerState.FAILED):
            self._forget(presence.worker)
            return Gone(presence.worker, presence.incarnation, presence.model, f"it is {presence.state}")
        if previous is None and len(self._seen) >= MAX_WORKERS:
            return None
        self._seen[presence.worker] = presence
        self._expires[presence.worker] = now + min(presence.lease_s, MAX_LEASE_S) + LEASE_MARGIN_S
        if previous is None or _differs(previous, presence):
            self._snapshot = None
        if previous is not None and previous.incarnation != presence.incarnation:
            reason = "it came back as a new incarnation"
            return Gone(previous.worker, previous.incarnation, previous.model, reason, is_final=False)
        if presence.state is WorkerState.FENCED:
            reason = "it has fenced itself"
            return Gone(presence.worker, presence.incarnation, presence.model, reason, is_final=False)
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
            self._expires[worker] = now + min(presence.lease_s, MAX_LEASE_S) + LEASE_MARGIN_S

    @property
    def snapshot(self) -> FleetSnapshot:
        """The live workers; the same object until one comes, goes or changes its state."""
        if self._snapshot is None:
            self._snapshot = FleetSnapshot(self.workers())
        return self._snapshot

    def workers(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Live workers by id, of one model or of all."""
        return tuple(p for _, p in sorted(self._seen.items()) if model is None or p.model == model)

    def serving(self, model: str | None = None) -> tuple[WorkerPresence, ...]:
        """Those of them that take whole requests."""
        return tuple(p for p in self.workers(model) if p.state is WorkerState.SERVING and takes_whole(p))

    def target_version(self, model: str) -> int | None:
        """The newest weights that any live worker of `model` should have; None: none has said."""
        announced = (p.target_version for p in self._seen.values() if p.model == model)
        return max((version for version in announced if version is not None), default=None)

    def get(self, worker: str) -> WorkerPresence | None:
        """The latest announcement of a live worker."""
        return self._seen.get(worker)

    def _forget(self, worker: str) -> None:
        self._snapshot = None
        self._seen.pop(worker, None)
        self._expires.pop(worker, None)


def takes_whole(worker: WorkerPresence) -> bool:
    """It takes requests from the queue, when it serves, and not prefill legs alone."""
    return worker.capabilities is None or worker.capabilities.role != "prefill"


def _serves_as(worker: WorkerPresence, role: Role) -> bool:
    capabilities = worker.capabilities
    return worker.state is WorkerState.SERVING and capabilities is not None and capabilities.role == role


def _connector_of(worker: WorkerPresence) -> str | None:
    return None if worker.capabilities is None else worker.capabilities.kv_connector


def _differs(a: WorkerPresence, b: WorkerPresence) -> bool:
    return (a.state, a.model, a.incarnation) != (b.state, b.model, b.incarnation)
