"""The parser of the command line, whose errors have one line, and the sections of a help text."""

import argparse
import itertools
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ...schemas.explain import nearest
from .console import note
from .exits import CommandFailed, ExitCode

__all__ = ["CliParser", "as_section", "option_names"]

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
        from .config_file import config_flags

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


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, each by its short name if it has one."""
    return [action.option_strings[0] for action in parser._actions if action.option_strings]


def as_section(title: str, lines: Collection[str]) -> str:
    """Return a section of a help text in the layout of argparse."""
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
