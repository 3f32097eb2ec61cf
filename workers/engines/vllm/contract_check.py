"""Compares the contract with vLLM: the installed one when an engine starts, or sources that need not be installed."""

import functools
import importlib.util
import logging
import re
import threading
from pathlib import Path

from ....schemas.errors import EngineDead
from .contract import CONTRACT
from .contract_loaded import check_loaded
from .contract_need import FIRST, PAST, Need
from .contract_source import ModuleSources

__all__ = ["check", "find_gaps", "needs_of", "release_in"]

logger = logging.getLogger(__name__)

READING = threading.Lock()
"""Held while sources are parsed. Engines that start side by side in one process do so in threads, and Python 3.11
may fail where two of them parse: SystemError, "AST constructor recursion depth mismatch"."""
MAX_NAMED = 12
"""Gaps that a message names."""


def release_in(folder: Path) -> str:
    """The release whose sources are in the folder `vllm`, as its own file says.

    Raises:
        EngineDead: it does not say.
    """
    try:
        text = (folder / "_version.py").read_text()
    except OSError as exc:
        raise EngineDead(f"{folder} does not say which release of vLLM it is: {exc}") from exc
    found = re.search(r"""^(?:__version__ = )?version = ["']([^"']+)["']""", text, re.MULTILINE)
    if found is None:
        raise EngineDead(f"{folder / '_version.py'} does not say which release of vLLM it is")
    return found[1]


def needs_of(release: str) -> list[Need]:
    """What the adapter uses of this release; of one that is newer than the contract, as of the newest."""
    return [need for need in CONTRACT if need.since <= _numbers(release) < need.until]


def find_gaps(folder: Path) -> tuple[str, ...]:
    """What the sources in the folder `vllm` lack of the contract, each in a few words; read once."""
    with READING:
        return _find_gaps(folder)


@functools.lru_cache(maxsize=1)
def _find_gaps(folder: Path) -> tuple[str, ...]:
    sources = ModuleSources(folder)
    return tuple(dict.fromkeys(gap for need in needs_of(release_in(folder)) for gap in sources.gaps(need)))


def check() -> None:
    """Compare the installed vLLM with the contract: its sources, and those of its modules that are imported by now.

    Raises:
        EngineDead: it is not installed, or lacks something; the message names the release and what it lacks.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineDead("vLLM is not installed; it comes with rollbus[worker]")
    folder = Path(next(iter(spec.submodule_search_locations)))
    release = release_in(folder)
    if _numbers(release) < FIRST:
        raise EngineDead(f"vLLM {release} is too old for the rollbus worker; {_allowed()}")
    if _numbers(release) >= PAST:
        logger.warning("engine.release_not_proven release=%s proven=%r", release, _proven())
    gaps = find_gaps(folder) or check_loaded(needs_of(release))
    if gaps:
        named = "; ".join(gaps[:MAX_NAMED])
        more = f"; and {len(gaps) - MAX_NAMED} more" if len(gaps) > MAX_NAMED else ""
        raise EngineDead(f"vLLM {release} lacks what the rollbus worker uses of it: {named}{more}; {_allowed()}")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def _allowed() -> str:
    return f"allowed: {_proven()}, as released"


def _proven() -> str:
    return f"{FIRST[0]}.{FIRST[1]} to {PAST[0]}.{PAST[1] - 1}"
