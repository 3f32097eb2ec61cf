"""Weights from the engine's own transfer engine are verified and get a version like other weights."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.leases import OWNER_LOST_S
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.control import (
    CancelWeightUpdate,
    FinishWeightUpdate,
    InitWeightTransfer,
    Recorded,
    StartWeightUpdate,
    UpdateWeightChunk,
)
from rollbus.schemas.errors import ControlCode, ControlError, EngineDead, ErrorCode
from rollbus.schemas.options import DEFAULT_IDLE_S
from rollbus.workers.control.desired import DesiredReader
from rollbus.workers.control.reconciler import Reconciler
from rollbus.workers.control.registers import Registers
from rollbus.workers.control.transfer import Transfer
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.lifecycle import WorkerLifecycle
from rollbus.workers.requests.publisher import OutboundPublisher
from tests.support.waits import until_true
from tests.workers.control_support import Rig, rig, update

LONG = 60_000
"""The tokens of a request that does not end by itself in a test."""


def chunk_of(path: Path) -> UpdateWeightChunk:
    """Return a whole checkpoint as one part."""
    return UpdateWeightChunk(info={"data": base64.b64encode((path / "model.safetensors").read_bytes()).decode()})


def is_open(worker: Rig) -> bool:
    """Return True if a transfer is open."""
    return worker.weights.is_transferring


async def transfer(worker: Rig, path: Path, version: int) -> None:
    """Transfer a checkpoint to the engine, from start to finish."""
    await worker.transfer.init(InitWeightTransfer(info={}), "c")
    await worker.transfer.start(StartWeightUpdate(), "c")
    await worker.transfer.add_chunk(chunk_of(path), "c")
    await worker.transfer.finish(FinishWeightUpdate(version=version), worker.report)


def was_fenced(worker: Rig, request_id: str) -> bool:
    """Return True if the request ended as `worker_fenced`, so that other workers resume it."""
    end = worker.end(request_id)
    return end is not None and end.error is not None and end.error.code is ErrorCode.WORKER_FENCED


async def test_transferred_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """The start of a transfer pauses streams, and they continue with the new weights after the finish."""
    async with rig(tmp_path / "a") as worker, rig(tmp_path / "b", fill=2) as fresh:
        path = worker.checkpoint("2", 2)
        await worker.begin("r", LONG)
        await worker.transfer.init(InitWeightTransfer(info={}), "c")
        await worker.transfer.start(StartWeightUpdate(), "c")
        heard = len(worker.tokens("r"))
        assert is_open(worker)
        await worker.transfer.add_chunk(chunk_of(path), "c")
        await worker.transfer.finish(FinishWeightUpdate(version=2), worker.report)
        assert not is_open(worker)
        assert len(worker.tokens("r")) == heard
        await worker.flow.resume()
        await worker.until_tokens("r", heard + 20)
        assert [token.weight_version for token in worker.tokens("r")[:heard]] == [1] * heard
        assert {token.weight_version for token in worker.tokens("r")[heard:]} == {2}
        assert worker.standing == (2, False)
        assert worker.weights.canary == fresh.weights.canary
        assert worker.stages == ["loading", "verifying"]


async def test_a_repeated_finish_has_no_effect(tmp_path: Path) -> None:
    """A repeated finish has no effect. A finish with another version needs a start."""
    async with rig(tmp_path) as worker:
        await transfer(worker, worker.checkpoint("2", 2), 2)
        canary = worker.weights.canary
        assert await worker.transfer.finish(FinishWeightUpdate(version=2), worker.report) == canary
        for attempt in (
            worker.transfer.finish(FinishWeightUpdate(version=3), worker.report),
            worker.transfer.add_chunk(chunk_of(worker.own), "c"),
        ):
            with pytest.raises(ControlError, match="no transfer of weights is open"):
                await attempt
        assert worker.standing == (2, False)


@pytest.mark.parametrize("command", [UpdateWeightChunk(info={"neither": 1}), FinishWeightUpdate(version=2)])
async def test_a_failed_transfer_poisons_the_worker(
    tmp_path: Path, command: UpdateWeightChunk | FinishWeightUpdate
) -> None:
    """An invalid part or an empty finish poisons the worker, and its requests end as retryable.

    A later update makes the worker serve again.
    """
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        await worker.transfer.start(StartWeightUpdate(), "c")
        attempt: Awaitable[object]
        if isinstance(command, UpdateWeightChunk):
            attempt = worker.transfer.add_chunk(command, "c")
        else:
            attempt = worker.transfer.finish(command, worker.report)
        with pytest.raises(ControlError):
            await attempt
        assert worker.standing == (1, True)
        assert not is_open(worker)
        assert was_fenced(worker, "r")
        await worker.weights.update(update(worker.own, 2), worker.report)
        await worker.flow.resume()
        assert worker.standing == (2, False)


async def test_a_start_that_the_engine_rejects_begins_no_transfer(tmp_path: Path) -> None:
    """If the engine rejects a start, streams continue as before.

    If another transfer was open, its weights are half-written.
    """
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        worker.engine.faults = SyntheticFaults(start_transfer=True)
        with pytest.raises(ControlError, match="rejected the weight transfer"):
            await worker.transfer.start(StartWeightUpdate(), "c")
        assert (*worker.standing, is_open(worker)) == (1, False, False)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 5)
        worker.engine.faults = SyntheticFaults()
        await worker.transfer.start(StartWeightUpdate(), "c")
        worker.engine.faults = SyntheticFaults(start_transfer=True)
        with pytest.raises(ControlError, match="rejected the weight transfer"):
            await worker.transfer.start(StartWeightUpdate(), "c")
        assert (*worker.standing, is_open(worker)) == (1, True, False)


async def test_an_abort_during_a_transfer_waits_until_the_engine_removed_the_requests(tmp_path: Path) -> None:
    """An abort during a transfer waits until the paused engine has removed the requests, or fails with their number."""
    gate = asyncio.Event()
    gate.set()

    class Slow(SyntheticEngine):
        async def abort(self, keys: Sequence[str]) -> None:
            await gate.wait()
            await super().abort(keys)

    async with rig(tmp_path, engine=Slow) as worker:
        await worker.begin("r", LONG)
        await worker.transfer.start(StartWeightUpdate(), "c")
        gate.clear()
        with pytest.raises(ControlError, match="still has 1 aborted requests") as caught:
            await worker.flow.abort_all(0.01)
        assert caught.value.code is ControlCode.TIMEOUT
        end = worker.end("r")
        assert end.finish_reason is FinishReason.ABORT
        gate.set()
        await worker.flow.abort_all(10.0)
        assert worker.flow.count == 0


async def test_the_lease_of_a_transfer_ends_without_commands(tmp_path: Path) -> None:
    """A transfer without commands for too long counts as abandoned. Its end poisons the weights until a load."""
    async with rig(tmp_path) as worker:
        await worker.transfer.start(StartWeightUpdate(), "c")
        now = time.monotonic()
        assert not worker.transfer.watch(now + DEFAULT_IDLE_S - 1)
        assert worker.transfer.watch(now + DEFAULT_IDLE_S + 1)
        reason = worker.transfer.end_of_lease(now + DEFAULT_IDLE_S + 1)
        assert is_open(worker)
        assert reason == "its owner, c, sent no command for 600 s"
        worker.transfer.end(reason)
        assert worker.transfer.watch(now)  # until it is handled
        assert await worker.transfer.recover()
        assert not worker.transfer.watch(now)
        assert (worker.weights.is_poisoned, worker.transfer.open) == (True, None)
        await worker.weights.restore(worker.report, 10.0)
        assert worker.standing == (1, False)


async def test_an_engine_that_does_not_answer_after_a_transfer_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits for a peer for ever ends by its timeout, and its engine, which answers no more, is dead.

    The requests in flight have ended as retryable.
    """
    monkeypatch.setattr("rollbus.workers.control.transfer.ANSWER_S", 0.1)
    async with rig(tmp_path) as worker:
        await worker.begin("r", LONG)
        await worker.transfer.start(StartWeightUpdate(), "c")
        worker.engine.faults = SyntheticFaults(transfer_hangs=True)
        with pytest.raises(ControlError, match="receiving weights was not done"):
            await worker.transfer.add_chunk(replace(chunk_of(worker.own), timeout_s=0.1), "c")
        assert was_fenced(worker, "r")
        with pytest.raises(EngineDead, match="did not answer within"):
            await worker.transfer.recover()


async def test_the_loss_of_its_owner_ends_a_call_of_a_transfer(tmp_path: Path) -> None:
    """A command in progress ends when its owner is lost, long before its own timeout."""
    heard: list[float | None] = [time.monotonic()]
    async with rig(tmp_path) as worker:
        transfer = Transfer(worker.flow, worker.weights, heard_at=lambda _client: heard[-1])
        await transfer.start(StartWeightUpdate(), "c")
        worker.engine.faults = SyntheticFaults(transfer_hangs=True)
        async with asyncio.TaskGroup() as tasks:
            chunk = tasks.create_task(refusal(transfer.add_chunk(chunk_of(worker.own), "c")))
            await until_true(lambda: transfer.open is not None and not transfer.open.left_s)
            heard.append(None)
            assert transfer.watch(time.monotonic() + OWNER_LOST_S + 1)
        assert chunk.result().code is ControlCode.TRANSFER_EXPIRED
        assert "the client c, published no presence for 20 s" in chunk.result().message


async def test_a_cancel_of_an_ended_transfer_does_not_interrupt_the_setup_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel with an id ends that transfer only; a cancel without an id ends whatever is in progress."""
    began = asyncio.Event()

    async def hang(_info: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async with rig(tmp_path) as worker:
        monkeypatch.setattr(worker.engine, "init_weight_transfer", hang)
        async with asyncio.TaskGroup() as tasks:
            setup = tasks.create_task(refusal(worker.transfer.init(InitWeightTransfer(id="two", info={}), "d")))
            await began.wait()
            worker.transfer.interrupt(CancelWeightUpdate(transfer="one"), "admin")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not setup.done()
            worker.transfer.interrupt(CancelWeightUpdate(), "admin")
        assert setup.result().message == "admin cancelled it"


class ReadState:
    """A stand-in for `DesiredReader`, and for the lifecycle of the worker."""

    is_fresh = True

    def __init__(self) -> None:
        self.effective: dict[str, Recorded] = {}
        self.num_read = 0
        self.may_act = True

    def may_publish(self) -> bool:
        """Return True if the worker holds its lease."""
        return self.may_act

    def request_read(self) -> int:
        """Return the number of the next read."""
        return self.num_read + 1


async def test_a_transfer_whose_finish_is_recorded_does_not_expire(tmp_path: Path) -> None:
    """After the end of the lease, the transfer ends only if a later read of the desired state shows no finish."""
    finish = Recorded(epoch=1, command=FinishWeightUpdate(version=2))
    async with rig(tmp_path) as worker:
        transfer = Transfer(worker.flow, worker.weights, idle_s=0.0)
        state = ReadState()
        reconciler = Reconciler(
            cast(DesiredReader, state),
            Registers(worker.flow, worker.weights, worker.loras, transfer),
            worker.stager,
            cast(WorkerLifecycle, state),
            worker.flow,
            cast(OutboundPublisher, None),
            engine_timeout_s=60.0,
        )
        await transfer.start(StartWeightUpdate(), "c")
        are_open = []
        for num_read, effective, may_act in (
            (0, {}, True),
            (1, {"weights": finish}, True),
            (1, {}, False),
            (1, {}, True),
        ):
            state.num_read, state.effective, state.may_act = num_read, effective, may_act
            await reconciler.end_transfers()
            are_open.append(is_open(worker))
        assert are_open == [True, True, True, False]
        assert worker.weights.is_poisoned


async def refusal(work: Awaitable[object]) -> ControlError:
    """Return the error with which `work` fails."""
    with pytest.raises(ControlError) as caught:
        await work
    return caught.value


async def test_only_its_owner_continues_a_transfer(tmp_path: Path) -> None:
    """Another owner is refused with the holder's name. The owner may start again; the earlier id is then no more open.

    A cancel ends the transfer of any owner.
    """
    async with rig(tmp_path) as worker:
        transfer, chunk = worker.transfer, chunk_of(worker.own)
        await transfer.start(StartWeightUpdate(id="one"), "c")
        codes = [
            (await refusal(attempt)).code
            for attempt in (
                transfer.start(StartWeightUpdate(id="his"), "d"),
                transfer.init(InitWeightTransfer(info={}), "d"),
                transfer.add_chunk(chunk, "d"),
            )
        ]
        assert codes == [ControlCode.TRANSFER_HELD] * 3
        await transfer.start(StartWeightUpdate(id="two"), "c")
        late = await refusal(transfer.add_chunk(replace(chunk, transfer="one"), "c"))
        assert late.code is ControlCode.TRANSFER_EXPIRED
        assert not worker.weights.is_poisoned
        await transfer.add_chunk(replace(chunk, transfer="two"), "c")
        with pytest.raises(ControlError, match="the transfer one is not open"):
            transfer.cancel(CancelWeightUpdate(transfer="one"), "admin")
        transfer.cancel(CancelWeightUpdate(transfer="two"), "admin")
        assert (transfer.open, transfer.last_end) == (None, "the transfer of weights ended: admin cancelled it")
        with pytest.raises(ControlError, match="no transfer of weights is open"):
            transfer.cancel(CancelWeightUpdate(), "admin")
        transfer.cancel(CancelWeightUpdate(), "admin", was_found=True)


async def test_an_update_ends_an_open_transfer(tmp_path: Path) -> None:
    """An update ends an open transfer and makes the weights whole. A transfer may also be started again."""
    async with rig(tmp_path) as worker:
        await worker.transfer.start(StartWeightUpdate(), "c")
        await worker.transfer.start(StartWeightUpdate(), "c")
        await worker.weights.update(update(worker.checkpoint("2", 2), 2), worker.report)
        assert not is_open(worker)
        assert worker.standing == (2, False)


async def test_a_worker_whose_engine_dropped_transferred_weights_stays_poisoned(tmp_path: Path) -> None:
    """Transferred weights cannot be loaded again, so an engine that dropped them leaves the worker poisoned."""
    async with rig(tmp_path) as worker:
        await transfer(worker, worker.checkpoint("2", 2), 2)
        await worker.engine.sleep(2)
        await worker.engine.wake()
        with pytest.raises(ControlError, match="cannot be loaded again"):
            await worker.weights.restore(worker.report, 10.0)
        assert worker.standing == (2, True)


async def test_an_engine_without_transfers_rejects_them_before_the_worker_pauses(tmp_path: Path) -> None:
    """An engine without transfers rejects them before the worker pauses anything."""
    async with rig(tmp_path, SyntheticConfig(weight_transfer=False)) as worker:
        for attempt in (
            worker.transfer.init(InitWeightTransfer(info={}), "c"),
            worker.transfer.start(StartWeightUpdate(), "c"),
        ):
            with pytest.raises(ControlError) as caught:
                await attempt
            assert caught.value.code is ControlCode.UNSUPPORTED
        assert worker.door.is_open
