"""`rb.groups`: each step returns the first groups that complete, and continues the other groups from their tokens."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, GroupPrompt, GroupStep, InvalidRequest, NoWorkers, SamplingParams
from rollbus.schemas.errors import BusClosed, ErrorCode
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation, until_idle
from tests.support.patience import SOON_S
from tests.support.requests import greedy
from tests.support.streams import all_of
from tests.support.waits import until_true

SLOW = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
ENDLESS = 1_000_000


def prompts(*lengths: int) -> list[GroupPrompt]:
    """Return greedy prompts whose answers have these lengths. The key is the number of the prompt."""
    return [GroupPrompt(greedy(10 + i, length), key=i) for i, length in enumerate(lengths)]


def keys(step: GroupStep) -> list[object]:
    """Return the keys of the groups in a step."""
    return [group.key for group in step.groups]


async def test_every_prompt_completes_once_and_as_if_undisturbed(one_worker: StartServed) -> None:
    """Over all steps, each prompt completes once, and interrupted long groups equal undisturbed ones."""
    lengths = [5, 700, 3, 4, 900, 6, 2, 500, 3, 5, 4, 2]
    async with one_worker(config=SLOW) as (rb, _, engine):
        async with rb.groups(prompts(*lengths), n=2, need=2, over=2) as groups:
            steps = await all_of(groups)
        taken = [group for step in steps for group in step.groups]
        for group in taken:
            request = greedy(10 + int(str(group.key)), lengths[int(str(group.key))])
            expected = await rb.complete(request)
            assert [generation.child for generation in group.generations] == [0, 1]
            for generation in group.generations:
                check_generation(generation, request)
                assert generation.prompt_len == request.prompt_len
                np.testing.assert_array_equal(generation.token_ids, expected.token_ids)
                np.testing.assert_array_equal(generation.logprobs, expected.logprobs)
                np.testing.assert_array_equal(generation.routed_experts, expected.routed_experts)
        async with asyncio.timeout(SOON_S):
            await until_idle(engine, rb)

    assert sorted(str(group.key) for group in taken) == sorted(map(str, range(len(lengths))))
    assert all(len(step.groups) == 2 for step in steps)
    assert not any(step.failed or step.dropped for step in steps)
    # The long groups completed late, in parts.
    assert steps[0].groups[0].key != 1
    longest = next(group for group in taken if group.key == 4)
    assert longest.steps > 1
    assert max(generation.parts for generation in longest.generations) > 1
    assert steps[0].stats.carried.size == 4
    assert sum(step.stats.taken.sum() for step in steps) == 2 * sum(lengths)
    assert sum(step.stats.started for step in steps) == len(lengths)


async def test_a_step_reads_no_more_prompts_than_groups_run(one_worker: StartServed) -> None:
    """A step reads no more prompts than groups run, and a slow async iterable delays no running group."""
    taken = itertools.count()
    resume = asyncio.Event()

    async def source() -> AsyncIterator[list[int]]:
        for i in taken:
            if i == 3:
                await resume.wait()
            yield [10 + i, 2, 3]

    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    async with one_worker() as (rb, *_):
        async with rb.groups(source(), n=1, need=2, over=2, sampling=sampling) as groups:
            async with asyncio.timeout(SOON_S):
                first = await groups.step()
            assert len(first.groups) == 2
            resume.set()
            second, third = await groups.step(), await groups.step()
            assert len(second.groups) == len(third.groups) == 2
        # Three steps of two groups, at most two further groups, and one prompt that is being read.
        assert next(taken) <= 6 + 2 + 1


async def test_an_error_of_the_iterable_is_raised_and_the_groups_continue(one_worker: StartServed) -> None:
    """An error of the iterable is raised by `step`. Running groups continue, and the next step returns them."""

    async def fails() -> AsyncIterator[GenerateRequest]:
        yield greedy(1, 5)
        raise OSError("the data set is gone")

    async with one_worker(config=SLOW) as (rb, *_), rb.groups(fails(), n=1, need=2) as groups:
        with pytest.raises(OSError, match="the data set is gone"):
            await groups.step()
        assert len((await groups.step()).groups) == 1
        assert not await groups.step()


async def test_the_next_step_returns_the_groups_of_a_cancelled_step(one_worker: StartServed) -> None:
    """The groups of a cancelled step continue, and the next step returns them."""
    async with (
        one_worker(config=SLOW) as (rb, *_),
        rb.groups(prompts(5000, 5000), n=1, need=2, over=1) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        cancelled = tasks.create_task(groups.step())
        await until_true(lambda: rb.stats().requests == 2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        step = await groups.step()
        assert not await groups.step()
    assert sorted(map(str, keys(step))) == ["0", "1"]
    assert [group.generations[0].parts for group in step.groups] == [1, 1]


async def test_leaving_the_block_aborts_all_groups(one_worker: StartServed) -> None:
    """After the block, no engine computes for the groups, and `step` raises an error."""
    async with one_worker(config=SLOW) as (rb, _, engine):
        async with rb.groups(prompts(3, ENDLESS, ENDLESS), n=2, need=1, over=3) as groups:
            assert keys(await groups.step()) == [0]
        async with asyncio.timeout(SOON_S):
            await until_idle(engine, rb)
        with pytest.raises(BusClosed, match="these groups are not open"):
            await groups.step()


async def test_a_step_during_another_step_is_an_error(one_worker: StartServed) -> None:
    """A step raises an error while another step of the same groups runs."""
    async with (
        one_worker(config=SLOW) as (rb, *_),
        rb.groups(prompts(300), n=1, need=1) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(groups.step())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="a step of these groups is still running"):
            await groups.step()
        assert len((await running).groups) == 1


async def test_failed_groups_are_replaced_and_returned_with_their_error(one_worker: StartServed) -> None:
    """A prompt that no worker can serve is returned as failed with its error, and another prompt replaces it."""
    too_long = GroupPrompt(GenerateRequest(prompt_token_ids=range(100)), key="long")
    config = SyntheticConfig(max_model_len=50)
    async with (
        one_worker(config=config) as (rb, *_),
        rb.groups([too_long, *prompts(3, 3)], n=2, need=2, over=1) as groups,
    ):
        step = await groups.step()
    assert sorted(map(str, keys(step))) == ["0", "1"]
    assert [group.key for group in step.failed] == ["long"]
    assert step.failed[0].error.code is ErrorCode.INVALID_REQUEST
    assert len(step.failed[0].generations) == 2


async def test_a_step_ends_if_all_prompts_fail(one_worker: StartServed) -> None:
    """If all prompts fail, a step returns without groups instead of reading all prompts."""
    taken = itertools.count()

    def bad() -> Iterator[GenerateRequest]:
        while True:
            next(taken)
            yield GenerateRequest(prompt_token_ids=range(100))

    async with (
        one_worker(config=SyntheticConfig(max_model_len=50)) as (rb, *_),
        rb.groups(bad(), n=1, need=2, over=1.5) as groups,
    ):
        step = await groups.step()
    assert not step.groups
    assert len(step.failed) >= 3
    assert next(taken) <= 2 * 3


async def test_without_workers_a_step_raises_and_keeps_its_groups(nats_url: str, fleet: str) -> None:
    """Without workers, `step` raises `NoWorkers`, and the group that was not sent waits for the next step."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, worker_grace_s=0) as rb,
        rb.groups(prompts(3), n=1, need=1) as groups,
    ):
        for _ in range(2):
            with pytest.raises(NoWorkers):
                await groups.step()
        assert "stopped=1" in repr(groups)


async def test_old_groups_are_dropped_and_counted(one_worker: StartServed) -> None:
    """`max_lag` counts from the oldest token.

    A dropped group is returned with its tokens, and another group replaces it.
    """
    async with (
        one_worker(config=SLOW) as (rb, *_),
        rb.groups(prompts(3, ENDLESS, 4, 4), n=1, need=1, over=2, max_lag=1) as groups,
    ):
        first = await groups.step(version=0)
        second = await groups.step(version=1)
        assert (keys(first), keys(second)) == ([0], [2])
        third = await groups.step(version=2)
        assert not await groups.step(version=2)
    assert not first.dropped
    assert not second.dropped
    assert [group.key for group in third.dropped] == [1]
    assert keys(third) == [3]
    dropped = third.dropped[0]
    assert dropped.oldest_version == 0
    assert dropped.steps == 2
    assert third.stats.dropped.tolist() == [len(dropped.generations[0].token_ids)]
    assert third.stats.dropped[0] > 0


async def test_the_lag_counts_from_the_newest_weights_of_any_worker(one_worker: StartServed) -> None:
    """Without `version`, the lag counts from the newest weights of any live worker."""
    async with (
        one_worker(config=SLOW, weight_version=7) as (rb, *_),
        rb.groups(prompts(3, 500), n=1, need=1, over=2, max_lag=0) as groups,
    ):
        steps = await all_of(groups)
    assert [keys(step) for step in steps] == [[0], [1]]
    assert steps[1].groups[0].oldest_version == 7


SEEDED = GenerateRequest(
    prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=100_000, temperature=1, seed=3, ignore_eos=True)
)


async def test_seeds_are_refused_unless_the_caller_chooses(one_worker: StartServed) -> None:
    """A seed cannot be continued exactly, so the caller chooses an error, an inexact result, or a dropped group."""
    async with one_worker(config=SLOW) as (rb, *_):
        async with rb.groups([SEEDED], n=1, need=1) as groups:
            with pytest.raises(InvalidRequest, match=r"sampling\.seed gives the sampler a state"):
                await groups.step()

        long = GroupPrompt(
            GenerateRequest(prompt_token_ids=[9, 2], sampling=SamplingParams(max_tokens=400, seed=3, ignore_eos=True)),
            key="seeded",
        )
        async with rb.groups([*prompts(3), long], n=1, need=1, over=2, inexact="continue") as groups:
            steps = await all_of(groups)
        assert [keys(step) for step in steps] == [[0], ["seeded"]]
        assert not steps[1].groups[0].generations[0].exact
        assert len(steps[1].groups[0].generations[0].token_ids) == 400

        async with rb.groups([*prompts(3), long, *prompts(3)], n=1, need=1, over=2, inexact="drop") as groups:
            steps = await all_of(groups)
        assert [keys(step) for step in steps] == [[0], [0]]
        assert [[group.key for group in step.dropped] for step in steps] == [[], ["seeded"]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 0}, "n is 0"),
        ({"need": 0}, "need is 0"),
        ({"over": 0.5}, r"over is 0\.5"),
        ({"max_lag": -1}, "max_lag is -1"),
        ({"inexact": "maybe"}, "inexact is 'maybe'; allowed: refuse, continue or drop"),
        ({"prompts": 7}, "prompts is 7"),
    ],
)
async def test_bad_options_are_refused_by_name(
    nats_url: str, fleet: str, options: dict[str, object], problem: str
) -> None:
    """The error for each invalid option names its field before any request runs."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        with pytest.raises(InvalidRequest, match=problem):
            rb.groups(**{"prompts": [], "n": 1, "need": 1, **options})  # type: ignore[arg-type]


async def test_a_request_with_another_number_of_samples_is_refused(one_worker: StartServed) -> None:
    """A request with another number of samples raises an error, and the next step continues after it."""
    three = GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(n=3))
    async with one_worker() as (rb, *_), rb.groups([three, *prompts(2)], n=2, need=1) as groups:
        with pytest.raises(InvalidRequest, match=r"sampling\.n is 3; allowed: 1, or n=2"):
            await groups.step()
        assert keys(await groups.step()) == [0]
