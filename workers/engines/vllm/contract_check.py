"""Compares the contract with the installed vLLM when an engine starts, or with sources that are not installed."""

import functools
import importlib.util
import logging
import re
import threading
from pathlib import Path

from ....schemas.errors import EngineDead
from ....schemas.install import pip_install
from .contract import CONTRACT
from .contract_loaded import check_loaded
from .contract_need import FIRST, PAST, Need
from .contract_source import ModuleSources

__all__ = ["check", "find_gaps", "needs_of", "release_in"]

logger = logging.getLogger(__name__)

READING = threading.Lock()
"""Lock for parsing sources. Engines that start at the same time in one process parse in threads. In Python 3.11, two
parsing threads may fail with SystemError "AST constructor recursion depth mismatch"."""
MAX_NAMED = 12
"""Maximum number of gaps in a message."""


def release_in(folder: Path) -> str:
    """Return the release of the sources in the folder `vllm`, from their own version file.

    Raises:
        EngineDead: the file is missing or does not state the release.
    """
    try:
        text = (folder / "_version.py").read_text()
    except OSError as exc:
        raise EngineDead(f"{folder} does not state its vLLM release: {exc}") from exc
    found = re.search(r"""^(?:__version__ = )?version = ["']([^"']+)["']""", text, re.MULTILINE)
    if found is None:
        raise EngineDead(f"{folder / '_version.py'} does not state its vLLM release")
    return found[1]


def needs_of(release: str) -> list[Need]:
    """Return the needs of this release; a release newer than the contract has the needs of the newest known release."""
    return [need for need in CONTRACT if need.since <= _numbers(release) < need.until]


def find_gaps(folder: Path) -> tuple[str, ...]:
    """Return the gaps between the sources in the folder `vllm` and the contract, one short text each. Cached."""
    with READING:
        return _find_gaps(folder)


@functools.lru_cache(maxsize=1)
def _find_gaps(folder: Path) -> tuple[str, ...]:
    sources = ModuleSources(folder)
    return tuple(dict.fromkeys(gap for need in needs_of(release_in(folder)) for gap in sources.gaps(need)))


def check() -> None:
    """Compare the sources and the imported modules of the installed vLLM with the contract.

    Raises:
        EngineDead: vLLM is not installed or has gaps; the message names the release and the gaps.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineDead(f"vLLM is not installed: {pip_install('worker')}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    release = release_in(folder)
    if _numbers(release) < FIRST:
        raise EngineDead(f"vLLM {release} is too old for the rollbus worker; {_allowed()}")
    if _numbers(release) >= PAST:
        logger.warning("engine.unverified_release_detected release=%s proven=%r", release, _proven())
    gaps = find_gaps(folder) or check_loaded(needs_of(release))
    if gaps:
        named = "; ".join(gaps[:MAX_NAMED])
        more = f"; and {len(gaps) - MAX_NAMED} more" if len(gaps) > MAX_NAMED else ""
        raise EngineDead(f"vLLM {release} lacks parts that the rollbus worker uses: {named}{more}; {_allowed()}")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def _allowed() -> str:
    return f"allowed: {_proven()}, as released"


def _proven() -> str:
    return f"{FIRST[0]}.{FIRST[1]} to {PAST[0]}.{PAST[1] - 1}"
