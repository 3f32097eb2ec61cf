"""What the commands to workers have in common: their options, their progress, and how their answers are shown."""

import argparse
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ...schemas.control import PauseMode
from ...schemas.weights import Staging, WeightSource
from .arguments import positive_float, positive_int
from .byte_counts import staging_text
from .exits import CommandFailed, ExitCode, exit_code_of_ledger

if TYPE_CHECKING:
    from ...bus import CommandIncomplete, CommandResult, Fleet
    from ...bus.client.fleet_options import SendOptions
    from ...schemas.control import Ack

__all__ = [
    "AckCounter",
    "add_send_options",
    "add_source_options",
    "add_switch_options",
    "command",
    "show_ledger",
    "source_of",
]


EXPECT_WITHIN_S = 5.0
"""For expected workers to be heard; live ones announce themselves every second."""

Send = Callable[[argparse.Namespace, "Fleet", "SendOptions"], Awaitable["CommandResult"]]
"""Sends a command to a fleet, as the arguments say."""


def add_send_options(parser: argparse.ArgumentParser, *, has_worker: bool = True) -> None:
    """Add the options that say whom a command concerns, and how long each may take.

    Args:
        has_worker: add --worker; not where workers are arguments already.
    """
    group = parser.add_argument_group("whom it concerns")
    group.add_argument("--model", metavar="NAME", help="workers that serve this model (default: of every model)")
    if has_worker:
        group.add_argument(
            "--worker",
            dest="only_workers",
            metavar="ID",
            action="append",
            help="this worker; may be given several times (default: all, also those that start later)",
        )
    group.add_argument(
        "--expect",
        metavar="N",
        type=positive_int,
        help="how many workers there are of the model, or of all: where fewer are heard, nothing is sent",
    )
    group.add_argument(
        "--timeout-s", metavar="S", type=positive_float, help="for each worker (default: 60, or 600 to load something)"
    )


def add_source_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add PATH and the options that say where it is.

    Args:
        what: is in the folder, for the help.
    """
    parser.add_argument(
        "path", metavar="PATH", help=f"folder of the {what} on the workers' machines, below one of their --weight-root"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--upload", action="store_true", help="PATH is on this machine: send it through NATS, for workers without it"
    )
    where.add_argument(
        "--objects", action="store_true", help="PATH is BUCKET/PREFIX in NATS's object store, as an upload made it"
    )


def add_switch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how workers go over to new weights."""
    parser.add_argument(
        "--mode", choices=get_args(PauseMode), default="keep", help="what becomes of requests in flight (default: keep)"
    )
    parser.add_argument("--allow-rollback", action="store_true", help="N may be lower than the present version")
    parser.add_argument(
        "--min-staged",
        metavar="N",
        type=positive_int,
        help="switch as soon as N workers have the weights on their machines; the others serve nothing until they have "
        "them, and are not waited for (default: all)",
    )


def source_of(args: argparse.Namespace) -> WeightSource:
    """Where PATH is. A path is made absolute and nothing more, as links may differ elsewhere.

    Raises:
        CommandFailed: there is nothing to upload.
    """
    if args.objects:
        return WeightSource(objects=args.path)
    path = str(Path(args.path).absolute())
    if args.upload and not Path(path).is_dir():
        raise CommandFailed(f"--upload {args.path}: not a folder on this machine", ExitCode.USAGE)
    return WeightSource(path=path)


def command(send: Send) -> Callable[[argparse.Namespace], Coroutine[object, object, int]]:
    """Make a subcommand's `run`: it sends one command, waits for all answers, shows them, and returns the exit code."""
    return functools.partial(_control, send)


async def _control(send: Send, args: argparse.Namespace) -> int:
    from ... import bus
    from .console import note, waiting

    incomplete: CommandIncomplete | None = None
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        with waiting(_name(args)) as show:
            if args.expect is not None:
                await _expect(args.expect, args.model, rb.fleet)
            options = _send_options(args)
            options["on_ack"] = AckCounter(show).add
            try:
                ledger = await send(args, rb.fleet, options)
            except bus.CommandIncomplete as error:
                incomplete, ledger = error, error.ledger
    show_ledger(args, ledger)
    if incomplete is not None:
        # Where one reader sees both, the table above has each worker's reason.
        has_table = not args.json and sys.stdout.isatty() and sys.stderr.isatty()
        note(f"rollbus: {incomplete.headline if has_table else incomplete}")
    return exit_code_of_ledger(ledger)


async def _expect(count: int, model: str | None, fleet: "Fleet") -> None:
    """Wait until that many workers have been heard.

    Raises:
        CommandFailed: fewer were in time.
    """
    deadline = time.monotonic() + EXPECT_WITHIN_S
    while True:
        workers = (await fleet.state()).workers
        present = [worker.worker for worker in workers if model in (None, worker.model)]
        if len(present) >= count:
            return
        if time.monotonic() >= deadline:
            names = f": {', '.join(present)}" if present else ""
            problem = f"only {len(present)} of {count} expected workers were heard, so nothing was sent{names}"
            raise CommandFailed(problem, ExitCode.NO_WORKERS)


def _send_options(args: argparse.Namespace) -> "SendOptions":
    options: SendOptions = {"model": args.model}
    if getattr(args, "only_workers", None):
        options["workers"] = args.only_workers
    if args.timeout_s is not None:
        options["timeout_s"] = args.timeout_s
    return options


def show_ledger(args: argparse.Namespace, ledger: "CommandResult") -> None:
    """Show what each worker answered."""
    from ..ledger import ledger_as_json
    from .console import print_json, print_table, write
    from .ledger import COLUMNS, ledger_rows, summary

    if args.json:
        print_json(ledger_as_json(ledger))
        return
    print_table(COLUMNS, ledger_rows(ledger))
    write(summary(ledger))


def _name(args: argparse.Namespace) -> str:
    return str(args.command.__name__.rpartition(".")[2].replace("_", "-"))


class AckCounter:
    """Sums up the answers that have come so far in one line.

    Args:
        show: takes that line; called on the thread on which answers arrive.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._command = ""
        self._stages: dict[str, str] = {}
        self._progress: dict[str, Staging] = {}

    def add(self, ack: "Ack") -> None:
        """Count a worker's answer and show the new sum."""
        if ack.id != self._command:
            # An update asks twice: whether it can be done, then to do it.
            self._command, self._stages, self._progress = ack.id, {}, {}
        self._stages[ack.worker] = ack.stage if ack.stage and not ack.status.is_final else ack.status
        self._progress.pop(ack.worker, None)
        if ack.progress is not None:
            self._progress[ack.worker] = ack.progress
        counts: dict[str, int] = {}
        for stage in self._stages.values():
            counts[stage] = counts.get(stage, 0) + 1
        self._show(f"{ack.command}: {', '.join(f'{count} {self._text(stage)}' for stage, count in counts.items())}")

    def _text(self, stage: str) -> str:
        """A stage, with how far all workers together are that are in it."""
        moving = [progress for progress in self._progress.values() if progress.stage == stage]
        done = sum(progress.done_bytes for progress in moving)
        total = sum(progress.total_bytes for progress in moving)
        return staging_text(Staging(source="", stage=stage, done_bytes=done, total_bytes=total))
