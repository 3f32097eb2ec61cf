"""The messages of `rb.groups` to workers: which answers continue, and the order of aborts and ends."""

import asyncio

from msgspec.structs import replace

from rollbus import GenerateRequest, SamplingParams
from rollbus.schemas.chunk import Chunk, End, FinishReason
from rollbus.schemas.messages import RequestKey
from tests.support.hand_worker import HandWorker, Taken, chunk, hand_worker


def group(first: int, n: int) -> GenerateRequest:
    """Return a greedy request for nine tokens without logprobs."""
    sampling = SamplingParams(max_tokens=9, min_tokens=4, temperature=0, logprobs=None, prompt_logprobs=None, n=n)
    return GenerateRequest(prompt_token_ids=[first, 2], sampling=sampling)


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
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups([group(1, 3), group(7, 3)], n=3, need=1, over=2) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        step = tasks.create_task(groups.step())
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

        step = tasks.create_task(groups.step())
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
        second = await step
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
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups([group(1, 1), group(7, 1)], n=1, need=1, over=2) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        step = tasks.create_task(groups.step())
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
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups(prompts, n=1, need=1, over=3) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        step = tasks.create_task(groups.step())
        keys = [(await worker.take()).key for _ in prompts]
        await worker.frame(0, *(chunk(key, 0, 5, total=1) for key in keys), admitted=tuple(keys))
        steps = [await step, await groups.step(), await groups.step(), await groups.step()]

    assert [len(step.groups) for step in steps] == [1, 1, 1, 0]
    assert [step.stats.carried_complete for step in steps] == [2, 1, 0, 0]
    assert [step.stats.carried.tolist() for step in steps] == [[1, 1], [1], [], []]
    assert worker.requests.empty()


async def test_a_request_that_no_worker_has_accepted_is_stopped_immediately(nats_url: str, fleet: str) -> None:
    """A request that no worker has accepted ends locally. The next step sends it again as a new request."""
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups([group(1, 1), group(7, 2)], n=2, need=1, over=2) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        step = tasks.create_task(groups.step())
        taken = await take(worker, 4)
        ones = [taken[1, 0].key, taken[1, 1].key]
        await worker.frame(0, *(chunk(key, 0, 5, total=1) for key in ones), admitted=tuple(ones))
        assert len((await step).groups) == 1

        step = tasks.create_task(groups.step())
        again = await take(worker, 2)
        assert again[7, 0].request.request_id != taken[7, 0].request.request_id
        keys = [again[7, 0].key, again[7, 1].key]
        await worker.frame(1, *(chunk(key, 0, 6, total=1) for key in keys), admitted=tuple(keys))
        assert [answer.token_ids.tolist() for answer in (await step).groups[0].generations] == [[6], [6]]


async def test_a_request_continues_if_its_worker_does_not_confirm_the_abort(nats_url: str, fleet: str) -> None:
    """If a worker does not confirm an abort within a time limit, the request continues from the tokens so far."""
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        rb.groups([group(1, 1), group(7, 1)], n=1, need=1, over=2) as groups,
        asyncio.TaskGroup() as tasks,
    ):
        step = tasks.create_task(groups.step())
        taken = await take(worker, 2)
        one, other = taken[1, 0].key, taken[7, 0].key
        await worker.frame(0, chunk(one, 0, 5, total=1), chunk(other, 0, 6), admitted=(one, other))
        await step
        step = tasks.create_task(groups.step())
        rest = await worker.take()
        assert rest.request.prompt_token_ids.tolist() == [7, 2, 6]  # type: ignore[union-attr]
        # The client ignores a late chunk of the first part.
        await worker.frame(1, chunk(other, 1, 9, total=2), chunk(rest.key, 0, 8, total=1), admitted=(rest.key,))
        assert [answer.token_ids.tolist() for answer in (await step).groups[0].generations] == [[6, 8]]
