"""`rb.groups` without asyncio: the same steps from any thread. The thread that waits for a step reads the prompts."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import rollbus
from rollbus import GroupPrompt, GroupStep, SamplingParams
from rollbus.schemas.errors import BusClosed
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.bus.test_sync_client import in_thread
from tests.support.fleet import StartServed, until_idle
from tests.support.processes import becomes_true
from tests.support.requests import greedy, short

SLOW = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
ENDLESS = 1_000_000


def prompts(*lengths: int) -> list[GroupPrompt]:
    """Return greedy prompts whose answers have these lengths. The key is the number of the prompt."""
    return [GroupPrompt(greedy(10 + i, length), key=i) for i, length in enumerate(lengths)]


def keys(*steps: GroupStep) -> list[object]:
    """Return the keys of the groups in these steps."""
    return [group.key for step in steps for group in step.groups]


def tokens_of(steps: list[GroupStep]) -> dict[object, list[list[int]]]:
    """Return the tokens of each answer, by the key of its group."""
    return {
        group.key: [answer.token_ids.tolist() for answer in group.generations]
        for step in steps
        for group in step.groups
    }


async def test_steps_are_those_of_the_client_with_asyncio(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Each prompt completes once, interrupted groups continue from their tokens, and all equal undisturbed ones."""
    lengths = [5, 700, 3, 4, 900, 6, 2, 500]
    steps: list[GroupStep] = []

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            with rb.groups(prompts(*lengths), n=2, need=2, over=2) as groups:
                steps.extend(groups)
            for key, answers in tokens_of(steps).items():
                number = int(str(key))
                expected = rb.complete(greedy(10 + number, lengths[number])).token_ids.tolist()
                assert answers == [expected, expected]

    async with one_worker(config=SLOW) as (rb, _, engine):
        await in_thread(program)
        await until_idle(engine, rb)
    assert sorted(map(str, keys(*steps))) == sorted(map(str, range(len(lengths))))
    assert max(group.steps for step in steps for group in step.groups) > 1
    assert not any(step.failed or step.dropped for step in steps)


async def test_prompts_are_read_on_the_thread_that_waits_for_the_step(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """`step` reads prompts one at a time on its own thread, and the source may use the client.

    An error of the source is raised by `step`. The next step contains the prompts from before the error.
    """
    drawn_on: list[int] = []

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()

            class Source:
                """A source that yields answers of the fleet and raises one error."""

                def __iter__(self) -> Iterator[list[int]]:
                    return self

                def __next__(self) -> list[int]:
                    drawn_on.append(threading.get_ident())
                    if len(drawn_on) == 2:
                        raise OSError("the data set is gone")
                    answer: list[int] = rb.complete(short(f"r{len(drawn_on)}")).token_ids.tolist()
                    return answer

            sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            with rb.groups(Source(), n=1, need=2, over=1, sampling=sampling) as groups:
                with pytest.raises(OSError, match="the data set is gone"):
                    groups.step()
                assert len(groups.step().groups) == 2
            assert drawn_on == [threading.get_ident()] * 3

    async with one_worker():
        await in_thread(program)


@pytest.mark.parametrize("left", ["groups", "client"])
async def test_leaving_the_groups_ends_a_step_of_another_thread(
    nats_url: str, fleet: str, one_worker: StartServed, left: str
) -> None:
    """If the groups or the client are left, a step of another thread ends with `BusClosed`, and the engines are idle.

    A second step beside it raises an error.
    """
    errors: list[BaseException] = []

    def program() -> None:
        rb = rollbus.sync.connect(nats_url, fleet=fleet).__enter__()
        rb.fleet.wait_for_workers()
        groups = rb.groups(prompts(ENDLESS, ENDLESS), n=2, need=2, over=1).__enter__()

        def take() -> None:
            try:
                groups.step()
            except (BusClosed, RuntimeError) as exc:
                errors.append(exc)

        taking = threading.Thread(target=take)
        taking.start()
        assert becomes_true(lambda: rb.stats().requests >= 2)
        take()
        (groups if left == "groups" else rb).__exit__(None, None, None)
        taking.join()
        groups.__exit__(None, None, None)
        if left == "groups":
            rb.__exit__(None, None, None)

    async with one_worker(config=SLOW) as (rb, _, engine):
        await in_thread(program)
        await until_idle(engine, rb)
    assert [type(error) for error in errors] == [RuntimeError, BusClosed]
    assert "a step of these groups is still running" in str(errors[0])


async def test_weights_may_change_between_steps(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Between steps, no request of the groups is in flight, so weights can change. The statistics count all lengths."""

    def program() -> None:
        with rollbus.sync.connect(nats_url, fleet=fleet) as rb:
            rb.fleet.wait_for_workers()
            with rb.groups(prompts(3, 500, 4), n=1, need=1, over=2) as groups:
                first = groups.step(version=0)
                rb.fleet.flush_cache()
                rest = list(groups)
            assert keys(first) == [0]
            assert sorted(map(str, keys(*rest))) == ["1", "2"]
            assert first.stats.carried.size == 1
            assert np.concatenate([step.stats.taken for step in (first, *rest)]).sum() == 507

    async with one_worker(config=SLOW):
        await in_thread(program)
