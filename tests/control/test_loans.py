"""Loans: a worker sleeps for a term so that another process can use its GPU, and returns with the newest weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.fleet.command_result import workers_that_must_ack
from rollbus.bus.protocol.fleet.desired import record, why_behind
from rollbus.bus.protocol.fleet.loans import check_lend, check_return, is_loan
from rollbus.schemas.control import DesiredState, Pause, Recorded, Sleep, UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest, NoWorkers
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.control.loan import LoanTerm
from rollbus.workers.engines.gpus import GpuMemory, describe_user, read_gpus
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import served, synthetic_worker, until_state
from tests.support.waits import SOON_S, until_true

CAPABILITIES = SyntheticConfig().capabilities


def lend_command(*workers: str, for_s: float = 3600.0) -> Sleep:
    """Return the command that lends these workers."""
    return Sleep(level=2, for_s=for_s, workers=workers)


def presence(worker: str, state: WorkerState = WorkerState.SERVING, **fields: object) -> WorkerPresence:
    """Return the presence of a worker that can sleep."""
    base = WorkerPresence(
        worker=worker,
        incarnation="1",
        model="m",
        state=state,
        weight_version=1,
        in_flight=0,
        free_slots=1,
        uptime_s=1.0,
        lease_s=6.0,
        capabilities=CAPABILITIES,
    )
    return replace(base, **fields)


def test_record_moves_the_term_beside_the_command() -> None:
    """The stored command has no new field, so workers of earlier releases decode it."""
    state, _ = record(DesiredState(model="m"), lend_command("w0", for_s=60.0))
    recorded = state.workers["w0"]["sleep"]
    assert recorded.for_s == 60.0
    assert recorded.command == replace(recorded.command, for_s=None)
    assert is_loan(recorded)


@pytest.mark.parametrize("fields", [{"level": 1}, {"workers": None}, {"for_s": 0.0}, {"for_s": 1e9}])
def test_a_loan_needs_a_term_a_worker_and_level_2(fields: dict[str, object]) -> None:
    """A command that lends no named worker, keeps memory, or has no valid term is rejected with the field."""
    with pytest.raises(InvalidRequest) as caught:
        Sleep(**{"level": 2, "for_s": 60.0, "workers": ("w0",), **fields})  # type: ignore[arg-type]
    assert caught.value.field in {*fields, "workers"}


def test_the_last_serving_worker_is_lent_only_with_allow_none() -> None:
    """Workers that are lent, recorded to sleep, or do not serve do not count as others."""
    state, _ = record(DesiredState(model="m"), lend_command("w1"))
    workers = [presence("w0"), presence("w1"), presence("w2", WorkerState.POISONED)]
    with pytest.raises(ControlError, match="no other worker serves") as caught:
        check_lend(state, "w0", workers, allow_none=False)
    assert caught.value.code is ControlCode.NOT_SERVING
    check_lend(state, "w0", workers, allow_none=True)
    check_lend(state, "w0", [*workers, presence("w3")], allow_none=False)
    check_lend(state, "w1", workers[1:], allow_none=False)  # a renewal takes no further worker


def test_an_engine_that_cannot_sleep_is_not_lent() -> None:
    """The lender gets `unsupported` with the worker's name before anything is recorded."""
    unable = presence("w0", capabilities=replace(CAPABILITIES, sleep=False))
    with pytest.raises(ControlError, match="w0") as caught:
        check_lend(DesiredState(model="m"), "w0", [unable, presence("w1")], allow_none=True)
    assert caught.value.code is ControlCode.UNSUPPORTED


def test_return_needs_a_loan() -> None:
    """A return of a worker that is not lent is no success."""
    with pytest.raises(ControlError) as caught:
        check_return(DesiredState(model="m"), "w0", [presence("w0")])
    assert caught.value.code is ControlCode.NOT_FOUND
    check_return(DesiredState(model="m"), "w0", [presence("w0", WorkerState.ASLEEP, loan_left_s=0.0)])


def test_updates_do_not_wait_for_lent_workers() -> None:
    """Commands that load weights leave out lent workers; a pause does not."""
    workers = [presence("w0"), presence("w1", WorkerState.ASLEEP, loan_left_s=5.0)]
    update = UpdateWeights(model="m", version=2, source=WeightSource(path="/w"))
    assert [each.worker for each in workers_that_must_ack(workers, update)["m"]] == ["w0"]
    assert len(workers_that_must_ack(workers, Pause())["m"]) == 2
    with pytest.raises(NoWorkers, match="w1 is lent"):
        workers_that_must_ack(workers[1:], update)


def test_a_lent_worker_is_behind_only_after_its_term() -> None:
    """Older weights of a lent worker are no problem; a loan that cannot end is."""
    state, _ = record(DesiredState(model="m"), UpdateWeights(model="m", version=2, source=WeightSource(path="/w")))
    assert why_behind(presence("w0", WorkerState.ASLEEP, loan_left_s=5.0), state) is None
    over = presence("w0", WorkerState.ASLEEP, loan_left_s=0.0, last_error="loan over, GPU in use by pid 7")
    assert "pid 7" in (why_behind(over, state) or "")


def test_term_counts_by_the_workers_clock() -> None:
    """A loan lasts its term from when the worker sees it, an undo continues it, and a renewal begins anew."""
    term = LoanTerm()
    first = Recorded(epoch=1, command=lend_command("w0"), for_s=100.0, at=4e9)
    term.begin(first, 10.0)
    term.begin(replace(first, epoch=3), 50.0)
    assert term.left_s(first, 60.0) == 50.0
    assert term.left_s(first, 500.0) == 0.0
    again = Recorded(epoch=4, command=lend_command("w0"), for_s=100.0)
    term.begin(again, 500.0)
    assert term.left_s(again, 500.0) == 100.0
    assert term.left_s(None, 500.0) == 0.0
    term.begin(first, 0.0, elapsed_s=-1e6)  # a clock that is ahead makes no loan longer than its term
    assert term.left_s(first, 0.0) == 100.0
    term.begin(first, 0.0, elapsed_s=30.0)
    assert term.left_s(first, 0.0) == 70.0


def test_gpu_memory_names_the_process_that_uses_it() -> None:
    """A GPU with too little free memory is described with the pids of other processes."""
    gpu = GpuMemory("0", free=1 << 30, total=80 << 30, pids=(7, 8))
    assert describe_user([gpu], lambda _: 1 << 30, frozenset()) is None
    assert "GPU in use by pid 7 (GPU 0: 1.0 GiB" in (describe_user([gpu], lambda _: 2 << 30, frozenset({8})) or "")


def test_memory_is_unknown_without_nvml() -> None:
    """Without NVML there are no GPUs, and no error."""

    def fail() -> object:
        raise OSError("no libnvidia-ml.so.1")

    assert read_gpus(fail) == []


async def until_lent(rb: rollbus.Client) -> None:
    """Wait until the only worker is asleep and announces its loan."""
    await until_state(
        rb, lambda s: s.workers and s.workers[0].state == "asleep" and s.workers[0].loan_left_s is not None
    )


async def test_lent_worker_takes_no_update_and_returns_with_it(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """While it is lent it stages nothing; after the return it has the newest recorded weights."""
    folder = write_checkpoint(tmp_path / "v2", fill=3)
    roots: dict[str, Any] = {"weight_roots": (str(tmp_path),), "cache_dir": str(tmp_path / "cache")}
    roots["model_path"] = str(write_checkpoint(tmp_path / "own"))
    async with (
        served(nats_url, fleet, worker_id="w0", **roots) as (rb, worker, _),
        synthetic_worker(nats_url, fleet, worker_id="w1", **roots),
    ):
        await rb.fleet.wait_for_workers(2)
        await rb.fleet.lend("w0", for_s=600.0)
        staged = worker.stats().stagings.weights_staged
        result = await rb.fleet.update_weights(folder, version=2)
        assert set(result.applied) == {"w1"}
        state = await rb.fleet.state(settle_s=30.0)
        assert state.stale == ()
        w0 = next(each for each in state.workers if each.worker == "w0")
        assert (w0.state, w0.weight_version, worker.stats().stagings.weights_staged) == ("asleep", 0, staged)
        assert 0 < w0.loan_left_s <= 600
        await rb.fleet.return_worker("w0")
        state = await rb.fleet.state()
        assert {(each.state, each.weight_version) for each in state.workers} == {("serving", 2)}
        with pytest.raises(ControlError) as caught:
            await rb.fleet.return_worker("w0")
        assert caught.value.code is ControlCode.NOT_FOUND


async def test_return_fails_while_the_gpu_is_in_use(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A return, and a wake by another admin, name the process that uses the memory, and leave the loan as it was."""
    user = tmp_path / "user"
    config = SyntheticConfig(faults=SyntheticFaults(memory_file=str(user)))
    async with served(
        nats_url, fleet, config=config, worker_id="w0", model_path=str(write_checkpoint(tmp_path / "own"))
    ) as (rb, _, _):
        await rb.fleet.lend("w0", allow_none=True)
        user.write_text("4711")
        with pytest.raises(rollbus.CommandIncomplete, match="pid 4711"):
            await rb.fleet.return_worker("w0")
        with pytest.raises(rollbus.CommandIncomplete, match="pid 4711"):
            await rb.fleet.wake(workers=["w0"])
        state = await rb.fleet.state()
        assert state.workers[0].state == "asleep"
        assert is_loan(state.desired["synthetic"].workers["w0"]["sleep"])
        await rb.fleet.pause()
        user.unlink()
        await rb.fleet.return_worker("w0")
        assert (await rb.fleet.state()).workers[0].state == "paused"


async def test_worker_wakes_at_the_end_of_the_term_when_its_memory_is_free(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the term it sleeps on while its memory is in use, says so, and then serves."""
    monkeypatch.setattr("rollbus.workers.control.loan.WAKE_RETRY_S", 0.5)
    user = tmp_path / "user"
    user.write_text("4711")
    config = SyntheticConfig(faults=SyntheticFaults(memory_file=str(user)))
    async with served(
        nats_url, fleet, config=config, worker_id="w0", model_path=str(write_checkpoint(tmp_path / "own"))
    ) as (rb, _, _):
        await rb.fleet.lend("w0", for_s=1.0, allow_none=True)
        await until_state(
            rb, lambda s: s.workers[0].last_error and "loan over, GPU in use by pid 4711" in s.workers[0].last_error
        )
        assert (await rb.fleet.state()).workers[0].state == "asleep"
        user.unlink()
        await until_state(rb, lambda s: s.workers[0].state == "serving")
        assert (await rb.complete([1, 2], max_tokens=2)).error is None


async def test_restarted_lent_worker_loads_nothing_until_its_return(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A lent worker that starts again is asleep before its engine starts, and starts it at the return."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        async with synthetic_worker(
            nats_url, fleet, worker_id="w0", model_path=str(write_checkpoint(tmp_path / "own"))
        ):
            await rb.fleet.wait_for_workers()
            await rb.fleet.lend("w0", allow_none=True)
        async with synthetic_worker(
            nats_url, fleet, worker_id="w0", model_path=str(write_checkpoint(tmp_path / "own"))
        ) as (_, engine):
            started = asyncio.Event()
            start = engine.start

            async def note_start() -> None:
                started.set()
                await start()

            engine.start = note_start  # type: ignore[method-assign]
            await until_lent(rb)
            await rb.fleet.pause()
            await rb.fleet.resume()
            await rb.fleet.lend("w0", for_s=900.0)
            assert not started.is_set()
            await rb.fleet.return_worker("w0")
            assert started.is_set()
            await rb.fleet.wait_for_workers()
            assert (await rb.complete([1, 2], max_tokens=2)).error is None


async def test_other_sleep_does_not_wake_a_lent_engine(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A plain sleep replaces the loan; the engine sleeps on, without a term, until `wake`."""
    async with served(nats_url, fleet, worker_id="w0", model_path=str(write_checkpoint(tmp_path / "own"))) as (
        rb,
        _,
        engine,
    ):
        await rb.fleet.lend("w0", allow_none=True)
        await rb.fleet.sleep(1)
        assert engine._sleep_level == 2
        await rb.fleet.wake()
        assert (await rb.complete([1, 2], max_tokens=2)).error is None


@pytest.mark.parametrize("for_s", [None, 0.0, float("nan")])
async def test_a_loan_without_a_term_is_no_sleep(nats_url: str, fleet: str, for_s: Any) -> None:
    """A lend without a valid term is rejected; it never becomes a sleep without an end."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        with pytest.raises(InvalidRequest) as caught:
            await rb.fleet.lend("w0", for_s=for_s)
        assert caught.value.field == "for_s"


async def test_only_what_is_lent_now_has_a_reason(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A renewal ends the reason of a failed return, and a plain sleep that replaces the loan is no problem."""
    user = tmp_path / "user"
    config = SyntheticConfig(faults=SyntheticFaults(memory_file=str(user)))
    folder = str(write_checkpoint(tmp_path / "own"))
    async with served(nats_url, fleet, config=config, worker_id="w0", model_path=folder) as (rb, worker, _):
        await rb.fleet.lend("w0", allow_none=True)
        user.write_text("4711")
        with pytest.raises(rollbus.CommandIncomplete, match="pid 4711"):
            await rb.fleet.return_worker("w0")
        await rb.fleet.lend("w0", for_s=900.0)
        assert worker.presence().last_error is None
        await rb.fleet.sleep(1)
        state = await rb.fleet.state()
        assert (state.workers[0].state, state.workers[0].loan_left_s) == ("asleep", 0.0)
        assert why_behind(state.workers[0], state.desired["synthetic"]) is None


async def test_memory_that_cannot_be_read_does_not_end_the_worker(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An error of the driver fails the return with its reason; the worker sleeps on."""
    folder = str(write_checkpoint(tmp_path / "own"))
    async with served(nats_url, fleet, worker_id="w0", model_path=folder) as (rb, _, engine):
        await rb.fleet.lend("w0", allow_none=True)
        find = engine.find_memory_user

        async def fail() -> str | None:
            raise OSError("driver")

        engine.find_memory_user = fail  # type: ignore[method-assign]
        with pytest.raises(rollbus.CommandIncomplete, match="driver"):
            await rb.fleet.return_worker("w0")
        engine.find_memory_user = find  # type: ignore[method-assign]
        await rb.fleet.return_worker("w0")
        assert (await rb.complete([1, 2], max_tokens=2)).error is None


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_cpu_engine_cannot_be_lent(nats_url: str, real_fleet: str) -> None:
    """On a real CPU engine `lend` fails as `unsupported` with the worker's name, and records nothing."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        await rb.fleet.wait_for_workers()
        (worker,) = rb.fleet.workers
        with pytest.raises(ControlError, match=worker.worker) as caught:
            await rb.fleet.lend(worker.worker, allow_none=True)
        assert caught.value.code is ControlCode.UNSUPPORTED
        state = await rb.fleet.state()
        assert all("sleep" not in own for each in state.desired.values() for own in each.everywhere)


async def test_loan_outlives_the_server(fleet: str, tmp_path: Path) -> None:
    """If the server is killed during a loan and restarts, the worker sleeps on with its term, and returns."""
    own = str(write_checkpoint(tmp_path / "own"))
    async with EmbeddedServer() as server, served(server.url, fleet, worker_id="w0", model_path=own) as (rb, worker, _):
        await rb.fleet.lend("w0", for_s=600.0, allow_none=True)
        before, incarnation = worker.presence().loan_left_s, worker.presence().incarnation
        await server.kill()
        await server.restart()
        state = await rb.fleet.state(settle_s=30.0)
        assert [(each.state, each.incarnation) for each in state.workers] == [("asleep", incarnation)]
        after = state.workers[0].loan_left_s
        assert 0 < after <= before
        await rb.fleet.return_worker("w0")
        assert (await rb.complete([1, 2], max_tokens=2)).error is None


async def test_term_that_ends_without_a_server_ends_the_loan(fleet: str, tmp_path: Path) -> None:
    """A worker whose term ends while the server is away wakes, and serves when the server is back."""
    own = str(write_checkpoint(tmp_path / "own"))
    async with EmbeddedServer() as server, served(server.url, fleet, worker_id="w0", model_path=own) as (rb, worker, _):
        await rb.fleet.lend("w0", for_s=2.0, allow_none=True)
        await server.kill()
        await until_true(lambda: not worker.presence().loan_left_s)
        await server.restart()
        await rb.fleet.wait_for_workers(timeout_s=SOON_S)
        assert (await rb.complete([1, 2], max_tokens=2)).error is None


async def test_drain_of_a_lent_worker_holds_after_its_return(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A drain during a loan wakes nothing, and the worker is drained when it returns, until `resume`."""
    own = str(write_checkpoint(tmp_path / "own"))
    async with served(nats_url, fleet, worker_id="w0", model_path=own) as (rb, _, engine):
        await rb.fleet.lend("w0", allow_none=True)
        await rb.fleet.drain(["w0"])
        [worker] = (await rb.fleet.state()).workers
        assert worker.state == "drained"
        assert worker.loan_left_s
        assert engine._sleep_level == 2
        await rb.fleet.return_worker("w0")
        [worker] = (await rb.fleet.state()).workers
        assert (worker.state, worker.loan_left_s) == ("drained", None)
        await rb.fleet.resume(workers=["w0"])
        assert (await rb.complete([1, 2], max_tokens=2)).error is None
