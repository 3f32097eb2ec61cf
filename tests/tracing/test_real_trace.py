"""The trace of a request to a vLLM worker."""

from pathlib import Path

import pytest

import rollbus
from rollbus import GenerateRequest, SamplingParams
from tests.support.otlp import collector
from tests.support.worker_process import LASTING, worker_process

ENGINE_ARGS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}


@pytest.mark.vllm
async def test_a_trace_of_a_real_engine_has_queue_worker_and_engine_below_the_call(
    nats_url: str, fleet: str, tiny_moe_float32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has queue, worker and engine below the call, with the engine's first token and cache hits."""
    prompt, sampling = list(range(1, 300)), SamplingParams(max_tokens=8, ignore_eos=True)
    with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        vllm = ("--model", str(tiny_moe_float32), "--engine", "vllm", "--no-prove-reload", "--served-model-name", "m")
        async with (
            worker_process(nats_url, fleet, "--otel", *LASTING, *vllm, engine_args=ENGINE_ARGS),
            rollbus.connect(nats_url, fleet=fleet, tracing=True) as rb,
        ):
            await rb.fleet.wait_for_workers()
            for _ in range(2):
                await rb.complete(GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
            await collected.until("engine", 2)

    first, second = collected.named("text_completion")
    engines = collected.named("engine")
    workers = {span.span_id: span.parent_id for span in collected.named("worker")}
    assert [workers[span.parent_id] for span in engines] == [first.span_id, second.span_id]
    assert len({span.trace_id for span in collected.spans}) == 2
    for engine in engines:
        assert engine.attributes["gen_ai.usage.output_tokens"] == 8
        assert [name for name, _ in engine.events] == ["prefilled", "first_token"]
    assert engines[1].attributes["gen_ai.usage.cache_read.input_tokens"] > 0
