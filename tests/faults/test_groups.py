"""During steps of groups, a worker is killed or weights are replaced.

Each prompt still completes once, and each token matches its weight version.
"""

import asyncio
from pathlib import Path

import numpy as np

import rollbus
from rollbus import GroupPrompt, GroupStep
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import undisturbed
from tests.control.support import write_checkpoint
from tests.support.fleet import StartServed, check_generation
from tests.support.processes import LASTING, worker_process
from tests.support.requests import all_of, greedy
from tests.support.waits import SOON_S, until_true

LEASE = ("--lease-s", "2")
ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 8}
LENGTHS = [5, 400, 7, 30, 600, 9, 4, 300, 8, 6, 20, 5]
LONG = greedy(1, 800)


def prompts() -> list[GroupPrompt]:
    """Return greedy prompts whose answers have these lengths."""
    return [GroupPrompt(greedy(10 + i, length), key=i) for i, length in enumerate(LENGTHS)]


async def test_answers_do_not_change_if_a_worker_is_killed_during_a_step(nats_url: str, fleet: str) -> None:
    """If one of two workers is killed during and between steps, each answer equals an undisturbed one."""
    expected = await undisturbed(
        [greedy(10 + i, length, request_id=f"{i}") for i, length in enumerate(LENGTHS)],
        SyntheticConfig.from_args(ENGINE_ARGS),
    )
    steps: list[GroupStep] = []
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=ENGINE_ARGS) as doomed,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS),
    ):
        await rb.fleet.wait_for_workers(2)
        async with rb.groups(prompts(), n=2, need=3, over=2) as groups, asyncio.TaskGroup() as tasks:
            steps.append(await groups.step())
            # Aborts of the first step may still be in progress.
            doomed.kill()
            steps += await tasks.create_task(all_of(groups))

    taken = [group for step in steps for group in step.groups]
    assert sorted(str(group.key) for group in taken) == sorted(map(str, range(len(LENGTHS))))
    assert not any(step.failed or step.dropped for step in steps)
    for group in taken:
        for generation in group.generations:
            alone = expected[str(group.key)]
            np.testing.assert_array_equal(generation.token_ids, alone.token_ids)
            np.testing.assert_array_equal(generation.routed_experts, alone.routed_experts)
            assert generation.exact


async def test_answers_that_a_pause_aborts_continue_in_the_same_step(one_worker: StartServed) -> None:
    """Answers that a pause with mode `abort` ends continue after the resume in the same step."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000)
    async with (
        one_worker(config=config) as (rb, _, engine),
        rb.groups([GroupPrompt(greedy(1, 900), key="one")], n=2, need=1) as groups,
        asyncio.TaskGroup() as tasks,
        asyncio.timeout(SOON_S),
    ):
        step = tasks.create_task(groups.step())
        await until_true(lambda: "running=2" in repr(engine))
        await rb.fleet.pause(mode="abort")
        await rb.fleet.resume()
        (group,) = (await step).groups
        expected = await rb.complete(greedy(1, 900))

    assert group.steps == 1
    for generation in group.generations:
        check_generation(generation, greedy(1, 900))
        assert generation.parts > 1
        np.testing.assert_array_equal(generation.token_ids, expected.token_ids)


async def test_a_continued_answer_has_tokens_of_both_versions_in_order(one_worker: StartServed, tmp_path: Path) -> None:
    """A continued answer has tokens of both versions in order, and its beginning equals that of the old weights."""
    old, new = (write_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    config = SyntheticConfig(step_s=0.001, max_model_len=100_000)
    async with (
        one_worker(config=config, weight_version=1, model_path=str(old), weight_roots=(str(tmp_path),)) as (rb, *_),
        rb.groups([*prompts()[:1], GroupPrompt(LONG, key="long")], n=1, need=1, over=2) as groups,
    ):
        before = await rb.complete(LONG)
        first = await groups.step()
        await rb.fleet.update_weights(new, version=2)
        second = await groups.step()
        after = await rb.complete(LONG)

    assert [group.key for group in first.groups] == [0]
    assert [group.key for group in second.groups] == ["long"]
    (generation,) = second.groups[0].generations
    check_generation(generation, LONG)
    versions = generation.weight_versions
    assert sorted(set(versions.tolist())) == [1, 2]
    assert (np.diff(versions) >= 0).all()
    assert second.groups[0].oldest_version == 1
    num_old = int((versions == 1).sum())
    np.testing.assert_array_equal(generation.token_ids[:num_old], before.token_ids[:num_old])
    # Rows of the first part are from the old weights and were not replaced.
    num_rows = LONG.prompt_len + num_old - 1
    np.testing.assert_array_equal(generation.routed_experts[:num_rows], before.routed_experts[:num_rows])
    assert not np.array_equal(before.token_ids, after.token_ids)
    assert not np.array_equal(generation.token_ids, before.token_ids)
