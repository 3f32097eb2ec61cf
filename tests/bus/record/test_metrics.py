"""`GroupStep.metrics`: a flat dict of numbers for a logger."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from rollbus import Generation, Group, GroupStats, GroupStep
from rollbus.schemas.chunk import FinishReason
from rollbus.trainer import sampler_kl
from tests.bus.record.test_rows import generation
from tests.support.fleet import StartServed
from tests.support.requests import greedy


def step_of(*answers: Generation, version: int | None = 7) -> GroupStep:
    """Return a step with one group of these answers."""
    groups = (Group(key=None, request=answers[0].request, generations=answers, steps=1),) if answers else ()
    none = np.array([], "i4")
    stats = GroupStats(
        taken=np.array([len(answer.token_ids) for answer in answers], "i4"),
        carried=none,
        dropped=none,
        seconds=2.0,
        started=1,
        continued=0,
        carried_complete=0,
        version=version,
        paused_s=0.5,
    )
    return GroupStep(groups=groups, dropped=(), failed=(), stats=stats)


def answer(num_tokens: int, version: int, logprob: float = -1.0, **fields: Any) -> Generation:
    """Return an answer of the base model with tokens of one version."""
    return generation(
        token_ids=np.arange(num_tokens, dtype="i4"),
        weight_versions=np.full(num_tokens, version, "i4"),
        logprobs=np.full(num_tokens, logprob, "f4"),
        **{"lora_versions": None, "attempts": 1, "parts": 1, **fields},
    )


def test_metrics_are_flat_numbers() -> None:
    """Reward, lengths, truncation, staleness, resumes, throughput, wait and pause are floats by name."""
    step = step_of(answer(2, 7), answer(6, 5, finish_reason=FinishReason.LENGTH, attempts=2))
    metrics = step.metrics(rewards=[[1.0, 0.0]])
    assert all(type(value) is float for value in metrics.values())
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "length/mean": 4.0,
        "length/max": 6.0,
        "length/truncated": 0.5,
        "staleness/mean": 1.5,
        "staleness/max": 2.0,
        "resumed": 1.0,
        "continued": 0.0,
        "dropped": 0.0,
        "tokens_per_s": 4.0,
        "wait_s": 2.0,
        "pause_s": 0.5,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert "kl" not in metrics


def test_the_divergence_equals_that_of_the_trainer() -> None:
    """`kl` is `sampler_kl` of the same tokens, also where the sampler could not choose a token."""
    step = step_of(answer(2, 7, -0.5), answer(3, 7, -1.25))
    ours = [np.array([-0.7, -0.6], "f4"), np.array([-1.0, -2.0, -1.25], "f4")]
    theirs = torch.tensor([[-0.5] * 2 + [-1.25] * 3])
    expected = sampler_kl(torch.tensor(np.concatenate(ours))[None], theirs, torch.ones(1, 5, dtype=torch.bool))
    assert step.metrics(trainer_logprobs=ours)["kl"] == pytest.approx(float(expected), rel=1e-5)
    impossible = step_of(answer(2, 7, -math.inf))
    assert impossible.metrics(trainer_logprobs=[[-1.0, -math.inf]])["kl"] == math.inf


def test_wrong_sizes_are_errors() -> None:
    """Rewards and log probabilities of another number of answers or tokens are errors that name both numbers."""
    step = step_of(answer(2, 7), answer(3, 7))
    with pytest.raises(ValueError, match="rewards has 1 numbers; allowed: 2, one for each answer"):
        step.metrics(rewards=[[1.0]])
    with pytest.raises(
        ValueError, match=r"trainer_logprobs has arrays of lengths \[2\]; allowed: those of the answers"
    ):
        step.metrics(trainer_logprobs=[[0.0, 0.0]])


def test_a_step_without_groups_has_no_means() -> None:
    """Without answers, the metrics are counts and times."""
    metrics = step_of().metrics()
    assert metrics["groups"] == 0
    assert not [name for name in metrics if "/" in name]


async def test_a_step_counts_its_pause_and_its_version(one_worker: StartServed) -> None:
    """`pause_s` has the time in which the model was paused during the step, and staleness counts from the version."""
    prompts = [greedy(1, 5), greedy(2, 5)]
    async with (
        one_worker(weight_version=3) as (rb, *_),
        asyncio.TaskGroup() as tasks,
        rb.groups(prompts, n=1, need=1, over=1) as groups,
    ):
        first = (await groups.step()).metrics()
        assert (first["pause_s"], first["staleness/max"]) == (0.0, 0.0)
        await rb.fleet.pause()
        stepping = tasks.create_task(groups.step(version=5))
        while not rb.stats().requests > 1:
            await rb.fleet.state()
        await rb.fleet.resume()
        second = (await stepping).metrics()
    assert 0 < second["pause_s"] <= second["wait_s"]
    assert second["staleness/max"] == 2.0
