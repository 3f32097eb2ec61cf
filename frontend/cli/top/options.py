"""The choices of the user of `rollbus top`, and their changes by keys. This module reads no terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

__all__ = ["SORTS", "Key", "KeyReader", "Sort", "TopOptions", "press"]

Sort = Literal["state", "worker", "in-flight", "kv", "tokens", "first-token", "next-token", "hits"]
"""Sort key of the workers. Names ascend, numbers descend, and the worst states come first."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
"""Sort keys in the order in which the key `s` selects them."""
Key = Literal["quit", "sort", "model", "up", "down", "page_up", "page_down", "home", "end", "open", "back"]
_SORT_KEYS: Final[dict[bytes, Key]] = {
    b"q": "quit",
    b"Q": "quit",
    b"s": "sort",
    b"p": "model",
    b"k": "up",
    b"j": "down",
    b" ": "page_down",
    b"\r": "open",
    b"\n": "open",
    b"b": "back",
    b"\x7f": "back",
    b"\x1b[D": "back",
    b"\x1bOD": "back",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page_up",
    b"\x1b[6~": "page_down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
}
"""Bytes that terminals send, as xterm defines them, with and without application mode."""
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}[@-~]|O[@-~])|[^\x1b]|\x1b(?![\[O])", re.DOTALL)
_PREFIX: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}|O)?\Z")


@dataclass(frozen=True, slots=True)
class TopOptions:
    """The displayed part of the fleet."""

    sort: Sort = "state"
    model: str | None = None
    """None for workers of all models."""
    first: int = 0
    """Number of workers above the screen."""


class KeyReader:
    """Decodes keys from the bytes of a terminal, in pieces of any length. It discards unknown bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> list[Key]:
        """Return the keys that are complete with `data`."""
        data = self._rest + data
        partial = _PREFIX.search(data)
        # The length of a prefix is bounded, so little is buffered.
        self._rest = partial[0] if partial else b""
        found = _SEQUENCE.findall(data[: len(data) - len(self._rest)])
        return [_SORT_KEYS[sequence] for sequence in found if sequence in _SORT_KEYS]


def press(options: TopOptions, key: Key, models: Sequence[str], rows: int) -> TopOptions | None:
    """Return the choices after a key; None if the key ends the display.

    Args:
        models: models of the fleet, in the order in which the key `p` selects them.
        rows: number of workers on the screen.
    """
    match key:
        case "quit":
            return None
        case "sort":
            return replace(options, sort=SORTS[(SORTS.index(options.sort) + 1) % len(SORTS)], first=0)
        case "model":
            choices = [None, *models]
            number = choices.index(options.model) if options.model in choices else 0
            return replace(options, model=choices[(number + 1) % len(choices)], first=0)
    steps = {"up": -1, "down": 1, "page_up": -rows, "page_down": rows, "home": -options.first, "end": _BEYOND}
    return replace(options, first=max(options.first + steps.get(key, 0), 0))


_BEYOND: Final = 1_000_000
"""More rows than a fleet has. The screen stops at the last row."""
