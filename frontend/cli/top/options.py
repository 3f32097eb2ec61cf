"""What the user of `rollbus top` has chosen, and how keys change that. Nothing here reads a terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

__all__ = ["SORTS", "Key", "KeyReader", "Sort", "TopOptions", "press"]

Sort = Literal["worker", "state", "in-flight", "kv", "tokens", "first-token", "next-token", "hits"]
"""What workers are sorted by: names upwards, states with those first that serve nothing, numbers from the highest."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
"""In the order in which a key goes through them."""
Key = Literal["quit", "sort", "model", "up", "down", "page_up", "page_down", "home", "end"]
_KEYS: Final[dict[bytes, Key]] = {
    b"q": "quit",
    b"Q": "quit",
    b"s": "sort",
    b"p": "model",
    b"k": "up",
    b"j": "down",
    b" ": "page_down",
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
"""What terminals send, by xterm's names, with and without application mode."""
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}[@-~]|O[@-~])|[^\x1b]|\x1b(?![\[O])", re.DOTALL)
_PREFIX: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,8}|O)?\Z")


@dataclass(frozen=True, slots=True)
class TopOptions:
    """What is shown of the fleet."""

    sort: Sort = "worker"
    model: str | None = None
    """None: workers of all models."""
    first: int = 0
    """Workers above the screen."""


class KeyReader:
    """Makes keys of what a terminal sends, in pieces of any length; what no key sends is dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> list[Key]:
        """Return the keys that are complete with `data`."""
        data = self._rest + data
        partial = _PREFIX.search(data)
        # A prefix is no longer than a sequence, so that little is kept.
        self._rest = partial[0] if partial else b""
        found = _SEQUENCE.findall(data[: len(data) - len(self._rest)])
        return [_KEYS[sequence] for sequence in found if sequence in _KEYS]


def press(options: TopOptions, key: Key, models: Sequence[str], rows: int) -> TopOptions | None:
    """Return what is shown after a key; None: nothing, as the user has had enough.

    Args:
        models: those of the fleet, in the order in which a key goes through them.
        rows: workers on the screen.
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
    return replace(options, first=max(options.first + steps[key], 0))


_BEYOND: Final = 1_000_000
"""More rows than a fleet has; the screen goes no further than to its last one."""
