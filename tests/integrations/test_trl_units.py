"""The integration with TRL's own types, without a fleet."""

import asyncio
from pathlib import Path

import pytest

from tests.integrations.support import needs_trainers, started
from tests.support.patience import ENGINE_STARTS_S

pytestmark = [pytest.mark.slow, needs_trainers]


async def test_prompts_sampling_and_advantages_are_those_of_trl(policy: Path) -> None:
    """Prompts, sampling, advantages and groups equal TRL's.

    Seeds differ within a group, aborted answers resume, and workers without new weights are named.
    """
    async with asyncio.timeout(ENGINE_STARTS_S), started("trl_units.py", policy) as process:
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.endswith("ok\n")


async def test_all_ranks_end_if_rank_0_cannot_publish() -> None:
    """If rank 0 cannot publish, all ranks end. Without this, the other ranks would wait until their time limit."""
    async with asyncio.timeout(ENGINE_STARTS_S), started("trl_ranks.py") as process:
        said = (await process.communicate())[0].decode()
    # Both ranks write to one pipe, so the ends of their lines may be interleaved.
    assert "rank 0 of 2: the lease is lost" in said, said
    assert "rank 1 of 2: rank 0 has not published the policy; see the error of rank 0" in said
