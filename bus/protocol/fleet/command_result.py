"""The workers that must ack a command, and its result: their acks. The caller passes in the time; nothing here waits.

*Each worker that must ack has exactly one result. The command is complete only if every result is `applied`.* The first
final ack counts. An ack of another incarnation of a worker does not count: the incarnation that received the command
has ended.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ....schemas.acks import Ack, AckError, AckStatus
from ....schemas.checks import list_names
from ....schemas.control import AnyCommand, FinishWeightUpdate, UpdateWeights
from ....schemas.errors import ControlCode, InvalidRequest, NoWorkers, RollbusError
from ....schemas.presence import WorkerPresence
from ..html import as_html
from .authority import MAX_NAMED, without
from .desired import SILENT
from .loans import executes
from .presence import LostWorker, by_model

RESULTS: Final = ("applied", "failed", "unsupported", "stale", "late", "missing")
"""The maps of a command result, in display order. Each map has the workers with that result."""
PAUSING: Final = ("update_weights", "finish_weight_update")
"""Commands that pause the requests in flight and resume them."""
MAX_REASON_CHARS = 300
"""Characters of each worker's reason in an error message. The command result has the whole reason."""
Roster = dict[str, tuple[WorkerPresence, ...]]
"""The workers that must ack, by model and in the order of their ids. Each model has at least one worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The workers that a command waits for, if not all."""

    count: int | None = None
    """Wait for this number of workers that have applied it, regardless of which workers these are."""
    workers: frozenset[str] | None = None
    """Wait for these workers."""


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one command. Each worker that had to ack is in one of the maps."""

    command: str
    """The name of the command."""
    id: str
    """The id of the command."""
    epochs: dict[str, int] = {}
    """By model: the epoch of the desired state that records the command. Empty for commands that are not recorded."""
    seconds: float = 0.0
    """Seconds from the first publication until all workers had acked or the time was over."""
    applied: dict[str, Ack] = {}
    """By worker: the final acks of workers that applied the command."""
    failed: dict[str, Ack] = {}
    """The final acks of workers that failed to apply the command."""
    unsupported: dict[str, Ack] = {}
    """The final acks of workers whose engine does not support the command."""
    stale: dict[str, Ack] = {}
    """The final acks of workers that have a later command."""
    late: dict[str, Ack] = {}
    """Workers that sent an ack, but no final ack in time, each with its last ack. They may still apply the command."""
    missing: dict[str, str] = {}
    """Workers that never sent an ack, or are lost, each with the reason."""
    not_found: tuple[str, ...] = ()
    """For an `abort`: the requests that no worker reported. Each waits in the queue, has ended, or never existed."""
    not_awaited: tuple[str, ...] = ()
    """Workers that an update with `min_staged` did not wait for, because they had not staged the weights. Each of them
    is also in one of the maps with its last ack. It serves nothing until it has the weights, which it loads by itself.
    """
    paused_s: float | None = None
    """For an update: seconds from the first worker's pause to the last worker's resume, among workers that applied it.
    The arrival times of their acks count. None: no weights were replaced, or a worker reports no times.
    """
    warnings: tuple[str, ...] = ()
    """For weights and adapters: why the version is unpinned, or that an earlier record had other content under this
    number. The command was executed."""

    def __repr__(self) -> str:
        """Return one line with counts; the fields have the acks."""
        counts = [f"{len(self.applied)} applied"]
        for name in (*RESULTS[1:], "not_found"):
            counts += [f"{len(getattr(self, name))} {name}"] if getattr(self, name) else []
        return f"<CommandResult {self.command}: {', '.join(counts)} in {self.seconds:.2f} s>"

    def _repr_html_(self) -> str:
        reasons = {worker: _explain(ack) for name in RESULTS[1:4] for worker, ack in getattr(self, name).items()}
        reasons |= {worker: ack.stage or ack.status for worker, ack in self.late.items()} | self.missing
        rows = [(worker, name, reasons.get(worker)) for name in RESULTS for worker in getattr(self, name)]
        rows += [(request_id, "not_found", None) for request_id in self.not_found]
        return as_html(f"{self.command} in {self.seconds:.2f} s", rows)

    @property
    def is_complete(self) -> bool:
        """True if every worker that had to ack has applied the command, and it found a request that it names."""
        others = {worker for name in RESULTS[1:] for worker in getattr(self, name)}
        return bool(self.applied) and others <= set(self.not_awaited) and not self.has_found_nothing

    @property
    def has_found_nothing(self) -> bool:
        """True if no worker had any request that the command names."""
        return bool(self.not_found) and not any(ack.request_ids for ack in self.applied.values())

    def of_abort(self, request_ids: Iterable[str]) -> "CommandResult":
        """Return this result for a command that aborts these requests."""
        found = {name for ack in self.applied.values() for name in ack.request_ids or ()}
        return replace(self, not_found=tuple(name for name in request_ids if name not in found))

    def of_cancel(self) -> "CommandResult":
        """Return this result for a cancelled transfer: if a worker ended it, no other worker needed to have it open."""
        absent = {
            worker: replace(ack, status=AckStatus.APPLIED, error=None)
            for worker, ack in self.failed.items()
            if self.applied and isinstance(ack.error, AckError) and ack.error.code is ControlCode.TRANSFER_EXPIRED
        }
        failed = {worker: ack for worker, ack in self.failed.items() if worker not in absent}
        return replace(self, applied=self.applied | absent, failed=failed)

    def with_ids(self, given: Mapping[str, str]) -> "CommandResult":
        """Return this result of an abort with the callers' ids, by their wire form in `given`."""
        applied = {
            worker: replace(ack, request_ids=tuple(given.get(name, name) for name in ack.request_ids or ()))
            for worker, ack in self.applied.items()
        }
        return replace(self, applied=applied, not_found=tuple(given.get(name, name) for name in self.not_found))


class CommandIncomplete(RollbusError):
    """Not every worker applied a command. The message names the other workers, with reasons.

    Attributes:
        ledger: the command result of all workers.
        note: more information for people, for example whether anything was recorded; may be empty.
        check_of: the command that was requested, if the command result is that of its check.
    """

    def __init__(self, ledger: CommandResult, note: str = "", *, check_of: str | None = None) -> None:
        self.ledger = ledger
        self.note = note
        self.check_of = check_of
        super().__init__(self._message(shows_reasons=True))

    @property
    def headline(self) -> str:
        """The message without the workers' reasons, for output that shows the reasons elsewhere."""
        return self._message(shows_reasons=False)

    def _message(self, *, shows_reasons: bool) -> str:
        result = self.ledger
        reasons = _list_reasons(result)
        of_all = f"{len(result.applied)} of {len(result.applied) + len(reasons)} workers"
        text = f"{result.command} was applied by {of_all}"
        if self.check_of is not None:
            text = f"{self.check_of} was not started: {of_all} passed its check"
        if len(reasons) == len(result.failed) == 1 and not result.applied:
            ((worker, ack),) = result.failed.items()
            reasons = [_explain(ack)]
            what = f"{result.command} was not applied" if self.check_of is None else f"{self.check_of} was not started"
            text = f"{what}: the only worker, {worker}, refused"
        if result.has_found_nothing:
            text += f", and none has {list_names(result.not_found, limit=MAX_NAMED)}"
        if reasons and shows_reasons:
            text += f": {list_names(reasons, '; ', MAX_NAMED)}"
        return f"{text}. {self.note}" if self.note else text


class AckTracker:
    """The workers that must ack one command, and the acks that have arrived.

    Args:
        command: name of the command.
        id: id of the command.
        workers: workers that must ack, in their present incarnations.
        now: present time in seconds.
        quorum: workers to wait for; None: all.
    """

    def __init__(
        self, command: str, id: str, workers: Iterable[WorkerPresence], now: float, quorum: Quorum | None = None
    ) -> None:
        self.command = command
        self.id = id
        self._since = now
        self._incarnations = {worker.worker: worker.incarnation for worker in workers}
        # Workers that are live and have sent no final ack.
        self._owing = set(self._incarnations)
        # The last ack of each worker that has sent one.
        self._acks: dict[str, Ack] = {}
        self._quorum = quorum or Quorum()
        # The time at which the ack that each worker applied it arrived here.
        self._applied_at: dict[str, float] = {}
        self.lost: dict[str, str] = {}
        """The reason for each worker that ended before its final ack."""

    @property
    def owing(self) -> tuple[str, ...]:
        """The ids of the live workers that have sent no final ack."""
        return tuple(sorted(self._owing))

    @property
    def is_settled(self) -> bool:
        """True if every worker that is waited for has sent a final ack or is lost."""
        awaited, count = self._quorum.workers, self._quorum.count
        return not (self._owing if awaited is None else self._owing & awaited) or (
            count is not None and sum(ack.status is AckStatus.APPLIED for ack in self._acks.values()) >= count
        )

    def add_ack(self, ack: Ack, now: float) -> bool:
        """Add an ack that arrived at `now`. Return True if it changes the result."""
        worker = ack.worker
        if worker not in self._incarnations or ack.id != self.id or self._is_final(worker):
            return False
        if ack.incarnation != self._incarnations[worker]:
            self.lost.setdefault(worker, "it came back as a new incarnation")
            self._owing.discard(worker)
            return False
        if ack.command != self.command and ack.status is not AckStatus.FAILED:
            ack = _fail_ack(ack)
        if ack.status.is_final:
            # A final ack of a worker that counted as lost overrides the loss.
            self.lost.pop(worker, None)
            self._owing.discard(worker)
            if ack.status is AckStatus.APPLIED:
                self._applied_at[worker] = now
        else:
            last = self._acks.get(worker)
            if last is not None and (ack.status is AckStatus.ACCEPTED or _read_progress(ack) == _read_progress(last)):
                return False
        self._acks[worker] = ack
        return True

    def mark_lost(self, lost: LostWorker) -> bool:
        """Record that a worker, or one of its incarnations, is lost. Return True if it changes the result."""
        worker = lost.worker
        if worker not in self._incarnations or worker in self.lost or self._is_final(worker):
            return False
        if not lost.is_final and lost.incarnation != self._incarnations[worker]:
            return False
        self.lost[worker] = lost.reason
        self._owing.discard(worker)
        return True

    def result(self, now: float, epochs: dict[str, int] | None = None) -> CommandResult:
        """Return the result. A worker without a final ack is late, or missing if it sent no ack at all."""
        results: dict[str, Any] = {name: {} for name in RESULTS}
        seconds = now - self._since
        for worker in sorted(self._incarnations):
            if worker in self.lost:
                results["missing"][worker] = self.lost[worker]
            elif worker not in self._acks:
                results["missing"][worker] = f"it did not answer within {seconds:.1f} s"
            else:
                ack = self._acks[worker]
                results[ack.status if ack.status.is_final else "late"][worker] = ack
        return CommandResult(
            command=self.command,
            id=self.id,
            epochs=epochs or {},
            seconds=seconds,
            **results,
            not_awaited=self._list_not_awaited(),
            paused_s=self._measure_pause(),
        )

    def _list_not_awaited(self) -> tuple[str, ...]:
        awaited = self._quorum.workers
        return () if awaited is None else tuple(sorted(self._incarnations.keys() - awaited))

    def _measure_pause(self) -> float | None:
        """Return the seconds from the first pause to the last resume: a worker acks when its engine resumes."""
        timings = {worker: self._acks[worker].timing for worker in self._applied_at}
        stops = [self._applied_at[worker] - timing.paused_s for worker, timing in timings.items() if timing is not None]
        if not stops or len(stops) < len(timings) or self.command not in PAUSING:
            return None
        return max(max(self._applied_at.values()) - min(stops), 0.0)

    def _is_final(self, worker: str) -> bool:
        return worker in self._acks and self._acks[worker].status.is_final


def _fail_ack(ack: Ack) -> Ack:
    """Return a failed ack in place of an ack for another command with this id: this command was not executed."""
    error = AckError(
        code=ControlCode.INVALID_COMMAND,
        message=f"the id belongs to another command, {ack.command}; allowed: a new id for each command",
    )
    return replace(ack, status=AckStatus.FAILED, error=error)


def _read_progress(ack: Ack) -> tuple[object, ...]:
    return ack.status, ack.stage, ack.progress


def _list_reasons(result: CommandResult) -> list[str]:
    return [
        *(f"{worker} failed: {_explain(ack)}" for worker, ack in result.failed.items()),
        *(f"{worker} does not support it: {_explain(ack)}" for worker, ack in result.unsupported.items()),
        *(f"{worker} is stale: {_explain(ack)}" for worker, ack in result.stale.items()),
        *(f"{worker} is late: {ack.stage or ack.status}" for worker, ack in result.late.items()),
        *(f"{worker} is missing: {why[:MAX_REASON_CHARS]}" for worker, why in result.missing.items()),
    ]


def _explain(ack: Ack) -> str:
    if ack.error is None:
        return "its ack has no reason"
    return f"{ack.error.code}: {ack.error.message[:MAX_REASON_CHARS]}"


def needs_known_models(command: AnyCommand) -> bool:
    """Return True if the command applies to one model and names neither the model nor workers.

    The only model with live workers need not be the model that the caller means.
    """
    return command.is_of_one_model and command.model is None and command.workers is None


def workers_that_must_ack(
    workers: Sequence[WorkerPresence], command: AnyCommand, known_models: Collection[str] = ()
) -> Roster:
    """Return the live `workers` that must ack `command`.

    Args:
        known_models: models that count although they may have no live workers; see `needs_known_models`.

    Raises:
        NoWorkers: no live worker can ack; the message has the states of the other workers.
        InvalidRequest: a named worker cannot ack; no worker of the named model is known; the command names no model
            although it must; or a worker of the model cannot decode one of its fields.
    """
    known = [worker for worker in workers if command.model in (None, worker.model)]
    if workers and not known:
        models = ", ".join(sorted({worker.model for worker in workers}))
        raise InvalidRequest("model", f"is {command.model!r}", f"one of {models}")
    able = [worker for worker in known if worker.state not in SILENT and executes(worker, command)]
    others = ", ".join(
        f"{worker.worker} is {worker.state if executes(worker, command) else 'lent'}"
        for worker in known
        if worker not in able
    )
    if not able:
        raise NoWorkers(
            message=f"no live worker of {command.model or 'any model'} can answer" + (f" ({others})" if others else "")
        )
    if command.workers is not None:
        wanted = set(command.workers)
        answering, able = able, [worker for worker in able if worker.worker in wanted]
        absent = sorted(wanted - {worker.worker for worker in able})
        if absent:
            states = {worker.worker: f"{worker.worker} ({worker.state}, {worker.model})" for worker in workers}
            of_model = "" if command.model is None else f" of {command.model}"
            live = sorted(f"{worker.worker} ({worker.model})" for worker in answering)
            raise InvalidRequest(
                "workers",
                f"names no live worker{of_model}: {', '.join(states.get(name, name) for name in absent)}",
                list_names(live),
            )
    ordered = sorted(able, key=lambda presence: (presence.model, presence.worker))
    roster = {model: tuple(present) for model, present in by_model(ordered).items()}
    named = sorted(roster.keys() | set(known_models))
    if len(named) > 1 and command.is_of_one_model:
        raise InvalidRequest("model", "is missing", f"one of {list_names(named)}")
    _check_label(known, command, roster)
    return roster


def _check_label(workers: Sequence[WorkerPresence], command: AnyCommand, models: Iterable[str]) -> None:
    """Check that every worker of the model can decode a label, also workers that the command does not name."""
    if not isinstance(command, UpdateWeights | FinishWeightUpdate) or command.label is None:
        return
    older = [worker for model in models for worker in without("version_labels", workers, model)]
    if older:
        raise InvalidRequest(
            "label",
            f"is {command.label!r}, which workers of an earlier release cannot decode",
            f"a number as the version, without a label, until {', '.join(older)} are upgraded",
        )
