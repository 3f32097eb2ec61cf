"""`rollbus bench` with the synthetic engine, because the engine is not under test. No test checks a speed."""

import asyncio
import json
import signal
import uuid
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import GenerateRequest, NoWorkers
from rollbus.frontend.cli.app import main
from rollbus.frontend.cli.bench import BenchOptions, ConcurrencyResult, Report, Round, measure, workers_to_measure
from rollbus.frontend.cli.exits import CommandFailed, ExitCode, cause_of
from rollbus.frontend.cli.tables import Spread, percentile
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import ENV, command, run_rollbus
from tests.support.fleet import capabilities, is_idle, presence, served
from tests.support.invariants import observing
from tests.support.waits import until_true

SMALL = BenchOptions(input_tokens=7, output_tokens=5)
ROW_BYTES = 16
"""Bytes of a row of the synthetic model: 4 layers, top 4, one byte each."""
ENGINE = SyntheticConfig().capabilities
SLOW = SyntheticConfig(step_s=0.01)
NOBODY = "no_workers: no live worker serves synthetic"
OPTIONS = ("--input-tokens", "7", "--output-tokens", "5", "--requests", "6", "--rounds", "2", "--json")


def requests(
    load: BenchOptions = SMALL, count: int = 6, seed: int = 0, vocab_size: int = 32_000
) -> list[GenerateRequest]:
    """Return the requests that a round of `count` requests sends."""
    return list(load.requests("synthetic", vocab_size, count, np.random.default_rng(seed)))


def prompts(of: Iterable[GenerateRequest]) -> list[tuple[int, ...]]:
    """Return the prompts of the requests in a form that can be compared."""
    return [tuple(np.asarray(request.prompt_token_ids).tolist()) for request in of]


def once_more(request: GenerateRequest) -> GenerateRequest:
    """Return a copy of the request with a new id."""
    return replace(request, request_id=uuid.uuid4().hex)


def test_prompts_of_rounds_and_seeds_differ() -> None:
    """Prompts differ within a round and between seeds.

    A seed repeats its prompts, but each run has another cache salt.
    """
    first, again, other = requests(), requests(BenchOptions(input_tokens=7, output_tokens=5)), requests(seed=1)

    assert len(set(prompts(first))) == 6
    assert prompts(first) == prompts(again)
    assert not set(prompts(first)) & set(prompts(other))
    assert first[0].cache_salt == first[5].cache_salt != again[0].cache_salt
    assert {token for prompt in prompts(requests(vocab_size=3, count=50)) for token in prompt} == {0, 1, 2}


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (BenchOptions(input_tokens=65_530, output_tokens=7), "65537 together; allowed: at most 65536, the max_model"),
        (BenchOptions(input_tokens=1, output_tokens=1, logprobs=21), "--logprobs 21; allowed: none, or 0 to 20"),
        (BenchOptions(input_tokens=1, output_tokens=1, routing=True), "--routing; allowed: --no-routing"),
    ],
)
def test_a_load_that_the_engine_cannot_serve_is_a_usage_error(load: BenchOptions, words: str) -> None:
    """A load that the weakest worker's engine cannot serve is a usage error before any request is sent."""
    without_experts = SyntheticConfig(num_experts=0, max_model_len=70_000).capabilities
    strong = SyntheticConfig(max_model_len=70_000).capabilities

    with pytest.raises(CommandFailed, match=words) as caught:
        load.check([strong, ENGINE, without_experts])
    assert caught.value.exit_code == ExitCode.USAGE
    BenchOptions(input_tokens=65_530, output_tokens=6, logprobs=20).check([strong, ENGINE, without_experts])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--requests", "5", "--concurrency", "2", "6"], "--requests 5; allowed: 6 or more"),
        (["--concurrency", "65537"], "--concurrency 65537; allowed: at most 65536"),
        (["--concurrency", "4096", "--output-tokens", "4096"], "allowed: at most 50000000, with fewer"),
    ],
)
def test_options_with_inconsistent_values_are_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options with inconsistent values are a usage error of one line that names them, and nothing is started."""
    assert main(["bench", *argv, "--nats", "nats://127.0.0.1:9"]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_round_counts_the_received_tokens_and_routed_experts(nats_url: str, fleet: str, streams: bool) -> None:
    """A round counts tokens and routed experts by the row rule, streamed or not.

    It measures times only when streaming.
    """
    ended: list[int] = []
    async with served(nats_url, fleet, weight_version=3) as (rb, *_):
        taken = await measure(rb, requests(), 4, streams=streams, advance=lambda: ended.append(1))
        without = BenchOptions(input_tokens=7, output_tokens=5, routing=False, logprobs=None)
        bare = await measure(rb, requests(without), 4, streams=streams)

    assert (taken.requests, taken.tokens, len(ended)) == (6, 30, 6)
    assert taken.routing_bytes == 6 * (7 + 5 - 1) * ROW_BYTES
    assert (bare.tokens, bare.routing_bytes) == (30, 0)
    assert (taken.weight_versions, taken.failures, taken.retries, taken.gaps) == ({3}, {}, 0, 0)
    assert min(taken.seconds, taken.cpu_s) > 0
    times = [len(times) for times in (taken.first_token_s, taken.chunk_s, taken.request_s)]
    assert times == ([6, pytest.approx(12, abs=12), 6] if streams else [0, 0, 0])


@pytest.mark.parametrize("streams", [False, True])
async def test_rejected_and_early_ended_requests_count_as_failures(nats_url: str, fleet: str, streams: bool) -> None:
    """A rejected request and a request that ends early at a stop token count as failures by name.

    The others count as usual.
    """
    refused = GenerateRequest(prompt_token_ids=[10**6])
    early = GenerateRequest(
        prompt_token_ids=[1], sampling=rollbus.SamplingParams(stop_token_ids=range(1024), allowed_token_ids=[5])
    )
    async with served(nats_url, fleet) as (rb, *_):
        taken = await measure(rb, [*requests(), refused, early, once_more(early)], 9, streams=streams)

    assert (taken.requests, taken.tokens) == (6, 30)
    assert taken.failures == {"invalid_request": 1, "stop": 2}
    assert taken.first_failure != ""


async def test_without_workers_a_round_fails_as_a_whole(nats_url: str, fleet: str) -> None:
    """Without workers, a round fails as a whole instead of counting each request as a failure."""
    ended: list[object] = []

    async def end(streams: bool) -> None:
        try:
            await measure(rb, requests(), 1, streams=streams)
        except* NoWorkers as group:
            ended.append(cause_of(group))

    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.TaskGroup() as tasks:
        for streams in (False, True):
            tasks.create_task(end(streams))

    assert list(map(str, ended)) == [NOBODY, NOBODY]


async def test_no_prompt_is_found_in_a_prefix_cache(nats_url: str, fleet: str) -> None:
    """A run with the seed of an earlier run has no prefix cache hits. A repetition of the same requests has hits."""
    earlier, later = (requests(BenchOptions(input_tokens=40, output_tokens=5)) for _ in range(2))
    async with served(nats_url, fleet, config=SyntheticConfig(prefix_cache=True)) as (rb, *_):
        cached = [(await measure(rb, those, 6, streams=False)).cached_tokens for those in (earlier, later)]
        cached.append((await measure(rb, map(once_more, later), 6, streams=True)).cached_tokens)

    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_the_report_has_the_fleet_and_whole_rounds(nats_url: str, fleet: str) -> None:
    """The JSON report has the fleet's model and version and whole rounds of both concurrencies, without warm-up."""
    async with observing(nats_url, fleet), served(nats_url, fleet, weight_version=3) as (_, worker, _):
        ended = await run_rollbus(nats_url, fleet, "bench", *OPTIONS, "--concurrency", "2", "3", "--stream")
        counted = worker.stats().links.ended

    assert (ended.code, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert (told["model"], told["fleet"]) == ("synthetic", fleet)
    assert counted == (2 + 3) + 2 * (6 + 6)
    assert [one["concurrency"] for one in told["results"]] == [2, 3]
    for one in told["results"]:
        assert (one["requests"], one["failures"], one["weight_versions"]) == (6, {}, [3])
        assert one["tokens_per_s"]["high"] == pytest.approx(5 * one["requests_per_s"]["high"])
        assert one["first_token_p50_ms"]["low"] <= one["request_p99_ms"]["high"]


async def test_aborted_requests_give_exit_code_1(nats_url: str, fleet: str) -> None:
    """Aborted requests are listed in the table and in the last line, and the other requests are still measured."""
    # The load takes seconds, because a busy machine needs that time to abort in the middle of it.
    options = ("--concurrency", "2", "--output-tokens", "150", "--requests", "4", "--rounds", "1", "--json")
    async with served(nats_url, fleet, config=SLOW) as (rb, worker, engine), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_rollbus(nats_url, fleet, "bench", *options))
        # At this point both warm-up requests have ended, and many requests follow.
        await until_true(lambda: worker.stats().links.ended >= 2 and not is_idle(engine))
        await rb.fleet.pause(mode="abort")
        await rb.fleet.resume()
        ended = await running

    told: dict[str, Any] = json.loads(ended.stdout)["results"][0]
    assert (ended.code, list(told["failures"])) == (ExitCode.FAILED, ["abort"])
    assert ended.stderr.startswith("rollbus: failed requests: abort ")
    assert len(ended.stderr.splitlines()) == 1


async def test_ctrl_c_aborts_the_requests_in_flight(nats_url: str, fleet: str) -> None:
    """After Ctrl-C, the engine has no request left, and the command reports the interrupt with exit code 130."""
    async with observing(nats_url, fleet) as observer, served(nats_url, fleet, config=SLOW) as (_, _, engine):
        process = await asyncio.create_subprocess_exec(
            *command("bench", "--output-tokens", "20000", "--concurrency", "3", "--fleet", fleet),
            env={**ENV, "ROLLBUS_NATS": nats_url},
            stderr=asyncio.subprocess.PIPE,
        )
        await until_true(lambda: "running=3" in repr(engine))
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
        await observer.check_at_rest()

    assert (process.returncode, stderr) == (130, b"rollbus: interrupted\n")


PAUSED = presence(state=WorkerState.PAUSED, capabilities=capabilities())
SERVES = presence(worker="v", capabilities=capabilities())
PREFILL = presence(worker="u", capabilities=capabilities(role="prefill"))


@pytest.mark.parametrize(
    ("workers", "model", "error", "words"),
    [
        ([], None, NoWorkers, "no worker is live"),
        ([PAUSED, PREFILL], None, CommandFailed, r"\(w is paused; u is serving prefill phases only\)"),
        ([SERVES], "n", InvalidRequest, "model is 'n'; allowed: one of m"),
        ([SERVES, replace(SERVES, model="n")], None, InvalidRequest, "model is missing; allowed: one of m, n"),
        ([PAUSED, replace(SERVES, model="n")], "m", CommandFailed, r"\(w is paused\)"),
        ([presence()], None, CommandFailed, "the workers of m have not published"),
    ],
)
def test_without_a_serving_worker_bench_fails_with_states_or_models(
    workers: list[WorkerPresence], model: str | None, error: type[Exception], words: str
) -> None:
    """The error gives the states of the live workers or the models that are served.

    Requests to a paused fleet would only wait.
    """
    with pytest.raises(error, match=words):
        workers_to_measure(workers, model, nats_url="nats://user:secret@h", fleet="f")


def test_the_serving_workers_of_a_model_are_the_target() -> None:
    """The target is the serving workers of the named model, or of the only model.

    A prefill worker alone serves no requests.
    """
    other = replace(SERVES, model="n")

    assert workers_to_measure([PAUSED, SERVES, PREFILL], None, nats_url="", fleet="f") == [SERVES]
    assert workers_to_measure([SERVES, other], "n", nats_url="", fleet="f") == [other]


# The report that `rollbus bench` makes of its rounds. The rounds are handmade.


def report(*outcomes: ConcurrencyResult) -> Report:
    """Return a report of these outcomes."""
    options = BenchOptions(input_tokens=7, output_tokens=5, rounds=2)
    return Report(command="rollbus bench", fleet="f", workers=[presence(model="m")], options=options, outcomes=outcomes)


def test_a_figure_is_a_median_with_its_range() -> None:
    """A figure shows median and range of the rounds with the significant digits. Equal values are shown once."""
    assert Spread.of([3.0, 100.0, 2.0]) == Spread(3.0, 2.0, 100.0)
    assert Spread.of([1234.5, 1000.0, 2000.4]).text() == "1,234 (1,000 to 2,000)"
    assert Spread.of([0.01234, 0.5]).text() == "0.256 (0.012 to 0.500)"
    assert Spread.of([12.5, 12.5]).text() == "12.5"


def test_a_percentile_is_one_of_the_values() -> None:
    """A percentile is the smallest value that so many percent of the values do not exceed, in any order."""
    values = array("f", range(100, 0, -1))

    assert (percentile(values, 50), percentile(values, 99), percentile([3.0, 1.0, 2.0], 50)) == (50.0, 99.0, 2.0)


def test_a_report_has_a_column_for_each_concurrency() -> None:
    """A report has medians and ranges of the rounds, sums of the errors, and each version that sampled a token."""
    one, two = ConcurrencyResult(1, 32), ConcurrencyResult(64, 256)
    for tokens in (100, 300, 200):
        one.add(Round(seconds=2.0, cpu_s=0.5, requests=1, tokens=tokens, routing_bytes=2_000_000, weight_versions={7}))
    both = {7, 8}
    streamed = Round(seconds=1.0, cpu_s=0.1, requests=2, tokens=100, retries=3, gaps=4, weight_versions=both)
    streamed.first_token_s.append(0.25)
    streamed.request_s.append(0.5)
    two.add(streamed)

    rows = {label: cells for label, *cells in report(one, two).rows()}

    assert rows["tokens/s"] == ["100 (50 to 150)", "100"]
    assert rows["requests/s"] == ["0.500", "2.00"]
    assert rows["client CPU, ms per 1,000 tokens"] == ["2,500 (1,667 to 5,000)", "1,000"]
    assert rows["routed experts, MB/s"] == ["1.00", "-"]
    assert rows["time to first token, p99, ms"] == ["-", "250"]
    assert "time between chunks, p50, ms" not in rows
    assert rows["attempts after the first"] == ["0", "3"]
    assert rows["gaps in frames"] == ["0", "4"]
    assert rows["weight versions"] == ["7", "7, 8"]
    first, second = json.loads(json.dumps(report(one, two).as_json()))["results"]
    assert first["tokens_per_s"] == {"median": 100, "low": 50, "high": 150}
    assert "first_token_p50_ms" not in first
    assert (second["first_token_p50_ms"]["median"], second["retries"], second["weight_versions"]) == (250, 3, [7, 8])


def test_a_failure_is_never_hidden() -> None:
    """A failure appears by its code in table and JSON and in the last line, also if it was a warm-up request."""
    outcome, other = ConcurrencyResult(1, 32), ConcurrencyResult(2, 32)
    warm_up = Round()
    warm_up.fail("timeout", "not finished within 3 s")
    warm_up.fail("engine_error", "it is broken")
    outcome.add_failures(warm_up)
    counted = Round(seconds=1.0, requests=1, tokens=1)
    counted.fail("engine_error", "it still is")
    counted.fail("engine_error", "and again")
    outcome.add(counted)
    other.add(Round(seconds=1.0, requests=1, tokens=1))
    told = report(outcome, other)

    rows = {label: cells for label, *cells in told.rows()}
    assert rows["failed requests"] == ["engine_error 3, timeout 1", "0"]
    first, second = json.loads(json.dumps(told.as_json()))["results"]
    assert (first["failures"], second["failures"]) == ({"engine_error": 3, "timeout": 1}, {})
    assert told.failure() == "failed requests: engine_error 3, timeout 1; the first: not finished within 3 s"
    assert report(other).failure() is None
