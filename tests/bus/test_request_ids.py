"""Ids of the caller's own choice: kept in every result, and found by every command that names them."""

import asyncio

import pytest

from rollbus.bus.protocol.fleet.command_result import CommandIncomplete
from rollbus.schemas.errors import ErrorCode, RequestRejected
from rollbus.schemas.request import wire_id
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed
from tests.support.requests import endless, short
from tests.support.streams import start_stream

SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)
NAMES = ["gsm8k/test.1", "a b=c", "日本-😀", "x:y", "r" * 512]


@pytest.mark.parametrize("placement", [True, False])
async def test_results_have_the_ids_that_the_caller_chose(one_worker: StartServed, placement: bool) -> None:
    """Results, samples, chunks and traces have the caller's id, with and without the queue."""
    async with one_worker(options={"placement": placement}) as (rb, *_):
        for name in NAMES:
            assert (await rb.complete(short(name))).request_id == name
            assert {chunk.request_id async for chunk in rb.generate(short(name))} == {name}
            trace = await rb.fleet.timelines(name)
            assert trace.request_id == name
            assert {(each.request_id, each.given_id) for each in trace.timelines} == {(wire_id(name), name)}


@pytest.mark.parametrize("name", NAMES)
async def test_an_abort_by_the_caller_id_ends_the_request(one_worker: StartServed, name: str) -> None:
    """Clients and admins abort a request by the id that its caller chose, and the error of a second one names it."""
    async with one_worker(config=SLOW) as (rb, *_), asyncio.TaskGroup() as tasks:
        for abort in (rb.abort, rb.fleet.abort):
            stream = await start_stream(tasks, rb, endless(name))
            with pytest.raises(RequestRejected, match="already in use") as double:
                await rb.complete(short(name))
            assert (double.value.code, double.value.request_id) == (ErrorCode.DUPLICATE_REQUEST, name)
            ended = await abort([name])
            assert name in (ended if isinstance(ended, list) else next(iter(ended.applied.values())).request_ids or ())
            await stream.reading
        with pytest.raises(CommandIncomplete, match="none has") as nothing:
            await rb.fleet.abort([name])
    assert nothing.value.ledger.not_found == (name,)


async def test_equal_ids_of_two_scopes_are_two_requests(one_worker: StartServed) -> None:
    """Requests with one id and different scopes run at once, and a trace by the id has both."""
    async with one_worker() as (rb, *_):
        requests = [short("1", id_scope=scope) for scope in ("a", "b")]
        results = [result async for result in rb.complete_many(requests)]
        trace = await rb.fleet.timelines("1")

    assert [result.request_id for result in results] == ["1", "1"]
    assert len({each.request_id for each in trace.timelines}) == 2
