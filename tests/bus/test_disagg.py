"""Prefill and decode workers together return the result of a single worker, also after failures between the phases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.bus.client.client import runtime_of
from rollbus.bus.protocol.attempt import machine
from rollbus.bus.protocol.queue.prefill_queue import PrefillFallback
from rollbus.schemas.errors import NoWorkers
from rollbus.schemas.limits import DEFAULT_PREFILL_MIN_TOKENS
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import undisturbed
from tests.support.checkpoints import write_adapter
from tests.support.disagg import disaggregated, long, until_paired
from tests.support.fleet import served, synthetic_worker
from tests.support.invariants import assert_equal, check_results, check_stream

pytestmark = pytest.mark.usefixtures("unhurried")

LENGTHS = (1, 31, 32, 33, 100, 500)
ALONE = SyntheticConfig()


async def check_equal(
    results: list[rollbus.Generation], requests: list[GenerateRequest], config: SyntheticConfig
) -> None:
    """Check that each request has one result, which equals that of a single engine (I1 to I3)."""
    check_results(results, requests, legs=2)
    expected = await undisturbed(requests, config)
    for result in results:
        assert_equal(result, expected[result.request_id])


@pytest.mark.proves("P24")
@pytest.mark.parametrize("num_experts", [16, 300])
async def test_two_workers_return_the_result_of_a_single_worker(nats_url: str, fleet: str, num_experts: int) -> None:
    """A prefill and a decode worker return the result of a single worker.

    Prompts have 1 to 500 tokens. Rows start at the start, middle and end of the prompt, and have one or two bytes for
    each id. Both workers serve prompts of 32 and more tokens in one attempt, and transferred tokens count as cached.
    """
    config = SyntheticConfig(num_experts=num_experts)
    requests = [
        long(f"r-{length}-{start}-{copy}", length, routed_experts_prompt_start=start)
        for length in LENGTHS
        for start in sorted({0, length // 2, length})
        for copy in range(4)
    ]
    async with disaggregated(nats_url, fleet, prefill=config, decode=config) as fleet_of_two:
        results = [result async for result in fleet_of_two.rb.complete_many(requests)]
        await check_equal(results, requests, config)

        for result in results:
            is_long = result.prompt_len >= DEFAULT_PREFILL_MIN_TOKENS
            assert result.worker_ids == (("p", "d") if is_long else ("d",))
            assert result.attempts == 1
            assert result.cached_tokens == (result.prompt_len // 16 * 16 if is_long else 0)
            assert result.routed_experts.dtype == (np.uint8 if num_experts == 16 else np.dtype("<u2"))
        assert fleet_of_two.rb.stats().prefill_legs == 4 * 12
        assert fleet_of_two.fallbacks() == {}


async def test_all_sampling_options_give_the_result_of_a_single_worker(nats_url: str, fleet: str) -> None:
    """All sampling options give the result of a single worker.

    The requests use samples, prompt and top logprobs, stop tokens, minimum tokens, seeds, no logprobs, and no routed
    experts.
    """
    extras: list[dict[str, Any]] = [
        {"n": 3},
        {"prompt_logprobs": 2, "logprobs": 2},
        {"logprobs": None},
        {"min_tokens": 5, "stop_token_ids": list(range(0, 32_000, 40))},
        {"stop_token_ids": list(range(0, 32_000, 40)), "ignore_eos": False},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"seed": 7, "temperature": 1.0},
    ]
    requests = [
        GenerateRequest(
            request_id=f"r{number}-{copy}",
            prompt_token_ids=[copy, *range(60)],
            sampling=SamplingParams(**{"max_tokens": 30, "temperature": 0, "ignore_eos": True, **extra}),
            return_routed_experts=False if copy == 2 else None,
        )
        for number, extra in enumerate(extras)
        for copy in range(3)
    ]
    async with disaggregated(nats_url, fleet) as both:
        results = [result async for result in both.rb.complete_many(requests)]
        await check_equal(results, requests, ALONE)

        assert all(result.exact for result in results)
        assert both.fallbacks() == {"sampling": 3}
        # A request for one token has no decode phase, so it has no prefill phase either.
        assert both.rb.stats().prefill_legs == 3 * 3 + 3 * 5


async def test_a_stream_has_chunks_of_both_workers_and_a_single_end(nats_url: str, fleet: str) -> None:
    """A stream consists of one chunk of the prefill worker and then chunks of the decode worker.

    Its one end has no KV params.
    """
    request = long("r")
    async with disaggregated(nats_url, fleet) as both:
        chunks = [chunk async for chunk in both.rb.generate(request)]

    check_stream(chunks, request)
    assert [chunk.worker_id for chunk in chunks] == ["p"] + ["d"] * 7
    assert chunks[-1].end.kv_params is None


async def test_short_prompts_skip_prefill(nats_url: str, fleet: str) -> None:
    """Prompts below `prefill_min_tokens` have no prefill phase, and do not count as fallbacks."""
    async with (
        disaggregated(nats_url, fleet) as both,
        rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=101) as other,
    ):
        await until_paired(other, "p", "d")
        assert (await other.complete(long("short", 100))).worker_ids == ("d",)
        assert (await other.complete(long("long", 101))).worker_ids == ("p", "d")
        assert sum(other.stats().prefill_fallbacks.values()) == 0
        assert (await both.rb.complete(long("other", 100))).worker_ids == ("p", "d")


# Without a prefill worker


async def test_without_a_prefill_worker_a_decode_worker_serves_alone(nats_url: str, fleet: str) -> None:
    """Without a prefill worker, a decode worker serves alone, and the client counts a fallback.

    A fleet without roles has no fallbacks.
    """
    async with disaggregated(nats_url, fleet, workers=("d",)) as alone:
        await check_equal([await alone.rb.complete(long("r"))], [long("r")], ALONE)
        assert alone.fallbacks() == {PrefillFallback.NO_WORKER: 1}
    async with served(nats_url, fleet) as (rb, *_):
        await rb.complete(long("r"))
        assert sum(rb.stats().prefill_fallbacks.values()) == 0


async def test_prefill_workers_alone_serve_no_model(nats_url: str, fleet: str) -> None:
    """Prefill workers alone serve no model, do not satisfy `wait_for_workers` and create no queue.

    The error states the reason.
    """
    async with disaggregated(nats_url, fleet, workers=("p",)) as both:
        with pytest.raises(NoWorkers, match="p is serving prefill phases only"):
            await both.rb.complete(long("r"))
        with pytest.raises(NoWorkers, match="0 of 1 workers served within"):
            await both.rb.fleet.wait_for_workers(timeout_s=0.1)
        state = await both.rb.fleet.state()
        assert [worker.worker for worker in state.workers] == ["p"]
        assert state.queues == ()


async def test_a_decode_worker_serves_alone_if_prefill_is_rejected_or_unanswered(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a prefill worker rejects a request or does not answer, a decode worker serves it alone.

    The request still has only one attempt.
    """
    monkeypatch.setattr(machine, "PREFILL_WAIT_S", 0.3)
    monkeypatch.setattr(machine, "HAND_OVER_S", 0.05)
    async with disaggregated(nats_url, fleet) as both:
        intake = both.workers["p"]._intake
        for name, broken in (("room", lambda: 0), ("accept_direct", lambda _client, _data: None)):
            with monkeypatch.context() as patch:
                patch.setattr(intake, name, broken)
                result = await both.rb.complete(long(name))
            await check_equal([result], [long(name)], ALONE)
            assert (result.attempts, result.worker_ids) == (1, ("d",))
        assert both.fallbacks() == {PrefillFallback.BUSY: 2}


async def test_a_prefill_worker_without_the_weights_or_adapter_is_skipped(nats_url: str, fleet: str) -> None:
    """The client skips a prefill worker without the weights, and a prompt that just fits a message."""
    config = SyntheticConfig(max_model_len=10_000_000)
    async with (
        disaggregated(nats_url, fleet, workers=("p",), prefill=config) as both,
        synthetic_worker(
            nats_url,
            fleet,
            worker_id="d",
            weight_version=3,
            config=SyntheticConfig(max_model_len=10_000_000, role="decode"),
        ),
    ):
        await until_paired(both.rb, "p", "d")
        newer = await both.rb.complete(long("newer", min_weight_version=3))
        assert both.fallbacks() == {PrefillFallback.UNSUITABLE: 1}
        # As many tokens as fit into a message beside the other fields of the request.
        max_payload = runtime_of(both.rb).nats.max_payload
        num_tokens = (max_payload - 900) // 4
        prompt = np.zeros(num_tokens, np.int32)
        largest = await both.rb.complete(long("largest", prompt_token_ids=prompt, return_routed_experts=False))
        assert both.fallbacks() == {PrefillFallback.UNSUITABLE: 1, PrefillFallback.TOO_LARGE: 1}

    assert (newer.worker_ids, largest.worker_ids) == (("d",), ("d",))


# Fields of a request in both phases


async def test_all_fields_of_a_request_reach_both_engines(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Id, priority, salt, adapter, session and trace reach both engines.

    The KV transfer parameters contain the versions.
    """
    adapter = write_adapter(tmp_path / "adapters" / "style")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    fields: dict[str, Any] = {
        "priority": -3,
        "cache_salt": "salt",
        "lora": "style",
        "session_id": "s",
        "traceparent": trace,
    }
    async with disaggregated(nats_url, fleet, weight_version=4, weight_roots=(str(tmp_path),)) as both:
        ledger = await both.rb.fleet.load_lora("style", str(adapter), version=2)
        assert len(ledger.applied) == 2
        # The command acks may arrive before the workers publish that they serve again.
        await until_paired(both.rb, "p", "d")
        request = long("r", timeout_s=50.0, min_weight_version=4, **fields)
        chunks = [chunk async for chunk in both.rb.generate(request)]

    for worker in "pd":
        given, kv = both.given[worker][-1]
        assert given.request_id == "r"
        assert {name: getattr(given, name) for name in fields} == fields
        assert (given.timeout_s, given.min_weight_version) == (50.0, 4)
        assert kv.is_prefill == (worker == "p")
    decode = both.given["d"][-1][1]
    assert (decode.connector, decode.weight_version, decode.lora_version) == ("synthetic", 4, 2)
    assert {chunk.lora_version for chunk in chunks} == {2}
    assert [chunk.traceparent for chunk in chunks if chunk.traceparent] == [trace] * 2


async def test_all_turns_of_a_session_and_samples_of_a_request_prefill_at_one_worker(nats_url: str, fleet: str) -> None:
    """All turns of a session have their prefill phase on one worker, which caches the prefix.

    Each sample has its own prefill phase, because its KV can be read once. All of them run on one worker.
    """
    async with disaggregated(nats_url, fleet, workers=("p1", "p2", "p3", "d")) as both:
        for session in ("a", "b", "c", "d"):
            turns = [
                await both.rb.complete(long(f"{session}{turn}", session_id=session, cache_salt=session))
                for turn in range(4)
            ]
            assert len({turn.worker_ids[0] for turn in turns}) == 1
        sampling = SamplingParams(n=4, max_tokens=3, temperature=0)
        results = [await both.rb.complete(long(f"r{i}", 600, sampling=sampling)) for i in range(3)]

    for result in results:
        prefilled_at = [sample.worker_ids for sample in (result, *result.siblings)]
        assert len(set(prefilled_at)) == 1
        assert len(prefilled_at[0]) == 2
