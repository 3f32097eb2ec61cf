"""Files of settings for `rollbus up`: TOML whose keys are the options of the command."""

import argparse
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ...schemas.explain import nearest
from .arguments import without_password
from .exits import CommandFailed, ExitCode

__all__ = ["config_flags", "config_template"]

NOT_IN_FILES: Final = frozenset({"help", "config", "json", "verbose"})
"""Options that belong to one call of the command."""
EXAMPLES: Final = {"N": 1, "K": 1, "SIZE": "100MB", "TIME": "5m", "HOST:PORT": "127.0.0.1:8080"}
"""Values of options without a default, by the placeholder of the value."""
HEADER: Final = """\
# Settings of `rollbus up --config {file}`. Each key is an option of `rollbus up`; the command line takes precedence.
# Durations are seconds or have a unit ("5m"), sizes are bytes or have one ("100MB"). Paths are relative to the
# directory in which the command runs. The HTTP service reads its tokens from the environment.
"""


def config_flags(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """Return the settings of a file as flags of `parser`.

    Raises:
        CommandFailed: the file cannot be read, or a key is no option. The message has the file and the key.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as exc:
        raise CommandFailed(f"{path}: {exc.strerror}; `rollbus init` writes a file", ExitCode.USAGE) from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise CommandFailed(f"{path}: {exc}", ExitCode.USAGE) from exc
    options = {_flag_of(action)[2:]: action for action in parser._actions if action.dest not in NOT_IN_FILES}
    flags: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if name not in options:
            advice = nearest(name, options) or "; `rollbus init` writes a file with all keys"
            raise CommandFailed(f'{path}: no setting "{key}"{advice}', ExitCode.USAGE)
        flags += _flags(options[name], value, f"{path}: {key}")
    return flags


def _flags(action: argparse.Action, value: Any, where: str) -> list[str]:
    name = _flag_of(action)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise CommandFailed(f"{where} is {value!r}; allowed: true or false", ExitCode.USAGE)
        return [name] if value else []
    if isinstance(value, list) and isinstance(action.default, list):
        return [flag for each in value for flag in _flags(action, each, where)]
    if isinstance(value, bool) or not isinstance(value, str | int | float | dict):
        raise CommandFailed(f"{where} is {value!r}; allowed: {action.metavar or 'text'}", ExitCode.USAGE)
    text = json.dumps(value, default=str) if isinstance(value, dict) else str(value)
    try:
        (action.type or str)(text)  # type: ignore[operator]
    except argparse.ArgumentTypeError as exc:
        raise CommandFailed(f"{where}: {exc}", ExitCode.USAGE) from exc
    except ValueError as exc:
        raise CommandFailed(f"{where} is {value!r}; allowed: {action.metavar}", ExitCode.USAGE) from exc
    if action.choices is not None and text not in map(str, action.choices):
        allowed = ", ".join(map(str, action.choices))
        raise CommandFailed(f"{where} is {value!r}; allowed: {allowed}", ExitCode.USAGE)
    return [f"{name}={text}"]


def config_template(parsers: Iterable[argparse.ArgumentParser], file: str) -> str:
    """Return a file with all options as comments, each with its help and its default or an example."""
    parts = [HEADER.format(file=file)]
    for action in (action for parser in parsers for action in parser._actions if action.dest not in NOT_IN_FILES):
        text = (action.help or "") % vars(action)
        parts.append(f"# {text}\n#{_flag_of(action)[2:]} = {_example(action)}\n")
    return "\n".join(parts)


def _example(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "true"
    if isinstance(action.default, list):
        return f'["{action.metavar}"]'
    if action.metavar == "JSON":
        return "{}"
    value = action.default
    if value is None:
        value = EXAMPLES.get(str(action.metavar), action.metavar)
    return json.dumps(without_password(value) if isinstance(value, str) else value)


def _flag_of(action: argparse.Action) -> str:
    """Return the long name of an option."""
    return next((name for name in action.option_strings if name.startswith("--")), "--")
