"""`rb.fleet.experts` with the synthetic engine: the counts of workers equal the rows that clients received."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus.schemas.errors import InvalidRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.control.support import ask, folders, serving
from tests.support.disagg import disaggregated, in_two_legs, long
from tests.support.fleet import StartServed, asked_until, counted, planes_of, synthetic_worker
from tests.support.hand_control import controlled
from tests.support.requests import greedy, short, sized, start_stream

SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}
EXPERTS = 16
"""Default number of experts of the synthetic engine."""


async def test_prompt_and_generated_counts_equal_the_rows_of_the_clients(one_worker: StartServed) -> None:
    """Prompt and generated counts equal the clients' rows of streamed and whole requests.

    Some prompts have cached prefixes, and the requests take one or several steps.
    """
    async with one_worker(worker_id="w0", config=SyntheticConfig(prefix_cache=True)) as (rb, *_):
        results = [await rb.complete(sized(64, 20)), await rb.complete(sized(80, 7)), await rb.complete(sized(3, 1))]
        stream = rb.generate(greedy(9, 30))
        chunks = [chunk async for chunk in stream]
        wanted = planes_of(results, EXPERTS)
        rows = np.concatenate([chunk.routed_experts.numpy() for chunk in chunks if chunk.routed_experts is not None])
        wanted["prompt"] += counted([rows[:3]], EXPERTS)
        wanted["generated"] += counted([rows[3:]], EXPERTS)
        answers = await asked_until(rb, lambda window: window.generated.computed == 19 + 6 + 0 + 29)

    assert results[1].cached_tokens == 48
    window = answers.window
    assert (window.prompt.counts == wanted["prompt"]).all()
    assert (window.generated.counts == wanted["generated"]).all()
    assert window.prompt.computed == window.prompt.seen == 64 + 80 - 48 + 3 + 3
    assert window.generated.seen == 54
    assert (answers.asked, answers.left_out, answers.num_workers) == (("w0",), {}, 1)


async def test_tokens_with_declined_rows_count_as_computed_and_not_as_seen(one_worker: StartServed) -> None:
    """Tokens whose rows a request declines count as computed and not as seen."""
    async with one_worker() as (rb, *_):
        await rb.complete(sized(10, 5, return_routed_experts=False))
        await rb.complete(sized(10, 5, routed_experts_prompt_start=6))
        answers = await asked_until(rb, lambda window: window.generated.computed == 8)

    window = answers.window
    assert (window.prompt.computed, window.prompt.seen) == (20, 4)
    assert (window.generated.computed, window.generated.seen) == (8, 4)
    assert window.prompt.share_seen == 0.2


async def test_each_phase_counts_the_tokens_that_its_worker_computes(nats_url: str, fleet: str) -> None:
    """The prefill worker counts the prompt, and the decode worker counts the tokens that it did not fetch."""
    async with disaggregated(nats_url, fleet) as found:
        result = await found.rb.complete(long("r", 100, 8))
        assert in_two_legs([result])
        prefill = await asked_until(found.rb, lambda window: window.prompt.seen, workers=["p"])
        decode = await asked_until(found.rb, lambda window: window.generated.seen, workers=["d"])

    rows = result.routed_experts
    assert (prefill.window.prompt.counts == counted([rows[:100]], EXPERTS)).all()
    assert (prefill.window.prompt.computed, prefill.window.generated.computed) == (100, 0)
    # The decode worker fetched 96 positions. Of the other five, the client requests only the row of the first token.
    assert (decode.window.prompt.computed, decode.window.prompt.seen) == (5, 1)
    assert (decode.window.prompt.counts == counted([rows[100:101]], EXPERTS)).all()
    assert (decode.window.generated.counts == counted([rows[101:]], EXPERTS)).all()
    assert decode.window.generated.computed == decode.window.generated.seen == 6


async def test_a_resumed_prompt_counts_again(nats_url: str, fleet: str) -> None:
    """After a worker has ended, the survivor computes prompt and earlier tokens again, and counts them as prompt."""
    config = SyntheticConfig.from_args(SLOW)
    async with (
        rollbus.connect(nats_url, fleet=fleet, placement=False) as rb,
        synthetic_worker(nats_url, fleet, worker_id="a", config=config) as (a, _),
        synthetic_worker(nats_url, fleet, worker_id="b", config=config) as (b, _),
    ):
        await rb.fleet.wait_for_workers(2)
        stream = rb.generate(greedy(5, 400))
        chunks = [await anext(stream) for _ in range(40)]
        doomed, survivor = (a, "b") if chunks[0].worker_id == "a" else (b, "a")
        doomed.stop()
        chunks += [chunk async for chunk in stream]
        before = sum(chunk.num_tokens for chunk in chunks if chunk.attempt == 0)
        answers = await asked_until(rb, lambda window: window.generated.computed == 400 - before - 1)

    window = answers.window
    assert window.workers == (survivor,)
    assert window.prompt.computed == 3 + before
    # The client has the rows of all positions except that of the last token of attempt 0.
    assert window.prompt.seen == 1


async def test_tokens_are_counted_for_each_weight_version(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Each weight version counts the tokens that its weights produced, also within a running request."""
    one, two = folders(tmp_path)
    async with serving(nats_url, fleet, one, 1, step_s=0.005) as (rb, _):
        async with asyncio.TaskGroup() as tasks:
            stream = await start_stream(tasks, rb, ask(max_tokens=300))
            await rb.fleet.update_weights(two, version=2)
            await stream.reading
        answers = await asked_until(rb, lambda window: window.generated.computed == 299)

    window = answers.window
    assert [version.weight_version for version in window.versions] == [2, 1]
    newer, older = window.versions
    first = stream.versions.index(2)
    assert older.generated.computed == older.generated.seen == first - 1
    assert newer.generated.computed == newer.generated.seen == 300 - first
    assert (older.prompt.seen, newer.prompt.seen) == (3, 0)


async def test_counts_with_last_s_exclude_earlier_tokens(one_worker: StartServed) -> None:
    """With `last_s`, the counts exclude earlier tokens, and the answer contains the length of the window."""
    async with one_worker() as (rb, *_):
        await rb.complete(short("r"))
        await asked_until(rb, lambda window: window.generated.computed == 2, last_s=60.0)
        later = await asked_until(rb, lambda window: not window.versions, last_s=1.0)

    assert later.window.seconds <= 10.0


async def test_a_fleet_of_several_models_requires_a_model_name(nats_url: str, fleet: str) -> None:
    """A fleet of several models requires a model name, because counts of different models are not added up."""
    async with controlled(nats_url, fleet, "a", "b", models={"a": "m", "b": "n"}) as control:
        await control.rb.fleet.wait_for_workers(2)
        with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, n"):
            await control.rb.fleet.experts()
        with pytest.raises(InvalidRequest, match="last_s"):
            await control.rb.fleet.experts("m", last_s=-1)
        with pytest.raises(InvalidRequest, match=r"last_s is 999.*to 120"):
            await control.rb.fleet.experts("m", last_s=999)
