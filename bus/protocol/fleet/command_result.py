"""Who has answered a command, and how. Time is passed in; nothing here waits.

*Each worker that must answer ends in exactly one column of the ledger; only if all of them are in `applied` is the
command complete.* The first final answer counts. One that comes from another life of a worker is no answer: the life
that was asked is gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from ....schemas.control import Ack, AckError, AckStatus
from ....schemas.errors import ControlCode, RollbusError
from ....schemas.presence import WorkerPresence
from .presence_table import LostWorker

__all__ = ["RESULTS", "AckTracker", "CommandIncomplete", "CommandResult", "Quorum"]

RESULTS: Final = ("applied", "failed", "unsupported", "stale", "late", "missing")
"""The maps of a ledger, in each of which stand the workers with that result, in the order in which they are shown."""

PAUSING: Final = ("update_weights", "finish_weight_update")
"""Commands that stop the requests in flight, and let them go on."""
MAX_NAMED = 8
"""Workers that an error's message names; the ledger has them all."""
MAX_REASON_CHARS = 300
"""Of each of their reasons: the ledger has them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """Which workers a command waits for, where that is not all of them."""

    count: int | None = None
    """As many as have applied it, whichever they are."""
    workers: frozenset[str] | None = None
    """These."""


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one command. Each worker that had to answer stands in one of the maps."""

    command: str
    """Its name."""
    id: str
    """Of the command."""
    epochs: dict[str, int] = {}
    """By model: of the desired state that it is recorded in. Empty for commands that are not recorded."""
    seconds: float = 0.0
    """From the first word to the workers until all had answered, or the time was up."""
    applied: dict[str, Ack] = {}
    """Final answers by worker, here and in the next three."""
    failed: dict[str, Ack] = {}
    unsupported: dict[str, Ack] = {}
    stale: dict[str, Ack] = {}
    late: dict[str, Ack] = {}
    """Those that answered, but not finally in time: their last word. They may still apply it."""
    missing: dict[str, str] = {}
    """Those that never answered, or are gone: why."""
    not_found: tuple[str, ...] = ()
    """Of an `abort`: what no worker has said that it had. It waits in the queue, has ended, or never was."""
    not_awaited: tuple[str, ...] = ()
    """Workers that an update with `min_staged` did not wait for, as they had not staged the weights. Each stands in one
    of the maps with what it has said so far. It serves nothing until it has the weights, and gets there by itself."""
    paused_s: float | None = None
    """Of an update: from the first worker's stop to the last worker's resume, of those that applied it, by the times at
    which their answers came. None: nothing was replaced, or a worker does not say."""

    def __repr__(self) -> str:
        """One line with counts; the fields have the acks."""
        counts = [f"{len(self.applied)} applied"]
        for name in (*RESULTS[1:], "not_found"):
            counts += [f"{len(getattr(self, name))} {name}"] if getattr(self, name) else []
        return f"<CommandResult {self.command}: {', '.join(counts)} in {self.seconds:.2f} s>"

    @property
    def is_complete(self) -> bool:
        """Every worker that had to answer has applied it, and it was not all for nothing."""
        others = {worker for name in RESULTS[1:] for worker in getattr(self, name)}
        return bool(self.applied) and others <= set(self.not_awaited) and not self.has_found_nothing

    @property
    def has_found_nothing(self) -> bool:
        """Nothing of what it names was anywhere."""
        return bool(self.not_found) and not any(ack.request_ids for ack in self.applied.values())

    def of_abort(self, request_ids: Iterable[str]) -> "CommandResult":
        """This ledger, of a command to end these requests."""
        found = {name for ack in self.applied.values() for name in ack.request_ids or ()}
        return replace(self, not_found=tuple(name for name in request_ids if name not in found))


class CommandIncomplete(RollbusError):
    """Not every worker applied a command. The message says who did not, and why.

    Attributes:
        ledger: of all of them.
        note: what else there is to know, for people: whether anything was recorded; may be empty.
        check_of: the command that was asked for, where the ledger is of the check before it.
    """

    def __init__(self, ledger: CommandResult, note: str = "", *, check_of: str | None = None) -> None:
        self.ledger = ledger
        self.note = note
        self.check_of = check_of
        super().__init__(self._message(shows_reasons=True))

    @property
    def headline(self) -> str:
        """The message without the workers' reasons, for where these stand already."""
        return self._message(shows_reasons=False)

    def _message(self, *, shows_reasons: bool) -> str:
        ledger = self.ledger
        reasons = _reasons(ledger)
        of_all = f"{len(ledger.applied)} of {len(ledger.applied) + len(reasons)} workers"
        text = f"{ledger.command} was applied by {of_all}"
        if self.check_of is not None:
            text = f"{self.check_of} was not begun, as {of_all} passed its check"
        if ledger.has_found_nothing:
            text += f", and none has {', '.join(ledger.not_found[:MAX_NAMED])}"
            text += f" and {len(ledger.not_found) - MAX_NAMED} more" if len(ledger.not_found) > MAX_NAMED else ""
        if reasons and shows_reasons:
            more = f"; and {len(reasons) - MAX_NAMED} more" if len(reasons) > MAX_NAMED else ""
            text += f": {'; '.join(reasons[:MAX_NAMED])}{more}"
        return f"{text}. {self.note}" if self.note else text


class AckTracker:
    """The workers that must answer one command, and what they have said.

    Args:
        command: its name.
        id: of the command.
        workers: those that must answer, in the lives that they have now.
        now: in seconds, as everywhere here.
        quorum: which of them are waited for; None: all.
    """

    def __init__(
        self, command: str, id: str, workers: Iterable[WorkerPresence], now: float, quorum: Quorum | None = None
    ) -> None:
        self.command = command
        self.id = id
        self._since = now
        self._incarnations = {worker.worker: worker.incarnation for worker in workers}
        # Those that live and have given no final answer.
        self._owing = set(self._incarnations)
        # By worker: the last word of each that has said one.
        self._acks: dict[str, Ack] = {}
        self._quorum = quorum or Quorum()
        # When each worker applied it, as heard here.
        self._applied_at: dict[str, float] = {}
        self.lost: dict[str, str] = {}
        """Workers that ended while they owed a final ack: why."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<AckTracker {self.command} {self.id} workers={len(self._incarnations)} owing={len(self._owing)}>"

    @property
    def owing(self) -> tuple[str, ...]:
        """Workers that live and have given no final answer, by id."""
        return tuple(sorted(self._owing))

    @property
    def is_settled(self) -> bool:
        """Nobody that is waited for owes an answer any more."""
        awaited, count = self._quorum.workers, self._quorum.count
        return not (self._owing if awaited is None else self._owing & awaited) or (
            count is not None and sum(ack.status is AckStatus.APPLIED for ack in self._acks.values()) >= count
        )

    def add_ack(self, ack: Ack, now: float | None = None) -> bool:
        """Take an answer, which came at `now`; whether it is news."""
        worker = ack.worker
        if worker not in self._incarnations or ack.id != self.id or self._is_final(worker):
            return False
        if ack.incarnation != self._incarnations[worker]:
            self.lost.setdefault(worker, "it came back as a new incarnation")
            self._owing.discard(worker)
            return False
        if ack.command != self.command and ack.status is not AckStatus.FAILED:
            ack = _as_failed(ack)
        if ack.status.is_final:
            # Also of one that we believed gone: its own word counts more.
            self.lost.pop(worker, None)
            self._owing.discard(worker)
            if now is not None and ack.status is AckStatus.APPLIED:
                self._applied_at[worker] = now
        else:
            last = self._acks.get(worker)
            if last is not None and (ack.status is AckStatus.ACCEPTED or _progress(ack) == _progress(last)):
                return False
        self._acks[worker] = ack
        return True

    def mark_lost(self, lost: LostWorker) -> bool:
        """Take note that a worker, or a life of one, is no more; whether that matters here."""
        worker = lost.worker
        if worker not in self._incarnations or worker in self.lost or self._is_final(worker):
            return False
        if not lost.is_final and lost.incarnation != self._incarnations[worker]:
            return False
        self.lost[worker] = lost.reason
        self._owing.discard(worker)
        return True

    def result(self, now: float, epochs: dict[str, int] | None = None) -> CommandResult:
        """Sum up: who still owes an answer is late, or missing where it never gave one."""
        by_status: dict[AckStatus, dict[str, Ack]] = {status: {} for status in AckStatus}
        late: dict[str, Ack] = {}
        missing: dict[str, str] = {}
        seconds = now - self._since
        for worker in sorted(self._incarnations):
            if worker in self.lost:
                missing[worker] = self.lost[worker]
            elif worker not in self._acks:
                missing[worker] = f"it did not answer within {seconds:.1f} s"
            elif self._is_final(worker):
                by_status[self._acks[worker].status][worker] = self._acks[worker]
            else:
                late[worker] = self._acks[worker]
        return CommandResult(
            command=self.command,
            id=self.id,
            epochs=epochs or {},
            seconds=seconds,
            applied=by_status[AckStatus.APPLIED],
            failed=by_status[AckStatus.FAILED],
            unsupported=by_status[AckStatus.UNSUPPORTED],
            stale=by_status[AckStatus.STALE],
            late=late,
            missing=missing,
            not_awaited=self._not_awaited(),
            paused_s=self._paused_s(),
        )

    def _not_awaited(self) -> tuple[str, ...]:
        awaited = self._quorum.workers
        return () if awaited is None else tuple(sorted(self._incarnations.keys() - awaited))

    def _paused_s(self) -> float | None:
        """Return the seconds from the first stop to the last resume: a worker answers when its engine goes on."""
        timings = {worker: self._acks[worker].timing for worker in self._applied_at}
        stops = [self._applied_at[worker] - timing.paused_s for worker, timing in timings.items() if timing is not None]
        if not stops or len(stops) < len(timings) or self.command not in PAUSING:
            return None
        return max(max(self._applied_at.values()) - min(stops), 0.0)

    def _is_final(self, worker: str) -> bool:
        return worker in self._acks and self._acks[worker].status.is_final


def _as_failed(ack: Ack) -> Ack:
    """What an answer to another command under our id means: ours was not done."""
    error = AckError(
        code=ControlCode.INVALID_COMMAND,
        message=f"id is that of another command, {ack.command}; allowed: a new id for each",
    )
    return replace(ack, status=AckStatus.FAILED, error=error)


def _progress(ack: Ack) -> tuple[object, ...]:
    return ack.status, ack.stage, ack.progress


def _reasons(ledger: CommandResult) -> list[str]:
    return [
        *(f"{worker} failed: {_reason_of(ack)}" for worker, ack in ledger.failed.items()),
        *(f"{worker} cannot do it: {_reason_of(ack)}" for worker, ack in ledger.unsupported.items()),
        *(f"{worker} is stale: {_reason_of(ack)}" for worker, ack in ledger.stale.items()),
        *(f"{worker} is late: {ack.stage or ack.status}" for worker, ack in ledger.late.items()),
        *(f"{worker} is missing: {why[:MAX_REASON_CHARS]}" for worker, why in ledger.missing.items()),
    ]


def _reason_of(ack: Ack) -> str:
    if ack.error is None:
        return "it did not say why"
    return f"{ack.error.code}: {ack.error.message[:MAX_REASON_CHARS]}"
