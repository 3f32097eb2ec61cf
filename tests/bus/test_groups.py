"""`rb.groups`: each step returns the first groups that complete, and continues the other groups from their tokens."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, GroupPrompt, GroupSampler, GroupStep, InvalidRequest, NoWorkers, SamplingParams
from rollbus.schemas.chunk import Chunk, End, FinishReason
from rollbus.schemas.errors import BusClosed, ErrorCode
from rollbus.schemas.messages import RequestKey
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation, until_idle
from tests.support.hand_worker import HandWorker, Taken, chunk, hand_worker
from tests.support.requests import all_of, greedy
from tests.support.waits import SOON_S, until_true

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

    assert [group.error for step in steps for group in (*step.failed, *step.dropped)] == []
    assert sorted(str(group.key) for group in taken) == sorted(map(str, range(len(lengths))))
    assert all(len(step.groups) == 2 for step in steps)
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


async def test_bad_options_are_refused_by_name(nats_url: str, fleet: str) -> None:
    """The error for each invalid option names its field before any request runs."""
    wrong: list[tuple[dict[str, object], str]] = [
        ({"n": 0}, "n is 0"),
        ({"need": 0}, "need is 0"),
        ({"over": 0.5}, r"over is 0\.5"),
        ({"max_lag": -1}, "max_lag is -1"),
        ({"inexact": "maybe"}, "inexact is 'maybe'; allowed: refuse, continue or drop"),
        ({"prompts": 7}, "prompts is 7"),
    ]
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        for options, problem in wrong:
            with pytest.raises(InvalidRequest, match=problem):
                rb.groups(**{"prompts": [], "n": 1, "need": 1, **options})  # type: ignore[arg-type]


async def test_a_request_with_another_number_of_samples_is_refused(one_worker: StartServed) -> None:
    """A request with another number of samples raises an error, and the next step continues after it."""
    three = GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(n=3))
    async with one_worker() as (rb, *_), rb.groups([three, *prompts(2)], n=2, need=1) as groups:
        with pytest.raises(InvalidRequest, match=r"sampling\.n is 3; allowed: 1, or n=2"):
            await groups.step()
        assert keys(await groups.step()) == [0]


# The messages of `rb.groups` to workers: which answers continue, and the order of aborts and ends.


def group(first: int, n: int) -> GenerateRequest:
    """Return a greedy request for nine tokens without logprobs."""
    sampling = SamplingParams(max_tokens=9, min_tokens=4, temperature=0, logprobs=None, prompt_logprobs=None, n=n)
    return GenerateRequest(prompt_token_ids=[first, 2], sampling=sampling)


@contextlib.asynccontextmanager
async def stepping(
    nats_url: str, fleet: str, *given: GenerateRequest
) -> AsyncIterator[tuple[HandWorker, GroupSampler, asyncio.TaskGroup, asyncio.Task[GroupStep]]]:
    """Run groups that all start in a first step which needs one of them, and a worker that a test acts for."""
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups(given, n=given[-1].sampling.n, need=1, over=len(given)) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        yield worker, groups, tasks, tasks.create_task(groups.step())


async def take(worker: HandWorker, count: int) -> dict[tuple[int, int], Taken]:
    """Return the next requests, by the first token of the prompt and the child."""
    taken = [await worker.take() for _ in range(count)]
    return {(int(one.request.prompt_token_ids[0]), one.key.child): one for one in taken}


def aborted(key: RequestKey, index: int, total: int) -> Chunk:
    """Return the terminal chunk by which a worker confirms an abort."""
    end = End(finish_reason=FinishReason.ABORT, num_tokens=total, num_rows=0)
    return replace(chunk(key, index), end=end)


async def test_open_answers_with_tokens_continue_and_without_tokens_restart(nats_url: str, fleet: str) -> None:
    """An interrupted group keeps its ended answers and continues answers with tokens.

    An answer without tokens restarts.
    """
    async with stepping(nats_url, fleet, group(1, 3), group(7, 3)) as (worker, groups, tasks, step):
        taken = await take(worker, 6)
        keys = {name: one.key for name, one in taken.items()}
        await worker.frame(
            0,
            *(chunk(keys[1, child], 0, 5, total=1) for child in range(3)),
            chunk(keys[7, 0], 0, 11, 12, total=2),
            chunk(keys[7, 1], 0, 13, 14, 15),
            admitted=tuple(keys.values()),
        )
        first = await step
        assert [len(answer.token_ids) for answer in first.groups[0].generations] == [1, 1, 1]
        assert sorted(first.stats.carried) == [0, 2, 3]
        assert sorted(await worker.aborted(2)) == sorted([keys[7, 1], keys[7, 2]])
        await worker.frame(1, aborted(keys[7, 1], 1, 3), aborted(keys[7, 2], 0, 0))

        later = tasks.create_task(groups.step())
        rest = [await worker.take() for _ in range(2)]
        rest.sort(key=lambda one: one.request.prompt_len)
        new, going_on = (one.request for one in rest)
        assert new.prompt_token_ids.tolist() == [7, 2]  # type: ignore[union-attr]
        assert (new.sampling.max_tokens, new.sampling.min_tokens, new.sampling.n) == (9, 4, 1)
        assert going_on.prompt_token_ids.tolist() == [7, 2, 13, 14, 15]  # type: ignore[union-attr]
        assert (going_on.sampling.max_tokens, going_on.sampling.min_tokens) == (6, 1)
        ids = {new.request_id, going_on.request_id, taken[7, 0].request.request_id}
        assert len(ids) == 3
        assert {new.group_id, going_on.group_id} == {taken[7, 0].request.group_id}
        await worker.frame(
            2,
            chunk(rest[0].key, 0, 21, 22, total=2),
            chunk(rest[1].key, 0, 23, total=1),
            admitted=(rest[0].key, rest[1].key),
        )
        second = await later
        assert not await groups.step()

    answers = second.groups[0].generations
    assert [answer.token_ids.tolist() for answer in answers] == [[11, 12], [13, 14, 15, 23], [21, 22]]
    assert [answer.child for answer in answers] == [0, 1, 2]
    assert [answer.parts for answer in answers] == [1, 2, 2]
    assert {answer.prompt_len for answer in answers} == {2}
    assert {answer.request_id for answer in answers} == {second.groups[0].request.request_id}
    assert second.groups[0].steps == 2


async def test_an_answer_that_ended_before_its_abort_arrived_is_complete(nats_url: str, fleet: str) -> None:
    """If an answer ends before its abort arrives, it is complete, and the next step returns it immediately."""
    async with stepping(nats_url, fleet, group(1, 1), group(7, 1)) as (worker, groups, _tasks, step):
        taken = await take(worker, 2)
        one, other = taken[1, 0].key, taken[7, 0].key
        await worker.frame(0, chunk(one, 0, 5, total=1), chunk(other, 0, 6), admitted=(one, other))
        assert len((await step).groups) == 1
        # The step returned before the worker confirmed the abort.
        assert await worker.aborted() == [other]
        await worker.frame(1, chunk(other, 1, 8, total=2))
        second = await groups.step()
        assert not await groups.step()

    assert [answer.token_ids.tolist() for answer in second.groups[0].generations] == [[6, 8]]
    assert second.groups[0].generations[0].parts == 1
    assert second.stats.continued == 0


async def test_groups_that_end_together_are_returned_by_separate_steps(nats_url: str, fleet: str) -> None:
    """If three groups end in one frame and a step needs one, three steps return one each without more requests."""
    prompts = [group(1, 1), group(3, 1), group(5, 1)]
    async with stepping(nats_url, fleet, *prompts) as (worker, groups, _tasks, step):
        keys = [(await worker.take()).key for _ in prompts]
        await worker.frame(0, *(chunk(key, 0, 5, total=1) for key in keys), admitted=tuple(keys))
        steps = [await step, await groups.step(), await groups.step(), await groups.step()]

    assert [len(step.groups) for step in steps] == [1, 1, 1, 0]
    assert [step.stats.carried_complete for step in steps] == [2, 1, 0, 0]
    assert [step.stats.carried.tolist() for step in steps] == [[1, 1], [1], [], []]
    assert worker.requests.empty()


async def test_a_request_that_no_worker_has_accepted_is_stopped_immediately(nats_url: str, fleet: str) -> None:
    """A request that no worker has accepted ends locally. The next step sends it again as a new request."""
    async with stepping(nats_url, fleet, group(1, 1), group(7, 2)) as (worker, groups, tasks, step):
        taken = await take(worker, 4)
        ones = [taken[1, 0].key, taken[1, 1].key]
        await worker.frame(0, *(chunk(key, 0, 5, total=1) for key in ones), admitted=tuple(ones))
        assert len((await step).groups) == 1

        later = tasks.create_task(groups.step())
        again = await take(worker, 2)
        assert again[7, 0].request.request_id != taken[7, 0].request.request_id
        keys = [again[7, 0].key, again[7, 1].key]
        await worker.frame(1, *(chunk(key, 0, 6, total=1) for key in keys), admitted=tuple(keys))
        assert [answer.token_ids.tolist() for answer in (await later).groups[0].generations] == [[6], [6]]


async def test_a_request_continues_if_its_worker_does_not_confirm_the_abort(nats_url: str, fleet: str) -> None:
    """If a worker does not confirm an abort within a time limit, the request continues from the tokens so far."""
    async with stepping(nats_url, fleet, group(1, 1), group(7, 1)) as (worker, groups, tasks, step):
        taken = await take(worker, 2)
        one, other = taken[1, 0].key, taken[7, 0].key
        await worker.frame(0, chunk(one, 0, 5, total=1), chunk(other, 0, 6), admitted=(one, other))
        await step
        later = tasks.create_task(groups.step())
        rest = await worker.take()
        assert rest.request.prompt_token_ids.tolist() == [7, 2, 6]  # type: ignore[union-attr]
        # The client ignores a late chunk of the first part.
        await worker.frame(1, chunk(other, 1, 9, total=2), chunk(rest.key, 0, 8, total=1), admitted=(rest.key,))
        assert [answer.token_ids.tolist() for answer in (await later).groups[0].generations] == [[6, 8]]
