"""The last commands of a fleet with each worker's acks. No I/O."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ....schemas.acks import Ack, AckStatus
from ....schemas.control import LOAD_TIMEOUT_S, Command

MAX_COMMANDS: Final = 20
MAX_WORKERS: Final = 2000
"""Maximum number of workers that are followed for each command. Further workers are ignored."""
MAX_LINES: Final = 100
"""Maximum number of workers that an older command lists. It lists the workers that have not applied it."""
NUM_WHOLE: Final = 2
"""Number of the newest commands, which list all of their workers."""
MAX_ERROR_CHARS: Final = 200
MAX_BEGUN: Final = MAX_COMMANDS // 2
"""Maximum number of commands that only one worker acked and that were never received. The limit protects the other
commands if a worker forges acks."""
MARGIN_S: Final = 10.0
"""Seconds after a command's timeout until the command counts as done, regardless of missing acks."""
AWAITED: Final = "awaited"
"""The status of a worker that has not acked. Other statuses are those of acks."""


class StagingProgress(msgspec.Struct, frozen=True):
    """The staging progress of a worker."""

    done_bytes: int
    total_bytes: int


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last ack of one worker to a command."""

    status: str = msgspec.field()
    """`awaited`, or the status of the last ack."""
    stage: str | None = None
    """With `progress`: the present stage."""
    progress: StagingProgress | None = None
    """With `progress`: the staging progress."""
    error: str | None = None
    """The reason why the worker has not applied the command."""
    seconds: float = 0.0
    """Seconds from its `accepted` to this ack."""


_AWAITED: Final = WorkerAnswer(status=AWAITED)


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its result so far."""

    id: str
    command: str
    controller: str
    at: float
    """Unix time at which the command was received."""
    epoch: int | None
    """The epoch of the desired state. None: the command is not recorded."""
    done: bool
    """True if all known workers of the command have sent a final ack, or its timeout has passed."""
    counts: dict[str, int]
    """Workers by status."""
    workers: dict[str, WorkerAnswer]
    """For the last two commands, all workers. For older commands, at most 100 workers that have not applied it."""


@dataclass(slots=True)
class _FollowedCommand:
    """One command."""

    id: str
    command: str
    controller: str
    at: float
    epoch: int | None
    over_at: float
    workers: dict[str, WorkerAnswer]
    is_heard: bool = True
    """True if the command was received. False: it is known only from acks."""
    begun_by: str | None = None
    """The only worker that acked a command that was not received. None: several workers acked it."""
    has_final: set[str] = field(default_factory=set)

    def line(self, now: float, *, is_whole: bool) -> CommandLine:
        lines: Iterable[tuple[str, WorkerAnswer]] = self.workers.items()
        if not is_whole:
            lines = [each for each in lines if each[1].status != AckStatus.APPLIED][:MAX_LINES]
        return CommandLine(
            id=self.id,
            command=self.command,
            controller=self.controller,
            at=round(self.at, 3),
            epoch=self.epoch,
            done=now > self.over_at or len(self.has_final) == len(self.workers),
            counts=dict(Counter(answer.status for answer in self.workers.values())),
            workers=dict(lines),
        )


class CommandBook:
    """Follows commands and their acks. The caller passes in the time as Unix time.

    Attributes:
        strangers: the number of acks by workers that the command does not concern.
    """

    def __init__(self) -> None:
        self._commands: OrderedDict[tuple[str, str], _FollowedCommand] = OrderedDict()
        self.strangers = 0

    def add_command(self, command: Command, controller: str, workers: Iterable[str], now: float) -> None:
        """Follow a command from now on. A repeated command with the same id changes nothing.

        A command may arrive after its first acks. Then these acks count, and the other workers are awaited.

        Args:
            workers: ids of the workers that must ack.
        """
        known = self._commands.get((controller, command.id))
        if known is not None and known.is_heard:
            return
        concerned = dict.fromkeys(list(workers)[:MAX_WORKERS], _AWAITED)
        over_at = now + command.timeout_s + MARGIN_S
        if known is not None:
            known.is_heard, known.begun_by = True, None
            known.epoch, known.over_at = command.epoch, over_at
            known.workers = {name: known.workers.get(name, awaited) for name, awaited in concerned.items()}
            known.has_final &= known.workers.keys()
            return
        self._follow(_FollowedCommand(command.id, command.command, controller, now, command.epoch, over_at, concerned))

    def _follow(self, followed: _FollowedCommand) -> None:
        self._commands[followed.controller, followed.id] = followed
        while len(self._commands) > MAX_COMMANDS:
            self._commands.popitem(last=False)

    def add_ack(self, ack: Ack, controller: str, now: float) -> None:
        """Record a worker's ack. Acks after the final ack of a worker are ignored.

        A command that was not received is followed from its first ack, with the workers that ack it. Programs without
        permission to receive commands learn of commands in this way.
        """
        followed = self._commands.get((controller, ack.id))
        if followed is None:
            followed = self._begin(ack, controller, now)
        if not followed.is_heard and len(followed.workers) < MAX_WORKERS:
            followed.workers.setdefault(ack.worker, _AWAITED)
            if ack.worker != followed.begun_by:
                followed.begun_by = None
        if ack.worker not in followed.workers:
            self.strangers += 1
            return
        if ack.worker in followed.has_final:
            return
        if ack.status.is_final:
            followed.has_final.add(ack.worker)
        staging = ack.progress
        followed.workers[ack.worker] = WorkerAnswer(
            status=ack.status,
            stage=ack.stage,
            progress=None if staging is None else StagingProgress(staging.done_bytes, staging.total_bytes),
            error=None if ack.error is None else ack.error.message[:MAX_ERROR_CHARS],
            seconds=round(ack.seconds, 3),
        )

    def _begin(self, ack: Ack, controller: str, now: float) -> _FollowedCommand:
        begun = [key for key, each in self._commands.items() if each.begun_by == ack.worker]
        if len(begun) >= MAX_BEGUN:
            del self._commands[begun[0]]
        over_at = now + LOAD_TIMEOUT_S + MARGIN_S
        followed = _FollowedCommand(
            ack.id, ack.command, controller, now, ack.epoch, over_at, {}, is_heard=False, begun_by=ack.worker
        )
        self._follow(followed)
        return followed

    def lines(self, now: float) -> tuple[CommandLine, ...]:
        """Return the last commands, the newest first."""
        newest_first = reversed(self._commands.values())
        return tuple(each.line(now, is_whole=at < NUM_WHOLE) for at, each in enumerate(newest_first))
