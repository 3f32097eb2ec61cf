"""Which trace a request over HTTP belongs to."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from nats.aio.msg import Msg
from starlette.datastructures import Headers

import rollbus
from rollbus.bus.nats.connection import subscribe
from rollbus.frontend.http.trace import traceparent_of
from rollbus.schemas.messages import KvTransfer, decode_frame
from rollbus.workers.engines.synthetic import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.http.support import http_before
from tests.support.connections import opened
from tests.support.fleet import synthetic_worker

IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([f"00-{IDS}-01"], f"00-{IDS}-01"),
        ([f" 00-{IDS}-00\t"], f"00-{IDS}-00"),
        # Of a later version what is known of it counts.
        ([f"cc-{IDS}-01"], f"00-{IDS}-01"),
        ([f"cc-{IDS}-01-what comes later"], f"00-{IDS}-01"),
        ([], None),
        ([""], None),
        (["nonsense"], None),
        ([f"00-{IDS}-01", f"00-{IDS}-01"], None),
        ([f"00-{IDS}-01-more"], None),
        ([f"00-{IDS}-01-"], None),
        ([f"00-{IDS}"], None),
        ([f"00-{IDS}-1"], None),
        ([f"ff-{IDS}-01"], None),
        ([f"cc-{IDS}-01.more"], None),
        ([f"00-{IDS.upper()}-01"], None),
        ([f"00-{'0' * 32}-{'b' * 16}-01"], None),
        ([f"00-{'a' * 32}-{'0' * 16}-01"], None),
    ],
)
def test_a_trace_is_taken_only_if_it_is_one(given: list[str], expected: str | None) -> None:
    """As W3C Trace Context says: malformed, forbidden and repeated values count as none."""
    headers = Headers(raw=[(b"traceparent", value.encode()) for value in given])

    assert traceparent_of(headers) == expected


async def test_a_trace_goes_through_every_attempt(nats_url: str, fleet: str) -> None:
    """From the header to both engines of a request that is resumed, and back in the first chunk of each attempt."""
    seen: list[str | None] = []
    back: list[tuple[int, str | None]] = []

    async def read(message: Msg) -> None:
        back.extend((chunk.attempt, chunk.traceparent) for chunk in decode_frame(message.data).chunks)

    async with (
        opened(nats_url) as nats,
        spied_worker(nats_url, fleet, "a", seen) as first,
        http_before(nats_url, fleet) as http,
    ):
        await http.own.fleet.wait_for_workers()
        await subscribe(nats, f"rb.v1.{fleet}.frame.*.*", read)
        await nats.flush()
        body = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
        async with http.client.stream(
            "POST", "/inference/v1/generate", json=body, headers={"traceparent": f"cc-{IDS}-01-more"}
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with spied_worker(nats_url, fleet, "b", seen):
                await http.own.fleet.wait_for_workers(2)
                first.stop()
                *_, done = [line async for line in lines if line]

    trace = f"00-{IDS}-01"
    assert done == "data: [DONE]"
    assert seen == [trace, trace]
    for attempt in (0, 1):
        of_attempt = [found for at, found in back if at == attempt]
        assert len(of_attempt) > 1
        assert of_attempt == [trace, *[None] * (len(of_attempt) - 1)]


@contextlib.asynccontextmanager
async def spied_worker(nats_url: str, fleet: str, worker_id: str, seen: list[str | None]) -> AsyncIterator[Worker]:
    """A worker whose engine notes the traces of its requests."""
    config = SyntheticConfig(step_s=0.05)
    async with synthetic_worker(nats_url, fleet, config=config, worker_id=worker_id) as (worker, engine):
        add = engine.add

        async def spy(key: str, request: rollbus.GenerateRequest, kv: KvTransfer | None = None) -> None:
            seen.append(request.traceparent)
            await add(key, request, kv)

        engine.add = spy  # type: ignore[method-assign]
        yield worker
