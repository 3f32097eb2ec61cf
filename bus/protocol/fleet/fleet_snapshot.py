"""One state of the live workers, which any thread may read: which models are served or awaited, and the reasons."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from ....schemas.errors import InvalidRequest, NoWorkers
from ....schemas.presence import Role, WorkerPresence, WorkerState

__all__ = ["FleetSnapshot", "accepts_whole_requests", "cause_of", "connector_of", "list_names"]

MAX_LISTED: Final = 16
"""Largest number of models or workers that an error lists, because workers choose the names."""
MAX_CAUSE_CHARS: Final = 256
"""Characters of a worker's own text that an error repeats: a worker may write any text."""


@dataclass(frozen=True)
class FleetSnapshot:
    """The live workers: states, versions, adapters. Each change makes a new snapshot; any thread may read it."""

    workers: tuple[WorkerPresence, ...]
    """The workers by id. Load, counters and times of their presence may be older than the snapshot."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """By worker that starts: how many of its incarnations have started since it last accepted requests."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """By model whose last worker is not started again: the name of that worker and the reason."""

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The sorted models for which a worker accepts requests now or soon: the worker may be paused or updating."""
        present = (worker for worker in self.workers if worker.state.is_present)
        return tuple(sorted({worker.model for worker in present if accepts_whole_requests(worker)}))

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The models for which a worker accepts requests now or soon: it may also be starting."""
        starting = (worker for worker in self.workers if worker.state is WorkerState.STARTING and worker.start_left_s)
        return frozenset((*self.served, *(worker.model for worker in starting)))

    @cached_property
    def serving(self) -> frozenset[str]:
        """The models for which a worker accepts requests and runs them now."""
        able = (worker for worker in self.workers if accepts_whole_requests(worker))
        return frozenset(worker.model for worker in able if worker.state is WorkerState.SERVING)

    @cached_property
    def prefillers(self) -> Mapping[str, tuple[str, ...]]:
        """By model with serving decode workers: the serving prefill workers whose KV the decode workers can read."""
        readable: dict[str, set[str | None]] = {}
        for worker in self.workers:
            if _serves_as(worker, "decode"):
                readable.setdefault(worker.model, set()).add(connector_of(worker))
        return {
            model: tuple(
                worker.worker
                for worker in self.workers
                if worker.model == model and _serves_as(worker, "prefill") and connector_of(worker) in connectors
            )
            for model, connectors in readable.items()
        }

    @cached_property
    def context_lens(self) -> Mapping[str, int]:
        """By model with serving workers: the shortest context length of any of them."""
        lens: dict[str, int] = {}
        for worker in self.workers:
            if worker.state is WorkerState.SERVING and worker.capabilities is not None:
                length = worker.capabilities.max_model_len
                lens[worker.model] = min(lens.get(worker.model, length), length)
        return lens

    def newest_version(self, model: str | None, lora: str | None) -> int | None:
        """Return the newest version of the weights or adapter at any live worker of `model`; None: unknown."""
        workers = [worker for worker in self.workers if worker.model == model]
        if lora is None:
            return max((worker.served_version for worker in workers), default=None)
        return max((info.version for worker in workers for info in worker.loras if info.name == lora), default=None)

    def choose_model(self, known: Collection[str] = ()) -> str:
        """Return the model of requests that name none: the only one of the live workers' models and `known`.

        Raises:
            NoWorkers: there is no model.
            InvalidRequest: there are several.
        """
        names = self._names(known)
        if len(names) > 1:
            raise InvalidRequest(field="model", problem="is missing", allowed=self._one_of(names))
        if not names:
            raise NoWorkers(message="no live worker serves any model")
        return names[0]

    def resolve_model(self, model: str | None, known: Collection[str] = ()) -> str:
        """Return the model for a request with `model`; None means the only model.

        Args:
            known: models that count although no live worker may have them.

        Raises:
            NoWorkers: no worker serves it, and none starts.
            InvalidRequest: no model was named and there are several, or there are only other models.
        """
        model = self.choose_model(known) if model is None else model
        if model in self.awaited:
            return model
        names = self._names(known)
        if names and model not in names:
            raise InvalidRequest(field="model", problem=f"is {model!r}", allowed=self._one_of(names))
        raise NoWorkers(message=f"no live worker serves {model}{self.describe_others(model)}")

    def _names(self, known: Collection[str]) -> list[str]:
        return sorted({worker.model for worker in self.workers}.union(known))

    def _one_of(self, names: Sequence[str]) -> str:
        """Return the allowed names for people, with the command that forgets a name without workers."""
        live = {worker.model for worker in self.workers}
        idle = [name for name in names if name not in live]
        text = f"one of {list_names(names)}"
        if idle:
            text += f" (without workers: {list_names(idle)}; `rollbus forget-model {idle[0]}` forgets a model)"
        return text

    def describe_others(self, model: str | None) -> str:
        """Return the workers of `model`, or of all, that do not serve, with states and causes, in brackets.

        The text may be empty.
        """
        others = [
            self._describe(worker)
            for worker in self.workers
            if not (worker.state is WorkerState.SERVING and accepts_whole_requests(worker))
            and model in (None, worker.model)
        ]
        others += [why for name, why in self.given_up.items() if model in (None, name)]
        return f" ({list_names(others, '; ')})" if others else ""

    def _describe(self, worker: WorkerPresence) -> str:
        """Return the state of a worker that does not serve. A start has its number and its cause."""
        if not accepts_whole_requests(worker):
            return f"{worker.worker} is serving prefill phases only"
        if worker.state is not WorkerState.STARTING:
            return f"{worker.worker} is {worker.state}"
        count = self.starts.get(worker.worker, 1)
        again = f", start {count} since it served" if count > 1 else ""
        why = f": {cause_of(worker)}" if worker.last_error else ""
        return f"{worker.worker} is starting{again}{why}"


def list_names(names: Sequence[str], separator: str = ", ") -> str:
    """Return names for an error message, the first `MAX_LISTED` of them."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{separator.join(names[:MAX_LISTED])}{more}"


def cause_of(worker: WorkerPresence) -> str:
    """Return the printable beginning of the last error of a worker."""
    return "".join(filter(str.isprintable, (worker.last_error or "")[:MAX_CAUSE_CHARS]))


def accepts_whole_requests(worker: WorkerPresence) -> bool:
    """Return True if the worker pulls requests from the queue when it serves, and not only prefill phases."""
    return worker.capabilities is None or worker.capabilities.role != "prefill"


def _serves_as(worker: WorkerPresence, role: Role) -> bool:
    capabilities = worker.capabilities
    return worker.state is WorkerState.SERVING and capabilities is not None and capabilities.role == role


def connector_of(worker: WorkerPresence) -> str | None:
    """Return the connector by which a worker shares KV; None: it shares none, or is starting."""
    return None if worker.capabilities is None else worker.capabilities.kv_connector
