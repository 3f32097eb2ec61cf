"""The last commands of a fleet, and what each worker has answered: what somebody who listens can know of them."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ....schemas.control import LOAD_TIMEOUT_S, Ack, AckStatus, Command

__all__ = ["AWAITED", "MAX_COMMANDS", "MAX_LINES", "MAX_WORKERS", "CommandBook", "CommandLine", "WorkerAnswer"]

MAX_COMMANDS: Final = 20
MAX_WORKERS: Final = 2000
"""Of each command; those beyond it are not followed."""
MAX_LINES: Final = 100
"""Workers that an older command lists: those that have not applied it."""
NUM_WHOLE: Final = 2
"""The newest commands, which list all of their workers."""
MAX_ERROR_CHARS: Final = 200
MAX_BEGUN: Final = MAX_COMMANDS // 2
"""Commands that one worker alone has answered, and that were not heard: what it makes up leaves room for others."""
MARGIN_S: Final = 10.0
"""Beyond a command's own time, until it counts as done whoever still owes an answer."""
AWAITED: Final = "awaited"
"""The status of a worker that has not answered; the others are those of acks."""


class StagingProgress(msgspec.Struct, frozen=True):
    """How far a worker is with staging."""

    done_bytes: int
    total_bytes: int


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one worker has answered to a command so far."""

    status: str = msgspec.field()
    """`awaited`, or that of its last ack."""
    stage: str | None = None
    """With `progress`: what it is doing."""
    progress: StagingProgress | None = None
    """With `progress`: how far it is with staging."""
    error: str | None = None
    """Why it has not applied the command."""
    seconds: float = 0.0
    """From its `accepted` to this answer."""


_AWAITED: Final = WorkerAnswer(status=AWAITED)


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """A command, and what became of it."""

    id: str
    command: str
    controller: str
    at: float
    """Unix time at which it was heard."""
    epoch: int | None
    """Of the desired state; None: it is not recorded."""
    done: bool
    """All that are known to be concerned have answered, or their time is up."""
    counts: dict[str, int]
    """Workers by status."""
    workers: dict[str, WorkerAnswer]
    """Of the last two commands all of them; of older ones at most 100 that have not applied it."""


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
    """The command was heard; else it is known by the acks of those that answer it."""
    begun_by: str | None = None
    """The one worker that is known to have answered a command that was not heard; None: there are several."""
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
    """Follows commands and their acks. Time is passed in, as Unix time.

    Attributes:
        strangers: acks by workers that the command does not concern.
    """

    def __init__(self) -> None:
        self._commands: OrderedDict[tuple[str, str], _FollowedCommand] = OrderedDict()
        self.strangers = 0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<CommandBook commands={len(self._commands)} strangers={self.strangers}>"

    def add_command(self, command: Command, controller: str, workers: Iterable[str], now: float) -> None:
        """Follow a command from now on; one that is repeated under its id changes nothing.

        A command may be heard after its first acks: then those count, and the other workers are awaited.

        Args:
            workers: those that should answer.
        """
        known = self._commands.get((controller, command.id))
        if known is not None and known.is_heard:
            return
        concerned = dict.fromkeys(list(workers)[:MAX_WORKERS], _AWAITED)
        over_at = now + command.timeout_s + MARGIN_S
        if known is not None:
            known.is_heard, known.begun_by = True, None
            known.epoch, known.over_at = command.epoch, over_at
            known.workers = concerned | {name: known.workers[name] for name in known.workers if name in concerned}
            known.has_final &= known.workers.keys()
            return
        self._follow(_FollowedCommand(command.id, command.command, controller, now, command.epoch, over_at, concerned))

    def _follow(self, followed: _FollowedCommand) -> None:
        self._commands[followed.controller, followed.id] = followed
        while len(self._commands) > MAX_COMMANDS:
            self._commands.popitem(last=False)

    def add_ack(self, ack: Ack, controller: str, now: float) -> None:
        """Note a worker's answer; after the final one, none counts.

        A command that was not heard is followed from its first ack on, with the workers that answer it: programs that
        may not hear commands know it so.
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
