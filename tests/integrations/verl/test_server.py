"""Announcements of updates at the server of verl's adapter. They need no verl and no fleet."""

import asyncio
import gc
from dataclasses import asdict
from typing import Any

import pytest

from rollbus.integrations.verl.options import Options
from rollbus.integrations.verl.outputs import RolloutFailed
from rollbus.integrations.verl.server import MAX_UPDATES, RollbusServer


@pytest.fixture
def server() -> RollbusServer:
    """A server that has not connected."""
    return RollbusServer(asdict(Options(model="m", checkpoint="/m")), {})


async def test_a_failure_that_nobody_waits_for_is_kept_and_not_reported_as_lost(server: RollbusServer) -> None:
    """The replica may ask after the trainer failed, and twice. asyncio reports no exception that nobody has read."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    await server.fail_update("first", "out of memory")
    await server.commit_update("first", 5, "objects", 1)
    for _ in range(2):
        with pytest.raises(RolloutFailed, match="out of memory"):
            await server.apply_update("first", leads=True)
    for number in range(MAX_UPDATES):
        await server.fail_update(f"never awaited {number}", "out of memory")
    gc.collect()
    assert reported == []


async def test_a_repeated_commit_has_no_effect(server: RollbusServer) -> None:
    """Neither the step of a later update nor the outcome of an update changes."""
    await server.commit_update("first", 5, "objects", 1)
    await server.commit_update("second", 6, "objects", 2)
    await server.commit_update("first", 5, "objects", 1)
    await server.fail_update("second", "too late")
    assert server.latest_step == 2
    # It goes on to load the weights, and fails at that: the server has no connection.
    with pytest.raises(RolloutFailed, match="not connected"):
        await server.apply_update("second", leads=False)
