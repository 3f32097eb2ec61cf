"""A short run of the RL example with real rollouts, weight updates during rollouts, and replay."""

import asyncio
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.waits import in_trainers_run

pytestmark = pytest.mark.vllm

RL_LOOP = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"


@pytest.mark.parametrize("num_steps", [5, pytest.param(20, marks=in_trainers_run)])
async def test_replay_lowers_the_kl_and_rewards_rise(tmp_path: Path, num_steps: int) -> None:
    """With one seed the KL is lower with replay, and no token is too old. In 20 steps the rewards rise by half."""
    shortened = ["--seeds", "1", "--steps", str(num_steps), "--workers", "1", "--output", str(tmp_path)]
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
    assert steps["step"].tolist() == list(range(num_steps))
    if num_steps == 20:
        assert steps["reward"][-10:].mean() > 1.5 * steps["reward"][:10].mean() > 0
    assert 0 < steps["kl_with_replay"].mean() < steps["kl_without_replay"].mean()
    # From the second step on, answers lag by at least one version and at most the allowed lag.
    assert set(steps["lag"][1:]) <= {1, 2}
    assert f"of {num_steps}\n" in said
    assert (tmp_path / "learning.svg").read_text().startswith("<?xml")


@pytest.fixture(scope="module")
def rl_loop() -> dict[str, Any]:
    """Return the names of the example."""
    return runpy.run_path(str(RL_LOOP))


def judged(rl_loop: dict[str, Any], rewards: list[float], *, kl: tuple[float, float] = (1e-5, 1e-4)) -> list[str]:
    """Return the problems that the example reports for a run with one step per reward."""
    fields: dict[str, Any] = {"seed": 0, "lag": 1, "mixed": 0.0, "dropped": 0, "seconds": 1.0}
    kls = {"kl_with_replay": kl[0], "kl_without_replay": kl[1]}
    steps = [rl_loop["Step"](step=step, reward=reward, **fields, **kls) for step, reward in enumerate(rewards)]
    problems: list[str] = rl_loop["summarize"]([steps])
    return problems


@pytest.mark.parametrize("rewards", [[0.1], [0.1] * 10, [0.2, 0.1, 0.0], [0.1] * 19, [0.0]])
def test_a_run_with_few_steps_need_not_raise_the_rewards(rl_loop: dict[str, Any], rewards: list[float]) -> None:
    """A run with few steps need not raise the rewards."""
    assert judged(rl_loop, rewards) == []


@pytest.mark.parametrize("num_steps", [20, 25, 40])
def test_rewards_of_enough_steps_must_rise_by_half(rl_loop: dict[str, Any], num_steps: int) -> None:
    """The mean reward of the last ten steps must exceed that of the first ten by half."""
    between = [0.1] * (num_steps - 20)

    assert judged(rl_loop, [0.1] * 10 + between + [0.16] * 10) == []
    assert judged(rl_loop, [0.0] * 10 + between + [0.16] * 10) == []
    for last in (0.14, 0.1, 0.0):
        assert judged(rl_loop, [0.1] * 10 + between + [last] * 10) == ["seed 0: the mean reward has not risen by half"]
    assert len(judged(rl_loop, [0.0] * num_steps)) == 1


@pytest.mark.parametrize("num_steps", [1, 30])
def test_replay_must_lower_the_kl_unless_there_is_no_kl(rl_loop: dict[str, Any], num_steps: int) -> None:
    """At any number of steps replay must lower the KL, unless there is no KL to compare."""
    rewards = [0.1 * 1.1**step for step in range(num_steps)]

    assert judged(rl_loop, rewards, kl=(math.nan, math.nan)) == []
    for kl in ((1e-4, 1e-4), (1e-4, 1e-5)):
        assert judged(rl_loop, rewards, kl=kl) == ["seed 0: replay has not brought sampler and trainer closer"]
