"""The subcommands that send commands to workers: options, progress and printed command results.

`rollbus drain` is a command to workers over NATS, or over the local socket of one worker.
"""

import argparse
import http.client
import inspect
import json
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from ... import bus
from ...bus import CommandIncomplete, Fleet
from ...bus.control.options import SendOptions
from ...bus.protocol.fleet.command_result import RESULTS, CommandResult
from ...schemas.acks import Ack
from ...schemas.options import MAX_DRAIN_S
from ...schemas.weights import Canary, Staging, UpdateTiming, Verified, WeightSource
from ..command_json import result_as_json, result_lines
from .console import note, print_json, size, staging_text, waiting
from .exits import CommandFailed, ExitCode, WrongUsage, exit_code_of_result
from .options import connect, refuse_options
from .tables import print_table, print_text, printable

EXPECT_WITHIN_S = 5.0
"""Seconds to wait for the presence of expected workers. Workers publish presence every second."""


def source_of(args: argparse.Namespace) -> WeightSource:
    """Return the weight source of PATH.

    A path becomes absolute, but its symbolic links are not resolved, because they may differ on other machines.

    Raises:
        CommandFailed: the path to upload is not a folder with safetensors.
    """
    if args.objects:
        return WeightSource(objects=args.path)
    path = str(Path(args.path).absolute())
    if args.upload and not Path(path).is_dir():
        raise WrongUsage(f"--upload {args.path}: PATH is not a folder on this machine")
    if args.upload and not any(Path(path).glob("*.safetensors")):
        problem = "the folder has no *.safetensors; expected a folder of save_pretrained()"
        raise WrongUsage(f"--upload {args.path}: {problem}")
    return WeightSource(path=path)


async def _send(method: str, args: argparse.Namespace, own: Mapping[str, Any]) -> int:
    """Send the command of a method of `Fleet` with its own arguments, and print all acks. Return the exit code."""
    incomplete: CommandIncomplete | None = None
    async with connect(args) as rb:
        with waiting(args.command.name) as show:
            if getattr(args, "expect", None) is not None:
                await _expect(args.expect, args.model, rb.fleet)
            options = _send_options(args)
            options["on_ack"] = AckCounter(show).add
            try:
                result = await getattr(rb.fleet, method)(**own, **options)
            except bus.CommandIncomplete as error:
                incomplete, result = error, error.ledger
    show_result(args, result)
    if incomplete is not None:
        # If stdout and stderr are the same terminal, the table above shows the reason of each worker.
        has_table = not args.json and sys.stdout.isatty() and sys.stderr.isatty()
        note(f"rollbus: {incomplete.headline if has_table else incomplete}")
    return exit_code_of_result(result)


async def _expect(count: int, model: str | None, fleet: Fleet) -> None:
    """Wait for the presence of `count` workers.

    Raises:
        CommandFailed: fewer workers published presence within `EXPECT_WITHIN_S`.
    """
    deadline = time.monotonic() + EXPECT_WITHIN_S
    while True:
        workers = (await fleet.state()).workers
        present = [worker.worker for worker in workers if model in (None, worker.model)]
        if len(present) >= count:
            return
        if time.monotonic() >= deadline:
            names = f": {', '.join(present)}" if present else ""
            problem = f"only {len(present)} of {count} expected workers are live, so the command was not sent{names}"
            raise CommandFailed(problem, ExitCode.NO_WORKERS)


def _send_options(args: argparse.Namespace) -> SendOptions:
    options: SendOptions = {"model": getattr(args, "model", None)}
    if getattr(args, "only_workers", None):
        options["workers"] = args.only_workers
    if args.timeout_s is not None:
        options["timeout_s"] = args.timeout_s
    return options


def show_result(args: argparse.Namespace, result: CommandResult) -> None:
    """Print the ack of each worker."""
    if args.json:
        print_json(result_as_json(result))
        return
    print_table(COLUMNS, result_rows(result))
    for line in (summary(result), *(f"warning: {warning}" for warning in result.warnings)):
        print_text(line)


class AckCounter:
    """Summarizes the received command acks in one line.

    Args:
        show: called with that line, on the thread that receives acks.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._command = ""
        self._stages: dict[str, str] = {}
        self._progress: dict[str, Staging] = {}

    def add(self, ack: Ack) -> None:
        """Count the ack of a worker and show the new summary."""
        if ack.id != self._command:
            # An update sends two commands: a dry run, then the update.
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
        """Return the name of a stage, with the total progress of all workers in that stage."""
        moving = [progress for progress in self._progress.values() if progress.stage == stage]
        done = sum(progress.done_bytes for progress in moving)
        total = sum(progress.total_bytes for progress in moving)
        return staging_text(Staging(source="", stage=stage, done_bytes=done, total_bytes=total))


MAX_NAMED = 3
"""Maximum number of modules named in a line. `--json` lists more."""
COLUMNS = ("result", "worker", "version", "seconds", "why")


def result_rows(result: CommandResult) -> list[list[str]]:
    """Return the cells of `COLUMNS` for each worker. Workers that applied the command come last."""
    return [
        [
            line.result,
            line.worker,
            "-" if line.ack is None else str(line.ack.weight_version),
            "-" if line.ack is None else f"{line.ack.seconds:.2f}",
            line.why or _what(result, line.ack) or "-",
        ]
        for line in sorted(result_lines(result), key=lambda line: line.result == "applied")
    ]


def summary(result: CommandResult) -> str:
    """Return the result in one line: `pause: applied by 1 of 2 workers in 0.31 s, epoch 7; 1 missing`."""
    applied, total = len(result.applied), sum(1 for _ in result_lines(result))
    share = f"all {total} workers" if applied == total > 1 else f"{applied} of {total} worker{'s' * (total > 1)}"
    others = [f"{len(getattr(result, column))} {column}" for column in RESULTS[1:] if getattr(result, column)]
    text = f"{result.command}: applied by {share} in {result.seconds:.2f} s{_epochs(result.epochs)}"
    if result.paused_s is not None:
        text += f", paused {result.paused_s:.2f} s"
    not_awaited = [f"not waited for: {', '.join(result.not_awaited)}"] if result.not_awaited else []
    not_found = [f"not found: {', '.join(result.not_found)}"] if result.not_found else []
    return "; ".join([text, *others, *not_awaited, *not_found])


def _what(result: CommandResult, ack: Ack | None) -> str:
    """Return details of the command at a worker, if they depend on the state of the worker."""
    if ack is None:
        return ""
    if result.command != "abort":
        verified = "" if ack.verified is None else _what_was_verified(ack.verified)
        return "; ".join(filter(None, (verified, "" if ack.timing is None else _where_time_went(ack.timing))))
    return f"aborted {', '.join(ack.request_ids)}" if ack.request_ids else "had none of these requests"


def _where_time_went(timing: UpdateTiming) -> str:
    """Return for example `staged 2.1 s (34 MiB fetched), waited 0.1 s, paused 0.9 s (loaded 0.6 s, canary 0.2 s)`."""
    fetched = f" ({size(timing.fetched_bytes)} fetched)" if timing.fetched_bytes else ""
    staged = f"staged {timing.staged_s:.1f} s{fetched}"
    if not timing.paused_s:
        return staged
    paused = f"paused {timing.paused_s:.2f} s (loaded {timing.loaded_s:.2f} s, canary {timing.canary_s:.2f} s)"
    return f"{staged}, waited {timing.waited_s:.2f} s, {paused}"


def _what_was_verified(verified: Verified) -> str:
    text = f"{verified.probed} modules probed, {verified.equal} equal"
    if verified.seconds:
        text += f" in {verified.seconds:.2f} s"
    if not verified.num_unprobed:
        return text
    more = verified.num_unprobed - MAX_NAMED
    named = ", ".join(verified.unprobed[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{text}, not probed: {named}"


def _epochs(epochs: Mapping[str, int]) -> str:
    if len(epochs) == 1:
        return f", epoch {next(iter(epochs.values()))}"
    return "".join(f", epoch {epoch} of {model}" for model, epoch in sorted(epochs.items()))


METHODS: Final = {"cancel_transfer": "cancel_weight_update", "return": "return_worker"}
"""The methods of `Fleet` whose names are not those of their subcommands."""


async def send(args: argparse.Namespace) -> int:
    """Send the command of the subcommand's method of `Fleet`. Arguments with the names of its parameters set these."""
    name = args.command.name.replace("-", "_")
    method = METHODS.get(name, name)
    parameters = inspect.signature(getattr(Fleet, method)).parameters
    own = {parameter: getattr(args, parameter) for parameter in parameters if hasattr(args, parameter)}
    return await _send(method, args, {parameter: value for parameter, value in own.items() if value is not None})


def drain(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
    """Drain the named workers, or the worker behind a socket."""
    if args.socket is None:
        return _drain(args)
    if args.workers:
        raise WrongUsage("drain takes either the ids of workers or --socket")
    refuse_options(args, NOT_AT_SOCKETS, "with --socket")
    return _drain_at(args.socket, args.timeout_s, as_json=args.json)


MARGIN_S: Final = 10.0
"""Seconds for a busy worker to answer after the limit of its drain."""
MAX_ANSWER_BYTES: Final = 65_536
NOT_AT_SOCKETS: Final = ("all", "one_by_one", "allow_none", "start_timeout", "model", "expect")
"""Options of a command to workers that a socket does not have."""


def _drain_at(path: Path, timeout_s: float | None, *, as_json: bool) -> int:
    if timeout_s is not None and timeout_s > MAX_DRAIN_S:
        raise WrongUsage(f"--timeout-s is {timeout_s:g}; allowed: at most {MAX_DRAIN_S:g} seconds")
    connection = _UnixConnection(path, (MAX_DRAIN_S if timeout_s is None else timeout_s) + MARGIN_S)
    try:
        connection.request("POST", "/drain" if timeout_s is None else f"/drain?timeout_s={timeout_s:.3f}")
        answer = connection.getresponse()
        found = json.loads(answer.read(MAX_ANSWER_BYTES))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except TimeoutError as exc:
        raise CommandFailed(f"the worker at {path} does not answer", ExitCode.TIMEOUT) from exc
    except OSError as exc:
        reason = exc.strerror or "it closed the connection without an answer: it ended, or another process listens"
        raise CommandFailed(f"no drain by a worker at {path}: {reason}") from exc
    except (http.client.HTTPException, ValueError, RecursionError) as exc:
        raise CommandFailed(f"the process at {path} is not a worker: its answer is invalid") from exc
    finally:
        connection.close()
    if as_json:
        print_json({"status": answer.status, **found})
    said = {name: printable(str(value)) for name, value in found.items()}
    if answer.status == http.HTTPStatus.OK:
        note(f"drained; its state is {said.get('state')}")
        return ExitCode.OK
    if answer.status == http.HTTPStatus.GATEWAY_TIMEOUT:
        left = f"{said.get('in_flight')} requests in flight; its clients have not acknowledged everything"
        raise CommandFailed(f"the worker at {path} is not drained in time: {left}", ExitCode.TIMEOUT)
    raise CommandFailed(f"the worker at {path} did not drain: {said.get('error', answer.status)}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of to a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


async def _drain(args: argparse.Namespace) -> int:
    """Drain the workers, or restart them one by one."""
    if args.all == bool(args.workers):
        raise WrongUsage("drain takes either ids of workers or --all; or --socket alone")
    if not args.one_by_one:
        refuse_options(args, ("allow_none", "start_timeout"), "without --one-by-one")
        if args.all:
            raise WrongUsage("--all needs --one-by-one: a drain of all workers leaves none for the requests")
        return await send(args)
    own: dict[str, Any] = {"workers": args.workers or None, "allow_none": args.allow_none}
    if args.start_timeout is not None:
        own["start_timeout_s"] = args.start_timeout
    return await _send("restart_one_by_one", args, own)


async def load_lora(args: argparse.Namespace) -> int:
    """Load the adapter."""
    own = {"name": args.name, "upload": args.upload, "version": args.version}
    return await _send("load_lora", args, {**own, **asdict(source_of(args))})


async def update_weights(args: argparse.Namespace) -> int:
    """Update the weights, or check them."""
    source = asdict(source_of(args))
    if args.check:
        if args.upload:
            problem = "--check and --upload exclude each other"
            raise WrongUsage(f"{problem}: --check tests weights that the workers can reach already")
        refuse_options(args, ("version", "mode", "allow_rollback", "min_staged", "expected_canary"), "with --check")
        return await _send("check_weights", args, source)
    if args.version is None:
        raise WrongUsage("--version N is required: it marks the tokens of the new weights")
    canary = None if args.expected_canary is None else read_canary(args.expected_canary)
    switch = {name: getattr(args, name) for name in ("upload", "version", "mode", "allow_rollback", "min_staged")}
    return await _send("update_weights", args, {**source, **switch, "expected_canary": canary})


def read_canary(path: Path) -> Canary:
    """Read a canary from a file.

    Raises:
        CommandFailed: the file cannot be read or contains no canary.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except (OSError, msgspec.MsgspecError) as exc:
        raise WrongUsage(f"--expected-canary {path}: {exc}") from exc
