"""Weights from the engine's own transfer engine are verified and get a version like other weights."""

import asyncio
import base64
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.control import (
    FinishWeightUpdate,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeightChunk,
)
from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode
from rollbus.workers.control.transfer import SILENCE_S
from rollbus.workers.engines.synthetic import SyntheticConfig, SyntheticEngine, SyntheticFaults
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
    await worker.transfer.init(InitWeightTransfer(info={}))
    await worker.transfer.start(StartWeightUpdate())
    await worker.transfer.add_chunk(chunk_of(path))
    await worker.transfer.finish(FinishWeightUpdate(version=version), worker.report)


def was_fenced(worker: Rig, request_id: str) -> bool:
    """Return True if the request ended as `worker_fenced`, so that other workers resume it."""
    end = worker.end(request_id)
    return end is not None and end.error is not None and end.error.code is ErrorCode.WORKER_FENCED


async def test_transferred_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """The start of a transfer pauses streams, and they continue with the new weights after the finish."""
    async with rig(tmp_path / "a") as worker, rig(tmp_path / "b", fill=2) as fresh:
        path = worker.checkpoint("2", 2)
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        await worker.transfer.init(InitWeightTransfer(info={}))
        await worker.transfer.start(StartWeightUpdate())
        heard = len(worker.tokens("r"))
        assert is_open(worker)
        await worker.transfer.add_chunk(chunk_of(path))
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
            worker.transfer.add_chunk(chunk_of(worker.own)),
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
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        await worker.transfer.start(StartWeightUpdate())
        attempt: Awaitable[object]
        if isinstance(command, UpdateWeightChunk):
            attempt = worker.transfer.add_chunk(command)
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
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        worker.engine.faults = SyntheticFaults(start_transfer=True)
        with pytest.raises(ControlError, match="rejected the weight transfer"):
            await worker.transfer.start(StartWeightUpdate())
        assert (*worker.standing, is_open(worker)) == (1, False, False)
        await worker.flow.resume()
        await worker.until_tokens("r", len(worker.tokens("r")) + 5)
        worker.engine.faults = SyntheticFaults()
        await worker.transfer.start(StartWeightUpdate())
        worker.engine.faults = SyntheticFaults(start_transfer=True)
        with pytest.raises(ControlError, match="rejected the weight transfer"):
            await worker.transfer.start(StartWeightUpdate())
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
        await worker.start("r", LONG)
        await worker.until_tokens("r", 5)
        await worker.transfer.start(StartWeightUpdate())
        gate.clear()
        with pytest.raises(ControlError, match="still has 1 aborted requests") as caught:
            await worker.flow.abort_all(0.01)
        assert caught.value.code is ControlCode.TIMEOUT
        end = worker.end("r")
        assert end is not None
        assert end.finish_reason is FinishReason.ABORT
        gate.set()
        await worker.flow.abort_all(10.0)
        assert worker.flow.count == 0


async def test_a_transfer_without_commands_for_too_long_poisons_the_weights(tmp_path: Path) -> None:
    """A transfer without commands for too long counts as abandoned by its controller, and poisons the weights once."""
    async with rig(tmp_path) as worker:
        await worker.transfer.start(StartWeightUpdate())
        heard_at = worker.transfer.last_command_at
        assert not worker.transfer.expire(heard_at + SILENCE_S - 1)
        assert is_open(worker)
        assert worker.transfer.expire(heard_at + SILENCE_S + 1)
        assert worker.weights.is_poisoned
        assert not is_open(worker)
        assert not worker.transfer.expire(heard_at + 2 * SILENCE_S)


async def test_an_update_ends_an_open_transfer(tmp_path: Path) -> None:
    """An update ends an open transfer and makes the weights whole. A transfer may also be started again."""
    async with rig(tmp_path) as worker:
        await worker.transfer.start(StartWeightUpdate())
        await worker.transfer.start(StartWeightUpdate())
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
            worker.transfer.init(InitWeightTransfer(info={})),
            worker.transfer.start(StartWeightUpdate()),
        ):
            with pytest.raises(ControlError) as caught:
                await attempt
            assert caught.value.code is ControlCode.UNSUPPORTED
        assert worker.door.is_open
