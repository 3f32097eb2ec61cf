"""Faults between a prefill and a decode worker cause another attempt, and never a mixed result or a hang."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import rollbus
from rollbus import Generation
from rollbus.bus.protocol.attempt.events import Event, Instruction, Lost
from rollbus.bus.protocol.attempt.machine import AttemptMachine
from rollbus.bus.protocol.queue.prefill_queue import PrefillFallback
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, RequestError
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from tests.bus.test_disagg import check_equal
from tests.chaos.workload import VOCAB_SIZE
from tests.support.checkpoints import write_checkpoint
from tests.support.disagg import Disaggregated, disaggregated, long, until_paired
from tests.support.fleet import until_known
from tests.support.processes import worker_process
from tests.support.requests import Load, outcome
from tests.support.waits import until_true

ALONE = SyntheticConfig()
SLOW_LOADS = SyntheticConfig(kv_load_s=0.5)
SMALL_STEPS = SyntheticConfig(prefill_step_tokens=1)
SLOW_STEPS = {
    "p0": {"step_s": 60.0, "max_num_seqs": 4},
    "d0": {"step_s": 1.0, "max_num_seqs": 4},
    "p1": {"step_s": 0.1},
}
"""Workers to kill are so slow that they have requests then, also if the client knows late of the ends of others."""


@contextlib.asynccontextmanager
async def loading(
    both: Disaggregated, request: GenerateRequest, rb: rollbus.Client | None = None
) -> AsyncIterator[asyncio.Task[Generation | RequestError]]:
    """Run a request until its KV is on the way to the engine of `d`, and yield its task.

    At the end of the block, the request has ended.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(outcome((rb or both.rb).complete(request)))
        await until_true(lambda: is_loading(both))
        yield task


def is_loading(both: Disaggregated) -> bool:
    """Return True if KV is on the way to the engine of `d`."""
    return bool(both.engines["d"]._loading)


async def check_serves(both: Disaggregated) -> None:
    """Check that both workers serve."""
    # Command acks and presence use different subjects, so the client may know an older state of the workers.
    await until_known(both.rb, *both.workers.values())
    result = await both.rb.complete(long("next"))
    await check_equal([result], [long("next")], ALONE)
    assert result.worker_ids == ("p", "d")


# Aborts


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("how", ["abort", "cancel", "deadline", "pause", "close"])
async def test_no_engine_receives_an_abort_during_a_kv_transfer(nats_url: str, fleet: str, how: str) -> None:
    """If a request ends during a KV transfer, its caller learns this immediately, and the engine survives."""
    # The deadline leaves time for the steps before the transfer, also on a busy machine.
    timeout_s, decode = (1.0, replace(SLOW_LOADS, kv_load_s=2.0)) if how == "deadline" else (None, SLOW_LOADS)
    async with disaggregated(nats_url, fleet, decode=decode) as both, contextlib.AsyncExitStack() as stack:
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet))
        await until_paired(rb, "p", "d")
        async with loading(both, long("r", timeout_s=timeout_s), rb) as task:
            match how:
                case "abort":
                    await rb.abort(["r"])
                case "cancel":
                    task.cancel()
                case "close":
                    await stack.aclose()
                case "pause":
                    ledger = await both.rb.fleet.pause(mode="abort")
                    assert len(ledger.applied) == 2
                    # `applied` means that the engine has no request any more, also none with a pending abort.
                    assert not is_loading(both)
                    await both.rb.fleet.resume()
            with contextlib.suppress(asyncio.CancelledError):
                ended = await task
                assert how == "pause" or is_loading(both)
                if isinstance(ended, RequestError):
                    assert (how, ended.code) in {("deadline", ErrorCode.TIMEOUT), ("close", ErrorCode.CLIENT_CLOSED)}
                else:
                    assert ended.finish_reason is FinishReason.ABORT
                    assert len(ended.token_ids) == 1

        await check_serves(both)
        assert both.workers["d"].stats().links.late_steps > 0


@pytest.mark.usefixtures("unhurried")
async def test_an_abort_at_the_prefill_worker_prevents_the_decode_phase(nats_url: str, fleet: str) -> None:
    """A request that is aborted at or before the prefill worker leaves nothing, and its decode phase does not begin."""
    slow = SyntheticConfig(max_num_seqs=1, step_s=1.0)
    async with disaggregated(nats_url, fleet, prefill=slow) as both, asyncio.TaskGroup() as tasks:
        ended = [tasks.create_task(outcome(both.rb.complete(long(name)))) for name in ("at", "waiting")]
        await until_received(both, "p", 1)
        await both.rb.abort(["at", "waiting"])
        engine = both.engines["p"]
        engine._config = replace(engine._config, step_s=0.0)
        for task in ended:
            result = await task
            assert isinstance(result, Generation)
            assert result.finish_reason is FinishReason.ABORT
        await check_serves(both)
        assert [request.request_id for request, _ in both.given["d"]] == ["next"]


# Weights


def folders(root: Path) -> tuple[Path, Path]:
    """Write two checkpoints of one model."""
    return write_checkpoint(root / "one", fill=1), write_checkpoint(root / "two", fill=2)


async def tokens_after(rb: rollbus.Client, request: GenerateRequest, first: int, count: int) -> list[int]:
    """Return the tokens that the current weights generate after the first token of a request."""
    prompt = [*(int(token) for token in request.prompt_token_ids), first]
    again = await rb.complete(long("again", prompt_token_ids=prompt, max_tokens=count))
    return [int(token) for token in again.token_ids]


@pytest.mark.proves("P24")
@pytest.mark.usefixtures("unhurried")
async def test_new_weights_between_the_phases_invalidate_the_kv(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If weights change between the phases, the first token is from the old weights.

    The new weights compute the prompt again and all other tokens.
    """
    one, two = folders(tmp_path)
    request = long("r", max_tokens=6)
    fields: dict[str, Any] = {"model_path": str(one), "weight_roots": (str(tmp_path),)}
    async with disaggregated(nats_url, fleet, **fields) as both:
        # The decode phase must wait in the queue until the update.
        both.workers["d"]._puller.pause()
        stream = both.rb.generate(request)
        chunks = [await anext(stream)]
        await both.rb.fleet.update_weights(str(two), version=1, mode="keep")
        chunks += [chunk async for chunk in stream]

        tokens = [int(token) for chunk in chunks for token in chunk.token_ids]
        assert [chunk.weight_version for chunk in chunks] == [0, 1, 1, 1, 1, 1]
        assert tokens[1:] == await tokens_after(both.rb, request, tokens[0], 5)
        assert both.workers["d"].stats().intake.kv_unused == 1


async def until_received(both: Disaggregated, worker: str, count: int) -> None:
    """Wait until an engine has received this number of requests."""
    await until_true(
        lambda: len([request for request, _ in both.given[worker] if request.request_id != "canary"]) >= count
    )


@pytest.mark.proves("P95")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("worker", ["p", "d"])
async def test_a_phase_without_a_token_fails_when_its_weights_change(
    nats_url: str, fleet: str, tmp_path: Path, worker: str
) -> None:
    """A phase without a token fails with `kv_transfer_failed` when its weights change.

    Its KV mixes or would mix both weights. A decode worker serves the next attempt alone.
    """
    one, two = folders(tmp_path)
    request = long("r", max_tokens=6)
    fields: dict[str, Any] = {"model_path": str(one), "weight_roots": (str(tmp_path),)}
    configs: dict[str, Any] = {"prefill": SMALL_STEPS, "decode": replace(SLOW_LOADS, kv_load_s=1.5)}
    async with disaggregated(nats_url, fleet, **configs, **fields) as both, asyncio.TaskGroup() as tasks:
        engine = both.engines["p"]
        # The update must begin before the end of the prefill phase, which has a step for each token of the prompt.
        engine._config = replace(SMALL_STEPS, step_s=0.5 if worker == "p" else 0.0)
        under_way = tasks.create_task(both.rb.complete(request))
        await until_received(both, worker, 1)
        await both.rb.fleet.update_weights(str(two), version=1, mode="keep")
        engine._config = SMALL_STEPS
        result = await under_way

        old = 0 if worker == "p" else 1
        assert result.weight_versions.tolist() == [0] * old + [1] * (6 - old)
        assert (result.attempts, result.worker_ids) == (2, (*"pd"[: 1 + old], "d"))
        assert both.fallbacks() == {PrefillFallback.FAILED: 1}
        first = int(result.token_ids[0])
        assert result.token_ids.tolist()[1:] == await tokens_after(both.rb, request, first, 5)


# Losses


@pytest.mark.proves("P95")
@pytest.mark.usefixtures("unhurried")
async def test_a_decode_worker_continues_alone_after_a_failed_kv_transfer(nats_url: str, fleet: str) -> None:
    """After a failed KV transfer, a decode worker continues from the first token without a prefill phase."""
    decode = SyntheticConfig(faults=SyntheticFaults(kv_loads=1))
    async with disaggregated(nats_url, fleet, decode=decode) as both:
        result = await both.rb.complete(long("r"))
        await check_equal([result], [long("r")], ALONE)
        assert (result.attempts, result.worker_ids) == (2, ("p", "d", "d"))
        assert both.fallbacks() == {PrefillFallback.FAILED: 1}
        await check_serves(both)


def record_losses(monkeypatch: pytest.MonkeyPatch) -> set[str | None]:
    """Return the set of workers at which clients of this process lose attempts from now on."""
    workers: set[str | None] = set()
    handle = AttemptMachine.handle

    def handle_recorded(self: AttemptMachine, event: Event, now: float) -> Sequence[Instruction]:
        if isinstance(event, Lost):
            workers.add(self.worker)
        return handle(self, event, now)

    monkeypatch.setattr(AttemptMachine, "handle", handle_recorded)
    return workers


@pytest.mark.proves("P95")
async def test_requests_of_killed_workers_of_both_roles_complete_once(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two workers of each role is killed under load, every request completes once, as if undisturbed."""
    engine = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE}
    load = await Load.mixed(90, SyntheticConfig.from_args(engine))
    async with contextlib.AsyncExitStack() as stack:
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet, prefill_min_tokens=2))
        processes = {}
        for name in ("p0", "p1", "d0", "d1"):
            role = "prefill" if name.startswith("p") else "decode"
            arguments = {**engine, "role": role, "kv_load_s": 0.01, **SLOW_STEPS.get(name, {})}
            processes[name] = await stack.enter_async_context(
                worker_process(nats_url, fleet, "--lease-s", "2", "--worker-id", name, engine_args=arguments)
            )
        await until_paired(rb, *processes)

        lost_at = record_losses(monkeypatch)

        async def kill(name: str) -> None:
            processes[name].kill()

        # Few requests at a time, so that some are sent after the kills.
        strikes = {10: partial(kill, "p0"), 40: partial(kill, "d0")}
        results = await load.run(rb, strikes=strikes, max_in_flight=24, legs=2)
        children = [child for result in results for child in (result, *result.siblings)]
        assert {"p0", "d0"} <= lost_at
        assert all(child.exact for child in children)
        assert rb.stats().prefill_legs > 20
