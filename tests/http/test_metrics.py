"""The metrics of `/metrics`. Some tests call the service without HTTP, so that no route affects the counts."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

import rollbus
from rollbus.frontend.http import Settings, metrics
from rollbus.frontend.http.calls import Admission
from rollbus.frontend.http.metrics import MAX_VERSIONS, FleetCollector, GenerationTimer, HttpRequestRecord, Metrics
from rollbus.frontend.http.service import Service
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import ClientState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.metrics_doc import DOC, rows, with_table
from tests.http.support import Serve
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_worker import chunk, failure, hand_worker, request
from tests.support.requests import short

TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
TO_FIRST, BETWEEN = "rollbus_http_time_to_first_token_seconds_count", "rollbus_http_inter_token_seconds_count"
W = frozenset({("worker", "w"), ("model", "synthetic")})
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """Return all samples by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return one sample."""
    return samples[name, frozenset(labels.items())]


@contextlib.asynccontextmanager
async def a_service(nats_url: str, fleet: str) -> AsyncIterator[Service]:
    """Yield the service that routes use, without HTTP."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        yield Service(rb, Settings(), Admission(8))


def a_request() -> Request:
    """Return the HTTP request of a client that never disconnects."""
    connection = SimpleNamespace(is_lost=False, waiting=[])
    return Request({"type": "http", "headers": [], "state": {"waited_s": 0.0, "connection": connection}})


def wanted(max_tokens: int, n: int = 1, **fields: object) -> rollbus.GenerateRequest:
    """Return a request for `max_tokens` tokens."""
    sampling = rollbus.SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
    return rollbus.GenerateRequest(prompt_token_ids=[1, 2, 3], model="synthetic", sampling=sampling, **fields)  # type: ignore[arg-type]


def a_chunk(weight_version: int) -> rollbus.Chunk:
    """Return a chunk with one token of these weights and its row."""
    return rollbus.Chunk(
        request_id="r",
        attempt=0,
        child=0,
        chunk_index=0,
        weight_version=weight_version,
        token_ids_data=b"\0\0\0\0",
        routed_experts=rollbus.RoutedExperts.from_rows(np.zeros((1, 1, 1), "u1"), 0),
    )


async def test_the_fleet_is_in_one_scrape(serve: Serve) -> None:
    """`/metrics` has the gauges of each worker's presence, the queue of each lane, and a count of HTTP requests.

    Values that an engine does not report have no series, instead of a series with 0.
    """
    async with serve(weight_version=3, worker_id="w") as http:
        await http.client.get("/v1/models")
        await http.client.get("/nowhere")
        answer = await http.client.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    found = parse(answer.text)
    assert value(found, "rollbus_bus_up") == 1
    assert value(found, "rollbus_worker_weight_version", worker="w", model="synthetic") == 3
    assert value(found, "rollbus_worker_state", worker="w", model="synthetic", state="serving") == 1
    for name in ("in_flight", "queued", "held_bytes"):
        assert value(found, f"rollbus_worker_{name}", worker="w", model="synthetic") == 0
    assert value(found, "rollbus_queue_waiting", model="synthetic", lane="normal") == 0
    requests = "rollbus_http_requests_total"
    assert value(found, requests, method="GET", route="/v1/models", status="200", model="") == 1
    assert value(found, requests, method="any", route="none", status="404", model="") == 1
    assert value(found, "rollbus_client_missing_frames_total") == 0
    assert {name for name, _ in found if name.startswith("vllm:")} == {
        *("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("vllm:num_preemptions_total", "vllm:cache_config_info"),
    }


async def test_the_page_lists_exactly_the_exported_metrics(serve: Serve) -> None:
    """docs/metrics.md lists exactly the exported metrics, with kind, labels and meaning."""
    async with serve() as http:
        text = (await http.client.get("/metrics")).text
    page = DOC.read_text()
    listed = {name: (kind, meaning) for name, kind, _, meaning in rows()}

    assert with_table(page) == page
    assert {name: kind for name, (kind, _) in listed.items()} == dict(TYPE.findall(text))
    assert not [name for name, (_, meaning) in listed.items() if not meaning]


async def test_the_scrape_counts_requests_and_stalls_of_all_clients(serve: Serve, nats_url: str, fleet: str) -> None:
    """Workers count the requests of all clients, and also stalls of clients that grant no credit."""
    async with (
        serve(worker_id="w", config=SyntheticConfig(num_layers=64)) as http,
        hand_client(nats_url, fleet, answers=False) as slow,
    ):
        await http.rb.complete(wanted(4))
        await slow.announce(lease_s=60.0)
        await slow.enqueue(wanted(20_000))
        found: Samples = {}
        while not found.get(("rollbus_worker_credit_stalls_total", W)):
            found = parse((await http.client.get("/metrics")).text)
        await slow.announce(ClientState.CLOSED)

    assert found["rollbus_worker_credit_stalls_total", W] == 1
    assert found["rollbus_worker_requests_total", W] == 2
    assert found["rollbus_worker_ended_total", W] >= 1
    assert found["rollbus_worker_prompt_tokens_total", W] == 6
    assert found["rollbus_worker_generated_tokens_total", W] > 4
    assert found["rollbus_worker_routing_bytes_total", W] > 0
    assert found["rollbus_worker_time_to_first_token_seconds_count", W] == 2
    assert found["rollbus_worker_time_to_first_token_seconds_sum", W] > 0
    assert found["rollbus_worker_inter_token_seconds_sum", W] > 0
    assert found["rollbus_worker_held_bytes", W] > 0
    assert not [name for name, _ in found if name.startswith(("rollbus_http_generat", "rollbus_client_queue_wait"))]


async def test_engines_have_the_metric_names_of_vllm(serve: Serve) -> None:
    """Engines have the metric names, kinds and labels of vLLM's server. Each worker is an engine."""
    vllm = frozenset({("model_name", "synthetic"), ("engine", "w"), ("worker", "w")})
    config = SyntheticConfig(prefix_cache=True)
    prompt: dict[str, object] = {
        "model": "synthetic",
        "token_ids": [*range(3, 103)],
        "sampling_params": {"max_tokens": 3},
    }
    async with serve(worker_id="w", config=config) as http:
        for _ in range(2):
            assert (await http.client.post("/inference/v1/generate", json=prompt)).status_code == 200
        found: Samples = {}
        while not found.get(("vllm:prefix_cache_hits_total", vllm)):
            text = (await http.client.get("/metrics")).text
            found = parse(text)

    kinds = dict(TYPE.findall(text))
    assert {name: kind for name, kind in kinds.items() if name.startswith("vllm:")} == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:num_preemptions_total": "counter",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:cache_config_info": "gauge",
    }
    assert found["vllm:cache_config_info", vllm | {("kv_cache_size_tokens", str(config.kv_cache_tokens))}] == 1
    assert found["vllm:num_requests_running", vllm] == found["vllm:num_requests_waiting", vllm] == 0
    assert found["vllm:kv_cache_usage_perc", vllm] == found["vllm:num_preemptions_total", vllm] == 0
    assert found["vllm:prefix_cache_queries_total", vllm] >= 200
    assert found["vllm:prefix_cache_hits_total", vllm] == 96
    ratio = 96 / found["vllm:prefix_cache_queries_total", vllm]
    assert found["rollbus_worker_prefix_cache_hit_ratio", W] == pytest.approx(ratio)
    assert found["rollbus_worker_prefill_tokens_per_second", W] > 0
    assert found["rollbus_worker_decode_tokens_per_second", W] > 0


async def test_placements_of_requests_are_counted_by_reason(serve: Serve) -> None:
    """The service counts its placements by reason. The worker counts its requests and its cached prompt tokens."""
    prompt = {"model": "synthetic", "token_ids": [*range(3, 1027)], "sampling_params": {"max_tokens": 3, "n": 4}}
    config = SyntheticConfig(prefix_cache=True)
    async with serve(worker_id="w", config=config) as http:
        for _ in range(2):
            assert (await http.client.post("/inference/v1/generate", json=prompt)).status_code == 200
        found: Samples = {}
        while found.get(("rollbus_worker_requests_total", W)) != 8 or found["rollbus_worker_in_flight", W]:
            found = parse((await http.client.get("/metrics")).text)

    placed = "rollbus_client_placed_total"
    reasons = {dict(labels)["reason"]: count for (name, labels), count in found.items() if name == placed}
    assert {"placed_prefix", "placed_group", "placed_session", "queued"} <= reasons.keys()
    assert sum(reasons.values()) == 8
    refused = found["rollbus_worker_placements_refused_total", W]
    assert reasons["placed_group"] > 0
    assert value(found, "rollbus_client_placements_refused_total") == refused
    assert found["rollbus_worker_placed_total", W] == 8 - reasons["queued"] - refused
    by_worker = {reason: found.get((f"rollbus_worker_{reason}_total", W), 0) for reason in reasons.keys() - {"queued"}}
    assert sum(by_worker.values()) == found["rollbus_worker_placed_total", W]
    assert by_worker["placed_group"] > 0
    cached = found["rollbus_worker_cached_prompt_tokens_total", W]
    recomputed = found["rollbus_worker_recomputed_prompt_tokens_total", W]
    assert min(cached, recomputed) > 0
    assert cached + recomputed == found["rollbus_worker_prompt_tokens_total", W]


async def test_requests_in_the_queue_count_as_waiting_at_an_engine(serve: Serve) -> None:
    """Requests in the queue count as waiting at an engine, because clients like prime-rl send more if none waits."""
    queue = frozenset({("model_name", "synthetic"), ("engine", "queue."), ("worker", "")})
    async with serve(worker_id="w") as http, asyncio.TaskGroup() as tasks:
        await http.rb.fleet.pause()
        asked = [tasks.create_task(http.rb.complete(short(f"r{i}"))) for i in range(5)]
        found: Samples = {}
        # A pull from before the pause may deliver one of the five requests.
        while found.get(("vllm:num_requests_waiting", queue), 0) < 4:
            found = parse((await http.client.get("/metrics")).text)
        await http.rb.fleet.resume()
        await asyncio.wait(asked)
        while found["vllm:num_requests_waiting", queue]:
            found = parse((await http.client.get("/metrics")).text)


async def test_the_time_in_the_queue_has_a_histogram(nats_url: str, fleet: str) -> None:
    """The queue wait of this service's requests is a histogram by model."""
    name, model = "rollbus_client_queue_wait_seconds", frozenset({("model", "synthetic")})
    async with synthetic_worker(nats_url, fleet), a_service(nats_url, fleet) as service:
        await service.complete(a_request(), wanted(1, n=3))
        found = parse((await service.metrics.text()).decode())

    assert found[f"{name}_count", model] == 3
    assert found[f"{name}_sum", model] > 0
    assert found[f"{name}_bucket", model | {("le", "+Inf")}] == found[f"{name}_bucket", model | {("le", "1800.0")}] == 3


async def test_streamed_and_other_requests_count_the_same_tokens(nats_url: str, fleet: str) -> None:
    """Streamed and other requests count the same tokens and rows. Only streams measure times of tokens."""
    async with synthetic_worker(nats_url, fleet, weight_version=5), a_service(nats_url, fleet) as service:
        generation = await service.complete(a_request(), wanted(4, n=2))
        whole = parse((await service.metrics.text()).decode())
        chunks = [chunk async for _, chunks in service.chunks(a_request(), wanted(4, n=2)) for chunk in chunks]
        both = parse((await service.metrics.text()).decode())

    rows = sum(s.routed_experts.nbytes for s in (generation, *generation.siblings) if s.routed_experts is not None)
    assert rows > 0
    tokens = "rollbus_http_generated_tokens_total"
    for found, times in ((whole, 1), (both, 2)):
        assert value(found, tokens, model="synthetic", weight_version="5") == 8 * times
        assert value(found, "rollbus_http_prompt_tokens_total", model="synthetic") == 3 * times
        assert value(found, "rollbus_http_routing_bytes_total", model="synthetic", weight_version="5") == rows * times
        assert value(found, "rollbus_http_generations_total", model="synthetic", outcome="done") == times
        assert value(found, "rollbus_http_generations_in_flight", model="synthetic") == 0
    assert not [name for name, _ in whole if name in (TO_FIRST, BETWEEN)]
    assert value(both, TO_FIRST, model="synthetic", weight_version="5") == 2
    assert (
        value(both, BETWEEN, model="synthetic", weight_version="5") == sum(chunk.num_tokens > 0 for chunk in chunks) - 2
    )


async def test_abandoned_streams_and_invalid_requests_have_separate_outcomes(nats_url: str, fleet: str) -> None:
    """An abandoned stream and an invalid request have separate outcomes, and neither remains in flight."""
    async with synthetic_worker(nats_url, fleet), a_service(nats_url, fleet) as service:
        stream = service.chunks(a_request(), wanted(10_000))
        await anext(stream)
        under_way = parse((await service.metrics.text()).decode())
        await stream.aclose()
        unknown_id = rollbus.GenerateRequest(prompt_token_ids=[2**31 - 1], model="synthetic")
        with pytest.raises(rollbus.InvalidRequest):
            await service.complete(a_request(), unknown_id)
        found = parse((await service.metrics.text()).decode())

    assert value(under_way, "rollbus_http_generations_in_flight", model="synthetic") == 1
    assert value(found, "rollbus_http_generations_in_flight", model="synthetic") == 0
    for outcome in ("left", "invalid_request"):
        assert value(found, "rollbus_http_generations_total", model="synthetic", outcome=outcome) == 1


async def test_retries_are_counted_by_model(nats_url: str, fleet: str) -> None:
    """Each attempt after the first counts as a retry of the model."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        metrics = Metrics(rb)
        completing = tasks.create_task(rb.complete(request(2)))
        first = await worker.next_key()
        await worker.frame(0, chunk(first, 0, 7), admitted=(first,))
        await worker.acked(1)
        before = parse((await metrics.text()).decode())
        await worker.frame(1, failure(first, 1, ErrorCode.WORKER_STOPPED, total=1))
        second = await worker.next_key()
        await worker.frame(2, chunk(second, 0, 8, total=1), admitted=(second,))
        await completing
        found = parse((await metrics.text()).decode())

    assert "rollbus_client_retries_total" not in {name for name, _ in before}
    assert value(found, "rollbus_client_retries_total", model="m") == 1


async def test_a_failed_result_is_not_counted_as_done(nats_url: str, fleet: str) -> None:
    """A failed result that is returned, not raised, has the outcome of its error, and its tokens count."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        service = Service(rb, Settings(), Admission(8))
        completing = tasks.create_task(service.complete(a_request(), request(2), raises=False))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.frame(1, failure(key, 1, ErrorCode.TOO_STALE, total=1))
        generation = await completing
        found = parse((await service.metrics.text()).decode())
    outcomes = {dict(labels)["outcome"] for name, labels in found if name == "rollbus_http_generations_total"}
    assert outcomes == {str(generation.error.code)}


async def test_labels_are_bounded(nats_url: str, fleet: str) -> None:
    """The number of weight versions in labels is bounded, because old versions lose their series."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        service = Service(rb, Settings(), Admission(8))
        for version in range(3 * MAX_VERSIONS):
            progress = GenerationTimer(service.metrics, "m")
            progress.add(a_chunk(version))
            progress.add(a_chunk(version))
        found = parse((await service.metrics.text()).decode())

    for name in ("rollbus_http_generated_tokens_total", "rollbus_http_routing_bytes_total", TO_FIRST, BETWEEN):
        versions = [dict(labels)["weight_version"] for found_name, labels in found if found_name == name]
        assert sorted(map(int, versions)) == list(range(2 * MAX_VERSIONS, 3 * MAX_VERSIONS))


async def test_models_that_were_not_used_for_long_lose_their_series(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the maximum number of models, the one used least recently has no series; open requests keep theirs."""
    monkeypatch.setattr(metrics, "MAX_MODELS", 4)
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        counted = Service(rb, Settings(), Admission(8)).metrics
        with GenerationTimer(counted, "open", 1):
            for number in range(50):
                with (
                    HttpRequestRecord(counted, "POST", "/r") as seen,
                    GenerationTimer(counted, f"m{number}", 1) as progress,
                ):
                    seen.model = f"m{number}"
                    progress.add(a_chunk(0))
                    progress.add(a_chunk(0))
            found = parse((await counted.text()).decode())
        after = parse((await counted.text()).decode())

    assert {dict(labels).get("model") for _, labels in found} - {None} == {"open", "m47", "m48", "m49"}
    assert value(found, "rollbus_http_generations_in_flight", model="open") == 1
    assert value(after, "rollbus_http_generations_in_flight", model="open") == 0


async def test_an_unknown_model_is_no_label(serve: Serve) -> None:
    """Requests for unknown models are counted together with an empty model label."""
    async with serve() as http:
        for name in ("no", "nope"):
            body: dict[str, object] = {"model": name, "token_ids": [1], "sampling_params": {}}
            assert (await http.client.post("/inference/v1/generate", json=body)).status_code == 404
        found = parse((await http.client.get("/metrics")).text)
    labels = {"method": "POST", "route": "/inference/v1/generate", "status": "404", "model": ""}
    assert value(found, "rollbus_http_requests_total", **labels) == 2
    assert {dict(labels).get("model") for _, labels in found} <= {None, "", "synthetic"}


async def test_the_scrape_reports_a_bus_that_does_not_answer(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the bus does not answer, the scrape still ends and reports that the bus is down."""

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("rollbus.frontend.http.metrics.TIMEOUT_S", 0.01)
    monkeypatch.setattr(rollbus.Fleet, "state", never)
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        collector = FleetCollector(rb)
        assert await collector.ask() is None
        found = parse((await Metrics(rb).text()).decode())
    assert value(found, "rollbus_bus_up") == 0
