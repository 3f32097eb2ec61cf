"""The trace of a request from an HTTP client to the engine, as a collector receives it."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler

import rollbus
from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.tracing import names
from rollbus.bus.tracing.spans import make_tracer
from rollbus.frontend.http import Settings
from rollbus.schemas.errors import RequestTimeout
from rollbus.schemas.messages import KvTransfer
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.request_spans import RequestSpans
from rollbus.workers.worker import Worker
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.processes import LASTING, worker_process
from tests.support.waits import ENGINE_STARTS_S, SOON_S, UNHURRIED_LEASE_S, until_true
from tests.tracing.otlp import Collector, collector

CALLER = "b7ad6b7169203331"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SERVER, CLIENT, PRODUCER, CONSUMER, INTERNAL = 2, 3, 4, 5, 1
SLOW = {"step_s": 0.02}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that receives the spans of all traced programs of the test."""
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


def check_times(collected: Collector) -> None:
    """Assert that spans end after their start, contain their events, and lie within a parent of the same process.

    A call may end shortly after its HTTP request, which ends with the last token: another thread ends the call.
    """
    by_id = {span.span_id: span for span in collected.spans}
    for span in collected.spans:
        assert span.start_ns <= span.end_ns
        assert all(span.start_ns <= at <= span.end_ns for _, at in span.events)
        parent = by_id.get(span.parent_id)
        if parent is not None and parent.service == span.service:
            assert parent.start_ns <= span.start_ns
            assert span.end_ns <= parent.end_ns or parent.kind == SERVER


async def test_a_request_that_is_resumed_is_one_trace(nats_url: str, fleet: str, collected: Collector) -> None:
    """A trace has HTTP, client, queue, worker and engine.

    After a kill, it has a resume with a link to the lost attempt.
    """
    body = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
    async with (
        http_before(nats_url, fleet, Settings(otel=True, trusts_traceparent=True)) as http,
        worker_process(nats_url, fleet, "--otel", "--lease-s", "2", "--worker-id", "a", engine_args=SLOW) as doomed,
    ):
        await http.own.fleet.wait_for_workers()
        async with http.client.stream("POST", "/inference/v1/generate", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            # The worker has not yet sent all tokens.
            doomed.kill()
            async with worker_process(nats_url, fleet, "--otel", *LASTING, "--worker-id", "b", engine_args=SLOW):
                *_, done = [line async for line in lines if line]
                await collected.until("engine", 1)
    assert done == "data: [DONE]"

    [server], [call], [resume] = collected.named("POST"), collected.named("text_completion"), collected.named("resume")
    lost, waited = collected.named("queue")
    [worker], [engine] = collected.named("worker"), collected.named("engine")
    assert len(collected.spans) == 7
    assert {span.trace_id for span in collected.spans} == {TRACE}
    assert {span.tracestate for span in (server, call, resume, lost, waited)} == {"vendor=1"}
    assert [server.parent_id, call.parent_id, resume.parent_id] == [CALLER, server.span_id, call.span_id]
    assert [lost.parent_id, waited.parent_id] == [call.span_id, resume.span_id]
    assert [worker.parent_id, engine.parent_id] == [resume.span_id, worker.span_id]
    assert resume.links == [(TRACE, lost.span_id)]
    kinds = [span.kind for span in (server, call, lost, resume, waited, worker, engine)]
    assert kinds == [SERVER, CLIENT, PRODUCER, INTERNAL, PRODUCER, CONSUMER, INTERNAL]
    assert server.attributes["http.route"] == "/inference/v1/generate"
    assert server.attributes["http.response.status_code"] == 200
    assert call.attributes["gen_ai.usage.output_tokens"] == 60
    assert call.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert call.attributes["rollbus.workers"] == ["a", "b"]
    assert call.attributes["rollbus.attempts"] == 2
    assert resume.attributes["rollbus.lost_worker"] == "a"
    assert resume.attributes["error.type"] == "worker_lost"
    assert [span.attributes["rollbus.worker"] for span in (lost, waited, worker)] == ["a", "b", "b"]
    assert [span.attributes["rollbus.lane"] for span in (lost, waited, worker)] == ["normal", "resume", "resume"]
    assert engine.attributes["gen_ai.usage.input_tokens"] > 2
    assert "first_token" in [name for name, _ in engine.events]
    assert {span.service for span in (worker, engine)} == {"rollbus-worker"}
    check_times(collected)


class Traced:
    """A client and a worker in this process that export to one provider."""

    def __init__(self, rb: rollbus.Client, exporter: InMemorySpanExporter) -> None:
        self.rb = rb
        self._exporter = exporter
        self.asked: list[GenerateRequest] = []
        """Requests that the engine received."""

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the spans whose names start with `name`."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(name)]


@contextlib.asynccontextmanager
async def traced(nats_url: str, fleet: str, sampler: Sampler | None = None) -> AsyncIterator[Traced]:
    """Run a client and a worker with a provider of this sampler."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = make_tracer(provider, service_name="")
    assert tracer is not None
    spans, engine = RequestSpans(tracer, worker="w", model="m"), SyntheticEngine()
    config = WorkerConfig(
        nats_url=nats_url, fleet=fleet, model="m", worker_id="w", lease_s=UNHURRIED_LEASE_S, listen_s=0
    )
    worker = Worker(config, engine, spans.export)
    async with asyncio.TaskGroup() as tasks, rollbus.connect(nats_url, fleet=fleet, tracing=provider) as rb:
        tasks.create_task(worker.run())
        found, add = Traced(rb, exporter), engine.add

        async def spy(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
            found.asked.append(request)
            await add(key, request, kv)

        engine.add = spy  # type: ignore[method-assign]
        await rb.fleet.wait_for_workers()
        try:
            yield found
        finally:
            worker.stop()


async def test_a_call_with_several_samples_has_one_span(nats_url: str, fleet: str) -> None:
    """A call with n samples has one span.

    Each sample has a queue, a worker and an engine span with its child number.
    """
    request = GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    async with traced(nats_url, fleet) as found:
        generation = await found.rb.complete(request)
        await until_true(lambda: len(found.spans("engine")) == 3)

        assert generation.request is request
        [call] = found.spans("text_completion")
        assert call.parent is None
        assert call.attributes["gen_ai.request.choice.count"] == 3
        assert call.attributes["gen_ai.usage.output_tokens"] == 12
        assert call.attributes["gen_ai.usage.input_tokens"] == 3
        assert call.attributes["rollbus.weight_versions"] == (0,)
        for name in ("queue", "worker"):
            spans = found.spans(name)
            assert {(span.attributes or {})["rollbus.child"] for span in spans} == {0, 1, 2}
            assert {span.parent.span_id for span in spans if span.parent} == {call.context.span_id}
        workers = {span.context.span_id for span in found.spans("worker") if span.context}
        assert {span.parent.span_id for span in found.spans("engine") if span.parent} == workers
        assert found.rb.stats().spans_exported == 4


async def test_spans_contain_no_part_of_a_prompt(nats_url: str, fleet: str) -> None:
    """Spans contain no session, no salt, no token ids, and only listed attributes."""
    request = GenerateRequest(prompt_token_ids=[7], session_id="secret session", cache_salt="secret salt")
    async with traced(nats_url, fleet) as found:
        await found.rb.complete(request)
        await until_true(lambda: found.spans("engine"))

        text = " ".join(span.to_json() for span in found.spans())
        assert "secret" not in text
        known = {getattr(names, name) for name in filter(str.isupper, vars(names))}
        assert {name for span in found.spans() for name in span.attributes or ()} <= known


async def test_a_call_that_is_not_sampled_exports_no_span(nats_url: str, fleet: str) -> None:
    """A call that is not sampled exports no span, also from workers that follow the flag.

    Its trace context is passed on.
    """
    async with traced(nats_url, fleet, ParentBased(ALWAYS_OFF)) as found:
        await found.rb.complete(GenerateRequest(prompt_token_ids=[1]))
        given = f"00-{TRACE}-{CALLER}-00"
        await found.rb.complete(GenerateRequest(prompt_token_ids=[1], traceparent=given, tracestate="v=1"))

        assert found.spans() == []
        first, second = found.asked
        assert str(first.traceparent).endswith("-00")
        assert str(second.traceparent).startswith(f"00-{TRACE}-")
        assert str(second.traceparent).endswith("-00")
        assert (first.tracestate, second.tracestate) == (None, "v=1")


async def test_a_call_is_a_child_of_the_active_span(nats_url: str, fleet: str) -> None:
    """A call inside a span of the trainer is its child, unless the request names another trace."""
    async with traced(nats_url, fleet) as found:
        with TracerProvider().get_tracer("trainer").start_as_current_span("step") as step:
            await found.rb.complete(GenerateRequest(prompt_token_ids=[1]))
            other = f"00-{TRACE}-{CALLER}-01"
            await found.rb.complete(GenerateRequest(prompt_token_ids=[1], traceparent=other))

        inside, outside = found.spans("text_completion")
        assert inside.parent.span_id == step.get_span_context().span_id
        assert f"{outside.parent.span_id:016x}" == CALLER


async def test_calls_that_fail_have_the_code_of_their_error(nats_url: str, fleet: str) -> None:
    """A call that times out has the error code `timeout`. The worker's span ends by the client's abort."""
    async with traced(nats_url, fleet) as found:
        endless = SamplingParams(max_tokens=1_000_000, ignore_eos=True)
        with pytest.raises(RequestTimeout):
            await found.rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=endless, model="m", timeout_s=2))
        await until_true(lambda: found.spans("worker"))

        [call] = found.spans("text_completion")
        assert (call.attributes or {})["error.type"] == "timeout"
        assert call.status.description == "timeout"
        [worker] = found.spans("worker")
        assert (worker.attributes or {})["rollbus.worker"] == "w"


@pytest.mark.parametrize("sampler", ["always_on", "traceidratio"])
async def test_the_traceparent_of_an_untrusted_client_becomes_a_link(
    nats_url: str, fleet: str, collected: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """An untrusted client's traceparent becomes a link.

    The service samples by its own rule and id, and ignores an invalid traceparent.
    """
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    # Every ratio above zero samples this id.
    stranger = f"00-{'0' * 31}1-{CALLER}-01"
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    given = [stranger, f"00-{TRACE}-{CALLER}-00", "garbage", "00-" + "f" * 60_000, f"{stranger}, {stranger}"]
    async with (
        synthetic_worker(nats_url, fleet),
        http_before(nats_url, fleet, Settings(otel=True)) as http,
    ):
        await http.own.fleet.wait_for_workers()
        for value in given:
            headers = {"traceparent": value, "tracestate": "V=1" if value == "garbage" else "v=1"}
            answer = await http.client.post("/inference/v1/generate", json=body, headers=headers)
            assert answer.status_code == 200

    spans = collected.named("POST")
    if sampler == "traceidratio":
        assert collected.spans == []
        return
    assert [span.links for span in spans] == [
        [(f"{'0' * 31}1", CALLER)],
        [(TRACE, CALLER)],
        *([[]] * 3),
    ]
    assert {span.parent_id for span in spans} == {""}
    assert len({span.trace_id for span in spans} - {TRACE, f"{'0' * 31}1"}) == len(given)
    assert {span.tracestate for span in collected.spans} == {""}


async def test_requests_are_served_without_a_collector(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collector, requests are served, lost spans are counted, and closing the client takes bounded time."""
    # No program listens at this port, which is reserved for discarding.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with synthetic_worker(nats_url, fleet), rollbus.connect(nats_url, fleet=fleet, tracing=True) as rb:
        await rb.fleet.wait_for_workers()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(rb.complete(GenerateRequest(prompt_token_ids=[1])))
        await until_true(lambda: rb.stats().spans_failed)
        assert rb.stats().spans_exported == 0
        assert (await rb.complete(GenerateRequest(prompt_token_ids=[1]))).error is None
    await until_true(lambda: not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate()))


# The trace of a request to a vLLM worker.


ENGINE_ARGS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}


@pytest.mark.vllm
async def test_a_trace_of_a_real_engine_has_queue_worker_and_engine_below_the_call(
    nats_url: str, fleet: str, tiny_moe_float32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has queue, worker and engine below the call, with the engine's first token and cache hits."""
    # This import loads vLLM's launcher.
    from tests.support.real_fleet import ForkedWorker

    prompt, sampling = list(range(1, 300)), SamplingParams(max_tokens=8, ignore_eos=True)
    with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        worker = ForkedWorker(
            *("--nats", nats_url, "--fleet", fleet, "--listen-s", "0", "--otel", "--no-prove-reload", *LASTING),
            *("--model", str(tiny_moe_float32), "--served-model-name", "m", "--engine-args", json.dumps(ENGINE_ARGS)),
        )
        try:
            async with rollbus.connect(nats_url, fleet=fleet, tracing=True) as rb:
                await rb.fleet.wait_for_workers(timeout_s=ENGINE_STARTS_S)
                for _ in range(2):
                    await rb.complete(GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
                await collected.until("engine", 2)
        finally:
            worker.terminate()
            await asyncio.to_thread(worker.wait, SOON_S)

    first, second = collected.named("text_completion")
    engines = collected.named("engine")
    workers = {span.span_id: span.parent_id for span in collected.named("worker")}
    assert [workers[span.parent_id] for span in engines] == [first.span_id, second.span_id]
    assert len({span.trace_id for span in collected.spans}) == 2
    for engine in engines:
        assert engine.attributes["gen_ai.usage.output_tokens"] == 8
        assert [name for name, _ in engine.events] == ["prefilled", "first_token"]
    assert engines[1].attributes["gen_ai.usage.cache_read.input_tokens"] > 0
