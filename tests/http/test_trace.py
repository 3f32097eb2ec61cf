"""The trace that an HTTP request belongs to."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from nats.aio.msg import Msg
from starlette.datastructures import Headers

import rollbus
from rollbus.bus.nats.connection import subscribe
from rollbus.frontend.http.requests import given_trace
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.messages import KvTransfer, decode_frame
from rollbus.workers.engines.synthetic.config import SyntheticConfig
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
        # Of a later version, the known part counts.
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
def test_an_invalid_traceparent_counts_as_none(given: list[str], expected: str | None) -> None:
    """As W3C Trace Context requires, malformed, forbidden and repeated traceparent values count as none."""
    trace = given_trace(_headers("traceparent", given), is_trusted=True)

    assert (trace and trace.traceparent) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=1"], "a=1"),
        ([" a=1 ,\tb@c=2 3 ", "", "d/e=~"], "a=1,b@c=2 3,d/e=~"),
        ([","], None),
        (["a=1,B=2"], None),
        (["a=1", "a=2"], None),
        (["a=é"], None),
        ([",".join(f"k{i}=1" for i in range(32))], ",".join(f"k{i}=1" for i in range(32))),
        ([",".join(f"k{i}=1" for i in range(33))], None),
        # Above the length that all systems forward, whole members are removed from the end.
        ([f"a={'1' * 250},b={'2' * 250},c=3456,d=7"], f"a={'1' * 250},b={'2' * 250},c=3456"),
        ([f"a={'1' * 257}"], None),
    ],
)
def test_an_invalid_tracestate_counts_as_none(given: list[str], expected: str | None) -> None:
    """A tracestate with malformed, repeated or too many members counts as none, but the trace remains."""
    headers = Headers(raw=[(b"traceparent", f"00-{IDS}-01".encode()), *_headers("tracestate", given).raw])

    trace = given_trace(headers, is_trusted=True)

    assert trace == (f"00-{IDS}-01", expected)
    assert given_trace(_headers("tracestate", given), is_trusted=True) is None


@pytest.mark.parametrize("flags", ["00", "01", "03", "ff"])
def test_trace_flags_are_forwarded_only_from_trusted_senders(flags: str) -> None:
    """The ids of a trace are always forwarded, its flags only if the sender is trusted."""
    headers = _headers("traceparent", [f"00-{IDS}-{flags}"])

    assert given_trace(headers, is_trusted=False) == (f"00-{IDS}-00", None)
    assert given_trace(headers, is_trusted=True) == (f"00-{IDS}-{flags}", None)


def _headers(name: str, given: list[str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode("latin-1")) for value in given])


async def test_every_attempt_has_the_trace_of_the_header(nats_url: str, fleet: str) -> None:
    """The trace of the header reaches both engines of a resumed request, and the first chunk of each attempt has it."""
    seen: list[tuple[str | None, str | None]] = []
    back: list[tuple[int, str | None]] = []

    async def read(message: Msg) -> None:
        back.extend((chunk.attempt, chunk.traceparent) for chunk in decode_frame(message.data).chunks)

    async with (
        opened(nats_url) as nats,
        spied_worker(nats_url, fleet, "a", seen) as first,
        http_before(nats_url, fleet, Settings(trusts_traceparent=True)) as http,
    ):
        await http.own.fleet.wait_for_workers()
        await subscribe(nats, f"rb.v1.{fleet}.frame.*.*", read)
        await nats.flush()
        body = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
        async with http.client.stream(
            "POST",
            "/inference/v1/generate",
            json=body,
            headers={"traceparent": f"cc-{IDS}-01-more", "tracestate": "a=1, b=2"},
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with spied_worker(nats_url, fleet, "b", seen):
                await http.own.fleet.wait_for_workers(2)
                first.stop()
                *_, done = [line async for line in lines if line]

    trace = f"00-{IDS}-01"
    assert done == "data: [DONE]"
    assert seen == [(trace, "a=1,b=2")] * 2
    for attempt in (0, 1):
        of_attempt = [found for at, found in back if at == attempt]
        assert len(of_attempt) > 1
        assert of_attempt == [trace, *[None] * (len(of_attempt) - 1)]


@contextlib.asynccontextmanager
async def spied_worker(
    nats_url: str, fleet: str, worker_id: str, seen: list[tuple[str | None, str | None]]
) -> AsyncIterator[Worker]:
    """Run a worker whose engine records the traces of its requests."""
    config = SyntheticConfig(step_s=0.05)
    async with synthetic_worker(nats_url, fleet, config=config, worker_id=worker_id) as (worker, engine):
        add = engine.add

        async def spy(key: str, request: rollbus.GenerateRequest, kv: KvTransfer | None = None) -> None:
            seen.append((request.traceparent, request.tracestate))
            await add(key, request, kv)

        engine.add = spy  # type: ignore[method-assign]
        yield worker
