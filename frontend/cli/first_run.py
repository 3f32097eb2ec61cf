"""The options of the first run of a `rollbus generate`, in a file beside its output.

A later run of the same output names the options that have changed, and reads the same commit of a data set.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from .exits import CommandFailed, ExitCode

__all__ = ["FirstRun", "read_first_run", "write_first_run"]


class FirstRun(msgspec.Struct, frozen=True):
    """What the first run of an output was given."""

    options: dict[str, object]
    """Options that affect results, by their names on the command line. Those that were not given are null."""
    revision: str | None = None
    """Commit of the data set."""

    def changes(self, options: Mapping[str, object]) -> str:
        """Return the options that differ now, or an empty string."""
        names = [name for name in options if options[name] != self.options.get(name)]
        return ", ".join(f"{_shown(name, options[name])}, first run {_value(self.options.get(name))}" for name in names)


def read_first_run(output: Path) -> FirstRun | None:
    """Return the record of the first run of an output; None if there is none.

    Raises:
        CommandFailed: the record is not readable.
    """
    path = _path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=FirstRun)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CommandFailed(f"{path} is not the record of a run ({exc}); remove it", ExitCode.USAGE) from None


def write_first_run(output: Path, record: FirstRun) -> None:
    """Write the record of the first run of an output."""
    path = _path(output)
    draft = path.with_name(path.name + ".tmp")
    draft.write_bytes(msgspec.json.encode(record) + b"\n")
    draft.replace(path)


def _path(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def _shown(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} {value}"


def _value(value: object) -> str:
    return "without" if value is None else str(value)
