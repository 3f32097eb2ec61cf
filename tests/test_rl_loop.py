"""The loop that learns, shortened, as a user runs it: real rollouts, new weights in the midst of them, replay."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RL_LOOP = Path(__file__).resolve().parents[1] / "examples" / "rl_loop.py"
NUM_STEPS = 20


async def test_it_learns_and_replay_brings_sampler_and_trainer_closer(tmp_path: Path) -> None:
    """One seed: rewards rise by half, the KL is lower with replay, and no trained token is too old."""
    shortened = ["--seeds", "1", "--steps", str(NUM_STEPS), "--workers", "1", "--output", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(RL_LOOP), *shortened, stdout=asyncio.subprocess.PIPE
    )
    try:
        said = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert process.returncode == 0, said
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = {name: np.array([line[name] for line in lines]) for name in lines[0]}
    assert steps["step"].tolist() == list(range(NUM_STEPS))
    assert steps["reward"][-10:].mean() > 1.5 * steps["reward"][:10].mean() > 0
    assert 0 < steps["kl_with_replay"].mean() < steps["kl_without_replay"].mean()
    # There are always answers of weights before the present ones, and none of those too old.
    assert set(steps["lag"][1:]) <= {1, 2}
    assert f"of {NUM_STEPS}\n" in said
    assert (tmp_path / "learning.svg").read_text().startswith("<?xml")
