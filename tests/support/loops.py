"""The event loops that connections support."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.support.patience import HANGS_AFTER_S

RUNNERS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}

on_both_loops = pytest.mark.parametrize("loop", RUNNERS)
"""Parametrizes a test with the argument `loop`."""


def run_on(loop: str, scenario: Coroutine[Any, Any, None]) -> None:
    """Run `scenario` on this loop; the time limit lies inside the loop, so a traceback shows where `scenario` hangs."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_AFTER_S):
            await scenario

    RUNNERS[loop](bounded())
