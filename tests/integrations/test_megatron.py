"""Megatron-Core's own router replay on a CPU, fed with the rows of a micro-batch."""

import asyncio

import pytest

from tests.integrations.support import needs_trainers, started
from tests.support.patience import ENGINE_STARTS_S

pytestmark = [pytest.mark.slow, needs_trainers]


async def test_megatron_core_replays_the_experts_of_the_rows() -> None:
    """Megatron-Core replays the experts of the rows, also for recomputed layers and for some layers or tokens.

    Gradients reach the router.
    """
    async with asyncio.timeout(ENGINE_STARTS_S), started("megatron_replay.py") as process:
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.endswith("ok\n")
