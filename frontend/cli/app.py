"""Parses the command line, runs the subcommand and maps errors to exit codes.

`frontend/cli/commands` declares the subcommands. `COMMANDS` has them after its modules are imported.
"""

import argparse
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from ... import __version__
from ...schemas.decoding import nearest
from ...schemas.errors import FREE_SPACE, InvalidRequest, NoWorkers, PermissionDenied, RollbusError, is_disk_full
from ...schemas.options import add_options
from .arguments import COMMANDS, CliCommand
from .commands import fleet, machine, prove, views  # noqa: F401 - they declare the subcommands
from .console import log_notes, note, write
from .exits import INTERRUPTED, CommandFailed, ExitCode, cause_of, exit_code_of
from .options import START_SOME, no_workers

logger = logging.getLogger("rollbus")


MISSING = "the following arguments are required"
"""First words of argparse's error for a missing argument."""
MIN_PREFIX = len("--co")
"""Shortest prefix that argparse reads as `--config`: other options of `up` begin with --c."""


class CliParser(argparse.ArgumentParser):
    """An `argparse` parser whose errors have one line and suggest the nearest command, option or value."""

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for other kinds of namespaces
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments. Report an unknown argument as an error, before a missing one."""
        given = list(sys.argv[1:] if args is None else args)
        self._check_options(given)
        if "--config" in self._option_string_actions:
            given = self._with_config(given)
        parsed, rest = super().parse_known_args(given, namespace)
        if rest and rest[0].startswith("-"):
            self.error(f'no option "{rest[0]}"')
        if rest:
            near = [f"{name} {rest[0]}" for name in ("--model", "--worker") if name in self._option_string_actions]
            question = f"; did you mean {' or '.join(near)}?" if near else ""
            self.error(f'one argument too many: "{rest[0]}"{question}')
        return parsed, []

    def with_option_names(self, text: str) -> str:
        """Return an error text with options in place of the Python arguments that they set: `--allow-rollback`."""
        names = {
            action.dest.removeprefix("only_"): action.option_strings[-1:] or [str(action.metavar)]
            for action in self._actions
        }
        names["workers"] = names.get("workers") or names.get("worker", [])
        first, _, rest = text.partition(" ")
        if names.get(first):
            text = f"{names[first][0]} {rest}"
        return re.sub(
            r"(?<![\w.-])[a-z]+(?:_[a-z]+)+(?![\w-])", lambda match: (names.get(match[0]) or [match[0]])[0], text
        )

    def error(self, message: str) -> NoReturn:
        """Write the error to stderr and exit with code 2."""
        text = message.removeprefix("argument ")
        if text.startswith(MISSING):
            text += f"; {self.prog} --help has examples"
        note(f"{self.prog}: {text}")
        sys.exit(ExitCode.USAGE)

    def _with_config(self, given: list[str]) -> list[str]:
        """Return `given` after the settings of the file that it names, so that the command line takes precedence."""
        from .options import config_flags

        for word, next_word in itertools.pairwise([*given, ""]):
            name, has_value, value = word.partition("=")
            if len(name) >= MIN_PREFIX and "--config".startswith(name):
                try:
                    return [*config_flags(self, Path(value if has_value else next_word)), *given]
                except CommandFailed as exc:
                    self.error(str(exc))
        return given

    def _check_options(self, given: list[str]) -> None:
        """Report a long option as an error unless it is an option of this parser or a prefix of one."""
        known = self._option_string_actions
        for name in self._long_options(given):
            if not any(option.startswith(name) for option in known):
                # A parser with subcommands has few options. The options of a subcommand follow it.
                place = f"{self.prog} --help lists them" if self._subparsers is None else "options follow the command"
                self.error(f'no option "{name}"{self._similar_option(name) or f"; {place}"}')

    def _similar_option(self, name: str) -> str:
        """Return a question with the one option whose name or else placeholder has the word, or the nearest option."""
        word, known = name.strip("-"), self._option_string_actions
        for texts in (
            {option: option for option in known},
            {action.option_strings[-1]: str(action.metavar or "").lower() for action in known.values()},
        ):
            having = [option for option, text in texts.items() if word and word in text]
            if len(having) == 1:
                return nearest(name, having, 0.0)
        return nearest(name, known)

    def _long_options(self, given: list[str]) -> Iterator[str]:
        """Yield the long options that argparse would assign to this parser, without their values."""
        if self._subparsers is not None:
            given = list(itertools.takewhile(lambda text: text.startswith("-"), given))
        for text in itertools.takewhile(lambda text: text != "--", given):
            if text.startswith("--") and " " not in text.partition("=")[0]:
                yield text.partition("=")[0]

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        # Before an option, Python 3.11 ends each positional argument that may be empty. Its words may follow the
        # option: `auth certify --dir DIR FILE`.
        while counts and counts[-1] == 0 and "O" in arg_strings_pattern[sum(counts) :]:
            counts.pop()
        return counts

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        allowed = list(map(str, action.choices))
        near = nearest(str(value), allowed)
        if isinstance(action, argparse._SubParsersAction):
            problem = f'no command "{value}"{near or f"; {self.prog} --help lists them"}'
        else:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            problem = f'{name}: no "{value}"{near}; allowed: {", ".join(allowed)}'
        raise argparse.ArgumentError(None, problem)


def as_section(title: str, lines: Collection[str]) -> str:
    """Return a section of a help text in the layout of argparse."""
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


Outcome = TypeVar("Outcome")

DEFAULT_NATS = "nats://127.0.0.1:4222"
DEFAULT_FLEET = "default"
CREDENTIALS_VARIABLE = "ROLLBUS_CREDS"
LOGIN_OPTIONS = (
    ("creds", CREDENTIALS_VARIABLE, "credentials of the NATS user to connect as", "none"),
    ("tls-ca", "ROLLBUS_TLS_CA", "CA certificates to trust", "those of the system"),
    ("tls-cert", "ROLLBUS_TLS_CERT", "client certificate", "none"),
    ("tls-key", "ROLLBUS_TLS_KEY", "key of the client certificate", "none"),
)
"""Login options: option, environment variable, help and default. Child processes read the environment variable."""
VALUES = "values: TIME is in seconds or has a unit (90, 5m, 1h30m), SIZE is in bytes or has one (100MB, 2GiB)"
EXIT_CODES = "exit codes: 0 ok, 1 failed, 2 usage, 3 partial acks, 4 timeout, 5 no workers, 130 interrupted"
EXAMPLES = (
    "rollbus demo                 # the tour; needs no GPU, model or server",
    "rollbus up --workers 2       # a fleet on this machine, until Ctrl-C",
    "rollbus status               # in a second terminal",
    "rollbus help generate        # a command's help; the same as rollbus generate --help",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rollbus` with `argv` (default: the arguments of the process) and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    parser = build_parser()
    if not given:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    args = parser.parse_args(given)
    _set_up_logs(args)
    if not args.verbose:
        sys.excepthook = _report_bug
    command: CliCommand = args.command
    try:
        _apply_login(args)
        outcome = command.run(args)
        return outcome if isinstance(outcome, int) else run_async(outcome)
    except KeyboardInterrupt as exc:
        # A command that can be resumed puts its progress into the exception.
        note(f"rollbus: {exc}" if exc.args else "rollbus: interrupted")
        return INTERRUPTED
    except (RollbusError, OSError) as exc:
        return _report(exc, exc, args)
    except BaseExceptionGroup as group:
        cause = cause_of(group)
        if cause is None:
            raise
        return _report(cause, group, args)


def _set_up_logs(args: argparse.Namespace) -> None:
    from ...bus.logs import set_up

    set_up(logging.DEBUG if args.verbose else logging.WARNING, args.log_format, "%(levelname)s %(name)s: %(message)s")
    if args.log_format == "json":
        log_notes()
    elif not args.verbose:
        # The error of the command has the denial.
        logging.getLogger(f"{__name__.partition('.')[0]}.bus.nats.failures").setLevel(logging.ERROR)


def _apply_login(args: argparse.Namespace) -> None:
    """Set the login variables of this process and its children from the options, and set `args.fleet`.

    Raises:
        BusBroken: the credentials file cannot be read.
    """
    for option, variable, _, _ in LOGIN_OPTIONS:
        path = getattr(args, option.replace("-", "_"))
        if path:
            os.environ[variable] = str(Path(path).absolute())
    if args.replicas is not None:
        os.environ["ROLLBUS_REPLICAS"] = str(args.replicas)
    # `rollbus drain --socket` needs no NATS.
    if args.fleet is None and not args.command.reads_no_credentials and getattr(args, "socket", None) is None:
        args.fleet = DEFAULT_FLEET
        if credentials := os.environ.get(CREDENTIALS_VARIABLE):
            from ...bus.auth.credentials import load_credentials

            args.fleet = load_credentials(credentials).fleet


def run_async(coroutine: Coroutine[object, object, Outcome]) -> Outcome:
    """Run the coroutine of a command to its end. Ctrl-C cancels it and raises `KeyboardInterrupt`."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


@contextmanager
def until_signalled(on_signal: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Cancel the current task on SIGINT or SIGTERM while the block runs. Each further signal cancels its cleanup.

    Args:
        on_signal: called on each of these signals.
    """
    import asyncio
    import signal

    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("until_signalled must run in an asyncio task")

    def stop() -> None:
        on_signal()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        # Only signals cancel this task.
        note("stopped")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `rollbus` with all subcommands. `args.command` is the chosen subcommand."""
    common = common_options()
    parser = CliParser(
        prog="rollbus",
        description="rollbus is a message bus between RL trainers and a fleet of vLLM workers.",
        epilog="\n".join([common.format_help(), VALUES, EXIT_CODES, "", as_section("examples", EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollbus {__version__}")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND [options]")
    for action in common._actions:
        action.help = argparse.SUPPRESS
    # Each by its short name if it has one.
    names = " ".join(action.option_strings[0] for action in common._actions if action.option_strings)
    named = as_section("options of every command (rollbus --help describes them)", [names])
    for name, command in sorted(COMMANDS.items()):
        subparser = subcommands.add_parser(
            name,
            help=command.summary,
            description=command.text,
            epilog=f"{named}\n\n{as_section('examples', command.examples)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        add_options(subparser, command.options)
        subparser.set_defaults(
            command=command, default_of=subparser.get_default, with_option_names=subparser.with_option_names
        )
    return parser


class _NamedServer(argparse.Action):
    """Stores --nats and the fact that the user set it: `up` may change the port only if the user did not set it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value and the fact that the user set it."""
        namespace.nats, namespace.is_nats_named = values, True


def common_options() -> CliParser:
    """Return the options of every command."""
    parser = CliParser(usage=argparse.SUPPRESS, add_help=False)
    group = parser.add_argument_group("options of every command")
    group.add_argument(
        "--nats",
        metavar="URL",
        action=_NamedServer,
        default=os.environ.get("ROLLBUS_NATS") or DEFAULT_NATS,
        help="URL of the NATS server, or comma-separated URLs of the servers of a cluster (default: $ROLLBUS_NATS, or "
        f"{DEFAULT_NATS})",
    )
    parser.set_defaults(is_nats_named=bool(os.environ.get("ROLLBUS_NATS")))
    group.add_argument("--fleet", metavar="NAME", help="name of the fleet (default: fleet of --creds, or 'default')")
    for option, variable, what, default in LOGIN_OPTIONS:
        group.add_argument(f"--{option}", metavar="FILE", help=f"{what} (default: ${variable}, or {default})")
    group.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        choices=range(1, 6),
        help="replicas of new queues and buckets (default: $ROLLBUS_REPLICAS, or 3 in a cluster, else 1)",
    )
    group.add_argument("--json", action="store_true", help="print the result as one line of JSON on stdout")
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of log lines on stderr (default: text)"
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="log at debug level, and show the traceback of an error"
    )
    return parser


def _report(cause: RollbusError | OSError, raised: BaseException, args: argparse.Namespace) -> ExitCode:
    from .tables import printable

    code = exit_code_of(cause)
    if args.log_format == "json":
        logger.error("command.failed error=%s exit_code=%d", cause, code, exc_info=raised if args.verbose else None)
        return code
    if args.verbose:
        traceback.print_exception(raised)
    text = args.with_option_names(_text_of(cause))
    # Its cause is a `NoWorkers` if the text says more, for example that a version is stored.
    if isinstance(cause, NoWorkers) and not isinstance(cause.__cause__, NoWorkers):
        text = _with_fleets(text, args)
    # The last lines of a worker's log stay lines.
    note("\n".join(map(printable, f"rollbus: {text}".split("\n"))))
    if not args.verbose and not isinstance(raised, PermissionDenied):
        for more in getattr(raised, "__notes__", ()):
            note(more)
    return code


def _text_of(cause: RollbusError | OSError) -> str:
    if isinstance(cause, InvalidRequest):
        return f"{cause.field} {cause.problem}; allowed: {cause.allowed}"
    if isinstance(cause, OSError) and cause.filename and cause.strerror:
        text = f"{cause.filename}: {cause.strerror}"
    else:
        text = str(cause)
    return f"{text}; {FREE_SPACE}" if is_disk_full(cause) else text


def _with_fleets(text: str, args: argparse.Namespace) -> str:
    """Return an error text with the fleets that have workers, or `text` if the fleet of the command has some."""
    from .watch.status import fleets_with_workers

    try:
        fleets = run_async(fleets_with_workers(args.nats, args.fleet))
    except (RollbusError, OSError):
        return text
    if args.fleet in fleets:
        return text
    text = no_workers(args.nats, args.fleet)
    return f"{text}; fleets with workers there: {', '.join(sorted(fleets))}" if fleets else f"{text}; {START_SOME}"


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace `sys.excepthook`: report an unexpected error in one line unless -v is given."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    note(f"rollbus: internal error, run again with -v for the traceback: {error!r}", logging.ERROR)


def print_completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    import shtab

    parser = build_parser()
    complete_files(parser)
    write(shtab.complete(parser, args.shell))
    return ExitCode.OK


def complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark the options whose values are paths, so that the shell completes them."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_files(command)
        elif isinstance(action.metavar, str) and ("FILE" in action.metavar or "DIR" in action.metavar):
            action.complete = shtab.DIRECTORY if "DIR" in action.metavar else shtab.FILE  # type: ignore[attr-defined]
