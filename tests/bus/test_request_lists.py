"""`rb.fleet.requests`: the lists of running, slowest, failed and resumed requests."""

import asyncio

import pytest

import rollbus
from rollbus.schemas.errors import InvalidRequest, RequestRejected
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.hand_control import controlled
from tests.support.processes import worker_process
from tests.support.requests import endless, greedy, short, start_stream
from tests.support.waits import until

SLOW = {"step_s": 0.005, "max_model_len": 10_000_000}


def ids(found: rollbus.RequestList) -> list[str]:
    """Return the ids of the listed requests."""
    return [each.given_id or each.request_id for each in found.timelines]


async def test_running_requests_are_listed_by_their_time_without_a_token(nats_url: str, fleet: str) -> None:
    """A request that makes no token comes first, with its tokens so far. Filters choose client, worker and number."""
    slow = SyntheticConfig.from_args(SLOW)
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="alice") as alice,
        rollbus.connect(nats_url, fleet=fleet, client="bob") as bob,
        synthetic_worker(nats_url, fleet, worker_id="a", config=slow),
        asyncio.TaskGroup() as tasks,
    ):
        await alice.fleet.wait_for_workers()
        paused = await start_stream(tasks, alice, endless("a request / 1"))
        await alice.fleet.pause(workers=["a"])
        async with synthetic_worker(nats_url, fleet, worker_id="b", config=slow):
            await bob.fleet.wait_for_workers()
            running = await start_stream(tasks, bob, endless("r2"))
            found = await bob.fleet.requests()
            of_bob = await bob.fleet.requests(client="bob")
            of_a = await bob.fleet.requests(workers=["a"])
            first = await bob.fleet.requests(limit=1)
            await bob.fleet.abort(["a request / 1", "r2"])
            await paused.reading
            await running.reading
            nothing = await bob.fleet.requests()

    assert ids(found) == ["a request / 1", "r2"]
    held, other = found.timelines
    assert held.progress.idle_s > other.progress.idle_s
    assert held.progress.seconds >= held.progress.idle_s
    assert held.progress.tokens > 0
    assert (held.worker, held.client, held.events[-1].reason) == ("a", "alice", "pause")
    assert (ids(of_bob), ids(of_a), ids(first)) == (["r2"], ["a request / 1"], ["a request / 1"])
    assert (found.left_out, first.left_out, found.workers_answered) == (0, 1, 2)
    assert nothing.timelines == ()


async def test_failed_and_slow_requests_are_listed(one_worker: StartServed) -> None:
    """`failed` has requests that ended with an error, the last first, and `slowest` the longest first."""
    async with one_worker(config=SyntheticConfig(step_s=0.005)) as (rb, *_):
        for name in ("f1", "f2"):
            with pytest.raises(RequestRejected):
                await rb.complete(short(name, lora="missing"))
        await rb.complete(short("fast"))
        await rb.complete(greedy(5, 40, request_id="slow"))
        failed = await rb.fleet.requests("failed")
        slowest = await rb.fleet.requests("slowest")
        resumed = await rb.fleet.requests("resumed")

    assert ids(failed) == ["f2", "f1"]
    assert [each.events[-1].reason for each in failed.timelines] == ["unsupported"] * 2
    assert ids(slowest) == ["slow", "fast"]
    assert resumed.timelines == ()


async def test_a_request_that_outlived_its_worker_is_listed_as_resumed(nats_url: str, fleet: str) -> None:
    """After kill -9 of its worker, a request is in the list `resumed` of the next worker, and not in `failed`."""
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, "--worker-id", "a", engine_args=SLOW) as doomed,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        stream = await start_stream(tasks, rb, endless("r"))
        async with synthetic_worker(nats_url, fleet, worker_id="b", config=SyntheticConfig.from_args(SLOW)):
            await rb.fleet.wait_for_workers(2)
            doomed.kill()

            async def resumed() -> list[str]:
                return ids(await rb.fleet.requests("resumed", workers=["b"])) if len(rb.fleet.workers) == 1 else []

            await until(resumed, ["r"])
            failed = await rb.fleet.requests("failed")
            await rb.fleet.abort(["r"])
            await stream.reading

    assert failed.timelines == ()


async def test_a_list_names_workers_of_an_earlier_release(nats_url: str, fleet: str) -> None:
    """A worker that does not know lists receives no question and is named. A wrong list is refused by name."""
    async with controlled(nats_url, fleet, "old") as control:
        with pytest.raises(InvalidRequest, match="running"):
            await control.rb.fleet.requests("fastest")  # type: ignore[arg-type]
        found = await control.rb.fleet.requests()

        assert control.count("read_request") == 0
    assert (found.timelines, list(found.silent)) == ((), ["old"])
